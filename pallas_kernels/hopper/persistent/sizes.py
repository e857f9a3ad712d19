"""Sizes that all persistent kernels share."""

from fdjax.pallas_kernels.hopper import MULTIPROCESSORS

MAX_ROWS = 32
CLUSTERS = MULTIPROCESSORS // 2
BRICK = 64  # a brick: this many rows and columns of a weight, or columns of x
TILE_BRICKS = 4  # bricks of a slot in the ring of weights, 32 kB
X_SLOTS = 12  # slots in the ring of x
TOKEN_SLOTS = 2  # slots in the ring of new tokens, if it is not that of x
PARTS = 8  # rows of a new token: the queries of a KV head, its key and its value
SMEM_BYTES = 227 * 1024 - 2376  # shared memory of a block, less its barriers
