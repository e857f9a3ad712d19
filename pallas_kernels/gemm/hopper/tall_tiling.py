"""Tilings of `tall_gemm`, and estimates of their times."""

import dataclasses
import itertools
from typing import Any

from fdjax.pallas_kernels.bricks import BITS, BRICK
from fdjax.pallas_kernels.dispatch import Shape
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS

SMEM_BYTES = 227 * 1024 - 1024  # shared memory of a block, less its barriers
# Bytes of a result that a warpgroup stores at once.
STORED_BYTES = 8 * 1024
# Bytes of other blocks' sums that leave room for the ring.
_MOST_RECEIVED_BYTES = 80 * 1024
# Registers of a thread that multiplies, and of one that copies, by warpgroups that multiply.
REGISTERS = {1: (255, None), 2: (224, 56), 3: (152, 56)}
# A block begins with registers shared out evenly. One instruction may use no more, and uses so many
# beside its sums.
_FIRST_REGISTERS, _INSTRUCTION_REGISTERS = {1: 255, 2: 168, 3: 128}, 30
# Registers of a thread that hold neither sums nor weights.
_OTHER_REGISTERS = 28
# For estimates. Multiprocessors that clusters of this size can use: a cluster lies within 16 or 18.
CLUSTER_MULTIPROCESSORS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS, 3: 126, 4: 120}
# For 4096 rows of the weight: time to multiply 64 columns with a row of x, and so many rows take as
# long as unpacking. Few rows are bound by instructions, many by the tensor cores. Fitted to times
# of 33 to 512 rows with int4 on an H100, and of 129 to 512 rows with int8 on an H200.
_FEW_ROWS_US, _MANY_ROWS_US = (0.0443, 94), (0.0727, 12)
# Two warpgroups overlap less than three do, unless each has two sums or many rows.
_TWO_ALONE, _OVERLAPPING_ROWS = 1.08, 200
# Time to copy a byte of 4096 rows of x and of the weight, of both ends of a block, between two of
# its tiles, and of the exchange of sums.
_COPY_US, _ENDS_US, _BETWEEN_US, _SPLIT_US = 0.0461, 5.2, 2.2, 0.9


@dataclasses.dataclass(frozen=True)
class TallGemmConfig:
    """Tiling of `matmul_tall`.

    Attributes:
      wide: columns of a block in bricks of 64, 1 to 4; with a gate, of each half.
      block_m: largest number of rows of a block, a multiple of 8 up to 256.
      deep: height of a tile of the ring in bricks of 64 rows, 1, 2 or 4.
      stages: largest number of tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
    """

    wide: int = 4
    block_m: int = 128
    deep: int = 2
    stages: int = 4
    split: int = 1

    def __post_init__(self):
        check_tiling("tall_gemm", self)
        check_rows("tall_gemm", self.block_m, 8)
        if self.deep not in (1, 2, 4):
            raise ValueError(f"tall_gemm: deep must be 1, 2 or 4, got {self.deep}")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply. More than three have too few registers."""
        return 3 if self.wide == 3 else min(self.wide, 2)

    @property
    def pieces(self) -> int:
        """Columns of bricks of each warpgroup."""
        return self.wide // self.warpgroups

    def unit(self, tile_m: int, *, gate: bool) -> int | None:
        """Rows of the weight that are unpacked at once; None if sums do not fit into registers."""
        if tile_m // 2 + _INSTRUCTION_REGISTERS > _FIRST_REGISTERS[self.warpgroups]:
            return None
        # Two units of weights are in registers at a time. If there are too few, the compiler lets
        # every instruction of the tensor cores wait for the one before.
        sums = self.pieces * (1 + gate) * tile_m // 2
        left = REGISTERS[self.warpgroups][0] - _OTHER_REGISTERS - sums
        return next((unit for unit in (BRICK, BRICK // 2) if 2 * unit // 4 <= left), None)

    def received(self, tile_m: int, *, gate: bool) -> float:
        """Bytes of other blocks' sums."""
        return 4 * BRICK * self.wide * (1 + gate) * tile_m * (self.split - 1) / self.split

    def fits(self, tile_m: int, *, bits: int, gate: bool, tiles: int = 2) -> bool:
        """Whether shared memory has room for so many tiles, and for a residual in them."""
        room = SMEM_BYTES - self.wide * STORED_BYTES - self.received(tile_m, gate=gate)
        columns = self.wide * (1 + gate)
        # A brick of x, of codes, and scales and zeros of a group.
        brick = BRICK * (2 * tile_m + columns * (BRICK * bits // 8 + 8))
        return max(tiles, -(-self.wide // self.deep)) * self.deep * brick <= room

    @classmethod
    def for_shape(cls, m: int, k: int, n: int, *, bits: int, gate: bool) -> "TallGemmConfig":
        """The tiling of the least estimated time."""
        return ranked(m, k, n, bits=bits, gate=gate)[0]

    def estimate(self, m: int, k: int, n: int, *, gate: bool) -> float:
        """The estimated time in microseconds."""
        tiles_m, tile_m = row_tiles_of(m, self.block_m)
        bricks, rows = self.wide * (1 + gate), k / 4096 / self.split
        blocks = -(-n // (self.wide * BRICK)) * tiles_m * self.split
        few, many = (us * (tile_m + more) for us, more in (_FEW_ROWS_US, _MANY_ROWS_US))
        alone = self.wide == 2 and self.split == 1 and not gate and tile_m < _OVERLAPPING_ROWS
        products = max(few, many * (_TWO_ALONE if alone else 1))
        copies = _COPY_US * (bricks * BRICK / 2 + 2 * tile_m)
        us = rows * max(bricks * products, copies)
        waves = -(-blocks // CLUSTER_MULTIPROCESSORS[self.split])
        if self.split > 1:
            return waves * (us + _ENDS_US + _SPLIT_US)
        return waves * us + _ENDS_US + (waves - 1) * _BETWEEN_US


def ranked(m: int, k: int, n: int, *, bits: int, gate: bool) -> list[TallGemmConfig]:
    """Tilings, the one of the least estimated time first."""
    widths = (3, 2, 4) if m > 128 and not gate else (3, 2)
    # Tiles of fewer rows take longer to unpack than to multiply.
    tiles = range(-(-m // 256), -(-m // 64) + 1)
    heights = dict.fromkeys(row_tiles_of(m, -(-m // count))[1] for count in tiles)
    found = []
    for split, wide, tile_m in itertools.product((1, 2, 3, 4), widths, heights):
        config = TallGemmConfig(wide, tile_m, 2, 6, split)
        # Two tiles are enough for warpgroups with several sums, if L2 delivers the weight.
        enough = 2 if (gate or wide == 4) and m > 256 else 3
        if not config.fits(tile_m, bits=bits, gate=gate, tiles=enough):
            config = dataclasses.replace(config, deep=1)
        if (
            config.fits(tile_m, bits=bits, gate=gate)
            and config.received(tile_m, gate=gate) <= _MOST_RECEIVED_BYTES
            and config.unit(tile_m, gate=gate)
            and (split == 1 or k >= 1024 * split)
        ):
            found.append(config)
    return sorted(found, key=lambda config: config.estimate(m, k, n, gate=gate))


def check_tiling(name: str, config: Any) -> None:
    """Raise `ValueError` for values of a kernel's `wide`, `stages` or `split` that cannot be."""
    if not 1 <= config.wide <= 4:
        raise ValueError(f"{name}: wide must be in 1..4, got {config.wide}")
    if config.stages < 2:
        raise ValueError(f"{name}: stages must be at least 2, got {config.stages}")
    if not 1 <= config.split <= 8:
        raise ValueError(f"{name}: split must be in 1..8, got {config.split}")


def check_rows(name: str, block_m: int, step: int) -> None:
    """Raise `ValueError` for a number of rows that is no multiple of `step` up to 256."""
    if block_m not in range(step, 257, step):
        raise ValueError(f"{name}: block_m must be a multiple of {step} up to 256, got {block_m}")


def row_tiles_of(m: int, block_m: int, step: int = 8) -> tuple[int, int]:
    """Number of tiles along M, and rows of each, a multiple of `step`."""
    tiles = -(-m // block_m)
    return tiles, -(-m // (step * tiles)) * step


def candidates(shape: Shape) -> list[TallGemmConfig]:
    """Tilings that `fdjax tune` tries: the best by estimate, with tiles of any height."""
    m, k, gate, bits = shape["m"], shape["k"], bool(shape["gate"]), bits_of(shape)
    best = ranked(m, k, shape["n"] // (1 + gate), bits=bits, gate=gate)[:5]
    options = (
        dataclasses.replace(config, deep=deep)
        for config, deep in itertools.product(best, (1, 2, 4))
    )
    return [o for o in options if o.fits(o.block_m, bits=bits, gate=gate)]


def bits_of(shape: Shape) -> int:
    """Bits of a weight's codes."""
    return next(bits for kind, bits in BITS.items() if kind in shape)
