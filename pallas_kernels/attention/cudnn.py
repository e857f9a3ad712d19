"""Attention through cuDNN's fused kernels, straight from the cache layout `[B,Hkv,S,D]`.

`jax.nn.dot_product_attention` takes `[B,S,Hkv,D]` only, which would cost two cache-sized transposes
a call. The function below it takes the layout as an argument and is not public; both JAX versions
we support have it, and the tests compile against both.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

from fdjax.pallas_kernels.attention.merge import merge_attention
from fdjax.pallas_kernels.attention.spec import Masking


def check_cudnn(op: str, q: Array, masking: Masking) -> None:
    """Raise NotImplementedError for what cuDNN's kernels cannot do here."""
    if q.dtype.itemsize != 2:
        raise NotImplementedError(f"{op}: cudnn needs bfloat16 or float16, got {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise NotImplementedError(
            f"{op}: cudnn needs D to be a multiple of 8 up to 256, got {q.shape[-1]}"
        )
    if not masking.plain:
        raise NotImplementedError(f"{op}: cudnn has no window, soft cap or ALiBi here")


def decode_cudnn(q, k, v, lengths, *, scale, masking, return_lse):
    """One query token per row. The G query heads of a KV head become G rows of one product."""
    check_cudnn("decode_attention", q, masking)
    b, t, h, d = q.shape
    if t != 1:
        raise NotImplementedError(f"decode_attention: cudnn needs T = 1, got {t}")
    kv_heads = k.shape[1]
    o, lse = _attend(
        q.reshape(b, kv_heads, h // kv_heads, d), k, v, None, lengths, scale, return_lse
    )
    return o.reshape(q.shape), None if lse is None else lse.reshape(b, 1, h)


def prefill_cudnn(q, k, v, lengths, offsets, *, scale, masking):
    """A chunk against itself (causal) and against the cached prefix, merged by logsumexp.

    cuDNN aligns its causal mask with the first key, so a chunk that starts at an offset cannot be
    one call.
    """
    check_cudnn("prefill_attention", q, masking)
    t, s = q.shape[1], k.shape[2]
    rows = q.transpose(0, 2, 1, 3)
    if not masking.causal:
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
    """q [B,H,T,D], k and v [B,Hkv,S,D]; rows that see nothing give zeros and -inf."""
    b, h, t, _ = q.shape
    if q_lengths is None:
        q_lengths = jnp.full((b,), t, jnp.int32)
    out = dot_product_attention(
        q,
        k,
        v,
        # cuDNN leaves rows of length 0 undefined; they are replaced below.
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
