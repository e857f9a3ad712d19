"""Layouts of decode attention kernels, for tiles [slots, query rows] and [D, query rows]."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

# Register layouts: of a tile [64·n, R], of one value per column [R] and of one per row [64·n].
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(0)
COLUMN = TILE.reduce(1)

# Shared memory layouts. TILES_FP32 are partial sums.
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILES_FP32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def byte_tiles(d: int) -> tuple[Any, ...]:
    """The layout of int8 tiles [slots, D] in shared memory."""
    width = min(d, 128)
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)
