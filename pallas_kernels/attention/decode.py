"""Decode attention: o = softmax(q Kᵀ · scale) V for a few query tokens per row against the cache.

FlashDecoding++ (Hong et al. 2024), section 3. Memory bound: it cannot avoid reading the live part
of the cache once, 2 · sum(lengths) · Hkv · D · itemsize bytes.
"""

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.attention.cudnn import decode_cudnn
from fdjax.pallas_kernels.attention.hopper.decode import DecodeAttentionConfig, decode_mosaic
from fdjax.pallas_kernels.attention.spec import Masking, check_attention, choose_attention
from fdjax.pallas_kernels.attention.xla import attention_xla
from fdjax.pallas_kernels.plan import Choice, Plan

MAX_QUERY_TOKENS = 16


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    scale: float,
    layer: Array | int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: tuple[float, ...] | None = None,
    phi: Array | None = None,
    unified: bool = True,
    return_lse: bool = False,
    return_reruns: bool = False,
    implementation: str | None = None,
    plan: Plan | None = None,
):
    """Attention of the last T tokens of each row against its KV cache, their own slots included.

    Query t of row b stands at position lengths[b] - T + t and sees the slots up to its position.

    Args:
      q: [B, T, H, D], T in 1..16.
      k, v: [B, Hkv, S, D], or with `layer` a stack [L, B, Hkv, S, D]. Slots at and past `lengths`
        never reach the result, whatever they hold; "cudnn" needs them finite, it multiplies
        masked probabilities of zero with what is there.
      lengths: [B] int32 live slots, the T new ones included. Length 0 gives zeros.
      scale: multiplies q·k, usually D ** -0.5.
      layer: index into stacked caches.
      window: a query sees only the last `window` positions, its own included.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      alibi: H slopes of a linear position bias.
      phi: [H] fp32 unified maximum per head (section 3.1), used by "mosaic_gpu" only: it changes
        the speed, never the result.
      unified: False takes the maximum of the rows seen so far instead, for heads whose scores
        leave the range of any φ too often.
      return_lse: also return the logsumexp of the scores.
      return_reruns: also return the share of the kernel's blocks (row, KV head, split) whose scores
        left the range of the unified maximum, so that they ran again with their own.
      implementation: "xla" | "cudnn" | "mosaic_gpu"; it never falls back.
      plan: consulted when no implementation is named; without either, XLA.

    Returns:
      o [B, T, H, D] in the dtype of q, or a tuple of it and what else is asked for: lse [B, T, H]
      fp32, reruns [] fp32, 0 where nothing runs again.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    masking = Masking(window=window, soft_cap=soft_cap, alibi=alibi)
    check_attention("decode_attention", q, k, v, lengths, layer, scale, masking)
    b, t, h, _ = q.shape
    if t > MAX_QUERY_TOKENS:
        raise ValueError(f"decode_attention: T must be at most {MAX_QUERY_TOKENS}, got {t}")
    if phi is not None and phi.shape != (h,):
        raise ValueError(f"decode_attention: phi must be [{h}], got {list(phi.shape)}")
    choice = choose_attention("decode_attention", q, k, masking, implementation, plan)
    if not b:
        lse = jnp.zeros(q.shape[:3], jnp.float32)
        return _asked_for(q, return_lse and lse, return_reruns and jnp.float32(0))
    if choice.implementation == "mosaic_gpu":
        o, lse, reruns = decode_mosaic(
            q,
            k,
            v,
            lengths,
            scale=scale,
            masking=masking,
            phi=phi,
            unified=unified,
            layer=layer,
            config=decode_config(choice),
            return_lse=return_lse,
            return_reruns=return_reruns,
        )
        return _asked_for(o, return_lse and lse, return_reruns and reruns)
    if layer is not None:
        k, v = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (k, v))
    if choice.implementation == "cudnn":
        o, lse = decode_cudnn(q, k, v, lengths, scale=scale, masking=masking, return_lse=return_lse)
    else:
        o, lse = attention_xla(
            q,
            k,
            v,
            lengths,
            lengths - t,
            scale=scale,
            masking=masking,
            batch_invariant=plan is not None and plan.batch_invariant,
        )
    return _asked_for(o, return_lse and lse, return_reruns and jnp.float32(0))


def _asked_for(o, *others):
    """o, or a tuple with those of the others that are not False."""
    others = [other for other in others if other is not False]
    return (o, *others) if others else o


def decode_config(choice: Choice) -> DecodeAttentionConfig | None:
    """The measured configuration of a choice, if it has one."""
    return DecodeAttentionConfig(**dict(choice.config)) if choice.config else None
