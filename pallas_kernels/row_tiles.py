"""Computes rows in tiles of fixed height, so that a row's bits do not depend on its batch.

XLA chooses blocking and vectorisation by shape. So a row computed in a large operation and the same
row computed in a small one can differ in the last bit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.dispatch import Dispatch

# Rows of a tile in prefill. In the decode phase a tile is one row.
PREFILL_TILE = 128


def in_row_tiles(function: Callable[..., Any], *operands: Array, tile: int | None = None) -> Any:
    """`function(*operands)`, one tile of rows at a time.

    Args:
      function: operands [R, ...] → [R, N...], or a tree of such arrays, for any R; each row depends
        on its own row only.
      *operands: [M, ...].
      tile: R; default 1 below 128 rows, else 128.

    Returns:
      [M, N...], or such a tree.
    """
    m = operands[0].shape[0]
    if tile is None:
        tile = 1 if m < PREFILL_TILE else PREFILL_TILE
    count = max(1, -(-m // tile))
    tiles = [
        jnp.pad(a, ((0, count * tile - m), *((0, 0),) * (a.ndim - 1))).reshape(
            count, tile, *a.shape[1:]
        )
        for a in operands
    ]

    def one(i, y):
        rows = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in tiles]
        # With `i` in the barrier, the compiler cannot take a single tile out of the loop.
        _, rows = lax.optimization_barrier((i, rows))
        part = function(*rows)
        return jax.tree.map(lambda y, p: lax.dynamic_update_index_in_dim(y, p, i, 0), y, part)

    out = jax.eval_shape(function, *(a[0] for a in tiles))
    # The barrier hides the count from the compiler, so that a single tile runs in the loop too.
    # Unrolled, it would be fused with its neighbours and rounded differently.
    unknown = lax.optimization_barrier(jnp.int32(count))
    y = jax.tree.map(lambda part: jnp.zeros((count, *part.shape), part.dtype), out)
    y = lax.fori_loop(0, unknown, one, y)
    return jax.tree.map(lambda a: a.reshape(count * tile, *a.shape[2:])[:m], y)


def by_row(
    function: Callable[..., Array], x: Array, plan: Dispatch | None, *others: Array
) -> Array:
    """Apply a function of rows to x [B,T,...] and others; the result is like x.

    Bits do not depend on the batch if the plan asks for that.
    """
    if plan is not None and plan.batch_invariant:
        rows = (a.reshape(-1, *a.shape[2:]) for a in (x, *others))
        return in_row_tiles(function, *rows).reshape(x.shape)
    return function(x, *others)
