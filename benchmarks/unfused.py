"""Runs the kernels without fusion, to measure the gain of fusion.

The same kernels run at the same shapes with the same tiles of the weight. But these are separate
operations: the norm before a linear layer, the activation and the residual after it, and RoPE and
the append to the cache before attention. This changes decode attention only; in prefill, a chunk's
keys and values are written as before.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
from jax import Array

from fdjax.engine import step
from fdjax.models import decoder_block
from fdjax.pallas_kernels.attention import (
    SharedPages,
    append_decode_attention,
    decode_attention,
    split_qkv,
    with_norms,
)
from fdjax.pallas_kernels.attention.append import append
from fdjax.pallas_kernels.gemm import ACTIVATIONS, FlatGemmConfig, matmul
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import matmul_flat_gemm
from fdjax.pallas_kernels.norm import HeadNorms, RMSNorm, rms_norm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import rotate


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Context in which programs are traced without fusion."""
    with (
        mock.patch.object(decoder_block, "matmul", unfused_matmul),
        mock.patch.object(step, "append_decode_attention", unfused_append_decode_attention),
    ):
        yield


def unfused_matmul(
    x: Array,
    w: Array,
    *,
    norm: RMSNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    preferred_element_type=None,
    implementation: str | None = None,
    plan: Plan,
) -> Array:
    """`matmul`, where "mosaic_gpu" runs only the product."""
    k, n = w.shape[0], w[0].size
    rows = x.reshape(-1, k)
    fused = any(operand is not None for operand in (norm, bias, gate, residual))
    choice = plan.choose(
        "matmul",
        m=rows.shape[0],
        k=k,
        n=n,
        itemsize=x.dtype.itemsize,
        gate=int(gate is not None),
        fused=int(fused),
    )
    if implementation is not None or choice.implementation != "mosaic_gpu":
        return matmul(
            x,
            w,
            norm=norm,
            bias=bias,
            gate=gate,
            residual=residual,
            preferred_element_type=preferred_element_type,
            implementation=implementation,
            plan=plan,
        )
    if norm is not None:
        rows = rms_norm(rows, norm.scale, eps=norm.eps)
    config = choice.config and FlatGemmConfig(**dict(choice.config))
    if config and gate is not None:  # block_n counts the columns of each half
        config = dataclasses.replace(config, block_n=min(2 * config.block_n, 256))
    dtype = jnp.dtype(preferred_element_type or x.dtype)
    y = matmul_flat_gemm(rows, w.reshape(k, n), dtype=dtype, config=config)
    if bias is not None:
        y = (y.astype(jnp.float32) + bias.reshape(1, n).astype(jnp.float32)).astype(dtype)
    if gate is not None:
        halves = y.astype(jnp.float32).reshape(-1, *w.shape[1:])
        y = (ACTIVATIONS[gate](halves[:, 0]) * halves[:, 1]).astype(dtype)
    y = y.reshape(*x.shape[:-1], -1)
    if residual is not None:
        y = (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(dtype)
    return y


def unfused_append_decode_attention(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    norms: HeadNorms | None = None,
    rotation: tuple[Array, Array] | None = None,
    layer: Array | int | None = None,
    pages: Array | None = None,
    shared: SharedPages | None = None,
    **options,
) -> tuple[Array, Array, Array]:
    """`append_decode_attention` as three operations. Each row reads all of its pages."""
    options |= {"layer": layer, "pages": pages}
    if norms is not None:
        qkv = with_norms(qkv, norms, options.get("plan"))
    if rotation is None:
        return append_decode_attention(qkv, k_cache, v_cache, lengths, **options)
    q, k, v = split_qkv(qkv)
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    k_cache, v_cache = (
        append(cache, new, lengths, layer, pages) for cache, new in ((k_cache, k), (v_cache, v))
    )
    o = decode_attention(q, k_cache, v_cache, lengths + q.shape[1], **options)
    return o, k_cache, v_cache
