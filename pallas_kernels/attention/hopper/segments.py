"""Decode attention of beams on Hopper: the beams of a prompt read each of their pages once.

The paper on segment KV caches (Intel) reads the prompt once for all beams and selects the slots of
the response by an index. Here the beams of a prompt are the query tokens of one row. The row's
pages are the pages of the prompt, then the pages of all beams' responses. A bit per beam and slot
says whether the beam sees the slot, so nothing is copied or gathered. The kernel is the one of
`decode`.

It must read 2 · (P + W·R) · Hkv · D · itemsize bytes for W beams of P and R slots, in whole pages.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.attention.hopper.decode import (
    DecodeAttentionConfig,
    decode_mosaic,
    default_config,
    query_tiles,
)
from fdjax.pallas_kernels.attention.hopper.decode_kernel import HOLES
from fdjax.pallas_kernels.attention.operands import BeamSlots, row_slots
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu


class Groups(NamedTuple):
    """The beams of each prompt combined into one row. Only the rows of first beams have slots.

    Attributes:
      pages: [B, N'] int32: the pages of the prompt, then the first page of each beam's response,
        the second page of each, and so on.
      lengths: [B] int32 number of used slots, rounded up to whole pages.
      visible: [B, N'·page] int32, see `decode_mosaic`.
    """

    pages: Array
    lengths: Array
    visible: Array


def groups_of(beams: BeamSlots, pages: Array, lengths: Array, size: int) -> Groups:
    """The rows into which the beams of a batch are combined.

    Args:
      beams: the slots of the rows' positions.
      pages: [B, N] int32, the pages of each row.
      lengths: [B] int32 number of positions of each row, including the new tokens.
      size: number of slots of a page.
    """
    b, n = pages.shape
    w = beams.width
    row = jnp.arange(b, dtype=jnp.int32)
    members = jnp.minimum(row[:, None] + jnp.arange(w, dtype=jnp.int32)[None], b - 1)
    is_member = (beams.first[members] == row[:, None]) & (members >= row[:, None])
    is_member = is_member & (jnp.arange(w)[None] <= b - 1 - row[:, None])
    width = jnp.maximum(is_member.sum(axis=1, dtype=jnp.int32), 1)[:, None]
    prompts = jnp.minimum(beams.prompts, n * size)[:, None]
    of_prompt = -(-prompts // size)

    # The beam and the page of that beam for each entry of the new table.
    entry = jnp.arange(n * w, dtype=jnp.int32)[None]
    response = entry - of_prompt
    beam = jnp.where(response < 0, 0, response % width)
    page = jnp.where(response < 0, entry, of_prompt + response // width)
    owner = jnp.minimum(row[:, None] + beam, b - 1)
    table = pages[owner, jnp.minimum(page, n - 1)]

    new = jnp.maximum(lengths[:, None] - prompts, 0)
    used = jnp.minimum(of_prompt, -(-lengths[:, None] // size)) + width * (-(-new // size))
    used = jnp.where(beams.first[:, None] == row[:, None], used, 0)

    slot = jnp.arange(size, dtype=jnp.int32)[None, None]
    begin = jnp.where(response < 0, entry * size, prompts + (response // width) * size)
    position = begin[:, :, None] + slot
    # Slots of the prompt's last page past the prompt are empty.
    ends = jnp.where(response < 0, jnp.minimum(prompts, lengths[:, None]), lengths[:, None])
    live = (position < ends[:, :, None]) & (entry < used)[:, :, None]
    source = beams.rows[members[:, :, None, None], jnp.minimum(position, n * size - 1)[:, None]]
    seen = (response < 0)[:, None, :, None] | (source == owner[:, None, :, None])
    seen = seen & live[:, None] & is_member[:, :, None, None]
    bit = 2 ** jnp.arange(w, dtype=jnp.int32)[None, :, None, None]
    bits = jnp.where(seen, bit, 0).sum(axis=1, dtype=jnp.int32)
    holes = jnp.any(bits == 0, axis=2, keepdims=True)
    bits = jnp.where(holes, bits | jnp.int32(HOLES), bits)
    return Groups(table, used[:, 0] * size, bits.reshape(b, n * w * size))


def decode_segments(
    q, k, v, lengths, *, spec, beams, pages, layer=None, config=None, return_lse=True, **options
):
    """`decode_attention` for beams; see `decode_mosaic` for `options`."""
    b, _, h, d = q.shape
    kv_heads, w = k.shape[-3], beams.width
    groups = groups_of(beams, pages, lengths, k.shape[-2])
    row = jnp.arange(b, dtype=jnp.int32)
    members = jnp.minimum(row[:, None] + jnp.arange(w, dtype=jnp.int32)[None], b - 1)
    if config is None:
        # Rows that are not first beams are empty.
        tiles, rows = query_tiles(w * h // kv_heads, d)
        config = default_config(
            max(1, b // w), kv_heads * tiles, row_slots(k, groups.pages), d, rows
        )
    # One gather in the order of the kernel. `decode_mosaic` undoes the swap, so none is left.
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    queries = q.reshape(b * kv_heads, h // kv_heads, d)[members[:, None] * kv_heads + heads]
    o, lse, reruns = decode_mosaic(
        *(queries.swapaxes(1, 2).reshape(b, w, h, d), k, v, groups.lengths),
        spec=spec,
        layer=layer,
        pages=groups.pages,
        visible=groups.visible,
        config=config,
        return_lse=return_lse,
        **options,
    )
    own = beams.first, row - beams.first
    return o[own][:, None], lse if lse is None else lse[own][:, None], reruns


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
    can=frozenset({"beams", "rope", "soft_cap", "phi", "unified", "sinks"}),
    needs=frozenset({"beams"}),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    config=DecodeAttentionConfig,
)
