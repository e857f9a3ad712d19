"""Conditionals of kernels, quick to lower.

`pl.when` and `lax.cond` turn their condition into an index, for which Mosaic GPU of JAX 0.11 starts
ptxas each time, 9 ms and more. A selected index needs no such conversion.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl


def when(condition: bool | Array) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function where the condition holds, as `pl.when` does."""
    if isinstance(condition, bool):
        return pl.when(condition)
    return lambda run: cond(condition, run, lambda: None)


def cond(condition: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """What one of both returns, as of `lax.cond`."""
    return lax.switch(jnp.where(condition, 1, 0), (if_false, if_true))
