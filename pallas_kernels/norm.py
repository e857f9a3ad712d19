"""RMS normalisation, y = x / rms(x) * scale, and LayerNorm, y = (x - mean) / std * scale + bias.

Memory bound: 2·M·K·itemsize bytes, or none where it is fused.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.ranks import all_mean


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """Operand of `gemm.matmul(norm=...)`: normalise the rows of x before the product.

    Attributes:
      scale: [K] weights.
      eps: added to the mean square.
    """

    scale: Array
    eps: float = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Operand of `gemm.matmul(norm=...)`: LayerNorm of the rows of x before the product.

    Attributes:
      scale: [K] weights.
      bias: [K] weights, or None.
      eps: added to the variance.
    """

    scale: Array
    bias: Array | None
    eps: float = dataclasses.field(metadata={"static": True})


# Norms [D] of each query and of each key, before RoPE.
HeadNorms = tuple[RMSNorm, RMSNorm]


def normalised(x: Array, norm: RMSNorm | LayerNorm) -> Array:
    """`rms_norm` or `layer_norm` of x [..., K]."""
    if isinstance(norm, LayerNorm):
        return layer_norm(x, norm.scale, norm.bias, eps=norm.eps)
    return rms_norm(x, norm.scale, eps=norm.eps)


def rms_norm(x: Array, scale: Array, *, eps: float, ranks: int = 1) -> Array:
    """RMS normalisation over the last axis, computed in fp32 (Zhang & Sennrich 2019, eq. 4).

    Args:
      x: [..., K].
      scale: [K].
      eps: added to the mean square.
      ranks: devices that share a row [ranks·K]; each has K of its values.

    Returns:
      [..., K] in the dtype of x.

    Raises:
      ValueError: x is not floating point, or scale is not [K].
    """
    _check("rms_norm", x, scale=scale)
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    if ranks > 1:
        mean_square = all_mean(mean_square, "squares")
    y = x32 * lax.rsqrt(mean_square + eps)
    return (y * jnp.broadcast_to(scale.astype(jnp.float32), y.shape)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array | None = None, *, eps: float) -> Array:
    """LayerNorm over the last axis, computed in fp32 (Ba et al. 2016).

    Args:
      x: [..., K].
      scale: [K].
      bias: [K], or None.
      eps: added to the variance.

    Returns:
      [..., K] in the dtype of x.

    Raises:
      ValueError: x is not floating point, or scale or bias is not [K].
    """
    _check("layer_norm", x, scale=scale, bias=bias)
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = y * jnp.broadcast_to(scale.astype(jnp.float32), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return y.astype(x.dtype)


def _check(op: str, x: Array, **weights: Array | None) -> None:
    if not x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: x must be floating point [...,K], got {x.dtype} {list(x.shape)}")
    for name, one in weights.items():
        if one is not None and one.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} must be [{x.shape[-1]}], got {list(one.shape)}")
