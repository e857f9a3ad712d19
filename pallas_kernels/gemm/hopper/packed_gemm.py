"""Flat GEMM with quantised weights on Hopper, in one launch.

A product of few rows is bound by the bytes of its weight. int4 takes a quarter of the bytes of
bf16, and 8 bits take half. Weights lie in memory as "bricks" that threads read without exchanging
anything. A warpgroup unpacks a unit of rows into registers and multiplies it with x from shared
memory, as in `flat_gemm` with the operands swapped. Several blocks share a multiprocessor, so that
one unpacks while the tensor cores work for another. For few rows and int4, warps multiply by
themselves (`fragments.multiplied`): wgmma would make them wait before they unpack further.

Scales multiply the fp32 sums of their group of rows. This costs less than scaling weights, and
rounds nothing. Zeros are subtracted while unpacking, exactly.

It takes up to 32 rows; `tall_gemm` takes more, and from 9 rows on if it is faster. XLA runs the
norm. On an H100, scaling x in every block took 7 us for a product of 20 us. A separate launch takes
2 us (benchmarks/LOG.md).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, brick_words
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.gemm.hopper.flat_tile import FlatTile, in_groups
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import left_of, loaded_right, multiplied, unpacked
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised
from fdjax.pallas_kernels.quantised import BITS, PLAIN, WEIGHT_FEATURES, QTensor

_MAX_ROWS = 32
# On an H100, int4 products of up to 16 rows are faster by warps, those of 32 by wgmma. Other kinds
# and small groups have not been measured by warps.
_MOST_ROWS_BY_WARPS = 16
# Rows of the weight that are unpacked at once. It does not depend on the tiling, nor do the bits.
_UNIT = 128


@dataclasses.dataclass(frozen=True)
class PackedGemmConfig:
    """Tiling of `matmul_packed`.

    Attributes:
      wide: width of a block in bricks; with a gate, width of each half.
      deep: height of a tile of the ring in bricks, a multiple of 2.
      stages: largest number of tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
    """

    wide: int = 1
    deep: int = 4
    stages: int = 3
    split: int = 1

    def __post_init__(self):
        if self.wide < 1 or self.wide > 4:
            raise ValueError(f"packed_gemm: wide must be in 1..4, got {self.wide}")
        if self.deep not in (2, 4):
            raise ValueError(f"packed_gemm: deep must be 2 or 4, got {self.deep}")
        if self.stages < 2:
            raise ValueError(f"packed_gemm: stages must be at least 2, got {self.stages}")
        if not 1 <= self.split <= 8:
            raise ValueError(f"packed_gemm: split must be in 1..8, got {self.split}")

    @classmethod
    def for_shape(cls, m: int, k: int, n: int, *, gate: bool = False) -> "PackedGemmConfig":
        """A good tiling for an unmeasured shape."""
        columns = n // BRICK
        # With half as many blocks, x is copied half as often.
        wide = 2 if not gate and m > 16 and columns >= 2 * MULTIPROCESSORS else 1
        # Every block should have 2048 rows. The sums of others must leave room for the ring.
        sums = (2 if gate else 1) * m * BRICK * 4
        splits = [s for s in (2, 4, 8) if k >= 2048 * s and (s - 1) * sums <= 2**16]
        bricks = columns * (2 if gate else 1)
        # More than two blocks that share K pay only if multiprocessors would have none.
        enough = (s for s in splits if s * bricks >= 0.9 * MULTIPROCESSORS)
        many = bricks >= 2 * MULTIPROCESSORS or not splits
        split = 1 if many else next(enough, splits[-1])
        return cls(wide=wide, stages=3 if split == 1 else 4, split=split)


def matmul_packed(
    x: Array,
    w: QTensor,
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | LayerNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    dtype: Any,
    config: PackedGemmConfig | None = None,
) -> Array:
    """`matmul` of x [M,K] and a quantised weight as one Mosaic GPU kernel, after a norm by XLA.

    Args:
      x: [M,K] bfloat16 or float16; M is at most 32.
      w: [K,N], or [K,2,N] with `gate`, in the layout "bricks"; with `layer` stacks of these.
      layer, norm, bias, gate, activation, residual: as for `matmul`; residual is [M,N].
      dtype: dtype of the result.
      config: default `PackedGemmConfig.for_shape`.

    Returns:
      [M,N].

    Raises:
      NotImplementedError: shared memory has no room for the configuration.
    """
    (m, k), n = x.shape, w.shape[-1]
    if m == 0:
        return jnp.zeros((m, n), dtype)
    if norm is not None:
        x = normalised(x, norm)
    x, residual = in_groups(x, residual)
    operands = {
        "x": x,
        "w": w.words,
        "scales": w.scales,
        "zeros": w.zeros,
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "bias": bias,
        "residual": residual,
    }
    y = _launch(
        {name: operand for name, operand in operands.items() if operand is not None},
        kind=w.kind,
        group=w.group,
        gate=gate,
        activation=activation,
        dtype=jnp.dtype(dtype),
        config=config or PackedGemmConfig.for_shape(m, k, n, gate=gate is not None),
    )
    return y.reshape(-1, n)[:m]


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(
    jax.jit, static_argnames=("kind", "group", "gate", "activation", "dtype", "config")
)
def _launch(operands, *, kind, group, gate, activation, dtype, config):
    """Launch the kernel; `operands` are arrays by name, without those that are None."""
    deep, wide = config.deep, config.wide
    tile = FlatTile(
        operands,
        n=operands["scales"].shape[-1],
        wide=wide,
        width=BRICK,
        block_k=deep * BRICK,
        block_m=_MAX_ROWS,
        split=config.split,
        gate=gate,
        activation=activation,
        eps=None,
        dtype=dtype,
        unit=min(group, BRICK),
    )
    block_k, pieces, steps = tile.block_k, tile.pieces, tile.steps
    unit = math.gcd(group, _UNIT)
    # Rows of scales and zeros of a step. A long group gives all steps the same.
    scale_rows = max(block_k // group, 1)
    stage = {"w": ((pieces, deep, *brick_words(kind)), jnp.int32)}
    factors = [name for name in ("scales", "zeros") if name in operands]
    for name in factors:
        stage[name] = ((pieces, scale_rows, BRICK), operands[name].dtype)
    copies = pieces * len(stage)
    names = (*stage, *tile.stage)
    stages, scratch = tile.scratch(stage, tuple(stage), copies, config)

    def fetch(step, slot, names):
        """Copy a tile of each named operand into its ring; past M, K and N it is zero."""
        at = tile.rank * steps + step
        arrived = tile.smem["arrived"].at[slot]
        for name in names:
            if name in tile.stage:
                tile.fetch(name, pl.ds(at * block_k, block_k), slot, arrived)
                continue
            for piece in range(pieces):
                part, column = divmod(piece, wide)
                part = (part,) if gate else ()
                column += lax.axis_index("n") * wide
                if name == "w":
                    place = (*tile.layer, *part, column, pl.ds(at * deep, deep))
                else:
                    groups = pl.ds(lax.div(at * block_k, group), scale_rows)
                    place = (*tile.layer, groups, *part, pl.ds(column * BRICK, BRICK))
                source, target = tile.gmem[name].at[place], tile.smem[name].at[slot, piece]
                plgpu.copy_gmem_to_smem(source, target, arrived)

    by_warps = kind == "int4" and unit >= BRICK and tile.block_m <= _MOST_ROWS_BY_WARPS
    layout = left_of(tile.in_dtype) if by_warps else LAYOUT

    def products(x, weights):
        """Each weight [64, unit] times x^T: [64, block_m]."""
        if by_warps:
            right = loaded_right(x)
            return [multiplied(weight(), right) for weight in weights]

        def product(*accumulators):
            for accumulator, weight in zip(accumulators, weights, strict=True):
                plgpu.wgmma(accumulator, weight(), x.T)
            return [accumulator[...] for accumulator in accumulators]

        accumulator = plgpu.ACC((BRICK, tile.block_m), jnp.float32)
        return pl.run_scoped(product, *[accumulator] * pieces)

    def step(i, totals):
        smem, slot, totals = tile.smem, lax.rem(i, stages), list(totals)
        plgpu.barrier_wait(smem["arrived"].at[slot])

        def factor(name, piece, start):
            row = smem[name].at[slot, piece, start // group if scale_rows > 1 else 0]
            return load(row, LAYOUT.reduce(1))

        def weight(piece, start):
            zeros = factor("zeros", piece, start) if "zeros" in factors else None
            bricks = smem["w"].at[slot, piece]
            return unpacked(bricks, kind, tile.in_dtype, start, unit, zeros, layout=layout)

        for start in range(0, block_k, unit):
            x = smem["x"].at[slot, :, pl.ds(start, unit)]
            sums = products(x, [functools.partial(weight, p, start) for p in range(pieces)])
            for piece, values in enumerate(sums):
                scale = factor("scales", piece, start)
                totals[piece] += values * lax.broadcast_in_dim(scale, values.shape, [0])

        @when(i + stages < steps)
        def _():
            fetch(i + stages, slot, names)

        return totals

    def body():
        for name in names:
            for slot in range(stages):
                fetch(slot, slot, (name,))
        tile.fetch_late()
        blank = jnp.zeros((BRICK, tile.block_m), jnp.float32)
        totals = [plgpu.layout_cast(blank, LAYOUT)] * pieces
        tile.finish(lax.fori_loop(0, steps, step, totals), ())

    return tile.launch("packed_gemm_kernel", scratch, body)


# (wide, deep, stages, split). In a sweep on an H100, the fastest was always one of these.
CANDIDATES = (
    *((1, 4, 3, 1), (1, 4, 5, 1), (1, 2, 6, 1), (1, 2, 10, 1)),
    *((1, 4, 4, 2), (1, 4, 6, 2), (1, 2, 8, 2), (1, 4, 4, 4), (1, 2, 8, 4)),
    *((2, 2, 4, 1), (2, 4, 3, 1), (2, 4, 3, 2)),
)


def _candidates(shape: Shape) -> list[PackedGemmConfig]:
    return [PackedGemmConfig(*c) for c in CANDIDATES]


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    if not 1 <= shape["m"] <= _MAX_ROWS:
        return f"takes 1..{_MAX_ROWS} rows, got {shape['m']}"
    group = next((shape[kind] for kind in BITS if kind in shape), None)
    if group is None:
        return "needs a quantised weight"
    if group not in (32, 64, 128, shape["k"]) and group % 256:
        return f"takes groups of 32, 64, 128, multiples of 256 or all rows, got {group}"
    return None


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_packed(x, w, **keywords)


PACKED_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"})
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}", "weight.fp4"}),
    fits=_fits,
    heuristic=on_gpu,  # XLA dequantises the weight, and moves nine times the bytes of int4
    capabilities=((9, 0), (9, 1)),
    config=PackedGemmConfig,
    in_place=True,
    candidates=_candidates,
)
