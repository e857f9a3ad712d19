"""The shared memory of a block."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import brick_words
from fdjax.pallas_kernels.hopper.coding import Coding
from fdjax.pallas_kernels.hopper.digits import DIGITS
from fdjax.pallas_kernels.hopper.halves import HALVES
from fdjax.pallas_kernels.hopper.persistent import handover
from fdjax.pallas_kernels.hopper.persistent.sizes import (
    BRICK,
    PARTS,
    SMEM_BYTES,
    TILE_BRICKS,
    TOKEN_SLOTS,
    X_SLOTS,
)
from fdjax.pallas_kernels.hopper.tiles import matrix, shared_bytes
from fdjax.pallas_kernels.quantised import BITS

_CODED_BYTES = 24 * 1024  # of the ring of bricks of x, if that is enough for six slots


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory that stages need beside the two rings, by name.

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


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the weights of a kernel are quantised.

    Attributes:
      kind: "int4" | "int8" | "fp8".
      group: number of rows that share a scale, or None for one scale per column.
      scales: dtype of the scales.
      wide: largest number of columns of a product's tile, in bricks.
      rows: number of rows of x.
      zeros: whether each group has a zero, beside its scale.
    """

    kind: str
    group: int | None
    scales: Any
    wide: int
    rows: int
    zeros: bool = False

    @property
    def coding(self) -> Coding:
        """How x is held."""
        return HALVES if self.kind == "fp8" else DIGITS

    @property
    def brick_of_x(self) -> tuple[int, int]:
        """Shape of the words of a brick of x."""
        return self.coding.places(self.rows), self.coding.words

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of what each group of a column has."""
        if not self.group:
            return ()
        return ("scales", "zeros") if self.zeros else ("scales",)

    @property
    def bricks(self) -> int:
        """Number of packed bricks that a slot of the ring of weights holds."""
        return TILE_BRICKS * 16 // BITS[self.kind]


def computing_warpgroups(packing: Packing | None, codes: bool = False) -> int:
    """Number of warpgroups that compute, see `with_rings`.

    One cannot unpack weights, keys and values as fast as memory delivers.
    """
    return 2 if packing or codes else 1


def with_rings(
    memory: Memory,
    rows: int,
    dtype: Any,
    copies: int,
    packing: Packing | None = None,
    codes: bool = False,
) -> dict[str, Any] | None:
    """Scratch of a kernel: `memory`, a ring of bricks of x, and a ring of tiles in the rest.

    With packed weights, "coded" [slots,2,places,words] is the ring of bricks of x, see `Coding`,
    and "token" a ring for queries, key and value of a new token.

    Args:
      memory: memory that the stages need.
      rows: rows of x, a multiple of 8.
      dtype: dtype of x and of the weights.
      copies: number of copies that fill one tile.
      packing: how weights are quantised, if they are.
      codes: whether a slot of the ring may hold keys and values in int8: "codes" [slots,4,64,128]
        in the same memory.

    Returns:
      Scratch by name, or None if the rest has no room for two tiles. "w" may be several views of
      the same memory, each a dictionary.
    """
    users = computing_warpgroups(packing, codes)
    matrices, barriers = dict(memory.matrices), {}
    vectors = memory.vectors | {"handover": handover.barriers()}
    x_slots = X_SLOTS
    if packing:
        matrices["token"] = (TOKEN_SLOTS, PARTS, 2 * BRICK), dtype
        brick = packing.brick_of_x
        x_slots = max(_CODED_BYTES // (2 * math.prod(brick) * 4), 6)
        x_slots = min(x_slots, X_SLOTS)
        vectors["coded"] = (x_slots, 2, *brick), jnp.int32
        barriers["token_arrived"] = plgpu.Barrier(num_barriers=TOKEN_SLOTS)
        barriers["token_used"] = plgpu.Barrier(num_arrivals=users, num_barriers=TOKEN_SLOTS)
    else:
        matrices["x"] = (x_slots, rows, BRICK), dtype
    slot_bytes = TILE_BRICKS * BRICK * BRICK * dtype.itemsize
    factors = packing.factors if packing else ()
    factor_rows = packing.bricks * BRICK // packing.group if factors else 0
    factor_bytes = factor_rows * BRICK * packing.scales.itemsize if factors else 0
    room = SMEM_BYTES - shared_bytes(matrices | vectors) - 1024 * len(factors)
    slots = room // (slot_bytes + factor_bytes * len(factors))
    if slots < 2:
        return None
    rings = {"w": matrix((slots, TILE_BRICKS * BRICK, BRICK), dtype)}
    views = []
    if packing:
        words = plgpu.SMEM((slots, packing.bricks, *brick_words(packing.kind)), jnp.int32)
        views.append({"words": words})
    if codes:
        views.append({"codes": matrix((slots, TILE_BRICKS, BRICK, 2 * BRICK), jnp.int8)})
    if views:
        rings["w"] = plgpu.RefUnion({"w": rings["w"]}, *views)
    for name in factors:
        rings[name] = plgpu.SMEM((slots, factor_rows, BRICK), packing.scales)
    return {
        **{name: matrix(*buffer) for name, buffer in matrices.items()},
        **rings,
        **{name: plgpu.SMEM(*buffer) for name, buffer in vectors.items()},
        **{name: plgpu.Barrier(num_arrivals=n) for name, n in memory.barriers.items()},
        **barriers,
        "w_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        "w_used": plgpu.Barrier(num_arrivals=users, num_barriers=slots),
        "x_arrived": plgpu.Barrier(num_barriers=x_slots),
        "x_used": plgpu.Barrier(num_arrivals=users, num_barriers=x_slots),
        "done": plgpu.Barrier(),
    }
