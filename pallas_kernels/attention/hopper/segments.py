"""Decode attention of beams on Hopper: the beams of a prompt read each of their slots once.

The paper on segment KV caches (Intel) reads the prompt once for all beams and selects the slots of
the response by an index. Here the beams of a prompt are the query tokens of one row. The row has
the blocks of the prompt, then the blocks of all beams' responses. A bit per beam and slot says
whether the beam sees the slot, so nothing is copied or gathered. The kernel is the one of `decode`.

If the beams are aligned, a row is a slice of the batch. Otherwise queries and results are gathered,
and the rows of all beams but the first of a prompt are empty.

It must read 2 · (P + W·R) · Hkv · D · itemsize bytes for W beams of P and R slots, each rounded up
to whole blocks.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.attention.hopper.cache_row import check_pages
from fdjax.pallas_kernels.attention.hopper.decode import (
    DecodeAttentionConfig,
    decode_mosaic,
    default_config,
    query_tiles,
)
from fdjax.pallas_kernels.attention.hopper.decode_kernel import HOLES
from fdjax.pallas_kernels.attention.operands import BeamSlots, row_slots
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS


class Groups(NamedTuple):
    """The beams of each prompt combined into one row, of G rows.

    Attributes:
      members: [G, W] int32, the rows of the batch. Some are not beams of this prompt.
      blocks: [G, N'] int32: the blocks of the prompt, then the first block of each beam's response,
        the second block of each, and so on. Block e is part e % n of page e // n, for n blocks of a
        page.
      lengths: [G] int32 number of used slots, rounded up to whole blocks.
      visible: [G, N'·block] int32, see `decode_mosaic`.
    """

    members: Array
    blocks: Array
    lengths: Array
    visible: Array


def groups_of(beams: BeamSlots, pages: Array, lengths: Array, size: int, block: int) -> Groups:
    """The rows into which the beams of a batch are combined: G = ⌊B/W⌋ if aligned, otherwise G = B.

    If not aligned, rows that are not first beams have no slots.

    Args:
      beams: the slots of the rows' positions.
      pages: [B, N] int32, the pages of each row.
      lengths: [B] int32 number of positions of each row, including the new tokens.
      size: number of slots of a page.
      block: number of slots of a block, which divides `size`.
    """
    b, n = pages.shape
    w, parts = beams.width, size // block
    beam_of = jnp.arange(w, dtype=jnp.int32)[None]
    if beams.aligned:
        first = jnp.arange(0, b // w * w, w, dtype=jnp.int32)[:, None]
        members = first + beam_of
        is_member = jnp.ones(members.shape, bool)
    else:
        first = jnp.arange(b, dtype=jnp.int32)[:, None]
        members = jnp.minimum(first + beam_of, b - 1)
        is_member = (beams.first[members] == first) & (first + beam_of < b)
    lengths, prompts = lengths[first], jnp.minimum(beams.prompts[first], n * size)
    width = jnp.maximum(is_member.sum(axis=1, keepdims=True, dtype=jnp.int32), 1)
    of_prompt = -(-prompts // block)

    # Of each block of the new table: the row, the first slot of the row's prompt or response, and
    # the page.
    entry = jnp.arange(n * parts * w, dtype=jnp.int32)[None]
    response = entry - of_prompt
    in_prompt = response < 0
    owner = jnp.minimum(first + jnp.where(in_prompt, 0, response % width), b - 1)
    begin = jnp.where(in_prompt, entry, response // width) * block
    page = begin // size + jnp.where(in_prompt, 0, -(-prompts // size))
    blocks = pages[owner, jnp.minimum(page, n - 1)] * parts + begin % size // block

    new = jnp.maximum(lengths - prompts, 0)
    used = jnp.minimum(of_prompt, -(-lengths // block)) + width * (-(-new // block))
    used = jnp.where(is_member[:, :1], used, 0)

    slot = jnp.arange(block, dtype=jnp.int32)[None, None]
    position = (begin + jnp.where(in_prompt, 0, prompts))[:, :, None] + slot
    # Slots of the prompt's last block past the prompt are empty.
    ends = jnp.where(in_prompt, jnp.minimum(prompts, lengths), lengths)
    live = (position < ends[:, :, None]) & (entry < used)[:, :, None]
    source = beams.rows[members[:, :, None, None], jnp.minimum(position, n * size - 1)[:, None]]
    seen = in_prompt[:, None, :, None] | (source == owner[:, None, :, None])
    seen = seen & live[:, None] & is_member[:, :, None, None]
    bit = 2 ** jnp.arange(w, dtype=jnp.int32)[None, :, None, None]
    bits = jnp.where(seen, bit, 0).sum(axis=1, dtype=jnp.int32)
    holes = jnp.any(bits == 0, axis=2, keepdims=True)
    bits = jnp.where(holes, bits | jnp.int32(HOLES), bits)
    return Groups(members, blocks, used[:, 0] * block, bits.reshape(len(bits), -1))


def decode_segments(
    q, k, v, lengths, *, spec, beams, pages, layer=None, config=None, return_lse=True, **options
):
    """`decode_attention` for beams; see `decode_mosaic` for `options`."""
    b, _, h, d = q.shape
    kv_heads, size, w = k.shape[-3], k.shape[-2], beams.width
    if config is None:
        config = segments_config(b // w, w, h, kv_heads, w * row_slots(k, pages), d)
    check_pages("decode_attention", k, pages, config.block_kv)
    groups = groups_of(beams, pages, lengths, size, config.block_kv)
    if beams.aligned:
        queries = q[: b // w * w].reshape(-1, w, h, d)
    else:
        queries = q[groups.members, 0]
    o, lse, reruns = decode_mosaic(
        *(queries, k, v, groups.lengths),
        spec=spec,
        layer=layer,
        pages=groups.blocks,
        entry_slots=config.block_kv,
        visible=groups.visible,
        config=config,
        return_lse=return_lse,
        **options,
    )
    if beams.aligned:
        o = _rows_of(o, b, 0)
        return o, lse if lse is None else _rows_of(lse, b, -jnp.inf), reruns
    own = beams.first, jnp.arange(b, dtype=jnp.int32) - beams.first
    return o[own][:, None], lse if lse is None else lse[own][:, None], reruns


def _rows_of(values: Array, b: int, fill: float) -> Array:
    """Values [G, W, ...] as rows [B, 1, ...]; rows without a group are filled."""
    values = values.reshape(-1, 1, *values.shape[2:])
    missing = b - len(values)
    if not missing:
        return values
    return jnp.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1), constant_values=fill)


def segments_config(
    groups: int, width: int, heads: int, kv_heads: int, slots: int, d: int
) -> DecodeAttentionConfig:
    """The configuration for groups of `width` beams with up to `slots` slots each."""
    # The rows of the grid without beams end at once.
    tiles, rows = query_tiles(width * heads // kv_heads, d)
    count = max(1, groups) * kv_heads * tiles
    if MULTIPROCESSORS // 8 < count <= MULTIPROCESSORS // 4 and slots >= 2048:
        # 32 heads and 4 608 slots took 23.1 us with a second launch, 29.0 as clusters of two.
        return DecodeAttentionConfig(splits=4)
    return default_config(max(1, groups), kv_heads * tiles, slots, d, rows)


def _fits(shape: Shape) -> str | None:
    if shape["d"] not in (64, 128, 256):
        return f"needs D of 64, 128 or 256, got {shape['d']}"
    if shape["t"] != 1:
        return f"needs T = 1, got {shape['t']}"
    return needs_half(shape)


def _run(*operands, batch_invariant, phi, **keywords):
    return decode_segments(*operands, **keywords)


DECODE_SEGMENTS = Implementation(
    *("decode_attention", "mosaic_gpu", _run),
    can=frozenset({"beams", "rope", "soft_cap", "phi", "unified", "sinks"})
    | cache_features("int8"),
    needs=frozenset({"beams"}),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    config=DecodeAttentionConfig,
)
