"""Code that kernels for matrix products share: memory, layouts, activations."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.activations import PAIRED, UNGATED

LAYOUT = plgpu.Layout.WGMMA


def matrix(shape: tuple[int, ...], dtype: Any, most: int = 128) -> Any:
    """Shared memory tiled by 8 rows, with the widest swizzle up to `most` that divides a row."""
    itemsize = jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=transforms_of(shape[-1], itemsize, most))


def transforms_of(width: int, itemsize: int, most: int = 128) -> tuple[Any, ...]:
    """Transforms of `matrix` for rows of `width` values."""
    swizzle = next(s for s in (128, 64, 32) if s <= most and width * itemsize % s == 0)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def shared_bytes(buffers: dict[str, tuple[tuple[int, ...], Any]]) -> int:
    """Bytes of shared memory for buffers (shape, dtype), each aligned to 1024 bytes."""
    sizes = (math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in buffers.values())
    return sum(-(-size // 1024) * 1024 for size in sizes)


def load(ref, layout=LAYOUT) -> Array:
    """Load shared memory into registers, as fp32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def put(ref, values: Array) -> None:
    """Store registers into shared memory, transposed and in its dtype."""
    ref.T[...] = values.astype(ref.dtype)


def _gelu(x: Array) -> Array:
    """x Φ(x) by Abramowitz and Stegun 7.1.26 (|error of Φ| < 8e-8): Mosaic has no erf."""
    z = jnp.abs(x) * 0.5**0.5
    t = 1 / (1 + 0.3275911 * z)
    polynomial = 0.0
    for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + a) * t
    tail = 0.5 * polynomial * jnp.exp(-z * z)  # Φ(-|x|)
    return x * jnp.where(x < 0, tail, 1 - tail)


def gated(gate: str, first: Array, second: Array) -> Array:
    """The hidden values of a gated MLP from its two products, gate and up."""
    if gate in PAIRED:
        return PAIRED[gate](first, second)
    return KERNEL_ACTIVATIONS[gate](first) * second


KERNEL_ACTIVATIONS = {**UNGATED, "gelu": _gelu}


def finished(sums: Sequence[Array], gate: str | None, activation: str | None) -> Array:
    """The end of a product from its sums, with the bias: gate and up with `gate`, otherwise one."""
    if gate is not None:
        return gated(gate, *sums)
    return sums[0] if activation is None else KERNEL_ACTIVATIONS[activation](sums[0])


def in_eights(x: Array, residual: Array | None) -> tuple[Array, Array | None]:
    """x [M,K] and residual [M,N] with rows of zeros at the end. TMA copies tiles of 8 rows."""
    padding = ((0, -len(x) % 8), (0, 0))
    if padding[0][1]:
        x = jnp.pad(x, padding)
        residual = None if residual is None else jnp.pad(residual, padding)
    return x, residual
