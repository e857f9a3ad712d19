"""Dequantises the pages that a prefill call reads, for kernels that read 16 bits.

A call has blocks of several prompts, and blocks of one prompt have the same table of pages. So
each table is dequantised once, up to the largest length of its blocks. Pages past it cost nothing.

It must read 2 · slots · Hkv · (D + 4) bytes and write 2 · slots · Hkv · D · 2, where slots are the
live ones of all different tables.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import QuantisedCache
from fdjax.pallas_kernels.attention.hopper.cache_row import CacheRow, check_pages
from fdjax.pallas_kernels.attention.hopper.decode_tiles import COLUMN, TILE, TILES, byte_tiles
from fdjax.pallas_kernels.hopper.conditional import when

_SLOTS = 64  # of a block of the grid
_SLOTS_AT_ONCE = 2**17  # of all rows that are dequantised together


def can_widen(k: QuantisedCache) -> bool:
    """Whether `widened_pages` takes a pool of keys or values."""
    *_, size, d = k.shape
    return d in (64, 128, 256) and size % _SLOTS == 0


def rows_at_once(rows: int, slots: int) -> int:
    """Number of rows to dequantise together, which divides all of them, to bound the memory."""
    most = max(1, min(rows, _SLOTS_AT_ONCE // slots))
    return next(count for count in range(most, 0, -1) if rows % count == 0)


@functools.partial(jax.jit, static_argnames="interpret")
def widened_pages(
    k: QuantisedCache,
    v: QuantisedCache,
    lengths: Array,
    *,
    pages: Array,
    layer: Array | int | None = None,
    interpret=None,
) -> tuple[Array, Array, Array]:
    """Copy the live pages of a quantised cache to pools in 16 bits.

    Jitted, so that the layers of a model share one lowering.

    Args:
      k, v: pools [P, Hkv, page, D], or with `layer` stacks [L, P, Hkv, page, D]. See `can_widen`.
      lengths: [R] int32 live slots of each row.
      pages: [R, N] int32.
      layer: index into stacked pools.

    Returns:
      (keys, values [R·N, Hkv, page, D]; pages [R, N] of these pools). Pages past the lengths are
      undefined, and so are slots past them.
    """
    check_pages("prefill_attention", k, pages, _SLOTS)
    r, n = pages.shape
    *_, kv_heads, size, d = k.shape
    pages = pages.astype(jnp.int32)
    # The first row with the same table copies for all of them.
    alike = (pages[:, None] == pages[None]).all(axis=-1)
    first = jnp.argmax(alike, axis=1).astype(jnp.int32)
    rows = jnp.arange(r, dtype=jnp.int32)
    longest = jnp.where(alike, lengths[None].astype(jnp.int32), 0).max(axis=1)
    operands = {
        "k": k.codes,
        "v": v.codes,
        "k_scales": k.scales,
        "v_scales": v.scales,
        "lengths": jnp.where(first == rows, longest, 0),
        "pages": pages,
    }
    if layer is not None:
        operands["layer"] = jnp.asarray(layer, jnp.int32).reshape(1)

    def body(*refs):
        refs = iter(refs)
        inputs = {name: next(refs) for name in operands}
        outputs = {name: next(refs) for name in "kv"}
        codes, scales, wide, arrived = refs
        head, block, row = (lax.axis_index(name) for name in ("head", "block", "row"))
        slot = block * _SLOTS

        @when(slot < inputs["lengths"][row])
        def _():
            for i, name in enumerate("kv"):
                sources = (
                    (CacheRow(inputs, name, row, head), codes),
                    (CacheRow(inputs, f"{name}_scales", row, head, axis=-1), scales),
                )
                for source, to in sources:
                    plgpu.copy_gmem_to_smem(source.block(slot, _SLOTS), to.at[i], arrived.at[i])
            page = row * n + lax.div(slot, jnp.int32(size))
            place = page, head, pl.ds(lax.rem(slot, jnp.int32(size)), _SLOTS)
            for i, output in enumerate(outputs.values()):
                plgpu.barrier_wait(arrived.at[i])
                wide.at[i][...] = _dequantised(codes.at[i], scales.at[i], wide.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(wide.at[i], output.at[place])
            plgpu.wait_smem_to_gmem(0)

    pool = jax.ShapeDtypeStruct((r * n, kv_heads, size, d), k.dtype)
    keys, values = plgpu.kernel(
        body,
        out_type=(pool, pool),
        kernel_name="widen_pages",
        scratch_types=(
            plgpu.SMEM((2, _SLOTS, d), jnp.int8, transforms=byte_tiles(d)),
            plgpu.SMEM((2, _SLOTS), jnp.float32),
            plgpu.SMEM((2, _SLOTS, d), k.dtype, transforms=TILES),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ),
        grid=(kv_heads, n * size // _SLOTS, r),
        grid_names=("head", "block", "row"),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands.values())
    return keys, values, first[:, None] * n + jnp.arange(n, dtype=jnp.int32)[None]


def _dequantised(codes, scales, dtype):
    """Codes [slots, D] in shared memory times the scale of each slot, rounded once."""
    found = plgpu.load(codes, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
    # 16 bits hold codes exactly.
    found = plgpu.layout_cast(found.astype(dtype), TILE).astype(jnp.float32)
    scales = plgpu.load(scales, layout=COLUMN)
    return (found * lax.broadcast_in_dim(scales, found.shape, [0])).astype(dtype)
