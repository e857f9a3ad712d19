"""Sizes that all persistent kernels have in common."""

from fdjax.pallas_kernels.hopper import MULTIPROCESSORS

MAX_ROWS = 32
CLUSTERS = MULTIPROCESSORS // 2
BRICK = 64  # rows and columns of weight, and columns of x, that are copied and multiplied at once
TILE_BRICKS = 4  # of a slot in the ring of weights, 32 kB
X_SLOTS = 12
SMEM_BYTES = 225 * 1024  # what a block may take, less its barriers
