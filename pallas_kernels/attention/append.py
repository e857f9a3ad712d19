"""Attention fused with the steps before it: norms, RoPE, and the append of new tokens to the cache.

With "mosaic_gpu", a decode step of one token per row takes one launch, and a prefill chunk two.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.attention.cache import Cache, features_of, stored_in
from fdjax.pallas_kernels.attention.decode import DECODE_ATTENTION, decode_attention
from fdjax.pallas_kernels.attention.merge import merge_attention
from fdjax.pallas_kernels.attention.operands import (
    BeamSlots,
    attention_shape,
    beam_features,
    check_attention,
    check_offsets,
    no_rotation,
    rotation_features,
    row_slots,
)
from fdjax.pallas_kernels.attention.prefill import PREFILL_ATTENTION, prefill_attention
from fdjax.pallas_kernels.attention.shared import SharedPages, can_share, spec_of_tiles
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Dispatch, Implementation, resolve
from fdjax.pallas_kernels.norm import HeadNorms, normalised
from fdjax.pallas_kernels.rope import rotate
from fdjax.pallas_kernels.row_tiles import by_row


def append_decode_attention(
    qkv: Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Array,
    *,
    spec: AttentionSpec,
    norms: HeadNorms | None = None,
    rotation: tuple[Array, Array] | None = None,
    layer: Array | int | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    shared: SharedPages | None = None,
    sinks: Array | None = None,
    return_reruns: bool = False,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array | Cache, ...]:
    """Append T new tokens of each row to its cache and compute their attention.

    Args:
      qkv: [B, T, Hkv, G+2, D], T in 1..16: the G queries of each KV head, its key and its value,
        before norms and RoPE.
      k_cache, v_cache: [B, Hkv, S, D], or as `layer` and `pages` say; updated in place if they are
        donated or carried by a loop. A `QuantisedCache` stores the rotated key and the value in
        int8, and attention reads the rounded values.
      lengths: [B] int32 slots filled before this call. Token t goes to slot lengths[b] + t, or is
        dropped if there is no such slot. Rows must not share the page that they write.
      spec: the attention.
      norms: RMS norms of each query and of each key, or None.
      rotation: (cos, sin) of `rope.rotation` at the tokens' positions, or None for no RoPE.
      layer, pages, sinks, return_reruns, implementation, plan: see `decode_attention`.
      beams: see `decode_attention`. The new tokens are written to each row's own pages, so `rows`
        must name the row itself at their positions.
      shared: rows that share their first pages, for T = 1; the result is the same up to rounding.
        Needs `pages`, excludes `beams` and `return_reruns`.

    Returns:
      (o [B, T, H, D], k_cache, v_cache), and with `return_reruns` reruns [] fp32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    checked(
        "append_decode_attention",
        *(qkv, k_cache, v_cache, lengths, spec, layer),
        pages=pages,
        beams=beams,
        sinks=sinks,
        rotation=rotation,
    )
    alone = qkv.shape[1] > 1 or beams is not None or return_reruns
    if shared is not None and (pages is None or alone):
        raise ValueError(
            "append_decode_attention: shared needs pages and T = 1, and excludes beams and "
            "return_reruns"
        )
    attend = functools.partial(
        _append_decode,
        qkv,
        spec=dataclasses.replace(spec, sinks=False),
        norms=norms,
        rotation=rotation,
        layer=layer,
        implementation=implementation,
        plan=plan,
    )
    if shared is None or not can_share(spec):
        o, lse, *caches, reruns = attend(
            *(k_cache, v_cache, lengths),
            pages=pages,
            beams=beams,
            sinks=sinks,
            return_lse=False,
            return_reruns=return_reruns,
        )
    else:
        shared = jax.tree.map(jnp.asarray, shared)
        own, tokens = shared.own(pages, lengths, k_cache.shape[-2])
        o, lse, *caches, reruns = attend(
            *(k_cache, v_cache, tokens),
            pages=own,
            beams=None,
            sinks=None,
            return_lse=True,
            return_reruns=False,
        )
        o, lse = merge_attention(
            *(o, lse),
            *_of_shared_pages(qkv, *caches, shared, **attend.keywords),
        )
        if sinks is not None:
            o, _ = _with_sinks(o, lse, sinks, plan)
    return (o, *caches, reruns) if return_reruns else (o, *caches)


def _append_decode(
    qkv,
    k_cache,
    v_cache,
    lengths,
    *,
    spec,
    norms,
    rotation,
    layer,
    pages,
    beams,
    sinks,
    return_lse,
    return_reruns,
    implementation,
    plan,
):
    """`append_decode_attention` without shared pages; returns (o, lse, both caches, reruns)."""
    q, k, v = split_qkv(qkv)
    fused, config = _with_append(
        DECODE_ATTENTION, q, k_cache, spec, rotation, pages, plan, implementation, beams, norms
    )
    if fused is not None:
        static, phi = spec.for_kernels()
        cos, sin = rotation or no_rotation(len(q), 1, q.shape[-1])
        return fused.run(
            *(qkv[:, 0], k_cache, v_cache, lengths),
            norms=norms,
            cos=cos,
            sin=sin,
            spec=static,
            phi=phi,
            layer=layer,
            pages=pages,
            sinks=sinks,
            config=config,
            return_lse=return_lse,
            return_reruns=return_reruns,
        )
    q, k, v = rotated(qkv, norms, rotation, plan)
    k_cache, v_cache = (
        append(c, new, lengths, layer, pages, beams) for c, new in ((k_cache, k), (v_cache, v))
    )
    found = decode_attention(
        *(q, k_cache, v_cache, lengths + qkv.shape[1]),
        spec=spec,
        layer=layer,
        pages=pages,
        beams=beams,
        return_lse=return_lse or sinks is not None,
        return_reruns=return_reruns,
        implementation=implementation,
        plan=plan,
    )
    o, *more = found if isinstance(found, tuple) else (found,)
    lse = more.pop(0) if return_lse or sinks is not None else None
    if sinks is not None:
        o, lse = _with_sinks(o, lse, sinks, plan)
    return o, lse, k_cache, v_cache, *(more or [None])


def _with_sinks(o, lse, sinks, plan):
    invariant = plan is not None and plan.batch_invariant
    return apply_sinks(o, lse, sinks, batch_invariant=invariant)


def _of_shared_pages(
    qkv,
    k_cache,
    v_cache,
    shared,
    *,
    spec,
    norms,
    rotation,
    layer,
    implementation,
    plan,
):
    """Attention of each row to the first pages that it shares: (o [B,1,H,D], lse [B,1,H])."""
    kv_heads = k_cache.shape[-3]
    q = shared.tiles(rotated(qkv, norms, rotation, plan)[0], kv_heads)
    o, lse = decode_attention(
        *(q, k_cache, v_cache, shared.counts * k_cache.shape[-2]),
        spec=spec_of_tiles(spec, kv_heads, shared.width),
        layer=layer,
        pages=shared.pages,
        return_lse=True,
        implementation=implementation,
        plan=plan,
    )
    return shared.by_row(o, kv_heads, 0.0), shared.by_row(lse, kv_heads, -jnp.inf)


def rotated(
    qkv: Array,
    norms: HeadNorms | None,
    rotation: tuple[Array, Array] | None,
    plan: Dispatch | None,
) -> tuple[Array, Array, Array]:
    """q [B,T,H,D], k and v [B,T,Hkv,D] of qkv [B,T,Hkv,G+2,D], after norms and RoPE."""
    q, k, v = split_qkv(qkv if norms is None else with_norms(qkv, norms, plan))
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    return q, k, v


def append_prefill_attention(
    qkv: Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Array,
    offsets: Array,
    *,
    spec: AttentionSpec,
    norms: HeadNorms | None = None,
    rotation: tuple[Array, Array] | None = None,
    layer: Array | int | None = None,
    rows: Array | None = None,
    pages: Array | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array, Cache, Cache]:
    """Append a chunk of each row's prompt to its cache and compute its attention.

    Args:
      qkv: [R, T, Hkv, G+2, D]: the G queries of each KV head, its key and its value, before norms
        and RoPE.
      k_cache, v_cache: [B, Hkv, S, D], or with `layer` a stack [L, B, Hkv, S, D]; updated in place
        if they are donated or carried by a loop; in int8 as in `append_decode_attention`. Slots
        from a row's length up to offsets[r] + T may be overwritten, unless the row has no live
        token in this chunk.
      lengths: [R] int32 live slots per row, the chunk included; tokens past them are padding.
      offsets: [R] int32 slot of the first token; offsets + T <= S.
      spec: the attention, causal.
      norms: RMS norms of each query and of each key, or None.
      rotation: (cos, sin) of `rope.rotation` at the tokens' positions, or None for no RoPE.
      layer: index into stacked caches.
      rows: [R] int32 distinct rows of the caches; default all of them in order (R = B).
      pages: [R, N] int32, see `decode_attention`; excludes `rows`. Rows must not share the pages
        that they write, and offsets must be multiples of 64. Rows may be chunks of one prompt in
        any order, because all are written before any attends.
      sinks, implementation, plan: see `prefill_attention`.

    Returns:
      (o [R, T, H, D], zeros for padding; k_cache; v_cache).

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    if norms is not None:
        qkv = with_norms(qkv, norms, plan)
    q, k, v = checked(
        "append_prefill_attention",
        qkv,
        k_cache,
        v_cache,
        lengths,
        spec,
        layer,
        rows,
        pages,
        sinks=sinks,
        rotation=rotation,
    )
    check_offsets("append_prefill_attention", offsets, len(q))
    fused, _ = _with_append(
        PREFILL_ATTENTION, q, k_cache, spec, rotation, pages, plan, implementation
    )
    if fused is not None:
        cos_sin = rotation or no_rotation(*qkv.shape[:2], q.shape[-1])
        q, k_cache, v_cache = fused.run(
            *(qkv, k_cache, v_cache, lengths, offsets, *cos_sin),
            rows=rows,
            layer=layer,
            pages=pages,
        )
    else:
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        slots = offsets[:, None] + jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        # Padding gets a slot that does not exist, so that the scatter drops it.
        slots = jnp.where(slots < lengths[:, None], slots, row_slots(k_cache, pages))
        index = jnp.arange(len(qkv), dtype=jnp.int32) if rows is None else rows
        k_cache, v_cache = (
            write(cache, new, index, slots, layer, pages, unique=True)
            for cache, new in ((k_cache, k), (v_cache, v))
        )
    o = prefill_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        offsets,
        layer=layer,
        rows=rows,
        pages=pages,
        spec=spec,
        sinks=sinks,
        implementation=implementation,
        plan=plan,
    )
    return o, k_cache, v_cache


def _with_append(
    own: Sequence[Implementation],
    q: Array,
    k_cache: Cache,
    spec: AttentionSpec,
    rotation: tuple[Array, Array] | None,
    pages: Array | None,
    plan: Dispatch | None,
    implementation: str | None,
    beams: BeamSlots | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Implementation | None, Any]:
    """(function that appends for the chosen attention, or None; configuration of the attention)."""
    if not len(q):
        return None, None
    shape = attention_shape(q, k_cache, spec, pages)
    features = spec.features | features_of(k_cache) | beam_features(beams)
    chosen, config = resolve(own, plan, implementation, features, **shape)
    features |= rotation_features(rotation, shape["d"]) | ({"norms"} if norms else set())
    can = chosen.append is not None and chosen.append.supports(shape, features)
    return chosen.append if can else None, config


def checked(
    op: str,
    qkv: Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Array,
    spec: AttentionSpec,
    layer: Array | int | None = None,
    rows: Array | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    sinks: Array | None = None,
    rotation: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """q [B,T,H,D], k and v [B,T,Hkv,D] of qkv [B,T,Hkv,G+2,D].

    Raises:
      ValueError: the operands do not fit together.
    """
    if qkv.ndim != 5 or qkv.shape[3] < 3:
        raise ValueError(f"{op}: qkv must be [B,T,Hkv,G+2,D], got {list(qkv.shape)}")
    q, k, v = split_qkv(qkv)
    check_attention(op, q, k_cache, v_cache, lengths, layer, spec, rows, pages, beams, sinks)
    if k_cache.shape[-3] != qkv.shape[2]:
        raise ValueError(
            f"{op}: qkv must have the {k_cache.shape[-3]} KV heads of the cache, got {qkv.shape[2]}"
        )
    if rotation is not None:
        b, t, *_, d = qkv.shape
        cos, sin = (list(a.shape) for a in rotation)
        if cos != sin or len(cos) != 3 or cos[:2] != [b, t] or 2 * cos[2] > d:
            raise ValueError(
                f"{op}: rotation must be cos and sin [{b},{t},N] with N at most {d // 2}, "
                f"got {cos} and {sin}"
            )
    return q, k, v


def split_qkv(qkv: Array) -> tuple[Array, Array, Array]:
    """qkv [B,T,Hkv,G+2,D] as q [B,T,H,D], k and v [B,T,Hkv,D]."""
    b, t, kv_heads, parts, d = qkv.shape
    q = qkv[..., :-2, :].reshape(b, t, kv_heads * (parts - 2), d)
    return q, qkv[..., -2, :], qkv[..., -1, :]


def with_norms(qkv: Array, norms: HeadNorms, plan: Dispatch | None = None) -> Array:
    """qkv [B,T,Hkv,G+2,D] with each query and key normalised."""
    *qk, v = jnp.split(qkv, (-2, -1), axis=3)
    pairs = zip(qk, norms, strict=True)
    qk = [by_row(functools.partial(normalised, norm=norm), a, plan) for a, norm in pairs]
    return jnp.concatenate([*qk, v], axis=3)


def append(
    cache: Cache,
    new: Array,
    lengths: Array,
    layer: Array | int | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
) -> Cache:
    """Write new [B,T,Hkv,D] into cache [B,Hkv,S,D] from slot lengths[b] on, while slots exist.

    See `decode_attention` for `layer`, `pages` and `beams`.
    """
    b, t = new.shape[:2]
    if b == t == 1 and layer is None and pages is None:
        slot, exists = lengths[0], lengths[0] < cache.shape[2]

        def put(cache, new):
            # JAX moves a slice that ends past the cache back onto live slots, which must not
            # change.
            old = lax.dynamic_slice_in_dim(cache, slot, 1, axis=2)
            new = jnp.where(exists, new.swapaxes(1, 2), old)
            return lax.dynamic_update_slice_in_dim(cache, new, slot, axis=2)

        return jax.tree.map(put, cache, stored_in(cache, new))
    slots = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    return write(cache, new, jnp.arange(b, dtype=jnp.int32), slots, layer, pages, beams)


def write(
    cache: Cache,
    new: Array,
    rows: Array,
    slots: Array,
    layer: Array | int | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    *,
    unique: bool = False,
) -> Cache:
    """Write new [R,T,Hkv,D] into cache [B,Hkv,S,D] at rows [R] and those slots [R,T] that exist.

    With `layer`, the cache is a stack [L,B,Hkv,S,D]. With `pages` [R,N], it is a pool of pages in
    place of rows. `unique` says that no two tokens go to the same slot of a page, so that XLA needs
    no atomic operations.
    Every axis but D is indexed. A slice over the heads would make XLA transpose the whole cache.
    """
    heads = jnp.arange(cache.shape[-3], dtype=jnp.int32)
    at_row = rows[:, None]
    if pages is not None:
        size, width = cache.shape[-2], pages.shape[1]
        if beams is not None:
            page, slot = beams.page_and_slot(slots, size)
            slots = page * size + slot
        page = jnp.minimum(slots // size, width - 1)
        at_row = jnp.take_along_axis(pages, page, axis=1)
        slots = jnp.where(slots < width * size, slots % size, size)
    index = at_row[:, None], heads[None, :, None], slots[:, None, :]
    index = index if layer is None else (layer, *index)

    def put(cache, new):
        # Rows without work may share a page.
        alone = unique or pages is None
        return cache.at[index].set(new.swapaxes(1, 2), mode="drop", unique_indices=alone)

    return jax.tree.map(put, cache, stored_in(cache, new))
