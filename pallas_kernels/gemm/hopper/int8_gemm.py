"""GEMM for prompts with weights and activations in int8 on Hopper, in one launch.

Tensor cores multiply int8 twice as fast as bf16. Each row of x gets a scale, so that its largest
value is 127, and each column of the weight has one. So sums of codes are exact in int32, and scales
multiply the results. The rest is as in `tall_gemm` and `byte_tile`.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.bricks import BRICK
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.gemm.hopper.byte_tile import STEP, ByteTile, product
from fdjax.pallas_kernels.gemm.hopper.tall_tiling import (
    CLUSTER_MULTIPROCESSORS,
    REGISTERS,
    SMEM_BYTES,
    STORED_BYTES,
    check_rows,
    check_tiling,
    row_tiles_of,
)
from fdjax.pallas_kernels.quantised import PLAIN, WEIGHT_FEATURES, QTensor

_ROW_STEP = 16  # tensor cores take no other heights of int8 from 32 rows on
_LEAST_ROWS = 65  # as in `fp8_gemm`
_MOST_K = 1 << 17  # whose sums fit into int32
# Registers of a thread that hold neither sums nor the codes of two steps.
_OTHER_REGISTERS = 28
# For estimates, measured on an H200: time of a step for a column of bricks, by rows and beside
# them; of both ends of a block; of exchanging sums, and of those of 128 rows and such a column.
_ROW_US, _COLUMN_US, _ENDS_US, _SPLIT_US, _SUMS_US = 0.00095, 0.078, 6.0, 5.6, 0.7


@dataclasses.dataclass(frozen=True)
class Int8GemmConfig:
    """Tiling of `matmul_int8`.

    Attributes:
      wide: columns of a block in bricks of 64, 1 to 4; with a gate, of each half.
      block_m: largest number of rows of a block, a multiple of 16 up to 256.
      stages: largest number of tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
    """

    wide: int = 3
    block_m: int = 128
    stages: int = 6
    split: int = 1

    deep = STEP // BRICK  # height of a tile of the ring in bricks, see `TallGemmConfig`

    def __post_init__(self):
        check_tiling("int8_gemm", self)
        check_rows("int8_gemm", self.block_m, _ROW_STEP)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return 3 if self.wide == 3 else min(self.wide, 2)

    def has_registers(self, tile_m: int, *, gate: bool) -> bool:
        """Whether a thread has registers for its sums, and for the codes of two steps."""
        sums = self.wide // self.warpgroups * (1 + gate) * tile_m // 2
        codes = 2 * STEP // 8
        return sums + codes + _OTHER_REGISTERS <= REGISTERS[self.warpgroups][0]

    def fits(self, tile_m: int, *, gate: bool) -> bool:
        """Whether shared memory has room for two tiles of the ring, beside sums and a residual."""
        columns, share = self.wide * (1 + gate), -(-tile_m // (8 * self.split)) * 8
        received = 4 * BRICK * columns * share * (self.split - 1)
        results = max(STORED_BYTES, 2 * BRICK * share) * self.wide
        tile = STEP * (tile_m + BRICK * columns)
        return received + results + 2 * tile + 1024 <= SMEM_BYTES

    @classmethod
    def for_shape(cls, m: int, k: int, n: int, *, gate: bool = False) -> "Int8GemmConfig":
        """The tiling of the least estimated time."""
        return ranked(m, k, n, gate=gate)[0]

    def estimate(self, m: int, k: int, n: int, *, gate: bool) -> float:
        """The estimated time in microseconds."""
        tiles_m, tile_m = row_tiles_of(m, self.block_m, _ROW_STEP)
        blocks = -(-n // (self.wide * BRICK)) * tiles_m * self.split
        steps = -(-k // (STEP * self.split))
        columns = self.wide * (1 + gate)
        us = steps * columns * (_COLUMN_US + _ROW_US * tile_m)
        waves = -(-blocks // CLUSTER_MULTIPROCESSORS[self.split])
        if self.split == 1:  # a block computes several tiles, and their ends overlap
            return waves * us + _ENDS_US
        sums = columns * tile_m / 128 * (1 - 1 / self.split)
        return waves * (us + _ENDS_US + _SPLIT_US + _SUMS_US * sums)


def ranked(m: int, k: int, n: int, *, gate: bool) -> list[Int8GemmConfig]:
    """Tilings, the one of the least estimated time first."""
    tiles = range(-(-m // 256), -(-m // 64) + 1)
    heights = dict.fromkeys(row_tiles_of(m, -(-m // count), _ROW_STEP)[1] for count in tiles)
    options = itertools.product((3, 2, 4), heights, (6,), (1, 2, 3, 4))
    found = [
        config
        for config in itertools.starmap(Int8GemmConfig, options)
        if config.has_registers(config.block_m, gate=gate)
        and config.fits(config.block_m, gate=gate)
        and (config.split == 1 or k >= 1024 * config.split)
    ]
    return sorted(found, key=lambda config: config.estimate(m, k, n, gate=gate))


class Int8Tile(ByteTile):
    """A block's tiles of a product in int8."""

    kernel_name = "int8_gemm_kernel"
    config_type = Int8GemmConfig
    sum_dtype = jnp.int32
    row_step = _ROW_STEP

    def set_warpgroups(self) -> None:
        """See `TallTile`."""
        config = self.config
        if not config.has_registers(self.tile_m, gate=self.gate is not None):
            raise NotImplementedError(
                f"matmul: {config} has no registers for {self.parts} x {self.tile_m} rows of sums"
            )
        self.warpgroups, self.unit = config.warpgroups, STEP
        self.pieces = self.wide // self.warpgroups
        self.registers = REGISTERS[self.warpgroups]

    def sums(self, warpgroup) -> list[Array]:
        """See `TallTile`."""
        return [total.astype(jnp.float32) for total in super().sums(warpgroup)]

    def _weights(self, brick, at, slot, part, start) -> Any:
        """See `TallTile`. A step is a unit."""
        return self.codes(self.smem["w"].at[slot, part, brick], brick)


def matmul_int8(x: Array, w: QTensor, **options: Any) -> Array:
    """`byte_tile.product` in int8. Each column of the weight has one scale, and none has zeros."""
    return product(x, w, Int8Tile, **options)


def _candidates(shape: Shape) -> list[Int8GemmConfig]:
    """Tilings that `fdjax tune` tries."""
    gate = bool(shape["gate"])
    return ranked(shape["m"], shape["k"], shape["n"] // (1 + gate), gate=gate)[:12]


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    if shape["m"] < _LEAST_ROWS:
        return f"takes at least {_LEAST_ROWS} rows, got {shape['m']}"
    if "int8" not in shape:
        return "needs weights in int8"
    if shape["int8"] < shape["k"]:
        return f"takes one scale for each column, got groups of {shape['int8']}"
    if shape["k"] > _MOST_K:
        return f"takes K of up to {_MOST_K}, got {shape['k']}"
    return None


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_int8(x, w, **keywords)


INT8_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"})
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}", "weight.zeros"}),
    needs=frozenset({"weight.rounded_activations"}),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    config=Int8GemmConfig,
    candidates=_candidates,
    shared=False,  # it has not run there
    in_place=True,
)
