"""Decode attention: o = softmax(q Kᵀ · scale) V for a few query tokens per row against the cache.

FlashDecoding++ (Hong et al. 2024), section 3. Memory bound: it must read the live part of the cache
once, 2 · sum(lengths) · Hkv · D · itemsize bytes.
"""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.attention.cache import Cache, features_of
from fdjax.pallas_kernels.attention.cudnn import DECODE_CUDNN
from fdjax.pallas_kernels.attention.hopper.decode import DECODE_HOPPER
from fdjax.pallas_kernels.attention.hopper.segments import DECODE_SEGMENTS
from fdjax.pallas_kernels.attention.operands import (
    BeamSlots,
    attention_shape,
    beam_features,
    check_attention,
)
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.attention.xla import DECODE_XLA
from fdjax.pallas_kernels.dispatch import Dispatch, resolve

DECODE_ATTENTION = (DECODE_HOPPER, DECODE_SEGMENTS, DECODE_CUDNN, DECODE_XLA)

MAX_QUERY_TOKENS = 16


def decode_attention(
    q: Array,
    k: Cache,
    v: Cache,
    lengths: Array,
    *,
    spec: AttentionSpec,
    layer: Array | int | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    return_reruns: bool = False,
    implementation: str | None = None,
    plan: Dispatch | None = None,
):
    """Attention of the last T tokens of each row against its KV cache, which contains them.

    Query t of row b has position lengths[b] - T + t and sees the slots up to its position.

    Args:
      q: [B, T, H, D], T in 1..16.
      k, v: [B, Hkv, S, D], or with `layer` a stack [L, B, Hkv, S, D]. Slots at and past `lengths`
        never affect the result. "cudnn" needs finite values there, because it multiplies them by
        zero. Both may be a `QuantisedCache`. "xla" and "cudnn" dequantise it first.
      lengths: [B] int32 live slots, the T new ones included. Length 0 gives zeros.
      spec: the attention; RoPE must have been applied already.
      layer: index into stacked caches.
      pages: [B, N] int32, or None. k and v are then a pool [P, Hkv, page, D], or with `layer`
        [L, P, Hkv, page, D], and slot s of row b is slot s % page of page pages[b, s // page].
      beams: the slots of beams, whose rows share parts of their responses; needs `pages`.
      sinks: [H], with `spec.sinks`.
      return_lse: also return the logsumexp of the scores, and of the sink if there is one.
      return_reruns: also return the share of the kernel's blocks (row, KV head, split) whose scores
        left the range of the unified maximum, so that they ran again with a running maximum.
      implementation: "xla" | "cudnn" | "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      o [B, T, H, D] in the dtype of q. With `return_lse` or `return_reruns` a tuple: o, then
      lse [B, T, H] fp32, then reruns [] fp32, 0 for implementations that never rerun.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    check_attention(
        "decode_attention", q, k, v, lengths, layer, spec, pages=pages, beams=beams, sinks=sinks
    )
    t = q.shape[1]
    if t > MAX_QUERY_TOKENS:
        raise ValueError(f"decode_attention: T must be at most {MAX_QUERY_TOKENS}, got {t}")
    if not len(q):
        lse = jnp.zeros(q.shape[:3], jnp.float32)
        return _asked_for(q, return_lse and lse, return_reruns and jnp.float32(0))
    shape = attention_shape(q, k, spec, pages)
    features = spec.features | features_of(k) | beam_features(beams)
    chosen, config = resolve(DECODE_ATTENTION, plan, implementation, features, **shape)
    spec, phi = spec.for_kernels()
    batch_invariant = plan is not None and plan.batch_invariant
    o, lse, reruns = chosen.run(
        *(q, k, v, lengths),
        spec=spec,
        phi=phi,
        layer=layer,
        pages=pages,
        config=config,
        return_lse=return_lse or sinks is not None,
        return_reruns=return_reruns,
        batch_invariant=batch_invariant,
        **({} if beams is None else {"beams": beams}),
    )
    if sinks is not None:
        o, lse = apply_sinks(o, lse, sinks, batch_invariant=batch_invariant)
    return _asked_for(o, return_lse and lse, return_reruns and reruns)


def _asked_for(o, *others):
    """o alone, or (o, *others) without those that are not asked for."""
    others = [other for other in others if other is not False]
    return (o, *others) if others else o
