"""Rows computed in tiles of fixed height, so that their bits do not depend on their batch.

XLA picks another blocking and another vectorisation for another shape, so the rows of one large
operation and of several small ones differ in the last bit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

# Rows of a prefill chunk; in the decode phase a tile is one row.
_PREFILL_TILE = 128


def in_row_tiles(function: Callable[..., Array], *operands: Array) -> Array:
    """`function(*operands)`, one tile of rows at a time.

    Args:
      function: [R, ...] each → [R, N...], any R, row by row.
      *operands: [M, ...].

    Returns:
      [M, N...].
    """
    m = operands[0].shape[0]
    tile = 1 if m < _PREFILL_TILE else _PREFILL_TILE
    count = max(1, -(-m // tile))
    tiles = [
        jnp.pad(a, ((0, count * tile - m), *((0, 0),) * (a.ndim - 1))).reshape(
            count, tile, *a.shape[1:]
        )
        for a in operands
    ]

    def one(i, y):
        part = function(*(lax.dynamic_index_in_dim(a, i, keepdims=False) for a in tiles))
        return lax.dynamic_update_index_in_dim(y, part, i, 0)

    out = jax.eval_shape(function, *(a[0] for a in tiles))
    # A single tile takes the loop too, at a count the compiler does not know: unrolled, it would be
    # fused with its neighbours and rounded otherwise.
    unknown = lax.optimization_barrier(jnp.int32(count))
    y = lax.fori_loop(0, unknown, one, jnp.zeros((count, *out.shape), out.dtype))
    return y.reshape(count * tile, *out.shape[1:])[:m]
