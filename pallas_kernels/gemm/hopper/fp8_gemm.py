"""GEMM for prompts with weights and activations in fp8 on Hopper, in one launch.

Tensor cores multiply fp8 twice as fast as bf16, if x is in fp8 too. Each row of x gets a scale, so
that its largest value is the largest of float8_e4m3fn, 448. Scales of the weight multiply the sums
of their group, scales of x the results.

The tensor cores add fp8 products with about 14 bits. So they add up to 128 rows of the weight only,
and these sums are added in fp32 (two levels, as DeepSeek-V3 does). Warpgroups take turns: one adds
while the tensor cores run the others' products. With 4096 rows, this takes 14 % of the time.

The rest is as in `tall_gemm` and `byte_tile`.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.gemm.hopper.byte_tile import STEP, ByteTile, product
from fdjax.pallas_kernels.gemm.hopper.tall_tiling import (
    CLUSTER_MULTIPROCESSORS,
    check_tiling,
    row_tiles_of,
)
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load
from fdjax.pallas_kernels.quantised import PLAIN, WEIGHT_FEATURES, QTensor

_LEAST_ROWS = 65  # with fewer, `tall_gemm` is about as fast, and does not round x
_REGISTERS = {1: (255, None), 2: (224, 56), 3: (160, 32)}
# For estimates, measured on an H200: time of a step with 128 rows, by columns of bricks; time of
# both ends of a block, and of the exchange of sums.
_STEP_US, _ENDS_US, _SPLIT_US = {1: 0.35, 2: 0.47, 3: 0.63, 4: 0.92}, 2.4, 2.8


@dataclasses.dataclass(frozen=True)
class Fp8GemmConfig:
    """Tiling of `matmul_fp8`.

    Attributes:
      wide: columns of a block in bricks of 64, 1 to 4; with a gate, of each half, 1 or 2.
      block_m: largest number of rows of a block, 64 or 128.
      stages: largest number of tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
    """

    wide: int = 3
    block_m: int = 128
    stages: int = 6
    split: int = 1

    deep = STEP // BRICK  # height of a tile of the ring in bricks, see `TallGemmConfig`

    def __post_init__(self):
        check_tiling("fp8_gemm", self)
        if self.block_m not in (64, 128):
            raise ValueError(f"fp8_gemm: block_m must be 64 or 128, got {self.block_m}")

    @classmethod
    def for_shape(cls, m: int, k: int, n: int, *, gate: bool = False) -> "Fp8GemmConfig":
        """The tiling of the least estimated time."""
        return min(_options(k, gate), key=lambda config: config.estimate(m, k, n, gate=gate))

    def estimate(self, m: int, k: int, n: int, *, gate: bool) -> float:
        """The estimated time in microseconds."""
        tiles_m, tile_m = row_tiles_of(m, self.block_m)
        blocks = -(-n // (self.wide * BRICK)) * tiles_m * self.split
        steps = -(-k // (STEP * self.split))
        us = _STEP_US[self.wide * (1 + gate)] * (1 + 2 * tile_m / 128) / 3
        ends = _ENDS_US + _SPLIT_US * (self.split > 1)
        return -(-blocks // CLUSTER_MULTIPROCESSORS[self.split]) * (steps * us + ends)


def _options(k: int, gate: bool) -> list[Fp8GemmConfig]:
    """Tilings that may be the fastest. Where two take as long, the first is chosen."""
    options = itertools.product((2,) if gate else (3, 2, 4), (128, 64), (6,), (1, 2, 3, 4))
    return [Fp8GemmConfig(*o) for o in options if o[-1] == 1 or k >= 1024 * o[-1]]


class Fp8Tile(ByteTile):
    """A block's tiles of a product in fp8."""

    kernel_name = "fp8_gemm_kernel"
    config_type = Fp8GemmConfig
    scales_columns_late = False  # sums are multiplied in any case

    def set_warpgroups(self) -> None:
        """Sums of 64 columns and 128 rows take 64 registers; those of a step come on top."""
        bricks = self.wide * self.parts
        if bricks > 4:
            raise NotImplementedError(f"matmul: {self.config} has no registers for a gate")
        # Three warpgroups overlap better than two, but have registers for one column each.
        self.warpgroups = 3 if self.wide == 3 else min(self.wide, 2)
        self.pieces, self.unit = self.wide // self.warpgroups, STEP
        self.registers = _REGISTERS[self.warpgroups]

    def sums(self, warpgroup) -> list[Array]:
        """See `TallTile`."""
        bricks = [warpgroup * self.pieces + piece for piece in range(self.pieces)]
        each = [(brick, part) for brick in bricks for part in range(self.parts)]

        def step(i, sums):
            slot = self.slot(i)
            plgpu.barrier_wait(self.smem["full"].at[slot])
            scales = [
                load(self.factor("scales", brick, self.at(i), slot, part, 0), LAYOUT.reduce(1))
                for brick, part in each
            ]
            total = []
            for (brick, part), before, scale in zip(each, sums, scales, strict=True):
                run = functools.partial(self._product, slot, brick, part)
                product = pl.run_scoped(run, plgpu.ACC((BRICK, self.tile_m), jnp.float32))
                if len(total) == len(each) - 1:
                    plgpu.barrier_arrive(self.smem["empty"].at[slot])
                total.append(before + product * lax.broadcast_in_dim(scale, product.shape, [0]))
            return total

        blank = jnp.zeros((BRICK, self.tile_m), jnp.float32)
        if not self.interpreted:
            blank = plgpu.layout_cast(blank, LAYOUT)
        return lax.fori_loop(0, self.steps, step, [blank] * len(each))

    def _product(self, slot, brick, part, accumulator) -> Array:
        """The product of 64 columns in a step [64, tile_m]."""
        words, x = self.smem["w"].at[slot, part, brick], self.smem["x"].at[slot]
        plgpu.wgmma(accumulator, self.codes(words, brick), x.T)
        return accumulator[...]


def matmul_fp8(x: Array, w: QTensor, **options: Any) -> Array:
    """`byte_tile.product` in fp8. Groups of the weight are multiples of 128, or all rows."""
    return product(x, w, Fp8Tile, **options)


def _candidates(shape: Shape) -> list[Fp8GemmConfig]:
    """Tilings that `fdjax tune` tries."""
    few = shape["m"] <= 512
    return [o for o in _options(shape["k"], bool(shape["gate"])) if few or o.split == 1]


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    if shape["m"] < _LEAST_ROWS:
        return f"takes at least {_LEAST_ROWS} rows, got {shape['m']}"
    group = shape.get("fp8")
    if group is None:
        return "needs weights in fp8"
    if group % STEP and group < shape["k"]:
        return f"takes groups of multiples of {STEP}, or of all rows, got {group}"
    return None


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_fp8(x, w, **keywords)


FP8_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"})
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}"}),
    needs=frozenset({"weight.rounded_activations"}),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    config=Fp8GemmConfig,
    candidates=_candidates,
    shared=False,  # it has not run there
    in_place=True,
)
