"""Decode attention on Hopper: split-KV, tensor cores with swapped operands, a unified maximum.

FlashDecoding++ (Hong et al. 2024), section 3. The G·T query rows that share a KV head are one tile;
they are the N of the wgmma, padded to 8 and not to 64: Sᵀ = K Qᵀ, Oᵀ = Vᵀ Pᵀ. The cache of a row is
cut into splits by its own length, one block of the grid each. A split computes (equations 3-4)

    p = 2^(s·log2(e) − m),   l = Σ p,   o = Σ p·v

with a constant m in place of the running maximum: no maximum and no rescaling in its loop. m is φ
of the head, or, where the maximum of the first block is further than 2^±32 from φ, that maximum: a
row that lies elsewhere as a whole costs one reduction and not a recomputation. The splits are
combined by their own m: o = Σ 2^(m−M) o / Σ 2^(m−M) l.

**Recomputation.** A split is healthy where every row that sees a slot has 2^-64 ≤ l ≤ 2^64 and a
finite o; otherwise it runs again with a running maximum, on the device, in the same launch. This is
all that needs checking, once per split and not per score:
- p and l are fp32 and P enters P·V in bf16, whose exponents are those of fp32. A score far above m
  gives p > 2^64 or inf, so l > 2^64; NaN fails both comparisons.
- With l ≥ 2^-64, a term that fp32 flushed to zero (below 2^-126) is below 2^-62·l: n slots lose at
  most n·2^-62 of the weight, for n < 2^30 less than the rounding of fp32. The same holds for
  products p·v: what they lose is at most n·2^-62 in units of l.
- l sums the rounded P that enters P·V, so a row dominated by one key returns its value exactly.
- p·v < 2^64·|v| overflows only for |v| ≥ 2^63; that o is not finite, and p ≤ 1 saves it.
fp16 ends at 65504 and has no such range: there the running maximum is used at once.

It cannot avoid reading the live part of the cache once: 2 · sum(lengths) · Hkv · D · itemsize
bytes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.masks import Masking

_LOG2E = math.log2(math.e)
_SAFE_LOG2 = 64
_NEAR_LOG2 = 32
# Below every score, and finite: the difference of two is zero, not NaN.
_LOWEST = -(2.0**120)
_LARGEST = 2.0**126

_MAX_ROWS = 64
_MAX_CLUSTER = 8
_PIPELINE_BYTES = 200 * 1024

_TILE = plgpu.Layout.WGMMA
_ROW = _TILE.reduce(0)
_COLUMN = _TILE.reduce(1)
_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Of tiles whose halves are loaded apart.
_HALF_TILES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))


@dataclasses.dataclass(frozen=True)
class DecodeAttentionConfig:
    """How the work is cut.

    Attributes:
      splits: parts into which a row's cache is cut.
      block_kv: slots per step, a multiple of 64.
      stages: steps in flight, each 2 · block_kv · D · 2 bytes of shared memory.
      cluster: the splits of a row form a thread block cluster and combine through its shared
        memory; otherwise a second, small kernel combines them.
      unified: False runs the synchronised variant (FlashDecoding), with a running maximum.
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
            raise ValueError(f"decode_attention: a cluster has at most {_MAX_CLUSTER}, got {self}")


def default_config(b: int, kv_heads: int, s: int, d: int) -> DecodeAttentionConfig:
    """What measured best on an H100 (benchmarks/LOG.md).

    64 blocks with 100 KB in flight each already draw the whole bandwidth, and a cluster of two
    combines faster than one of eight; a second launch costs 2-6 us. With more KV heads than
    multiprocessors, small blocks that share one hide each other's start and end.
    """
    heads = b * kv_heads
    if heads >= 160:
        return DecodeAttentionConfig(splits=1, stages=_stages(2, 64, d))
    if heads > 64:
        return DecodeAttentionConfig(splits=1, stages=_stages(6, 64, d))
    splits = min(_MAX_CLUSTER, 2 ** math.floor(math.log2(max(64 // heads, 2))), -(-s // 64))
    if splits <= 2 and s <= 256:
        return DecodeAttentionConfig(splits=1, stages=_stages(2, 64, d), unified=False)
    if heads * splits < 32 and s >= 8192:
        return DecodeAttentionConfig(splits=64 // heads, stages=_stages(6, 64, d))
    if d == 64 or s // splits > 1024:
        stages = min(2, _stages(2, 128, d))
        return DecodeAttentionConfig(splits, block_kv=128, stages=stages, cluster=splits > 1)
    # Few steps: a running maximum costs less than looking after a constant one.
    few = s // splits <= 8 * 64
    return DecodeAttentionConfig(
        splits, stages=_stages(3, 64, d), cluster=splits > 1, unified=not few
    )


def _stages(wanted: int, block_kv: int, d: int) -> int:
    """As many stages as fit into shared memory, where D = 128 would take `wanted`."""
    return max(1, min(wanted * 128 // d, _PIPELINE_BYTES // (4 * block_kv * d)))


_STATIC = ("scale", "masking", "config", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode_mosaic(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    scale: float,
    masking: Masking,
    phi: Array | None = None,
    layer: Array | int | None = None,
    config: DecodeAttentionConfig | None = None,
    interpret=None,
) -> tuple[Array, Array]:
    """Arguments of `decode_attention`; returns o [B,T,H,D] and lse [B,T,H].

    Jitted, so that the layers of a model share one lowering.
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[-3]
    group = h // kv_heads
    _check_supported(q, k, group * t)
    if t > 1:
        q = q.reshape(b, t, kv_heads, group, d).transpose(0, 2, 1, 3, 4)
    q = q.reshape(b, kv_heads, group * t, d)
    # TMA fills up and cuts off a single tile of rows, not the last of several.
    if group * t > 8:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, -(group * t) % 8), (0, 0)))
    operands = {"q": q, "k": k, "v": v, "lengths": lengths, "layer": layer, "phi": phi}
    o, lse = _launch(
        operands,
        t=t,
        group=group,
        scale=scale,
        masking=masking,
        config=config,
        interpret=interpret,
    )
    o = o.reshape(b, kv_heads, t, group, d)
    lse = lse.reshape(b, kv_heads, t, group)
    if t > 1:
        o, lse = o.swapaxes(1, 2), lse.swapaxes(1, 2)
    return o.reshape(b, t, h, d), lse.reshape(b, t, h)


@functools.partial(jax.jit, static_argnames=_STATIC)
def append_decode_mosaic(
    qkv: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    cos: Array,
    sin: Array,
    scale: float,
    masking: Masking,
    phi: Array | None = None,
    config: DecodeAttentionConfig | None = None,
    interpret=None,
) -> tuple[Array, Array, Array]:
    """Arguments of `append_decode_attention` for T = 1: qkv [B,Hkv,G+2,D], cos, sin [B,1,D/2].

    RoPE, append and attention in one launch; the caches are updated where they are. Returns
    o [B,1,H,D] and both caches.
    """
    b, kv_heads, parts, d = qkv.shape
    group = parts - 2
    _check_supported(qkv, k, group)
    # TMA fills up a single tile of rows, not the last of several.
    if parts > 8:
        qkv = jnp.pad(qkv, ((0, 0), (0, 0), (0, -parts % 8), (0, 0)))
    turns = jnp.stack(
        [jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)], axis=1
    ).reshape(b, 2, d)
    k, v = jax.new_ref(k), jax.new_ref(v)
    operands = {"qkv": qkv, "turns": turns, "k": k, "v": v, "lengths": lengths, "phi": phi}
    o, _ = _launch(
        operands,
        t=1,
        group=group,
        scale=scale,
        masking=masking,
        config=config,
        interpret=interpret,
    )
    return o.reshape(b, 1, kv_heads * group, d), jax.freeze(k), jax.freeze(v)


def _launch(operands, *, t, group, scale, masking, config, interpret):
    """o [B,Hkv,G·T,D] and lse [B,Hkv,G·T]; `operands` by name, None where there is none."""
    b, kv_heads, s, d = operands["k"].shape[-4:]
    dtype = operands["k"].dtype
    rows = group * t
    padded = -(-rows // 8) * 8
    stored = rows if rows < 8 else padded
    config = config or default_config(b, kv_heads, s, d)
    if dtype == jnp.float16:
        config = dataclasses.replace(config, unified=False)
    operands |= {"slopes": None if masking.alibi is None else jnp.array(masking.alibi)}
    for name, like in (("lengths", jnp.int32), ("phi", jnp.float32), ("slopes", jnp.float32)):
        if operands.get(name) is not None:
            operands[name] = operands[name].astype(like)
    if operands.get("layer") is not None:
        operands["layer"] = jnp.asarray(operands["layer"], jnp.int32).reshape(1)
    operands = {name: value for name, value in operands.items() if value is not None}

    # q and, of a fused front, the k and v of the new token as further rows.
    staged = -(-(group + 2) // 8) * 8 if "qkv" in operands else padded
    scratch = {
        "q": plgpu.SMEM((staged, d), dtype, transforms=_TILES),
        "p": plgpu.SMEM((padded, config.block_kv), dtype, transforms=_TILES),
        "o": plgpu.SMEM((d, padded), jnp.float32),  # of this split, with l and m
        "l": plgpu.SMEM((padded,), jnp.float32),
        "m": plgpu.SMEM((padded,), jnp.float32),
        "out": plgpu.SMEM((padded, d), dtype, transforms=_TILES),
        "lse": plgpu.SMEM((padded,), jnp.float32),
        "q_arrived": plgpu.Barrier(num_arrivals=1),
    }
    if "qkv" in operands:
        scratch |= {
            "qkv": plgpu.SMEM((staged, d), dtype, transforms=_HALF_TILES),
            "swapped": plgpu.SMEM((staged, d), dtype, transforms=_HALF_TILES),
            "turns": plgpu.SMEM((2, d), jnp.float32),
            "new": plgpu.SMEM((2, d), dtype),
            "q_arrived": plgpu.Barrier(num_arrivals=1 + 3 * staged // 8),
        }
    if config.cluster:
        scratch["cluster"] = plgpu.ClusterBarrier(collective_axes=("split",))

    if config.splits == 1 or config.cluster:
        outs = ((b, kv_heads, stored, d), dtype), ((b, kv_heads, padded), jnp.float32)
    else:
        outs = (
            ((b, kv_heads, config.splits, d, padded), jnp.float32),
            ((b, kv_heads, config.splits, 2, padded), jnp.float32),
        )

    def body(*refs):
        count = len(operands)
        _decode_kernel(
            dict(zip(operands, refs, strict=False)),
            refs[count : count + 2],
            dict(zip(scratch, refs[count + 2 :], strict=True)),
            t=t,
            group=group,
            scale=scale,
            masking=masking,
            config=config,
        )

    out, lse = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*o) for o in outs),
        kernel_name="decode_attention",
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **_grid(b, kv_heads, config),
    )(*operands.values())
    if config.splits > 1 and not config.cluster:
        out, lse = _combine(out, lse, stored, dtype, interpret)
    return out[:, :, :rows], lse[:, :, :rows]


def _check_supported(q: Array, k: Array, rows: int) -> None:
    s, d = k.shape[-2:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs bfloat16 or float16, got {q.dtype}"
        )
    if d not in (64, 128, 256):
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs D of 64, 128 or 256, got {d}"
        )
    if s % 8:
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs S to be a multiple of 8, got {s}"
        )
    if rows > _MAX_ROWS:
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs G·T of at most {_MAX_ROWS}, got {rows}"
        )


def _grid(b: int, kv_heads: int, config: DecodeAttentionConfig) -> dict:
    if config.cluster:
        return dict(
            grid=(b, kv_heads),
            grid_names=("row", "head"),
            cluster=(config.splits,),
            cluster_names=("split",),
        )
    return dict(grid=(b, kv_heads, config.splits), grid_names=("row", "head", "split"))


def _decode_kernel(inputs, outputs, smem, *, t, group, scale, masking, config):
    out_g, lse_g = outputs
    q_s, p_s, o_s, l_s, m_s, out_s, lse_s = (
        smem[name] for name in ("q", "p", "o", "l", "m", "out", "lse")
    )
    (d, padded), bk, splits = o_s.shape, config.block_kv, config.splits
    row, head, split = (lax.axis_index(axis) for axis in ("row", "head", "split"))
    zero = row * 0
    n = inputs["lengths"][row]
    # Slots that are read: a new token takes part by itself.
    cached = n
    if "qkv" in inputs:
        n = n + 1
        _load_front(inputs, smem, row, head)
    else:
        # Rows past G·T are outside of q: TMA fills them with zeros, and drops them from the result.
        source = inputs["q"].at[row, head, pl.ds(zero, padded)]
        plgpu.copy_gmem_to_smem(source, q_s, smem["q_arrived"])
    caches = [inputs["k"], inputs["v"]]
    if "layer" in inputs:
        index = inputs["layer"][0]
        caches = [c.at[index] for c in caches]
    caches = [c.at[row, head] for c in caches]

    lowest = 0 if masking.window is None else jnp.maximum(n - t + 1 - masking.window, 0)
    start_block = lax.div(lowest, jnp.int32(bk))
    end_block = lax.div(cached + (bk - 1), jnp.int32(bk))
    chunk = lax.div(end_block - start_block + (splits - 1), jnp.int32(splits))
    first = jnp.minimum(start_block + split * chunk, end_block)
    count = jnp.minimum(chunk, end_block - first)

    def per_row(values):
        """values[head's g] at every query row, as a register array that broadcasts."""
        rows = plgpu.broadcasted_iota(jnp.int32, (bk, padded), 1, layout=_TILE)
        spread = jnp.zeros_like(rows).astype(jnp.float32)
        for g in range(group):
            spread = jnp.where(
                rows % group == g if t > 1 else rows == g, values[head * group + g], spread
            )
        return spread

    def visible(step):
        """[block, R] whether a slot is seen by a query row, and its distance to it."""
        slots = (
            plgpu.broadcasted_iota(jnp.int32, (bk, padded), 0, layout=_TILE) + (first + step) * bk
        )
        query = n - 1
        if t > 1:
            rows = plgpu.broadcasted_iota(jnp.int32, (bk, padded), 1, layout=_TILE)
            query = n - t + lax.div(rows, jnp.full_like(rows, group))
        distance = slots - query
        seen = distance <= 0 if cached is n else distance < 0
        if masking.window is not None:
            seen = seen & (distance > -masking.window)
        return seen, distance

    def log2_scores(z):
        """Products q·k as scores in units of log2, without position bias."""
        if masking.soft_cap is not None:
            return jnp.tanh(z * (scale / masking.soft_cap)) * (masking.soft_cap * _LOG2E)
        return z * (scale * _LOG2E)

    def wait_for_q():
        plgpu.barrier_wait(smem["q_arrived"])
        if "qkv" in inputs:
            _rotate(smem)

    def scores(step, k_s, first_pass):
        """[block, R] scores in units of log2, and which of them count."""

        def product(acc):
            plgpu.wgmma(acc, k_s, q_s.at[pl.ds(0, padded)].T)
            return acc[...]

        if first_pass:
            pl.when(step == 0)(wait_for_q)
        z = pl.run_scoped(product, plgpu.ACC((bk, padded), jnp.float32))
        z = log2_scores(z)
        seen, distance = visible(step)
        if "slopes" in inputs:
            z = z + per_row(inputs["slopes"]) * _LOG2E * distance.astype(jnp.float32)
        return z, seen

    def zero_dead_values(step, v_s):
        """Slots past the length may hold NaN, which a probability of zero does not stop."""
        begin = (first + step) * bk

        @pl.when(begin + bk > cached)
        def _():
            slots = plgpu.broadcasted_iota(jnp.int32, (bk, 64), 0, layout=_TILE) + begin
            for column in range(0, d, 64):
                part = v_s.at[:, pl.ds(column, 64)]
                tile = plgpu.load(part, layout=_TILE)
                part[...] = jnp.where(slots < cached, tile, jnp.zeros_like(tile))

    def down(values, size):
        """values [R] as every row of [size, R]."""
        return lax.broadcast_in_dim(values, (size, padded), [1])

    def put(p):
        p_s.T[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

    block = plgpu.BlockSpec((bk, d), lambda i: (first + i, 0), transforms=_TILES)
    pipeline = functools.partial(
        plgpu.emit_pipeline,
        grid=(count,),
        in_specs=[block, block],
        max_concurrent_steps=config.stages,
    )
    blank = plgpu.layout_cast(jnp.zeros((bk, padded), jnp.float32), _TILE)

    def attend_unified():
        """o [D, R], l [R], m [R] of this split, with a constant m after the first block."""

        def nearest(m, z, seen):
            """φ, or the maximum of the first block where that is far from φ."""
            top = jnp.where(seen, z, _LOWEST).max(axis=0)
            far = jnp.where(jnp.abs(top - m) > _NEAR_LOG2, top, m)
            return plgpu.layout_cast(jnp.where(top > _LOWEST, far, m), _ROW)

        def accumulate(acc):
            def step(indices, k_s, v_s, carry):
                l, m = carry
                z, seen = scores(indices[0], k_s, first_pass=True)
                m = lax.cond(
                    indices[0] == 0,
                    lambda: nearest(m, z, seen),
                    lambda: plgpu.layout_cast(m, _ROW),
                )
                p = jnp.where(seen, jnp.exp2(z - down(m, bk)), 0.0).astype(q_s.dtype)
                zero_dead_values(indices[0], v_s)
                put(p)
                plgpu.wgmma(acc, v_s.T, p_s.T)
                l = l + p.astype(jnp.float32)
                plgpu.wgmma_wait(0)
                return l, m

            if "phi" in inputs:
                m = per_row(inputs["phi"]).max(axis=0) * _LOG2E
            else:
                m = plgpu.layout_cast(jnp.zeros((padded,), jnp.float32), _ROW)
            l, m = pipeline(step, init_carry=(blank, m))(*caches)
            return acc[...], l, m

        o, l, m = pl.run_scoped(accumulate, plgpu.ACC((d, padded), jnp.float32))
        return o, l.sum(axis=0), m

    def attend_synchronised():
        """The same with the running maximum of the split."""

        def step(indices, k_s, v_s, carry):
            o, l, m = carry
            z, seen = scores(indices[0], k_s, first_pass=not config.unified)
            m_new = jnp.maximum(m, jnp.where(seen, z, _LOWEST).max(axis=0))
            p = jnp.where(seen, jnp.exp2(z - down(m_new, bk)), 0.0).astype(q_s.dtype)
            zero_dead_values(indices[0], v_s)
            put(p)
            rescale = jnp.exp2(m - m_new)
            l = l * down(rescale, bk) + p.astype(jnp.float32)
            o = o * down(rescale, d)

            def product(acc):
                plgpu.wgmma(acc, v_s.T, p_s.T)
                return acc[...]

            o = o + pl.run_scoped(product, plgpu.ACC((d, padded), jnp.float32))
            return o, l, m_new

        o = plgpu.layout_cast(jnp.zeros((d, padded), jnp.float32), _TILE)
        m = plgpu.layout_cast(jnp.full((padded,), _LOWEST, jnp.float32), _ROW)
        o, l, m = pipeline(step, init_carry=(o, blank, m))(*caches)
        return o, l.sum(axis=0), m

    def save(o, l, m):
        o_s[...] = o
        l_s[...] = l
        m_s[...] = m

    if config.unified:
        o, l, m = attend_unified()
        save(o, l, m)
        rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (padded,), 0), _ROW)
        last = n - t + lax.div(rows, jnp.full_like(rows, group))
        seen = jnp.minimum((first + count) * bk, jnp.minimum(last + 1, cached))
        if masking.window is None:
            seen = seen - first * bk
        else:
            seen = seen - jnp.maximum(first * bk, last - masking.window + 1)
        seen = jnp.where(rows < group * t, seen, 0)
        out_of_range = jnp.where(
            l >= 2.0**-_SAFE_LOG2, jnp.where(l <= 2.0**_SAFE_LOG2, 0.0, 1.0), 1.0
        )
        broken = jnp.where(jnp.abs(o) < _LARGEST, 0.0, 1.0).max(axis=0)
        # A row that sees no slot of this split has l = 0, and is well.
        broken = jnp.where(seen > 0, jnp.maximum(broken, out_of_range), 0.0)

        @pl.when(broken.max() > 0)
        def _():
            save(*attend_synchronised())
    else:
        save(*attend_synchronised())

    def finish():
        peers = [{"split": i} for i in range(splits)] if config.cluster else [None]
        os, ls, ms = (
            [ref if peer is None else plgpu.cluster_ref(ref, peer) for peer in peers]
            for ref in (o_s, l_s, m_s)
        )
        os = [plgpu.load(ref, layout=_TILE) for ref in os]
        ls, ms = ([plgpu.load(ref, layout=_ROW) for ref in refs] for refs in (ls, ms))
        o, l, m = _merge(os, ls, ms)
        _finish(o, l, m, out_s, lse_s)
        plgpu.commit_smem()
        if config.cluster:
            plgpu.barrier_arrive(smem["cluster"])
        plgpu.copy_smem_to_gmem(out_s, out_g.at[row, head, pl.ds(zero, padded)])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[row, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # A split without work has not waited for its queries.
    pl.when(count == 0)(wait_for_q)
    plgpu.commit_smem()
    if "qkv" in inputs:

        @pl.when(split == 0)
        def _():
            # The new token as one more split, of one slot at distance 0.
            q, new_k, new_v = _append(inputs, smem, row, head, cached, group)
            z = log2_scores((q * new_k).sum(axis=0))
            o = plgpu.load(o_s, layout=_TILE)
            l, m = (plgpu.load(ref, layout=_ROW) for ref in (l_s, m_s))
            save(*_merge([o, new_v], [l, jnp.ones_like(l)], [m, z]))
            plgpu.commit_smem()

    if config.cluster:
        # One thread arrives for a warpgroup, so each arrival follows a commit, which waits for all.
        plgpu.barrier_arrive(smem["cluster"])
        plgpu.barrier_wait(smem["cluster"])
        pl.when(split == 0)(finish)

        # A block outlives those that read its shared memory or arrive at its barrier.
        pl.when(split > 0)(lambda: plgpu.barrier_arrive(smem["cluster"]))
        plgpu.barrier_wait(smem["cluster"])
    elif splits == 1:
        finish()
    else:
        plgpu.copy_smem_to_gmem(o_s, out_g.at[row, head, split])
        plgpu.copy_smem_to_gmem(l_s, lse_g.at[row, head, split, 0])
        plgpu.copy_smem_to_gmem(m_s, lse_g.at[row, head, split, 1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge(os, ls, ms):
    """Combine splits, os [D, R], by their maxima; one that saw nothing has l = 0 and any m."""
    ms = [jnp.where(l > 0, m, _LOWEST) for l, m in zip(ls, ms, strict=True)]
    m = functools.reduce(jnp.maximum, ms)
    weights = [jnp.exp2(part - m) for part in ms]
    l = sum(w * part for w, part in zip(weights, ls, strict=True))
    o = sum(
        lax.broadcast_in_dim(w, part.shape, [1]) * part for w, part in zip(weights, os, strict=True)
    )
    return o, l, m


def _load_front(inputs, smem, row, head):
    """Begin to load q, k and v of the new token, as they are and with their halves exchanged."""
    staged, d = smem["qkv"].shape
    half = d // 2
    for start in range(0, staged, 8):
        # A tile that sticks out is filled up with zeros.
        source = inputs["qkv"].at[row, head, pl.ds(row * 0 + start, 8)]
        to = pl.ds(start, 8)
        plgpu.copy_gmem_to_smem(source, smem["qkv"].at[to], smem["q_arrived"])
        for i in range(2):
            plgpu.copy_gmem_to_smem(
                source.at[:, pl.ds((1 - i) * half, half)],
                smem["swapped"].at[to, pl.ds(i * half, half)],
                smem["q_arrived"],
            )
    plgpu.copy_gmem_to_smem(inputs["turns"].at[row], smem["turns"], smem["q_arrived"])


def _rotate(smem):
    """RoPE of all staged rows: x cos + swapped(x) sin, with the sign of the first half in sin."""
    x, swapped = (_load_rows(smem[name]) for name in ("qkv", "swapped"))
    cos, sin = (
        lax.broadcast_in_dim(plgpu.load(smem["turns"].at[i], layout=_COLUMN), x.shape, [0])
        for i in range(2)
    )
    rotated = (x * cos + swapped * sin).astype(smem["q"].dtype)
    smem["q"].T[...] = plgpu.layout_cast(rotated, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()


def _load_rows(ref):
    """Rows [R, D] of shared memory as fp32 columns [D, R]."""
    columns = plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED)
    return plgpu.layout_cast(columns, _TILE).astype(jnp.float32)


def _append(inputs, smem, row, head, slot, group):
    """Write the new k and v to their slot; returns rotated q, and k and v at every row, [D, R]."""
    d, padded = smem["o"].shape

    def column(ref, index):
        columns = _load_rows(ref)
        rows = plgpu.broadcasted_iota(jnp.int32, columns.shape, 1, layout=_TILE)
        return jnp.where(rows == index, columns, 0.0).sum(axis=1)

    new = column(smem["q"], group), column(smem["qkv"], group + 1)
    for i, values in enumerate(new):
        smem["new"].at[i][...] = values.astype(smem["new"].dtype)
    plgpu.commit_smem()

    @pl.when(slot < inputs["k"].shape[-2])
    def _():
        for i, name in enumerate("kv"):
            plgpu.copy_smem_to_gmem(smem["new"].at[i], inputs[name].at[row, head, slot])

    spread = (lax.broadcast_in_dim(values, (d, padded), [0]) for values in new)
    return _load_rows(smem["q"].at[pl.ds(0, padded)]), *spread


def _finish(o, l, m, out_s, lse_s):
    """Write o/l and the logsumexp. o [D, R], l and m [R]."""
    inverse = jnp.where(l > 0, 1.0 / l, 0.0)
    out = (o * lax.broadcast_in_dim(inverse, o.shape, [1])).astype(out_s.dtype)
    out_s.T[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
    lse_s[...] = jnp.where(l > 0, m / _LOG2E + jnp.log(l), -jnp.inf)


def _combine(o, lm, rows, dtype, interpret):
    """The splits in a kernel of their own. o [B,Hkv,splits,D,R], lm [B,Hkv,splits,2,R]."""
    b, kv_heads, splits, d, padded = o.shape

    def body(o_g, lm_g, out_g, lse_g, lm_s, out_s, lse_s, barrier):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        plgpu.copy_gmem_to_smem(lm_g.at[row, head], lm_s, barrier)
        plgpu.barrier_wait(barrier)
        ls = [plgpu.load(lm_s.at[i, 0], layout=_ROW) for i in range(splits)]
        ms = [plgpu.load(lm_s.at[i, 1], layout=_ROW) for i in range(splits)]
        ms = [jnp.where(l > 0, m, _LOWEST) for l, m in zip(ls, ms, strict=True)]
        m = functools.reduce(jnp.maximum, ms)
        l = sum(jnp.exp2(part - m) * part_l for part, part_l in zip(ms, ls, strict=True))

        def step(indices, o_s, total):
            i = indices[0]
            part_l, part_m = (plgpu.load(lm_s.at[i, j], layout=_ROW) for j in range(2))
            weight = jnp.where(part_l > 0, jnp.exp2(part_m - m), 0.0)
            tile = plgpu.load(o_s.at[0], layout=_TILE)
            return total + lax.broadcast_in_dim(weight, (d, padded), [1]) * tile

        total = plgpu.emit_pipeline(
            step,
            grid=(splits,),
            in_specs=[plgpu.BlockSpec((1, d, padded), lambda i: (i, 0, 0))],
            max_concurrent_steps=min(splits, 8),
            init_carry=plgpu.layout_cast(jnp.zeros((d, padded), jnp.float32), _TILE),
        )(o_g.at[row, head])
        _finish(total, l, m, out_s, lse_s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g.at[row, head, pl.ds(row * 0, padded)])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[row, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, kv_heads, rows, d), dtype),
            jax.ShapeDtypeStruct((b, kv_heads, padded), jnp.float32),
        ),
        kernel_name="decode_attention_combine",
        grid=(b, kv_heads),
        grid_names=("row", "head"),
        scratch_types=(
            plgpu.SMEM((splits, 2, padded), jnp.float32),
            plgpu.SMEM((padded, d), dtype, transforms=_TILES),
            plgpu.SMEM((padded,), jnp.float32),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(o, lm)
