"""Prefill attention: a chunk of a prompt against the cache, which already holds the chunk's keys.

Compute bound: 4 · H · D FLOPs for each visible (query, key) pair, about
2 · B · H · D · T · (2·offset + T) in total when causal.
"""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.attention.cache import Cache, features_of
from fdjax.pallas_kernels.attention.cudnn import PREFILL_CUDNN
from fdjax.pallas_kernels.attention.hopper.prefill import PREFILL_HOPPER
from fdjax.pallas_kernels.attention.operands import (
    attention_shape,
    check_attention,
    check_offsets,
)
from fdjax.pallas_kernels.attention.prefill_ampere import PREFILL_AMPERE
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.attention.xla import PREFILL_XLA
from fdjax.pallas_kernels.dispatch import Dispatch, resolve

PREFILL_ATTENTION = (PREFILL_HOPPER, PREFILL_AMPERE, PREFILL_CUDNN, PREFILL_XLA)


def prefill_attention(
    q: Array,
    k: Cache,
    v: Cache,
    lengths: Array,
    offsets: Array | None = None,
    *,
    spec: AttentionSpec,
    layer: Array | int | None = None,
    rows: Array | None = None,
    pages: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    plan: Dispatch | None = None,
):
    """Attention of a chunk of queries against the cache.

    Query t of row b has position offsets[b] + t. Queries at or past lengths[b] are padding: they
    give zeros, and their content affects no other row or query.

    Args:
      q: [B, T, H, D].
      k, v: [B, Hkv, S, D], or with `layer` a stack [L, B, Hkv, S, D]. They hold the chunk's own
        keys and values already. Slots at and past `lengths` never affect the result, but "cudnn"
        needs finite values there. Both may be a `QuantisedCache`, which is dequantised first.
      lengths: [B] int32 live slots per row, the chunk included.
      offsets: [B] int32 position of the first query, default 0.
      spec: the attention; RoPE must have been applied already.
      layer: index into stacked caches.
      rows: [B] int32 row of k and v for each row of q; default the same row.
      pages: see `decode_attention`; excludes `rows`.
      sinks: [H], with `spec.sinks`.
      return_lse: also return the logsumexp of the scores, and of the sink if there is one.
      implementation: "xla" | "cudnn" | "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs. With a plan for compute
        capability 8.x, "mosaic_gpu" is the Ampere kernel, otherwise the Hopper kernel.

    Returns:
      o [B, T, H, D] in the dtype of q, or (o, lse [B, T, H] fp32; for padding -inf, or the sinks).

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    check_attention("prefill_attention", q, k, v, lengths, layer, spec, rows, pages, sinks=sinks)
    b = len(q)
    if offsets is None:
        offsets = jnp.zeros((b,), jnp.int32)
    check_offsets("prefill_attention", offsets, b)
    if not b:
        return (q, jnp.zeros(q.shape[:3], jnp.float32)) if return_lse else q
    shape = attention_shape(q, k, spec, pages)
    features = spec.features | features_of(k)
    chosen, config = resolve(PREFILL_ATTENTION, plan, implementation, features, **shape)
    spec, phi = spec.for_kernels()
    batch_invariant = plan is not None and plan.batch_invariant
    o, lse = chosen.run(
        *(q, k, v, lengths, offsets),
        spec=spec,
        phi=phi,
        layer=layer,
        rows=rows,
        pages=pages,
        config=config,
        return_lse=return_lse or sinks is not None,
        batch_invariant=batch_invariant,
    )
    if sinks is not None:
        o, lse = apply_sinks(o, lse, sinks, batch_invariant=batch_invariant)
    return (o, lse) if return_lse else o
