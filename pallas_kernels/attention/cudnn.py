"""Attention through cuDNN's fused kernels, straight from the cache layout `[B,Hkv,S,D]`.

`jax.nn.dot_product_attention` takes only `[B,S,Hkv,D]`, which would cost two transposes of the
cache per call. So this module calls the private function below it, which takes the layout as an
argument. Both supported JAX versions have that function, and the tests compile against both.
"""

import jax.numpy as jnp
from jax import lax
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.attention.merge import merge_attention
from fdjax.pallas_kernels.attention.operands import take_layer
from fdjax.pallas_kernels.dispatch import Capability, Implementation, Shape, needs_half


def decode_cudnn(q, k, v, lengths, spec, *, return_lse):
    """Attention of one query token per row; the G queries of a KV head are rows of one product."""
    b, _, h, d = q.shape
    kv_heads = k.shape[1]
    o, lse = _attend(
        q.reshape(b, kv_heads, h // kv_heads, d), k, v, None, lengths, spec.scale, return_lse
    )
    return o.reshape(q.shape), None if lse is None else lse.reshape(b, 1, h)


def prefill_cudnn(q, k, v, lengths, offsets, spec):
    """Attention of a chunk to itself and to the cached prefix, merged by logsumexp.

    cuDNN aligns its causal mask with the first key, so a chunk that starts at an offset needs two
    calls.
    """
    t, s, scale = q.shape[1], k.shape[2], spec.scale
    rows = q.transpose(0, 2, 1, 3)
    if not spec.causal:
        live_queries = jnp.clip(lengths - offsets, 0, t)
        o, lse = _attend(rows, k, v, live_queries, lengths, scale, True)
        return o.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)
    slots = jnp.minimum(offsets[:, None] + jnp.arange(t, dtype=jnp.int32)[None], s - 1)
    own = [jnp.take_along_axis(a, slots[:, None, :, None], axis=2) for a in (k, v)]
    live = jnp.clip(lengths - offsets, 0, t)
    o, lse = _attend(rows, *own, live, live, scale, True, causal=True)

    def with_prefix():
        return merge_attention(
            o, lse, *_attend(rows, k, v, live, jnp.minimum(offsets, lengths), scale, True)
        )

    o, lse = lax.cond(jnp.any(offsets > 0), with_prefix, lambda: (o, lse))
    return o.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)


def _attend(q, k, v, q_lengths, kv_lengths, scale, return_lse, causal=False):
    """q [B,H,T,D], k and v [B,Hkv,S,D]; queries that see no key give zeros and -inf."""
    b, h, t, _ = q.shape
    if q_lengths is None:
        q_lengths = jnp.full((b,), t, jnp.int32)
    out = dot_product_attention(
        q,
        k,
        v,
        # cuDNN leaves rows of length 0 undefined. They get length 1 here and are replaced below.
        q_seqlen=jnp.maximum(q_lengths, 1).astype(jnp.int32),
        kv_seqlen=jnp.maximum(kv_lengths, 1).astype(jnp.int32),
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        qkv_layout="BNTH",
        return_residual=return_lse,
    )
    o, lse = out if return_lse else (out, None)
    seen = jnp.arange(t, dtype=jnp.int32)[None] < q_lengths[:, None]
    seen = (seen & (kv_lengths > 0)[:, None])[:, None]
    o = jnp.where(seen[..., None], o, jnp.zeros((), o.dtype))
    if lse is not None:
        lse = jnp.where(seen, lse.reshape(b, h, t).astype(jnp.float32), -jnp.inf)
    return o, lse


def _fits(shape: Shape) -> str | None:
    if shape["masks"]:
        return "supports no window, soft cap or ALiBi"
    if shape["d"] % 8 or shape["d"] > 256:
        return f"needs D to be a multiple of 8 up to 256, got {shape['d']}"
    return needs_half(shape)


def _decode_fits(shape: Shape) -> str | None:
    return f"needs T = 1, got {shape['t']}" if shape["t"] != 1 else _fits(shape)


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True on a GPU for D up to 128: cuDNN reads only live slots, XLA's einsum every slot."""
    return capability is not None and shape["d"] <= 128


def _run_decode(q, k, v, lengths, *, spec, layer, pages, return_lse, **_):
    k, v = take_layer(k, v, layer, pages=pages)
    o, lse = decode_cudnn(q, k, v, lengths, spec, return_lse=return_lse)
    return o, lse, jnp.float32(0)


def _run_prefill(q, k, v, *live, spec, layer, rows, pages, **_):
    return prefill_cudnn(q, *take_layer(k, v, layer, rows, pages), *live, spec)


_CAPABILITIES = (8, 0), (99, 0)
# Features beside causal attention. It ignores φ, which changes no result.
_CAN = frozenset({"rope", "phi", "unified", "sinks"}) | cache_features("int8")

DECODE_CUDNN = Implementation(
    *("decode_attention", "cudnn", _run_decode),
    can=_CAN,
    fits=_decode_fits,
    heuristic=_heuristic,
    capabilities=_CAPABILITIES,
)
PREFILL_CUDNN = Implementation(
    *("prefill_attention", "cudnn", _run_prefill),
    can=_CAN | {"causal"},
    fits=_fits,
    heuristic=_heuristic,
    capabilities=_CAPABILITIES,
)
