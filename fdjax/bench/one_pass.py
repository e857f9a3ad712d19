"""One pass over a whole text, without a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.engine.generation import forward
from fdjax.engine.state import SLOT_MULTIPLE
from fdjax.models import Model, Params


@functools.partial(jax.jit, static_argnums=0, static_argnames="last")
def one_pass_program(model: Model, params: Params, ids: Array, *, last: int) -> Array:
    """Logits [1,last,V] of the last tokens of ids [1,T], which are padded for the kernels.

    Keys and values are rounded as those of the model's cache.
    """
    t = ids.shape[1]
    padding = -t % SLOT_MULTIPLE
    padded = jnp.pad(ids, ((0, 0), (0, padding)))
    lengths = jnp.full((1,), t, jnp.int32)
    options = {"last": last + padding, "kv_dtype": model.kv_dtype}
    return forward(model, params, padded, lengths, **options)[:, :last]


def one_pass(lm: Any, ids: Array, n: int) -> Array:
    """Logits [1,n,V] of the last n tokens of ids [1,T], in one pass without a cache."""
    return one_pass_program(lm.model, lm.params, ids, last=n)
