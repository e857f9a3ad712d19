"""Decode attention on Hopper: split-KV, tensor cores with swapped operands, a unified maximum.

FlashDecoding++ (Hong et al. 2024), section 3. The G·T query rows that share a KV head form one
tile, or several if one would spill registers. They are the N of the wgmma, so they are padded to 8
and not to 64: Sᵀ = K Qᵀ, Oᵀ = Vᵀ Pᵀ. The cache of a row is cut into splits by the row's own length,
and each split is one block of the grid. A split computes (equations 3-4)

    p = 2^(s·log2(e) − m),   l = Σ p,   o = Σ p·v

with a constant m in place of the running maximum, so its loop needs no maximum and no rescaling. m
is φ of the head. If the maximum of the first block is more than 32 away from φ in log2, m is that
maximum instead: a row whose scores all lie elsewhere then costs one reduction, not a recomputation.
The splits are combined by their own m: o = Σ 2^(m−M) o / Σ 2^(m−M) l.

**Recomputation.** A split is healthy if every row that sees a slot has 2^-64 ≤ l ≤ 2^64 and a
finite o. Otherwise it runs again with a running maximum, on the device, in the same launch. One
check per split, not per score, is enough:
- p and l are fp32, and P enters P·V in bf16, which has the exponent range of fp32. A score far
  above m gives p > 2^64 or inf, so l > 2^64; NaN fails both comparisons.
- With l ≥ 2^-64, a term that fp32 flushed to zero (below 2^-126) is below 2^-62·l. So n slots lose
  at most n·2^-62 of the weight, which for n < 2^30 is less than the rounding of fp32. Products p·v
  also lose at most n·2^-62 in units of l.
- l sums the rounded P that enters P·V, so a row dominated by one key returns its value exactly.
- p·v < 2^64·|v| overflows only for |v| ≥ 2^63. Then o is not finite, and the running maximum, with
  p ≤ 1, avoids the overflow.
fp16 ends at 65504 and has no such range, so it uses the running maximum from the start.

**int8.** A `QuantisedCache` is read without dequantising it in memory first. 16 bits hold codes
exactly, and codes become 16 bits in registers, see `codes`. The scales of K multiply rows of Sᵀ.
The scales of V multiply P before it is rounded to bf16, also in fp16, and l sums P without them.

It must read the live part of the cache once: 2 · sum(lengths) · Hkv · D · itemsize bytes. In
int8 these are 2 · sum(lengths) · Hkv · (D + 4).
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.attention.hopper.cache_row import by_name, check_pages
from fdjax.pallas_kernels.attention.hopper.decode_combine import combine
from fdjax.pallas_kernels.attention.hopper.decode_kernel import decode_kernel
from fdjax.pallas_kernels.attention.hopper.decode_tiles import (
    TILES,
    TILES_FP32,
    byte_tiles,
)
from fdjax.pallas_kernels.attention.operands import row_slots, slots_are_tiled
from fdjax.pallas_kernels.attention.spec import ALL_FEATURES
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu

_MAX_CLUSTER = 8
# Shared memory of a block of the grid, without the bytes that Mosaic uses for sums over warps and
# for barriers.
_SMEM_BYTES = 227 * 1024 - 2304


@dataclasses.dataclass(frozen=True)
class DecodeAttentionConfig:
    """Tile sizes and options.

    Attributes:
      splits: number of parts that a row's cache is cut into.
      block_kv: slots per step, a multiple of 64.
      stages: steps in flight, each 2 · block_kv · D · 2 bytes of shared memory, or half in int8.
      cluster: the splits of a row form a thread block cluster and combine through its shared
        memory; otherwise a second, small kernel combines them.
      unified: use the unified maximum; False uses a running maximum, as FlashDecoding does.
    """

    splits: int
    block_kv: int = 64
    stages: int = 3
    cluster: bool = False
    unified: bool = True

    def __post_init__(self):
        if self.splits < 1 or self.stages < 1:
            raise ValueError(f"decode_attention: splits and stages must be positive, got {self}")
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"decode_attention: block_kv must be a multiple of 64, got {self}")
        if self.cluster and self.splits > _MAX_CLUSTER:
            raise ValueError(
                f"decode_attention: a cluster must have at most {_MAX_CLUSTER} splits, got {self}"
            )


def default_config(b: int, kv_heads: int, s: int, d: int, rows: int = 8) -> DecodeAttentionConfig:
    """The fastest on an H100 (benchmarks/LOG.md); `rows` are the rows staged for a tile.

    64 blocks with 100 KB in flight each reach the full bandwidth. A cluster of two combines faster
    than a cluster of eight, and a second launch costs 2-6 us. With more KV heads than
    multiprocessors, small blocks that share a multiprocessor hide each other's start and end.
    """
    stages = functools.partial(_stages, d=d, rows=rows)
    heads = b * kv_heads
    if heads >= 160:
        return DecodeAttentionConfig(splits=1, stages=stages(2, 64))
    if heads > 64:
        return DecodeAttentionConfig(splits=1, stages=stages(4 if d == 128 else 6, 64))
    splits = min(_MAX_CLUSTER, 2 ** math.floor(math.log2(max(64 // heads, 2))), -(-s // 64))
    if splits <= 2 and s <= 256:
        return DecodeAttentionConfig(splits=1, stages=stages(2, 64), unified=False)
    if heads * splits < 32 and s >= 8192:
        return DecodeAttentionConfig(splits=64 // heads, stages=stages(6, 64))
    if (d == 64 and s > 256) or (d == 128 and s // splits > 1024):
        return DecodeAttentionConfig(
            splits, block_kv=128, stages=min(2, stages(2, 128)), cluster=splits > 1
        )
    # With few steps, a running maximum costs less than the checks of a constant one.
    few = s // splits <= 8 * 64
    wanted = 3 if few or d == 128 else 6
    return DecodeAttentionConfig(
        splits, stages=stages(wanted, 64), cluster=splits > 1, unified=not few
    )


def int8_config(b: int, kv_heads: int, s: int, d: int, rows: int = 8) -> DecodeAttentionConfig:
    """The default for int8, with the arguments of `default_config`.

    A step has half the bytes, but takes as many instructions, so there are twice as many blocks.
    Measured for attention alone on an H200 at D = 128 (benchmarks/LOG.md). Within a decode step,
    other configurations were as fast for one row.
    """
    stages = functools.partial(_stages, d=d, rows=rows, itemsize=1)
    heads = b * kv_heads
    if heads > 64:
        return DecodeAttentionConfig(splits=1, stages=stages(2 if heads >= 160 else 4, 64))
    blocks = 256 if heads <= 32 and s > 2048 else 128
    splits = min(_MAX_CLUSTER, 2 ** math.floor(math.log2(blocks / heads)), -(-s // 64))
    if heads * splits <= 64 and s >= 16384:
        return DecodeAttentionConfig(128 // heads, block_kv=128, stages=stages(4, 128))
    if s // splits > 256:
        wanted = 4 if heads * splits <= 64 else 2
        return DecodeAttentionConfig(
            splits, block_kv=128, stages=stages(wanted, 128), cluster=splits > 1
        )
    return DecodeAttentionConfig(splits, stages=stages(4, 64), cluster=splits > 1)


def _stages(wanted: int, block_kv: int, *, d: int, rows: int, itemsize: int = 2) -> int:
    """Stages with the bytes that `wanted` take at D = 128, or as many as fit into shared memory."""
    # q, k and v of the new token as loaded, twice, and as rotated; and P or rotation and norms in
    # fp32.
    others = 6 * rows * d + max(2 * rows * block_kv, 24 * d)
    stage = 2 * block_kv * d * itemsize + (8 * block_kv if itemsize == 1 else 0)  # and scales
    return max(1, min(wanted * 128 // d, (_SMEM_BYTES - others) // stage))


_STATIC = ("spec", "config", "return_reruns", "interpret", "entry_slots")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "return_lse"))
def decode_mosaic(
    q,
    k,
    v,
    lengths,
    *,
    spec,
    phi=None,
    layer=None,
    pages=None,
    visible=None,
    return_lse=True,
    **options,
):
    """`decode_attention`; returns o [B,T,H,D], lse [B,T,H] or None, reruns or None.

    Jitted, so that the layers of a model share one lowering. `options` are options of `_launch`.

    Args:
      visible: [B, S] int32, or None. Query token t then sees the slots whose bit t is set. All such
        slots are below `lengths`. If no query sees some slot of a block of `block_kv`, `HOLES` is
        set for all slots of that block.
      entry_slots: slots of an entry of `pages`, a multiple of `block_kv`; default a whole page.
        Otherwise, entry e is part e % n of page e // n, for n parts of a page.
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[-3]
    group = h // kv_heads
    rows = group * t
    # TMA zero-fills and clips a single tile of 8 rows, but not the last of several tiles.
    tiles, tile_rows = query_tiles(rows, d)
    missing = tiles * tile_rows - rows if rows > 8 else 0
    if by_token := _by_token(t, group, tiles):
        q = jnp.pad(q, ((0, 0), (0, missing), (0, 0), (0, 0)))
    else:
        if t > 1:
            q = q.reshape(b, t, kv_heads, group, d).transpose(0, 2, 1, 3, 4)
        q = q.reshape(b, kv_heads, rows, d)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0)))
        q = q.reshape(b, kv_heads * tiles, -1, d)
    operands = {"q": q, "lengths": lengths, "pages": pages, "layer": layer, **by_name(k, v)}
    operands |= {"phi": phi, "visible": visible}
    static = {"t": t, "group": group, "spec": spec, "return_lse": return_lse}
    o, lse, reruns = _launch(operands, **static, **options)
    if by_token:
        o = o[:, :t]
    else:
        o = o.reshape(b, kv_heads, -1, d)[:, :, :rows].reshape(b, kv_heads, t, group, d)
        o = o.swapaxes(1, 2).reshape(b, t, h, d)
    if return_lse:
        lse = lse.reshape(b, kv_heads, -1)[:, :, :rows].reshape(b, kv_heads, t, group)
        lse = lse.swapaxes(1, 2).reshape(b, t, h)
    return o, lse, reruns


@functools.partial(jax.jit, static_argnames=(*_STATIC, "return_lse"))
def append_decode_mosaic(
    qkv,
    k,
    v,
    lengths,
    *,
    cos,
    sin,
    spec,
    norms=None,
    phi=None,
    layer=None,
    pages=None,
    sinks=None,
    return_lse=False,
    **options,
):
    """`append_decode_attention` for T = 1, with qkv [B,Hkv,G+2,D] and cos, sin [B,1,D/2].

    One launch does norms, RoPE, append and attention and updates the caches in place. Returns
    o [B,1,H,D], lse [B,1,H] or None, both caches, and reruns or None. lse includes sinks [H].
    """
    b, kv_heads, parts, d = qkv.shape
    group = parts - 2
    rotation = jnp.stack(
        [jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)], axis=1
    ).reshape(b, 2, d)
    k, v = jax.tree.map(jax.new_ref, (k, v))
    operands = {"qkv": qkv, "rotation": rotation, "lengths": lengths, **by_name(k, v)}
    operands |= {"pages": pages, "layer": layer, "phi": phi}
    if sinks is not None:
        rows = query_tiles(group, d)[1]
        operands["sinks"] = jnp.pad(sinks.reshape(kv_heads, group), ((0, 0), (0, rows - group)))
    if norms is not None:
        # This depends on weights only, so it runs beside other kernels.
        scales = jnp.stack([norm.scale.astype(jnp.float32) for norm in norms])
        operands["norms"] = jnp.stack([scales, jnp.roll(scales, d // 2, axis=1)], axis=1)
        options["norm_eps"] = tuple(norm.eps for norm in norms)
    options |= {"spec": spec, "return_lse": return_lse}
    o, lse, reruns = _launch(operands, t=1, group=group, **options)
    o = o[:, :, :group].reshape(b, 1, kv_heads * group, d)
    lse = lse[:, :, :group].reshape(b, 1, -1) if return_lse else None
    k, v = jax.tree.map(jax.freeze, (k, v))
    return o, lse, k, v, reruns


def _launch(
    operands,
    *,
    t,
    group,
    spec,
    return_lse,
    config=None,
    entry_slots=None,
    norm_eps=None,
    return_reruns=False,
    interpret=None,
):
    """Launch the kernel; returns o in the shape of q, lse [B,Hkv·tiles,R] and reruns [].

    lse and reruns are None unless asked for. An operand that is None is left out.
    """
    operands = _prepared(operands | {"slopes": spec.slopes()})
    k, pages = operands["k"], operands.get("pages")
    (kv_heads, _, d), dtype = k.shape[-3:], operands["q" if "q" in operands else "qkv"].dtype
    b, s = len(operands["lengths"]), row_slots(k, pages)
    if entry_slots is not None:
        s = pages.shape[1] * entry_slots
    tiles, padded = query_tiles(group * t, d)
    # Rows of q; with a fused front, k and v of the new token are two more rows.
    staged = -(-(group + 2) // 8) * 8 if "qkv" in operands else padded
    # A row reads the slots of its window, and some of the block in which the window begins.
    reach = s if spec.window is None else min(s, spec.window + 64)
    if config is None:
        choose = int8_config if "k_scales" in operands else default_config
        config = choose(b, kv_heads * tiles, reach, d, staged)
        if pages is not None and (entry_slots or k.shape[-2]) % config.block_kv:
            config = dataclasses.replace(config, block_kv=64)
    # With `visible`, the kernel cannot distinguish a query that sees no slot of a split from one
    # whose scores are out of range. With ALiBi, scores grow along the cache: 17 of 32 heads leave
    # the range around the first block's maximum within 1024 slots, and would run again.
    running = not spec.unified or spec.alibi is not None or "visible" in operands
    if dtype == jnp.float16 or running:
        config = dataclasses.replace(config, unified=False)
    check_pages("decode_attention", k, pages, config.block_kv, entry_slots)

    grid, by_token = (b, kv_heads * tiles), _by_token(t, group, tiles)
    stored = group * t if group * t < 8 else padded
    one_launch = config.splits == 1 or config.cluster
    if one_launch:
        outs = {"o": ((b, stored, kv_heads, d) if by_token else (*grid, stored, d), dtype)}
        if return_lse:
            outs["lse"] = (*grid, padded), jnp.float32
    else:
        outs = {
            "o": ((*grid, config.splits, d, padded), jnp.float32),
            "lm": ((*grid, config.splits, 2, padded), jnp.float32),
        }
    if return_reruns:
        outs["reruns"] = (*grid, config.splits), jnp.int32
    scratch, unions = _scratch(
        operands, config, group, staged, padded, norm_eps, return_lse, interpret
    )

    def body(*refs):
        refs = iter(refs)
        inputs = {name: next(refs) for name in operands}
        outputs = {name: next(refs) for name in outs}
        smem = {name: next(refs) for name in scratch}
        for part in itertools.chain.from_iterable(refs):
            smem |= part
        decode_kernel(
            inputs,
            outputs,
            smem,
            t=t,
            group=group,
            tiles=tiles,
            by_token=by_token,
            spec=spec,
            config=config,
            entry_slots=entry_slots,
            norm_eps=norm_eps,
            interpreted=bool(interpret),
        )

    results = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*o) for o in outs.values()),
        kernel_name="decode_attention",
        scratch_types=(*scratch.values(), *(plgpu.RefUnion(*parts) for parts in unions)),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        **_grid(grid, config),
    )(*operands.values())
    results = dict(zip(outs, results, strict=True))
    o, lse = results["o"], results.get("lse")
    if not one_launch:
        o, lse = combine(o, results["lm"], stored, dtype, interpret, by_token)
    lse = lse[:, :, :stored] if return_lse else None
    return o, lse, results["reruns"].mean() if return_reruns else None


def _prepared(operands):
    """The operands that are not None, in the dtypes that the kernel reads."""
    types = {"lengths": jnp.int32, "pages": jnp.int32, "visible": jnp.int32, "phi": jnp.float32}
    for name, like in types.items():
        if operands.get(name) is not None:
            operands[name] = operands[name].astype(like)
    if operands.get("layer") is not None:
        operands["layer"] = jnp.asarray(operands["layer"], jnp.int32).reshape(1)
    return {name: value for name, value in operands.items() if value is not None}


def _scratch(operands, config, group, staged, padded, norm_eps, return_lse, interpret):
    """(buffers and barriers by name, pairs of groups of buffers that share memory).

    Buffers that are not needed at the same time share memory. So three blocks of the grid with 64
    slots and two stages fit on a multiprocessor.
    """
    d, dtype = operands["k"].shape[-1], operands["q" if "q" in operands else "qkv"].dtype
    int8, marked = "k_scales" in operands, "visible" in operands
    stages, block = config.stages, config.block_kv
    if int8:
        loaded = plgpu.SMEM((stages, block, d), jnp.int8, transforms=byte_tiles(d))
    else:
        loaded = plgpu.SMEM((stages, block, d), dtype, transforms=TILES)
    # float16 has too small a range for P times a scale.
    of_values = jnp.bfloat16 if int8 else dtype
    p = {"p": plgpu.SMEM((padded, block), of_values, transforms=TILES)}
    # Without tiling, rows of 32 columns would all begin in the same bank of shared memory.
    partial = TILES_FP32 if padded % 32 == 0 else ()
    result = {
        "o": plgpu.SMEM((d, padded), jnp.float32, transforms=partial),  # o, l, m of this split
        "l": plgpu.SMEM((padded,), jnp.float32),
        "m": plgpu.SMEM((padded,), jnp.float32),
        "out": plgpu.SMEM((padded, d), dtype, transforms=TILES),
    }
    if return_lse:
        result["lse"] = plgpu.SMEM((padded,), jnp.float32)
    unions = [({"k": loaded, "v": loaded}, result)]
    scratch = {
        "q": plgpu.SMEM((staged, d), dtype, transforms=TILES),
        "q_arrived": plgpu.Barrier(num_arrivals=1),
        "loaded": plgpu.Barrier(num_arrivals=2 + marked + 2 * int8, num_barriers=stages),
    }
    if marked:
        scratch["visible"] = plgpu.SMEM((stages, block), jnp.int32)
    if int8:
        scales = plgpu.SMEM((stages, block), jnp.float32)
        scratch |= {"k_scales": scales, "v_scales": scales}
    if "qkv" in operands:
        vectors, arrivals = {"rotation": plgpu.SMEM((2, d), jnp.float32)}, 1 + 2 * (group + 2)
        if norm_eps is not None:
            vectors["norms"] = plgpu.SMEM((2, 2, d), jnp.float32)
            arrivals += 1
        token = {"new": plgpu.SMEM((2, d), dtype), "score": plgpu.SMEM((padded,), jnp.float32)}
        if int8:
            token["codes"] = plgpu.SMEM((2, d), jnp.int8)
            token["new_scales"] = plgpu.SMEM((2,), jnp.float32)
        unions += [(vectors, p), ({"qkv": plgpu.SMEM((staged, 2 * d), dtype)}, token)]
        scratch["q_arrived"] = plgpu.Barrier(num_arrivals=arrivals)
    else:
        scratch |= p
    if config.cluster:
        scratch["cluster"] = plgpu.ClusterBarrier(collective_axes=("split",))
    return scratch, unions


def query_tiles(rows: int, d: int) -> tuple[int, int]:
    """(number of tiles that the query rows of a KV head are cut into, rows of each tile).

    Each tile reads the cache again, from L2. Larger tiles would spill registers.
    """
    tiles = -(-rows // (32 if d <= 128 else 16))
    return tiles, -(-rows // (8 * tiles)) * 8


def _by_token(t: int, group: int, tiles: int) -> bool:
    """Whether the kernel reads q and writes o [B,T,Hkv,D] as they are, because G is 1."""
    return t > 1 and group == 1 and tiles == 1


def _grid(grid: tuple[int, int], config: DecodeAttentionConfig) -> dict:
    if config.cluster:
        return dict(
            grid=grid,
            grid_names=("row", "tile"),
            cluster=(config.splits,),
            cluster_names=("split",),
        )
    return dict(grid=(*grid, config.splits), grid_names=("row", "tile", "split"))


def _fits(shape: Shape) -> str | None:
    if shape["d"] not in (64, 128, 256):
        return f"needs D of 64, 128 or 256, got {shape['d']}"
    return needs_half(shape) or slots_are_tiled(shape)


def _append_fits(shape: Shape) -> str | None:
    """Check for a single new token per row. Its queries, key and value must fit into one tile."""
    group = shape["h"] // shape["hkv"]
    if shape["t"] != 1:
        return f"needs T = 1, got {shape['t']}"
    if group > 16 or query_tiles(group, shape["d"])[0] > 1:
        return f"takes up to 16 query heads per KV head in one tile, got {group}"
    return _fits(shape)


def _run(*operands, batch_invariant, **keywords):
    return decode_mosaic(*operands, **keywords)


def _run_append(*operands, **keywords):
    return append_decode_mosaic(*operands, **keywords)


_CAN = ALL_FEATURES - {"causal"}
_HOPPER = (9, 0), (9, 1)

APPEND_DECODE_HOPPER = Implementation(
    *("append_decode_attention", "mosaic_gpu", _run_append),
    can=_CAN | {"norms"} | cache_features("int8"),
    fits=_append_fits,
    capabilities=_HOPPER,
)
DECODE_HOPPER = Implementation(
    *("decode_attention", "mosaic_gpu", _run),
    can=_CAN | cache_features("int8"),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=_HOPPER,
    config=DecodeAttentionConfig,
    append=APPEND_DECODE_HOPPER,
)
