"""The decode chunk: how many steps it takes, and of which rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.models import describe, parse_config, random_params
from fdjax.options import GenerationConfig, per_row
from fdjax.state import init_cache, start
from fdjax.step import decode_steps, prefill

pytestmark = pytest.mark.usefixtures("quick_compiles")

MAX_STEPS = 4
PROMPT = 3


@functools.cache
def programs():
    config = parse_config(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "vocab_size": 64,
            "num_hidden_layers": 2,
        }
    )
    model = describe(config, dtype="float32")
    params = random_params(model)
    first = jax.jit(functools.partial(prefill, model, params))
    steps = jax.jit(functools.partial(decode_steps, model, params, max_steps=MAX_STEPS))
    return model, first, steps


def two_rows(*limits):
    """State after the prompts of two rows that end after so many tokens, and their sampling."""
    model, first, _ = programs()
    requests = [GenerationConfig(max_new_tokens=limit) for limit in limits]
    sampling = jax.tree.map(jnp.asarray, per_row(requests, 2))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, PROMPT)), jnp.int32)
    state = start(init_cache(model, 2, 64))
    full = jnp.full(2, PROMPT, jnp.int32)
    state, _, _ = first(state, sampling, tokens, full, 0 * full, jnp.ones(2, bool))
    return state, sampling


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


def test_takes_no_more_steps_than_the_result_has_room_for():
    state, sampling = two_rows(32, 32)
    after, tokens, _ = programs()[2](state, sampling, np.int32(MAX_STEPS + 3))
    assert (tokens >= 0).all() and (after.steps == 1 + MAX_STEPS).all()


def test_a_finished_row_waits_for_the_others():
    state, sampling = two_rows(2, 32)
    after, tokens, _ = programs()[2](state, sampling, np.int32(3))
    assert (tokens[0] >= 0).tolist() == [True, False, False, False]
    assert (tokens[1] >= 0).tolist() == [True, True, True, False]
    assert after.lengths.tolist() == [PROMPT + 1, PROMPT + 3]


def test_nothing_runs_once_every_row_has_finished():
    state, sampling = two_rows(1, 1)
    assert state.finished.all()
    after, tokens, _ = programs()[2](state, sampling, np.int32(MAX_STEPS))
    assert (tokens == -1).all()
    # A step that ran would have written a key and a value behind the prompt.
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after, state))
