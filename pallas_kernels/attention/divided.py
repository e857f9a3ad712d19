"""Attention whose cache is divided by tokens among the devices that have the same KV head.

If N times as many devices share a model as it has KV heads, N devices next to each other have the
same KV head. Each holds every N-th page of a row: slot s is on device s // page % N of the N, in
entry s // (N · page) of the row's table. All devices have the same tables, so an entry stands for
N pages, one on each device.

The N devices exchange their queries, and each attends with all of them to the slots that it has.
Then each sends every other device the results of that device's heads, and merges what it receives
by the logsumexp (Helix, Bhatia et al. 2025). A sum over the devices would need a maximum that all
know, and would move twice the bytes.

A device must read 1/N of the live part of the cache. For each token it sends (N - 1) · H · D
values of its queries, and (N - 1) · H · (D + 1) fp32 values of results, for its H query heads.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fdjax.pallas_kernels.attention.append import checked, rotated, write
from fdjax.pallas_kernels.attention.cache import Cache
from fdjax.pallas_kernels.attention.decode import decode_attention
from fdjax.pallas_kernels.attention.merge import merge_parts
from fdjax.pallas_kernels.attention.operands import BeamSlots, row_slots
from fdjax.pallas_kernels.attention.prefill import prefill_attention
from fdjax.pallas_kernels.attention.shared import needs_positions
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Dispatch, refuse_unknown
from fdjax.pallas_kernels.norm import HeadNorms
from fdjax.pallas_kernels.ranks import AXIS, announced
from fdjax.pallas_kernels.row_tiles import in_row_tiles

# Rows of a tile if bits must not depend on the batch, as in `apply_sinks`.
_TILE = 16


def append_decode_divided(
    qkv: Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Array,
    *,
    token_ranks: int,
    spec: AttentionSpec,
    pages: Array,
    norms: HeadNorms | None = None,
    rotation: tuple[Array, Array] | None = None,
    layer: Array | int | None = None,
    beams: BeamSlots | None = None,
    sinks: Array | None = None,
    return_reruns: bool = False,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array | Cache, ...]:
    """`append_decode_attention` of one token per row to a cache that devices divide by tokens.

    It is called on each device, inside a `jax.shard_map` over `ranks.AXIS`.

    Args:
      qkv: [B, 1, 1, G+2, D], the G queries of this device, and the key and value of its KV head.
      k_cache, v_cache: the pool of this device's pages.
      lengths: [B] int32 slots filled before this call, on all devices together. Only the device
        that holds slot lengths[b] writes the new token.
      token_ranks: N, number of devices that have the same KV head.
      spec: the attention; `can_share` must hold.
      pages: [B, W] int32, the same on all devices.
      beams: as on a single device; `rows` covers at least the slots of a row.
      norms, rotation, layer, sinks, return_reruns, implementation, plan: see
        `append_decode_attention`. Reruns are those of this device.

    Returns:
      See `append_decode_attention`; o has this device's heads.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    op = "append_decode_divided"
    share = _Share.of(op, qkv, k_cache, token_ranks, spec)
    if qkv.shape[1] != 1:
        raise ValueError(f"{op}: T must be 1, got {qkv.shape[1]}")
    checked(op, qkv, k_cache, v_cache, lengths, spec, layer, pages=pages, sinks=sinks)
    q, k, v = rotated(qkv, norms, rotation, plan)
    width = row_slots(k_cache, pages)
    slot = share.slots(lengths, width, beams)[:, None]
    count = share.count(lengths + 1, beams)
    own = beams and share.beams(beams, width)
    rows = jnp.arange(len(qkv), dtype=jnp.int32)
    k_cache, v_cache = (
        write(cache, new, rows, slot, layer, pages, own)
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    o, lse, *reruns = decode_attention(
        *(share.all_queries(q), k_cache, v_cache, count),
        spec=share.spec_of_all(spec, q.shape[2]),
        layer=layer,
        pages=pages,
        beams=own,
        return_lse=True,
        return_reruns=return_reruns,
        implementation=implementation,
        plan=plan,
    )
    o = share.results([o], [lse], sinks, plan)
    return o, k_cache, v_cache, *reruns


def append_prefill_divided(
    qkv: Array,
    k_cache: Cache,
    v_cache: Cache,
    lengths: Array,
    offsets: Array,
    *,
    token_ranks: int,
    spec: AttentionSpec,
    pages: Array,
    norms: HeadNorms | None = None,
    rotation: tuple[Array, Array] | None = None,
    layer: Array | int | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array, Cache, Cache]:
    """`append_prefill_attention` to a cache that devices divide by tokens.

    Each chunk is in one page. Its queries see all slots of the pages before, and one device has
    their own page, of which they see the slots up to their position.

    Args:
      qkv: [R, T, 1, G+2, D], see `append_decode_divided`; T divides the slots of a page.
      k_cache, v_cache, token_ranks, pages: see `append_decode_divided`.
      lengths, offsets: see `append_prefill_attention`; offsets are multiples of T.
      spec, norms, rotation, layer, sinks, implementation, plan: see `append_prefill_attention`.

    Returns:
      See `append_prefill_attention`; o has this device's heads.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    op = "append_prefill_divided"
    share = _Share.of(op, qkv, k_cache, token_ranks, spec)
    t, page = qkv.shape[1], share.page
    if page % t:
        raise ValueError(f"{op}: T must divide the {page} slots of a page, got {t}")
    checked(op, qkv, k_cache, v_cache, lengths, spec, layer, pages=pages, sinks=sinks)
    q, k, v = rotated(qkv, norms, rotation, plan)
    width = row_slots(k_cache, pages)
    slots = offsets[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    live = slots < lengths[:, None]
    rows = jnp.arange(len(qkv), dtype=jnp.int32)
    held = jnp.where(live, share.slots(slots, width), width)
    k_cache, v_cache = (
        write(cache, new, rows, held, layer, pages) for cache, new in ((k_cache, k), (v_cache, v))
    )
    attend = functools.partial(
        prefill_attention,
        *(share.all_queries(q), k_cache, v_cache),
        layer=layer,
        return_lse=True,
        implementation=implementation,
        plan=plan,
    )
    spec = share.spec_of_all(spec, q.shape[2])
    begin = offsets // page * page
    entry = begin // (token_ranks * page)
    own_page = jnp.take_along_axis(pages, jnp.minimum(entry, pages.shape[1] - 1)[:, None], axis=1)
    within = jnp.where(share.holds(offsets), jnp.clip(lengths - begin, 0, page), 0)
    o, lse = zip(
        attend(share.count(begin), spec=dataclasses.replace(spec, causal=False), pages=pages),
        attend(within, offsets - begin, spec=spec, pages=own_page),
        strict=True,
    )
    o = share.results(o, lse, sinks, plan)
    return jnp.where(live[..., None, None], o, jnp.zeros((), o.dtype)), k_cache, v_cache


@dataclasses.dataclass(frozen=True)
class _Share:
    """The slots that this device has of each row.

    Attributes:
      ranks: N, number of devices that divide a row.
      page: slots of a page.
    """

    ranks: int
    page: int

    @classmethod
    def of(cls, op: str, qkv: Array, cache: Cache, ranks: int, spec: AttentionSpec) -> "_Share":
        """The share of a cache; checks that devices can divide it."""
        if qkv.ndim == 5 and qkv.shape[2] != 1:
            raise ValueError(f"{op}: a device must have one KV head, got {qkv.shape[2]}")
        if lax.axis_size(AXIS) % ranks:
            raise ValueError(
                f"{op}: token_ranks must divide the {lax.axis_size(AXIS)} devices, got {ranks}"
            )
        refuse_unknown(op, needs_positions(spec), frozenset())
        return cls(ranks, cache.shape[-2])

    @property
    def rank(self) -> Array:
        """Index of this device among those that have the same KV head."""
        return lax.axis_index(AXIS) % self.ranks

    @property
    def groups(self) -> list[list[int]]:
        """The devices of each KV head."""
        every = np.arange(lax.axis_size(AXIS))
        return every.reshape(-1, self.ranks).tolist()

    def holds(self, slots: Array) -> Array:
        """Whether this device has these slots."""
        return slots // self.page % self.ranks == self.rank

    def count(self, slots: Array, beams: BeamSlots | None = None) -> Array:
        """Number of slots before `slots` that this device has. With `beams`, slots are [B]."""
        if beams is not None:
            of_prompt = jnp.minimum(slots, beams.prompts)
            return self.count(of_prompt) + self.count(slots - of_prompt)
        whole, rest = slots // (self.ranks * self.page), slots % (self.ranks * self.page)
        return whole * self.page + jnp.clip(rest - self.rank * self.page, 0, self.page)

    def slots(self, slots: Array, none: int, beams: BeamSlots | None = None) -> Array:
        """The place of each slot on this device; `none` for slots of other devices."""
        in_part = slots
        if beams is not None:
            in_part = jnp.where(slots < beams.prompts, slots, slots - beams.prompts)
        return jnp.where(self.holds(in_part), self.count(slots, beams), none)

    def beams(self, beams: BeamSlots, width: int) -> BeamSlots:
        """The slots of beams, for the `width` slots that this device has of each row.

        Prompt and response are divided separately, because each begins with a page.
        """
        prompts = self.count(beams.prompts)
        held = jnp.arange(width, dtype=jnp.int32)[None]
        in_part = jnp.where(held < prompts[:, None], held, held - prompts[:, None])
        in_part = (in_part // self.page * self.ranks + self.rank) * self.page + in_part % self.page
        slots = jnp.where(held < prompts[:, None], in_part, beams.prompts[:, None] + in_part)
        slots = jnp.minimum(slots, beams.rows.shape[1] - 1)
        return dataclasses.replace(
            beams,
            rows=jnp.take_along_axis(beams.rows, slots, axis=1),
            prompts=prompts,
            prompt_pages=-(-beams.prompts // (self.ranks * self.page)),
        )

    def all_queries(self, q: Array) -> Array:
        """Queries [B,T,H,D] of this device as [B,T,N·H,D] of all devices of its KV head."""
        q = announced(q, "queries")
        return lax.all_gather(q, AXIS, axis=2, tiled=True, axis_index_groups=self.groups)

    def spec_of_all(self, spec: AttentionSpec, heads: int) -> AttentionSpec:
        """The attention of `all_queries`, without sinks. A device has `heads` query heads."""
        phi = spec.phi
        if phi is not None:
            # A device uses its share of φ. Repeated values make it cover the heads of all queries.
            phi = np.array(phi).reshape(-1, 1, self.ranks * heads).repeat(self.ranks, axis=1)
            phi = tuple(phi.ravel().tolist())
        return dataclasses.replace(spec, phi=phi, sinks=False)

    def results(
        self, o: Sequence[Array], lse: Sequence[Array], sinks: Array | None, plan: Dispatch | None
    ) -> Array:
        """The attention [B,T,H,D] of this device's heads.

        Args:
          o, lse: results of `all_queries` for disjoint parts of the slots that this device has.
          sinks: [H], or None.
          plan: says whether bits must not depend on the batch.
        """
        invariant = plan is not None and plan.batch_invariant
        b, t, heads, d = o[0].shape
        # Rounded once, at the end.
        mine, mine_lse = _merged([part.astype(jnp.float32) for part in o], lse, invariant)
        sent = jnp.concatenate([mine, mine_lse[..., None]], axis=-1)
        sent = announced(sent.reshape(b, t, self.ranks, heads // self.ranks, d + 1), "attention")
        got = lax.all_to_all(sent, AXIS, 2, 0, axis_index_groups=self.groups)
        merged, merged_lse = _merged([*got[..., :-1]], [*got[..., -1]], invariant)
        merged = merged.astype(o[0].dtype)
        if sinks is not None:
            merged, _ = apply_sinks(merged, merged_lse, sinks, batch_invariant=invariant)
        return merged


def _merged(o: Sequence[Array], lse: Sequence[Array], invariant: bool) -> tuple[Array, Array]:
    """`merge_parts` of o [B,T,H,D] and lse [B,T,H]."""
    if len(o) == 1:
        return o[0], lse[0]
    if not invariant:
        return merge_parts(o, lse)
    count, lead = len(o), lse[0].shape
    rows = [a.reshape(-1, *a.shape[2:]) for a in (*o, *lse)]
    merged = in_row_tiles(lambda *a: merge_parts(a[:count], a[count:]), *rows, tile=_TILE)
    return tuple(a.reshape(*lead[:2], *a.shape[1:]) for a in merged)
