"""Conditionals for kernels that lower quickly.

`pl.when` and `lax.cond` convert their condition to an index. For each conversion, Mosaic GPU of JAX
0.11 starts ptxas, which takes 9 ms or more. Selecting the index with `jnp.where` avoids it. Code of
a single warp needs `lax.cond`, as it cannot clamp an index.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

_in_a_warp = contextvars.ContextVar("in_a_warp", default=False)


@contextlib.contextmanager
def in_a_warp() -> Iterator[None]:
    """While code of a single warp is traced."""
    token = _in_a_warp.set(True)
    try:
        yield
    finally:
        _in_a_warp.reset(token)


def when(condition: bool | Array) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function if the condition holds, like `pl.when`."""
    if isinstance(condition, bool):
        return pl.when(condition)
    return lambda run: cond(condition, run, lambda: None)


def cond(condition: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Run one of two functions and return its result, like `lax.cond`."""
    if _in_a_warp.get():
        return lax.cond(condition, if_true, if_false)
    return lax.switch(jnp.where(condition, 1, 0), (if_false, if_true))
