"""Prefill attention: a chunk of a prompt against the cache that already holds it and its prefix.

Compute bound: 4 · H · D FLOPs for each (query, key) pair that is seen, about
2 · B · H · D · T · (2·offset + T) in all when causal.
"""

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.attention.cudnn import prefill_cudnn
from fdjax.pallas_kernels.attention.hopper.prefill import prefill_mosaic
from fdjax.pallas_kernels.attention.prefill_ampere import prefill_ampere
from fdjax.pallas_kernels.attention.spec import Masking, check_attention, choose_attention
from fdjax.pallas_kernels.attention.xla import attention_xla
from fdjax.pallas_kernels.plan import Plan, on_ampere


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array | None = None,
    *,
    scale: float,
    layer: Array | int | None = None,
    rows: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: tuple[float, ...] | None = None,
    phi: Array | None = None,
    unified: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
    plan: Plan | None = None,
):
    """Attention of a chunk of queries against the cache.

    Query t of row b stands at position offsets[b] + t. Queries at or past lengths[b] are padding
    and give zeros; no implementation lets what they hold reach another row or query.

    Args:
      q: [B, T, H, D].
      k, v: [B, Hkv, S, D], the chunk's own keys already written, or with `layer` a stack
        [L, B, Hkv, S, D]. Slots at and past `lengths` never reach the result; "cudnn" needs them
        finite.
      lengths: [B] int32 live slots per row, the chunk included.
      offsets: [B] int32 position of the first query, default 0.
      scale: multiplies q·k, usually D ** -0.5.
      layer: index into stacked caches.
      rows: [B] int32, those of k and v that the rows of q attend to, where there are others.
      causal: a query sees no later position; otherwise it sees every live slot.
      window: a query sees only the last `window` positions, its own included.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      alibi: H slopes of a linear position bias.
      phi: [H] fp32 unified maximum per head (FlashDecoding++, section 3.1), used by "mosaic_gpu"
        only: it changes the speed, never the result.
      unified: False takes the maximum of the rows seen so far instead, for heads whose scores
        often leave the safe range; "mosaic_gpu" only.
      return_lse: also return the logsumexp of the scores.
      implementation: "xla" | "cudnn" | "mosaic_gpu"; it never falls back.
      plan: consulted when no implementation is named; without either, XLA. Of two kernels of
        "mosaic_gpu" it takes that for Ampere on compute capability 8.x.

    Returns:
      o [B, T, H, D] in the dtype of q, or (o, lse [B, T, H] fp32; -inf for padding).

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    masking = Masking(causal=causal, window=window, soft_cap=soft_cap, alibi=alibi)
    check_attention("prefill_attention", q, k, v, lengths, layer, scale, masking, rows)
    b, _, h, _ = q.shape
    if offsets is None:
        offsets = jnp.zeros((b,), jnp.int32)
    if offsets.shape != (b,):
        raise ValueError(f"prefill_attention: offsets must be [{b}], got {list(offsets.shape)}")
    if phi is not None and phi.shape != (h,):
        raise ValueError(f"prefill_attention: phi must be [{h}], got {list(phi.shape)}")
    choice = choose_attention("prefill_attention", q, k, masking, implementation, plan)
    if not b:
        return (q, jnp.zeros(q.shape[:3], jnp.float32)) if return_lse else q
    if choice.implementation == "mosaic_gpu":
        kernel = prefill_ampere if on_ampere(plan) else prefill_mosaic
        o, lse = kernel(
            q,
            k,
            v,
            lengths,
            offsets,
            scale=scale,
            masking=masking,
            phi=phi,
            unified=unified,
            layer=layer,
            rows=rows,
            return_lse=return_lse,
        )
        return (o, lse) if return_lse else o
    if layer is not None:
        k, v = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (k, v))
    if rows is not None:
        k, v = (a[rows] for a in (k, v))
    if choice.implementation == "cudnn":
        o, lse = prefill_cudnn(q, k, v, lengths, offsets, scale=scale, masking=masking)
    else:
        o, lse = attention_xla(
            q,
            k,
            v,
            lengths,
            offsets,
            scale=scale,
            masking=masking,
            batch_invariant=plan is not None and plan.batch_invariant,
        )
    return (o, lse) if return_lse else o
