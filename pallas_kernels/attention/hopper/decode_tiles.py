"""Layouts of the decode attention kernels: tiles of slots by query rows, and of D by query rows."""

from jax.experimental.pallas import mosaic_gpu as plgpu

# In registers: a tile [64·n, R], a value for each of its columns [R], for each of its rows [64·n].
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(0)
COLUMN = TILE.reduce(1)

# In shared memory; the second of tiles whose halves are loaded apart, the third of partial sums.
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
HALF_TILES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
TILES_FP32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
