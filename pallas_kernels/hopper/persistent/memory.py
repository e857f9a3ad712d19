"""The shared memory of a block."""

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, SMEM_BYTES, TILE_BRICKS, X_SLOTS
from fdjax.pallas_kernels.hopper.tiles import matrix, shared_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """What stages need beside the two rings, by name.

    Attributes:
      matrices: (shape, dtype) of tiled buffers.
      vectors: (shape, dtype) of buffers without tiles.
      barriers: number of arrivals that completes each barrier.
    """

    matrices: dict[str, tuple[tuple[int, ...], Any]]
    vectors: dict[str, tuple[tuple[int, ...], Any]]
    barriers: dict[str, int]

    def __or__(self, other: "Memory") -> "Memory":
        return Memory(
            self.matrices | other.matrices,
            self.vectors | other.vectors,
            self.barriers | other.barriers,
        )


NO_MEMORY = Memory({}, {}, {})


def with_rings(memory: Memory, rows: int, dtype: Any, copies: int) -> dict[str, Any] | None:
    """Scratch of a kernel: `memory`, a ring of bricks of x, and a ring of tiles in the rest.

    Args:
      memory: what the stages need.
      rows: rows of x, a multiple of 8.
      dtype: dtype of x and of the weights.
      copies: number of copies that fill one tile.

    Returns:
      Scratch by name, or None if the rest has no room for two tiles.
    """
    matrices = memory.matrices | {"x": ((X_SLOTS, rows, BRICK), dtype)}
    slot_bytes = TILE_BRICKS * BRICK * BRICK * dtype.itemsize
    slots = (SMEM_BYTES - shared_bytes(matrices | memory.vectors)) // slot_bytes
    if slots < 2:
        return None
    matrices["w"] = ((slots, TILE_BRICKS * BRICK, BRICK), dtype)
    return {
        **{name: matrix(*buffer) for name, buffer in matrices.items()},
        **{name: plgpu.SMEM(*buffer) for name, buffer in memory.vectors.items()},
        **{name: plgpu.Barrier(num_arrivals=n) for name, n in memory.barriers.items()},
        "w_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        "w_used": plgpu.Barrier(num_barriers=slots),
        "x_arrived": plgpu.Barrier(num_barriers=X_SLOTS),
        "x_used": plgpu.Barrier(num_barriers=X_SLOTS),
        "done": plgpu.Barrier(),
    }
