"""Attention as two einsums. It reads every slot of the cache; its scores are [B,H,T,S] in fp32."""

import math

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.attention.operands import take_layer
from fdjax.pallas_kernels.attention.spec import ALL_FEATURES, AttentionSpec
from fdjax.pallas_kernels.dispatch import Implementation
from fdjax.pallas_kernels.row_tiles import in_row_tiles

# Limit of the scores of a block of query rows, in bytes.
_SCORES_BYTES = 256 * 2**20
# A call with at most this many rows of P per KV head counts as a decode step.
_DECODE_ROWS = 64
# Slots per block when V is masked block by block.
_MASKED_BLOCK = 128
# Query tokens per block in batch-invariant mode: the shortest chunk of a prompt, so that products
# have one shape for all chunks.
_INVARIANT_BLOCK = 16


def attention_xla(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    spec: AttentionSpec,
    *,
    batch_invariant: bool = False,
) -> tuple[Array, Array]:
    """Same arguments and results as `attention_reference`, with o in the dtype of q.

    P is rounded to the dtype of v before the second product, and the denominator sums the rounded
    P, so a row dominated by one key returns that key's value exactly.

    Args:
      batch_invariant: compute one row of the batch at a time. Then results do not depend on B, and
        if T is a multiple of 16, they do not depend on how a prompt is cut into chunks.
    """
    t = q.shape[1]
    if batch_invariant:
        block = _INVARIANT_BLOCK if t % _INVARIANT_BLOCK == 0 else t

        def one_row(*row):
            return _in_query_blocks(block, *row, spec)

        return in_row_tiles(one_row, q, k, v, lengths, offsets, tile=1)
    block = min(t, max(1, _SCORES_BYTES // (4 * q.shape[0] * q.shape[2] * k.shape[2])))
    while t % block:
        block -= 1
    return _in_query_blocks(block, q, k, v, lengths, offsets, spec)


def _in_query_blocks(block, q, k, v, lengths, offsets, spec):
    """`_attention` over blocks of query tokens; `block` divides T."""
    b, t, h, d = q.shape
    if block == t:
        return _attention(q, k, v, lengths, offsets, spec)

    def query_block(operands):
        q, start = operands
        return _attention(q, k, v, lengths, offsets + start, spec)

    blocks = jnp.moveaxis(q.reshape(b, t // block, block, h, d), 1, 0)
    o, lse = lax.map(query_block, (blocks, jnp.arange(0, t, block, dtype=jnp.int32)))
    return jnp.moveaxis(o, 0, 1).reshape(q.shape), jnp.moveaxis(lse, 0, 1).reshape(b, t, h)


def _attention(q, k, v, lengths, offsets, spec):
    b, t, h, d = q.shape
    kv_heads, s = k.shape[1:3]
    group = h // kv_heads
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # The rows of a KV head's group share its keys: one product of [G·T, D] with [D, S].
    rows = q.reshape(b, t, kv_heads, group, d).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(b, kv_heads, group * t, d)
    scores = jnp.einsum(
        "bhrd,bhsd->bhrs", rows, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(b, kv_heads, group, t, s) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    query = (offsets[:, None] + jnp.arange(t, dtype=jnp.int32)[None])[:, None, None, :, None]
    key = jnp.arange(s, dtype=jnp.int32)[None, None, None, None]
    if spec.alibi is not None:
        slopes = spec.slopes().reshape(1, kv_heads, group, 1, 1)
        scores = scores + slopes * (key - query).astype(jnp.float32)
    length = lengths[:, None, None, None, None]
    seen = (key < length) & (query < length)
    if spec.causal:
        seen = seen & (key <= query)
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    p = jnp.exp(scores - top).astype(v.dtype)
    total = jnp.sum(p.astype(jnp.float32), axis=-1)
    o = _weighted_values(p.reshape(b, kv_heads, group * t, s), v, lengths, precision)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    o = o.reshape(b, kv_heads, group, t, d) / total[..., None]
    lse = jnp.where(empty, -jnp.inf, top[..., 0] + jnp.log(total))
    o = o.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)
    return o.astype(q.dtype), lse.transpose(0, 3, 1, 2).reshape(b, t, h)


def _weighted_values(p, v, lengths, precision):
    """P V over live slots. p [B,Hkv,R,S], zero past the lengths, and v [B,Hkv,S,D] → fp32.

    0 * NaN is NaN, so V must be masked where slots are dead. For one row of P, XLA fuses the mask
    into the product. For the few rows of a decode step it would copy all of V. So the product uses
    V unmasked. Only if a result is not finite, a second product uses small masked blocks of V and
    replaces it. For the many rows of a prefill, the copy costs little.
    """
    s = v.shape[2]

    def product(p, v):
        return jnp.einsum(
            "bhrs,bhsd->bhrd", p, v, precision=precision, preferred_element_type=jnp.float32
        )

    def masked(p, v, start):
        slots = start + jnp.arange(v.shape[2], dtype=jnp.int32)
        live = (slots[None] < lengths[:, None])[:, None, :, None]
        return product(p, jnp.where(live, v, jnp.zeros((), v.dtype)))

    def masked_by_blocks():
        block = math.gcd(s, _MASKED_BLOCK)

        def add(i, total):
            start = i * block
            p_block = lax.dynamic_slice_in_dim(p, start, block, axis=3)
            v_block = lax.dynamic_slice_in_dim(v, start, block, axis=2)
            return total + masked(p_block, v_block, start)

        return lax.fori_loop(0, s // block, add, jnp.zeros_like(o))

    if p.shape[2] == 1 or p.shape[2] > _DECODE_ROWS:
        return masked(p, v, 0)
    o = product(p, v)
    finite = jnp.all(jnp.isfinite(o), axis=(1, 2, 3), keepdims=True)
    return lax.cond(jnp.all(finite), lambda: o, lambda: jnp.where(finite, o, masked_by_blocks()))


def _run_decode(q, k, v, lengths, *, spec, layer, pages, batch_invariant, beams=None, **_):
    k, v = take_layer(k, v, layer, pages=pages, beams=beams)
    offsets = lengths - q.shape[1]
    o, lse = attention_xla(q, k, v, lengths, offsets, spec, batch_invariant=batch_invariant)
    return o, lse, jnp.float32(0)


def _run_prefill(q, k, v, *live, spec, layer, rows, pages, batch_invariant, **_):
    k, v = take_layer(k, v, layer, rows, pages)
    return attention_xla(q, k, v, *live, spec, batch_invariant=batch_invariant)


_CAN = ALL_FEATURES | cache_features("int8")

DECODE_XLA = Implementation(
    *("decode_attention", "xla", _run_decode), can=_CAN | {"beams", "many_beams", "prompt_pages"}
)
PREFILL_XLA = Implementation("prefill_attention", "xla", _run_prefill, can=_CAN)
