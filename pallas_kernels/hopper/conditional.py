"""Conditionals for kernels that lower quickly.

`pl.when` and `lax.cond` convert their condition to an index. For each conversion, Mosaic GPU of JAX
0.11 starts ptxas, which takes 9 ms or more. Selecting the index with `jnp.where` avoids it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl


def when(condition: bool | Array) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function if the condition holds, like `pl.when`."""
    if isinstance(condition, bool):
        return pl.when(condition)
    return lambda run: cond(condition, run, lambda: None)


def cond(condition: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Run one of two functions and return its result, like `lax.cond`."""
    return lax.switch(jnp.where(condition, 1, 0), (if_false, if_true))
