"""Skips work that no row of a batch asks for."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax


def where_asked[T](asked: Array, change: Callable[[T], T], values: T) -> T:
    """`change(values)` if `asked` is true for any row, else `values`.

    `change` must not alter the other rows.
    """
    return lax.cond(jnp.any(asked), change, lambda values: values, values)
