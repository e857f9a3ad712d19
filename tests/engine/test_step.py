"""The decode chunk: the number of its steps, and the rows that take part."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from fdjax.engine.state import abstract_state, cache_bytes, init_cache, start
from fdjax.engine.step import decode_steps, prefill
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.weights.quantise import to_quantise

pytestmark = pytest.mark.usefixtures("quick_compiles")

MAX_STEPS = 4
PROMPT = 3


@functools.cache
def programs(layers=2):
    config = parse_config(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "vocab_size": 64,
            "num_hidden_layers": layers,
        }
    )
    model = describe(config, dtype="float32")
    params = random_params(model)
    first = jax.jit(functools.partial(prefill, model, params))
    steps = jax.jit(functools.partial(decode_steps, model, params, max_steps=MAX_STEPS))
    return model, first, steps


def nbytes(tree):
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def two_rows(*limits):
    """State after the prompts of two rows that end after this many tokens, and their sampling."""
    model, first, _ = programs()
    requests = [GenerationConfig(max_new_tokens=limit) for limit in limits]
    sampling = jax.tree.map(jnp.asarray, per_row(requests, 2))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, PROMPT)), jnp.int32)
    state = start(init_cache(model, 2, 64))
    full = jnp.full(2, PROMPT, jnp.int32)
    state, _, _ = first(state, sampling, tokens, full, 0 * full, jnp.ones(2, bool))
    return state, sampling


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int4", "fp8"])
def test_prefill_with_the_layers_in_a_loop(weights):
    layers = 6  # three turns of two
    model, _, _ = programs(layers=layers)
    if weights:
        form = WeightFormat(weights, 32)
        forms = {path: form for _, path, _ in to_quantise(model.config)}
        model = describe(model.config.with_formats(forms), dtype="float32")
    params = random_params(model)
    blocks = [traverse_util.flatten_dict(params["blocks"][i], sep=".") for i in range(layers)]
    stacked = {
        name: jax.tree.map(lambda *a: jnp.stack(a), *(block[name] for block in blocks))
        for name in blocks[0]
    }
    rng = np.random.default_rng(0)
    sampling = jax.tree.map(jnp.asarray, per_row([GenerationConfig()] * 2, 2))
    tokens = rng.integers(0, 64, (2, 8)).astype(np.int32)
    args = sampling, tokens, np.int32([8, 5]), np.int32([0, 0]), np.ones(2, bool)
    state = start(init_cache(model, 2, 64, stacked=True))
    want, got = (
        jax.jit(functools.partial(prefill, model, params, layers=layers))(state, *args)
        for layers in (None, stacked)
    )
    assert got[1].tolist() == want[1].tolist()
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_prefill_of_a_stacked_cache_is_that_of_its_layers():
    model, first, _ = programs()
    rng = np.random.default_rng(0)
    sampling = jax.tree.map(jnp.asarray, per_row([GenerationConfig()] * 2, 2))
    rows, on = np.array([2, 0], np.int32), np.ones(2, bool)
    calls = [  # tokens, offsets, final, rows to restart
        ([7, 3], [0, 0], ~on, [2, 1, 1]),
        ([5, 8], [7, 3], np.array([False, True]), [0, 0, 0]),
        ([8, 0], [12, 0], on, [0, 0, 0]),
        ([2, 6], [0, 11], on, [0, 0, 1]),
    ]
    apart, stacked = (start(init_cache(model, 3, 64, stacked=s)) for s in (False, True))
    assert stacked.kv.k.shape == stacked.kv.v.shape == (2, 3, 2, 64, 16)
    assert jax.tree.structure(stacked) == jax.tree.structure(abstract_state(model, stacked=True))
    assert nbytes(stacked.kv) == nbytes(apart.kv) == cache_bytes(model, 3, 64)
    for lengths, offsets, final, restarts in calls:
        tokens = rng.integers(0, 64, (2, 8)).astype(np.int32)
        args = sampling, tokens, np.int32(lengths), np.int32(offsets), final, rows, None
        apart, *want = first(apart, *args, np.int32(restarts))
        stacked, *got = first(stacked, *args, np.int32(restarts))
        layers = zip(stacked.kv.k, stacked.kv.v, strict=True)
        of_layers = dataclasses.replace(stacked, kv=list(layers))
        assert jax.tree.all(jax.tree.map(np.array_equal, (of_layers, got), (apart, want)))


@pytest.mark.slow
def test_layers_of_a_stacked_cache_share_a_lowering():
    model, first, _ = programs(layers=4)
    sampling = jax.tree.map(jnp.asarray, per_row([GenerationConfig()], 1))
    row = np.zeros(1, np.int32)
    args = sampling, row[:, None], row + 1, row, row == 0
    text = first.lower(start(init_cache(model, 1, 64, stacked=True)), *args).as_text()
    # Only the last block differs: all but one of its tokens end there.
    assert len(re.findall(r"func private @run\w*\(", text)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("n", range(MAX_STEPS + 1))
def test_takes_as_many_steps_as_asked(n):
    state, sampling = two_rows(32, 32)
    after, tokens, _ = programs()[2](state, sampling, np.int32(n))
    assert (tokens[:, :n] >= 0).all() and (tokens[:, n:] == -1).all()
    assert (after.lengths == PROMPT + n).all() and (after.steps == 1 + n).all()
    one_by_one, chosen = state, []
    for _ in range(n):
        one_by_one, token, _ = programs()[2](one_by_one, sampling, np.int32(1))
        chosen.append(token[:, 0])
    assert all((tokens[:, i] == token).all() for i, token in enumerate(chosen))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after, one_by_one))


@pytest.mark.slow
def test_takes_no_more_steps_than_the_result_has_room_for():
    state, sampling = two_rows(32, 32)
    after, tokens, _ = programs()[2](state, sampling, np.int32(MAX_STEPS + 3))
    assert (tokens >= 0).all() and (after.steps == 1 + MAX_STEPS).all()


@pytest.mark.slow
def test_rows_after_the_first_are_left_as_they_are():
    model, _, steps = programs()
    state, sampling = two_rows(32, 32)
    want, chosen, _ = steps(state, sampling, np.int32(3))
    ids = jnp.concatenate([state.ids, jnp.full((3, 64), 9, jnp.int32)])
    progress = jnp.concatenate([state.progress, jnp.int32([[7] * 3, [8] * 3, [2] * 3, [0] * 3])], 1)
    state = dataclasses.replace(state, ids=ids, progress=progress)
    run = functools.partial(decode_steps, model, random_params(model), max_steps=MAX_STEPS, rows=2)
    after, tokens, _ = jax.jit(run)(state, sampling, np.int32(3))
    assert np.array_equal(tokens, chosen)
    of_first = after.first(2)
    assert jax.tree.all(jax.tree.map(np.array_equal, of_first, want))
    assert np.array_equal(after.ids[2:], ids[2:])
    assert np.array_equal(after.progress[:, 2:], progress[:, 2:])


@pytest.mark.slow
def test_a_finished_row_waits_for_the_others():
    state, sampling = two_rows(2, 32)
    after, tokens, _ = programs()[2](state, sampling, np.int32(3))
    assert (tokens[0] >= 0).tolist() == [True, False, False, False]
    assert (tokens[1] >= 0).tolist() == [True, True, True, False]
    assert after.lengths.tolist() == [PROMPT + 1, PROMPT + 3]


@pytest.mark.slow
def test_nothing_runs_once_every_row_has_finished():
    state, sampling = two_rows(1, 1)
    assert state.finished.all()
    after, tokens, _ = programs()[2](state, sampling, np.int32(MAX_STEPS))
    assert (tokens == -1).all()
    # A step would have written a key and a value after the prompt.
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after, state))
