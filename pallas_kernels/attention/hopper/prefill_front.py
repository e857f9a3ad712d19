"""The work before attention in a prefill chunk: RoPE of q and k, and writing k and v to the cache.

It must read and write q, k and v once, 2·R·T·(H + 2·Hkv)·D elements. XLA needs three kernels and
twice the time.

A block handles 64 tokens of a KV head: queries, key and value, each as two tiles [64, D/2]. TMA
loads the tiles to shared memory, q and k are rotated there, and TMA stores them. For a cache in
int8, k and v are rounded to codes and scales in between.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import cache_features, features_of
from fdjax.pallas_kernels.attention.hopper.cache_row import CacheRow, by_name, check_pages
from fdjax.pallas_kernels.attention.hopper.decode_front import rounded_to_codes
from fdjax.pallas_kernels.attention.hopper.decode_tiles import TILE
from fdjax.pallas_kernels.attention.operands import slots_are_tiled
from fdjax.pallas_kernels.attention.spec import ALL_FEATURES
from fdjax.pallas_kernels.dispatch import Implementation, Shape
from fdjax.pallas_kernels.hopper.codes import put_codes
from fdjax.pallas_kernels.hopper.conditional import when

_TOKENS = 64
_PARTS = 6  # heads of a block at most: more blocks with fewer heads hide more latency


@functools.partial(jax.jit, static_argnames="interpret")
def write_chunk_mosaic(
    qkv, k, v, lengths, offsets, cos, sin, *, rows=None, layer=None, pages=None, interpret=None
):
    """Rotate a chunk of tokens and write their keys and values to the cache.

    Jitted, so that the layers of a model share one lowering.

    Args:
      qkv: [R, T, Hkv, G+2, D], T a multiple of 64, D of 64 or 128.
      k, v: caches [B, Hkv, S, D], or with `layer` a stack [L, B, Hkv, S, D], also quantised;
        updated in place.
      lengths: [R] int32 live slots, the chunk included; later tokens are padding. Padding may
        overwrite slots up to the next multiple of 64 tokens, which hold no live token.
      offsets: [R] int32 slot of the first token; offsets + T <= S.
      cos, sin: [R, T, D/2] fp32.
      rows: [R] int32 rows of the cache; default all of them in order.
      layer: index into stacked caches.
      pages: see `decode_attention`; excludes `rows`. Offsets are then multiples of 64.

    Returns:
      (q [R, T, H, D], undefined for padding; k; v).
    """
    r, t, kv_heads, parts, d = qkv.shape
    group = parts - 2
    half = d // 2
    layout = plgpu.Layout.WG_STRIDED((_TOKENS, half), vec_size=8)
    held = min(parts, _PARTS)
    groups = -(-parts // held)

    int8 = bool(features_of(k))
    # Not in tiles of 8 tokens: TMA could store them only from a multiple of 8 slots on.
    rounded = plgpu.SMEM((2, 2, _TOKENS, half), jnp.int8)
    k, v = (jax.tree.map(jax.new_ref, cache) for cache in (k, v))
    named = {
        **by_name(k, v),
        "rows": None if rows is None else rows.astype(jnp.int32),
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "pages": None if pages is None else pages.astype(jnp.int32),
    }
    named = {name: operand for name, operand in named.items() if operand is not None}
    check_pages("append_prefill_attention", k, pages, _TOKENS)

    def body(qkv, lengths, offsets, cos, sin, *refs):
        *others, q, tiles, rounded, arrived = refs
        inputs = dict(zip(named, others, strict=True))
        row, block, index = (lax.axis_index(name) for name in ("row", "tokens", "head"))
        # `first` is static if there is one group, and so are the conditions below.
        head, first = index, 0
        if groups > 1:
            head, first = lax.div(index, groups), lax.rem(index, groups) * held
        tokens = pl.ds(block * _TOKENS, _TOKENS)

        def each(do):
            """Call do(tile, barrier, part) for the parts of this block."""
            for i in range(held):
                args = tiles.at[i], arrived.at[i], first + i
                when(first + i < parts)(functools.partial(do, *args))

        def halves(tile, head):
            """Pairs of halves of D: of a tile [2,64,D/2] and of a head's tokens [64,D]."""
            return [(tile.at[i], head.at[:, pl.ds(i * half, half)]) for i in range(2)]

        def load(tile, barrier, part):
            for to, source in halves(tile, qkv.at[row, tokens, head, part]):
                plgpu.copy_gmem_to_smem(source, to, barrier)

        def store(tile, target):
            for source, to in halves(tile, target):
                plgpu.copy_smem_to_gmem(source, to)

        def store_codes(tile, at, target, target_scales):
            codes = rounded.at[at]
            parts = (plgpu.load(tile.at[i], layout=TILE, optimized=False) for i in range(2))
            found, scale = rounded_to_codes([part.astype(jnp.float32) for part in parts])
            for i, values in enumerate(found):
                values = values.astype(jnp.int8)
                if interpret is None:
                    put_codes(codes.at[i], values)
                else:
                    codes.at[i][...] = values
            plgpu.commit_smem()
            for i in range(2):
                plgpu.copy_smem_to_gmem(codes.at[i], target.at[:, pl.ds(i * half, half)])
            # TMA would copy one dimension in multiples of 16 bytes only, from any slot on.
            target_scales[...] = scale

        slot = offsets[row] + block * _TOKENS

        @when(slot < lengths[row])
        def _():
            each(load)
            c, s = (plgpu.load(a.at[row, tokens], layout=layout) for a in (cos, sin))

            def rotate_tile(tile):
                a, b = (plgpu.load(tile.at[i], layout=layout).astype(jnp.float32) for i in range(2))
                tile.at[0][...] = (a * c - b * s).astype(tile.dtype)
                tile.at[1][...] = (b * c + a * s).astype(tile.dtype)
                plgpu.commit_smem()

            def finish(tile, barrier, part):
                plgpu.barrier_wait(barrier)
                when(part <= group)(lambda: rotate_tile(tile))

                @when(part < group)
                def _():
                    store(tile, q.at[row, tokens, head * group + part])

                for at, name in enumerate("kv"):

                    @when(part == group + at)
                    def _(at=at, name=name):
                        of_cache = inputs["rows"][row] if "rows" in inputs else row
                        target = CacheRow(inputs, name, of_cache, head).block(slot, _TOKENS)
                        if not int8:
                            store(tile, target)
                            return
                        scales = CacheRow(inputs, f"{name}_scales", of_cache, head, axis=-1)
                        store_codes(tile, at, target, scales.block(slot, _TOKENS))

            each(finish)
            plgpu.wait_smem_to_gmem(0)

    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((r, t, kv_heads * group, d), qkv.dtype),
        kernel_name="write_chunk",
        scratch_types=(
            plgpu.SMEM((held, 2, _TOKENS, half), qkv.dtype),
            rounded if int8 else (),
            plgpu.Barrier(num_arrivals=2, num_barriers=held),
        ),
        grid=(kv_heads * groups, t // _TOKENS, r),
        grid_names=("head", "tokens", "row"),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(qkv, *(a.astype(jnp.int32) for a in (lengths, offsets)), cos, sin, *named.values())
    return q, *(jax.tree.map(jax.freeze, cache) for cache in (k, v))


def _fits(shape: Shape) -> str | None:
    if shape["d"] not in (64, 128):
        return f"needs D of 64 or 128, got {shape['d']}"
    if shape["t"] % _TOKENS:
        return f"needs T to be a multiple of {_TOKENS}, got {shape['t']}"
    return slots_are_tiled(shape)


def _run(*operands, rows, layer, pages):
    return write_chunk_mosaic(*operands, rows=rows, layer=layer, pages=pages)


WRITE_CHUNK_HOPPER = Implementation(
    *("append_prefill_attention", "mosaic_gpu", _run),
    can=ALL_FEATURES | cache_features("int8"),
    fits=_fits,
    capabilities=((9, 0), (9, 1)),
)
