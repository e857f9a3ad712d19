"""The decode chunk: what it makes of its steps does not depend on how they are grouped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax import step
from fdjax.models import describe, parse_config, random_params
from fdjax.options import GenerationConfig, per_row
from fdjax.pallas_kernels.plan import Plan
from fdjax.sampling import Processors
from fdjax.state import DecodeState, init_cache, pack_progress

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
}
SLOTS, STEPS = 32, 7


pytestmark = pytest.mark.usefixtures("quick_compiles")


@functools.cache
def model():
    return describe(parse_config(CONFIG), plan=Plan(batch_invariant=True))


def _state(max_new_tokens, stop_tokens=()):
    """Three rows with random caches, the second of them finished."""
    requests = [
        GenerationConfig(max_new_tokens=n, eos_token_ids=stop_tokens) for n in max_new_tokens
    ]
    sampling = jax.tree.map(jnp.asarray, per_row(requests, 3))
    caches = jax.tree.map(
        lambda a: jnp.asarray(np.random.default_rng(0).standard_normal(a.shape), a.dtype),
        init_cache(model(), 3, SLOTS),
    )
    lengths, tokens = jnp.array([5, 9, 2], jnp.int32), jnp.array([7, 8, 9], jnp.int32)
    progress = pack_progress(lengths, tokens, jnp.ones_like(tokens), jnp.array([0, 1, 0]) > 0)
    return DecodeState(caches, jnp.zeros((3, SLOTS), jnp.int32), progress), sampling


@functools.cache
def _program(at_once):
    decode = functools.partial(
        step.decode_steps, model(), max_steps=STEPS, processors=Processors(logprobs=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_steps_at_once", lambda plan: at_once)
        args = random_params(model()), *_state((9, 9, 9), (1, 2)), np.int32(0)
        return jax.jit(decode).lower(*args).compile()


def _run(at_once, n, max_new_tokens, stop_tokens=(1, 2)):
    """Progress, the tokens in live slots, the tokens chosen, their log-probabilities."""
    args = random_params(model()), *_state(max_new_tokens, stop_tokens), np.int32(n)
    state, tokens, logprobs = jax.device_get(_program(at_once)(*args))
    live = np.arange(SLOTS) < state.progress[0][:, None]
    return state.progress, np.where(live, state.ids, 0), tokens, logprobs


@pytest.mark.parametrize("at_once", [2, 3])
@pytest.mark.parametrize(
    ("n", "max_new_tokens"),
    [
        (7, (9, 9, 9)),
        (5, (9, 9, 9)),
        (4, (9, 9, 9)),
        (7, (4, 9, 3)),
        (7, (2, 9, 2)),
        (0, (9, 9, 9)),
    ],
    ids=str,
)
def test_steps_at_once_are_those_one_by_one(at_once, n, max_new_tokens):
    one, several = (_run(k, n, max_new_tokens) for k in (1, at_once))
    for want, got in zip(jax.tree.leaves(one[:3]), jax.tree.leaves(several[:3]), strict=True):
        np.testing.assert_array_equal(got, want)
    chosen = one[2] >= 0
    np.testing.assert_array_equal(several[3].chosen[chosen], one[3].chosen[chosen])
    steps = [min(n, limit - 1) for limit in max_new_tokens]
    assert chosen.sum(axis=1).tolist() == [steps[0], 0, steps[2]]


def test_a_stop_token_ends_rows_within_steps_at_once():
    free = _run(1, 7, (9, 9, 9))[2]
    stop = int(free[0, 0]), int(free[2, 2])
    one, several = (_run(k, 7, (9, 9, 9), stop) for k in (1, 2))
    for want, got in zip(jax.tree.leaves(one[:3]), jax.tree.leaves(several[:3]), strict=True):
        np.testing.assert_array_equal(got, want)
    assert (one[2][0] >= 0).sum() == 1
    assert 1 <= (one[2][2] >= 0).sum() <= 3
