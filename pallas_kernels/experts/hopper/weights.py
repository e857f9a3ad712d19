"""Tiles of experts' weights on Hopper. A block copies one in each step and multiplies it with x.

A tile has `block_k` rows and `block_n` columns of an expert; with two parts, of both gate and up.
Transposed, it is the left operand. x of a step, [rows, block_k], is the right operand.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, brick_words
from fdjax.pallas_kernels.dispatch import Shape
from fdjax.pallas_kernels.hopper.fragments import unpacked
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load
from fdjax.pallas_kernels.quantised import BRICKS, QTensor

_UNIT = 128  # rows that are unpacked at once
_MX_GROUP = 32


def misfit(shape: Shape) -> str | None:
    """Why tiles do not fit E and F of a shape of `moe`; None if they do."""
    width, hidden = shape["width"], shape["hidden"]
    if width % BRICK or hidden % BRICK:
        return f"needs E and F that are multiples of {BRICK}, got {width} and {hidden}"
    return None


def takes_group(group: int, k: int) -> bool:
    """Whether `PackedTiles` takes groups of this size of K rows."""
    return group in (32, 64, 128, k) or group % 256 == 0


def kernel_scales(q: QTensor, dtype: Any) -> Array:
    """The scales in the form for kernels: MXFP4's for bf16 as bits, other powers of 2 as fp32."""
    if q.scales.dtype != jnp.float8_e8m0fnu:
        return q.scales
    if (q.kind, q.group, dtype) == ("fp4", _MX_GROUP, jnp.bfloat16):
        return lax.bitcast_convert_type(q.scales, jnp.uint8)
    return q.scales.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class DenseTiles:
    """Tiles of a weight [X,K,N] or [X,K,2,N] in the dtype of x."""

    parts: int
    block_n: int
    block_k: int
    dtype: Any

    vectors = ()
    unit = 64

    @property
    def stage(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Buffers of a step. Their first axis is the axis of the parts."""
        return {"w": ((self.parts, self.block_k, self.block_n), self.dtype)}

    def sources(self, gmem, expert, n, step) -> Iterator[tuple[str, int, Any]]:
        """(buffer, part, source of the copy) for each copy of a step. Past K the source is zero."""
        ks, columns = (
            pl.ds(step * self.block_k, self.block_k),
            pl.ds(n * self.block_n, self.block_n),
        )
        for part in range(self.parts):
            own = (part,) if self.parts > 1 else ()
            yield "w", part, gmem["w"].at[(expert, ks, *own, columns)]

    def sums(self, smem, rows: int, steps: int, arrive: Callable, free: Callable) -> list[Array]:
        """Multiply all steps.

        Args:
          smem: buffers by name.
          rows: rows of x.
          steps: number of steps.
          arrive: function of a step that waits for its tiles and returns their index in the ring.
          free: function of a step that lets its tiles be overwritten. It ignores steps below 0.

        Returns:
          Sums [block_n, rows] for each part.
        """

        def accumulate(*accumulators):
            def step(i, _):
                at = arrive(i)
                for part, accumulator in enumerate(accumulators):
                    plgpu.wgmma(accumulator, smem["w"].at[at, part].T, smem["x"].at[at].T)
                # The previous step's products have finished reading their tiles. This step's run.
                plgpu.wgmma_wait(self.parts)
                free(i - 1)

            lax.fori_loop(0, steps, step, None)
            return [accumulator[...] for accumulator in accumulators]

        accumulator = plgpu.ACC((self.block_n, rows), jnp.float32)
        return pl.run_scoped(accumulate, *[accumulator] * self.parts)


@dataclasses.dataclass(frozen=True)
class PackedTiles:
    """Tiles of quantised weights in bricks, unpacked in registers.

    Scales multiply fp32 sums over their group of rows. The scales of MXFP4 are powers of 2. They
    multiply the weights, which is exact in bf16, so sums need not be split at every 32 rows.
    """

    parts: int
    block_n: int
    block_k: int
    dtype: Any
    kind: str
    group: int
    scales: Any
    zeros: Any | None

    def __post_init__(self):
        if self.block_k not in (128, 256):
            raise NotImplementedError(
                f"moe: tiles of quantised weights have 128 or 256 rows, got {self.block_k}"
            )

    @classmethod
    def of(cls, q: QTensor, parts: int, block_k: int, dtype: Any) -> "PackedTiles":
        """The tiles of a weight whose scales are as in `kernel_scales`.

        Raises:
          NotImplementedError: the weight is not in bricks, or has unsupported groups.
        """
        if q.layout != BRICKS or not takes_group(q.group, q.shape[0]):
            raise NotImplementedError(
                f"moe: mosaic_gpu cannot read weights in {q.format}, layout {q.layout}"
            )
        scales = jax.eval_shape(functools.partial(kernel_scales, dtype=dtype), q).dtype
        zeros = None if q.zeros is None else jnp.dtype(q.zeros.dtype)
        tiling = parts, BRICK, block_k, jnp.dtype(dtype)
        return cls(*tiling, q.kind, q.group, jnp.dtype(scales), zeros)

    @property
    def _has_powers(self) -> bool:
        return self.scales == jnp.uint8

    @property
    def _scale_rows(self) -> int:
        return max(self.block_k // self.group, 1)

    @property
    def unit(self) -> int:
        """Number of rows of x that a product takes."""
        return _UNIT if self._has_powers else math.gcd(self.group, _UNIT)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the buffers without a swizzle."""
        return tuple(self.stage)

    @property
    def stage(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """See `DenseTiles`."""
        deep, parts = self.block_k // BRICK, self.parts
        stage = {"words": ((parts, deep, *brick_words(self.kind)), jnp.int32)}
        factors = {"scales": self.scales, "zeros": self.zeros}
        for name, dtype in factors.items():
            if dtype is not None:
                stage[name] = ((parts, self._scale_rows, BRICK), dtype)
        return stage

    def sources(self, gmem, expert, n, step) -> Iterator[tuple[str, int, Any]]:
        """See `DenseTiles`."""
        deep = self.block_k // BRICK
        groups = pl.ds(lax.div(step * self.block_k, self.group), self._scale_rows)
        for part in range(self.parts):
            own = (part,) if self.parts > 1 else ()
            for name in self.stage:
                place = (expert, groups, *own, pl.ds(n * BRICK, BRICK))
                if name == "words":
                    place = (expert, *own, n, pl.ds(step * deep, deep))
                yield name, part, gmem[name].at[place]

    def sums(self, smem, rows, steps, arrive, free) -> list[Array]:
        """See `DenseTiles`."""
        return (self._exact_sums if self._has_powers else self._scaled_sums)(
            smem, rows, steps, arrive, free
        )

    def _exact_sums(self, smem, rows, steps, arrive, free):
        unit = self.unit

        def accumulate(*accumulators):
            def step(i, _):
                at = arrive(i)

                def weights(start):
                    return [self._unpacked(smem, at, p, start, unit) for p in range(self.parts)]

                ready = weights(0)
                for start in range(0, self.block_k, unit):
                    x = smem["x"].at[at, :, pl.ds(start, unit)]
                    for accumulator, a in zip(accumulators, ready, strict=True):
                        plgpu.wgmma(accumulator, a, x.T)
                    # The next weights are unpacked while the tensor cores multiply.
                    if start + unit < self.block_k:
                        ready = weights(start + unit)
                    plgpu.wgmma_wait(0)
                free(i)

            lax.fori_loop(0, steps, step, None)
            return [accumulator[...] for accumulator in accumulators]

        accumulator = plgpu.ACC((BRICK, rows), jnp.float32)
        return pl.run_scoped(accumulate, *[accumulator] * self.parts)

    def _unpacked(self, smem, at, part, start, unit):
        """Weights of some rows times their powers of 2."""
        groups = range(start // _MX_GROUP, (start + unit) // _MX_GROUP)
        rows = [smem["scales"].at[at, part, group] for group in groups]
        layout = LAYOUT.reduce(1)
        exponents = tuple(
            plgpu.load(row, layout=layout, optimized=False).astype(jnp.int32) for row in rows
        )
        words = smem["words"].at[at, part]
        return unpacked(words, self.kind, self.dtype, start, unit, exponents=exponents)

    def _scaled_sums(self, smem, rows, steps, arrive, free):
        unit = self.unit

        def factor(name, at, part, start):
            row = start // self.group if self._scale_rows > 1 else 0
            return load(smem[name].at[at, part, row], LAYOUT.reduce(1))

        def step(i, totals):
            at, totals = arrive(i), list(totals)
            for start in range(0, self.block_k, unit):

                def product(*accumulators, start=start):
                    for part, accumulator in enumerate(accumulators):
                        zeros = self.zeros and factor("zeros", at, part, start)
                        words = smem["words"].at[at, part]
                        a = unpacked(words, self.kind, self.dtype, start, unit, zeros)
                        plgpu.wgmma(accumulator, a, smem["x"].at[at, :, pl.ds(start, unit)].T)
                    return [accumulator[...] for accumulator in accumulators]

                accumulator = plgpu.ACC((BRICK, rows), jnp.float32)
                sums = pl.run_scoped(product, *[accumulator] * self.parts)
                for part, values in enumerate(sums):
                    scale = factor("scales", at, part, start)
                    totals[part] += values * lax.broadcast_in_dim(scale, values.shape, [0])
            free(i)
            return totals

        blank = plgpu.layout_cast(jnp.zeros((BRICK, rows), jnp.float32), LAYOUT)
        return lax.fori_loop(0, steps, step, [blank] * self.parts)
