"""The reference of `matmul`."""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS, UNGATED
from fdjax.pallas_kernels.norm import LayerNorm


def matmul_reference(
    x, w, *, norm=None, bias=None, gate=None, activation=None, residual=None
) -> Array:
    """The reference of `matmul`, every step in fp32. x [M,K], w [K,N] or [K,2,N]; returns fp32."""
    f32 = jnp.float32
    x = x.astype(f32)
    if isinstance(norm, LayerNorm):
        x = x - jnp.mean(x, axis=1, keepdims=True)
    if norm is not None:
        x = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + norm.eps)
        x = x * norm.scale.astype(f32)[None]
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        x = x + norm.bias.astype(f32)[None]
    y = jnp.tensordot(x, w.astype(f32), axes=1, precision="highest")
    if bias is not None:
        y = y + bias.astype(f32)[None]
    if gate is not None:
        y = ACTIVATIONS[gate](y[:, 0]) * y[:, 1]
    if activation is not None:
        y = UNGATED[activation](y)
    if residual is not None:
        y = y + residual.astype(f32)
    return y
