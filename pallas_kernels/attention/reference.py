"""The reference of every attention implementation: masked softmax in fp32."""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.attention.spec import ALL_FEATURES, AttentionSpec
from fdjax.pallas_kernels.dispatch import refuse_unknown


def attention_reference(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    *,
    spec: AttentionSpec,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of queries at positions offsets[b] + t against slots below lengths[b].

    Args:
      q: [B, T, H, D].
      k, v: [B, Hkv, S, D]; slots at and past lengths may hold anything, NaN included.
      lengths: [B] live slots.
      offsets: [B] position of the first query.
      spec: the attention; RoPE must have been applied already.
      sinks: [H], with `spec.sinks`.

    Returns:
      (o [B, T, H, D] fp32, lse [B, T, H] fp32). A query that sees no slot, or whose position is at
      or past `lengths`, gives zeros, and -inf or the sink.

    Raises:
      NotImplementedError: the spec uses a feature that this reference does not know.
    """
    refuse_unknown("attention_reference", spec.features, ALL_FEATURES)
    f32 = jnp.float32
    b, t, h, _ = q.shape
    s = k.shape[2]
    group = h // k.shape[1]
    k = jnp.repeat(k.astype(f32), group, axis=1)
    v = jnp.repeat(v.astype(f32), group, axis=1)
    scores = jnp.einsum("bthd,bhsd->bths", q.astype(f32), k, precision="highest") * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    query = (offsets[:, None] + jnp.arange(t)[None])[:, :, None, None]
    key = jnp.arange(s)[None, None, None]
    if spec.alibi is not None:
        slopes = spec.slopes()[None, None, :, None]
        scores = scores + slopes * (key - query).astype(f32)
    length = lengths[:, None, None, None]
    seen = (key < length) & (query < length)
    if spec.causal:
        seen = seen & (key <= query)
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = -jnp.inf if sinks is None else sinks.astype(f32)[None, None, :, None]
    top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    p = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(p, axis=-1) + jnp.exp(sink - top)[..., 0]
    live = (key < length).reshape(b, 1, s, 1)
    o = jnp.einsum("bths,bhsd->bthd", p, jnp.where(live, v, 0.0), precision="highest")
    o = jnp.where(total[..., None] > 0, o / jnp.where(total > 0, total, 1.0)[..., None], 0.0)
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return o, lse
