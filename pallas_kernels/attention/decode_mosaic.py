"""Decode attention on Hopper: split-KV, tensor cores with swapped operands, a unified maximum.

FlashDecoding++ (Hong et al. 2024), section 3. The G·T query rows that share a KV head are one tile;
they are the N of the wgmma, padded to 8 and not to 64: Sᵀ = K Qᵀ, Oᵀ = Vᵀ Pᵀ. The cache of a row is
cut into splits by its own length, one block of the grid each. A split computes (equations 3-4)

    p = 2^(s·log2(e) − φ),   l = Σ p,   o = Σ p·v

with the constant φ of the head: no maximum and no rescaling in its loop. The splits are combined by
their own maxima m (φ for a healthy one): o = Σ 2^(m−M) o / Σ 2^(m−M) l.

**Recomputation.** A split is healthy where every row that sees a slot has 2^-64 ≤ l ≤ 2^64 and a
finite o; otherwise it runs again with a running maximum, on the device, in the same launch. This is
all that needs checking, once per split and not per score:
- p and l are fp32 and P enters P·V in bf16, whose exponents are those of fp32. A score far above φ
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
# Below every score, and finite: the difference of two is zero, not NaN.
_LOWEST = -(2.0**120)
_LARGEST = 2.0**126

_MAX_ROWS = 64
_MAX_CLUSTER = 8
_PIPELINE_BYTES = 200 * 1024

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(0)
_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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
        return DecodeAttentionConfig(splits=1, stages=_stages(2, 64, d))
    if heads * splits < 32 and s >= 8192:
        return DecodeAttentionConfig(splits=64 // heads, stages=_stages(6, 64, d))
    block_kv = 128 if s // splits > 1024 else 64
    return DecodeAttentionConfig(
        splits=splits, block_kv=block_kv, stages=_stages(3, block_kv, d), cluster=splits > 1
    )


def _stages(wanted: int, block_kv: int, d: int) -> int:
    """As many stages as fit into shared memory, where D = 128 would take `wanted`."""
    return max(1, min(wanted * 128 // d, _PIPELINE_BYTES // (4 * block_kv * d)))


@functools.partial(jax.jit, static_argnames=("scale", "masking", "config", "interpret"))
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
    kv_heads, s = k.shape[-3:-1]
    group = h // kv_heads
    rows = group * t
    padded = -(-rows // 8) * 8
    _check_supported(q, rows)
    config = config or default_config(b, kv_heads, s, d)
    if q.dtype == jnp.float16:
        config = dataclasses.replace(config, unified=False)
    if t > 1:
        q = q.reshape(b, t, kv_heads, group, d).transpose(0, 2, 1, 3, 4)
    q = q.reshape(b, kv_heads, rows, d)
    # TMA fills up and cuts off a single tile of rows, not the last of several.
    stored = rows if rows < 8 else padded
    if stored > rows:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, stored - rows), (0, 0)))
    operands = [q, k, v, lengths.astype(jnp.int32)]
    names = ["q", "k", "v", "lengths"]
    for name, value, dtype in (
        ("layer", None if layer is None else jnp.reshape(layer, (1,)), jnp.int32),
        ("phi", phi, jnp.float32),
        ("slopes", None if masking.alibi is None else jnp.array(masking.alibi), jnp.float32),
    ):
        if value is not None:
            operands.append(value.astype(dtype))
            names.append(name)

    def body(*refs):
        inputs = dict(zip(names, refs, strict=False))
        rest = refs[len(names) :]
        outputs, scratch = rest[:2], rest[2:]
        _decode_kernel(
            inputs, outputs, *scratch, t=t, group=group, scale=scale, masking=masking, config=config
        )

    if config.splits == 1 or config.cluster:
        outs = ((b, kv_heads, stored, d), q.dtype), ((b, kv_heads, padded), jnp.float32)
    else:
        outs = (
            ((b, kv_heads, config.splits, d, padded), jnp.float32),
            ((b, kv_heads, config.splits, 2, padded), jnp.float32),
        )
    out, lse = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*o) for o in outs),
        kernel_name="decode_attention",
        scratch_types=(
            plgpu.SMEM((padded, d), q.dtype, transforms=_TILES),  # q
            plgpu.SMEM((padded, config.block_kv), q.dtype, transforms=_TILES),  # p
            plgpu.SMEM((d, padded), jnp.float32),  # o of this split
            plgpu.SMEM((padded,), jnp.float32),  # l of this split
            plgpu.SMEM((padded,), jnp.float32),  # m of this split
            plgpu.SMEM((padded, d), q.dtype, transforms=_TILES),  # o, final
            plgpu.SMEM((padded,), jnp.float32),  # lse
            plgpu.Barrier(),
            *([plgpu.ClusterBarrier(collective_axes=("split",))] if config.cluster else []),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **_grid(b, kv_heads, config),
    )(*operands)
    if config.splits > 1 and not config.cluster:
        out, lse = _combine(out, lse, stored, q.dtype, interpret)
    out, lse = out[:, :, :rows], lse[:, :, :rows]
    out = out.reshape(b, kv_heads, t, group, d)
    lse = lse.reshape(b, kv_heads, t, group)
    if t > 1:
        out, lse = out.swapaxes(1, 2), lse.swapaxes(1, 2)
    return out.reshape(b, t, h, d), lse.reshape(b, t, h)


def _check_supported(q: Array, rows: int) -> None:
    d = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs bfloat16 or float16, got {q.dtype}"
        )
    if d not in (64, 128, 256):
        raise NotImplementedError(
            f"decode_attention: mosaic_gpu needs D of 64, 128 or 256, got {d}"
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


def _decode_kernel(
    inputs,
    outputs,
    q_s,  # [R, D] queries of a KV head, R = G·T padded to 8
    p_s,  # [R, block] probabilities of a step
    o_s,  # [D, R] fp32
    l_s,  # [R] fp32
    m_s,  # [R] fp32
    out_s,  # [R, D]
    lse_s,  # [R]
    barrier,
    cluster_barrier=None,
    *,
    t,
    group,
    scale,
    masking,
    config,
):
    out_g, lse_g = outputs
    padded, d = q_s.shape
    bk, splits = config.block_kv, config.splits
    row, head, split = (lax.axis_index(axis) for axis in ("row", "head", "split"))
    zero = row * 0
    # Rows past G·T are outside of q: TMA fills them with zeros, and drops them from the result.
    plgpu.copy_gmem_to_smem(inputs["q"].at[row, head, pl.ds(zero, padded)], q_s, barrier)
    n = inputs["lengths"][row]
    caches = [inputs["k"], inputs["v"]]
    if "layer" in inputs:
        index = inputs["layer"][0]
        caches = [c.at[index] for c in caches]
    caches = [c.at[row, head] for c in caches]

    lowest = 0 if masking.window is None else jnp.maximum(n - t + 1 - masking.window, 0)
    start_block = lax.div(lowest, jnp.int32(bk))
    end_block = lax.div(n + (bk - 1), jnp.int32(bk))
    chunk = lax.div(end_block - start_block + (splits - 1), jnp.int32(splits))
    first = jnp.minimum(start_block + split * chunk, end_block)
    count = jnp.minimum(chunk, end_block - first)

    def per_row(values, layout):
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
        seen = distance <= 0
        if masking.window is not None:
            seen = seen & (distance > -masking.window)
        return seen, distance

    def scores(step, k_s, wait_for_q):
        """[block, R] scores in units of log2, and which of them count."""

        def product(acc):
            plgpu.wgmma(acc, k_s, q_s.T)
            return acc[...]

        if wait_for_q:
            pl.when(step == 0)(lambda: plgpu.barrier_wait(barrier))
        z = pl.run_scoped(product, plgpu.ACC((bk, padded), jnp.float32))
        seen, distance = visible(step)
        if masking.soft_cap is not None:
            z = jnp.tanh(z * (scale / masking.soft_cap)) * (masking.soft_cap * _LOG2E)
        else:
            z = z * (scale * _LOG2E)
        if "slopes" in inputs:
            z = z + per_row(inputs["slopes"], _TILE) * _LOG2E * distance.astype(jnp.float32)
        return z, seen

    def zero_dead_values(step, v_s):
        """Slots past the length may hold NaN, which a probability of zero does not stop."""
        begin = (first + step) * bk

        @pl.when(begin + bk > n)
        def _():
            slots = plgpu.broadcasted_iota(jnp.int32, (bk, 64), 0, layout=_TILE) + begin
            for column in range(0, d, 64):
                part = v_s.at[:, pl.ds(column, 64)]
                tile = plgpu.load(part, layout=_TILE)
                part[...] = jnp.where(slots < n, tile, jnp.zeros_like(tile))

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
        """o [D, R], l [R], m [R] of this split, with m = φ."""
        shift = blank
        if "phi" in inputs:
            shift = per_row(inputs["phi"], _TILE) * _LOG2E

        def accumulate(acc):
            def step(indices, k_s, v_s, l):
                z, seen = scores(indices[0], k_s, wait_for_q=True)
                p = jnp.where(seen, jnp.exp2(z - shift), 0.0).astype(q_s.dtype)
                zero_dead_values(indices[0], v_s)
                put(p)
                plgpu.wgmma(acc, v_s.T, p_s.T)
                l = l + p.astype(jnp.float32)
                plgpu.wgmma_wait(0)
                return l

            l = pipeline(step, init_carry=blank)(*caches)
            return acc[...], l

        o, l = pl.run_scoped(accumulate, plgpu.ACC((d, padded), jnp.float32))
        return o, l.sum(axis=0), shift.max(axis=0)

    def attend_synchronised():
        """The same with the running maximum of the split."""

        def step(indices, k_s, v_s, carry):
            o, l, m = carry
            z, seen = scores(indices[0], k_s, wait_for_q=not config.unified)
            m_new = jnp.maximum(m, jnp.where(seen, z, _LOWEST).max(axis=0))
            shift = lax.broadcast_in_dim(m_new, (bk, padded), [1])
            p = jnp.where(seen, jnp.exp2(z - shift), 0.0).astype(q_s.dtype)
            zero_dead_values(indices[0], v_s)
            put(p)
            rescale = jnp.exp2(m - m_new)
            l = l * lax.broadcast_in_dim(rescale, (bk, padded), [1]) + p.astype(jnp.float32)
            o = o * lax.broadcast_in_dim(rescale, (d, padded), [1])

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
        seen = jnp.minimum((first + count) * bk, last + 1)
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
        ls, ms = ([plgpu.load(ref, layout=_ROW) for ref in refs] for refs in (ls, ms))
        o, l, m = _merge(os, ls, ms, (d, padded))
        _finish(o, l, m, out_s, lse_s)
        plgpu.commit_smem()
        if config.cluster:
            plgpu.barrier_arrive(cluster_barrier)
        plgpu.copy_smem_to_gmem(out_s, out_g.at[row, head, pl.ds(zero, padded)])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[row, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # A split without work has not waited for its queries.
    pl.when(count == 0)(lambda: plgpu.barrier_wait(barrier))
    plgpu.commit_smem()
    if config.cluster:
        # One thread arrives for a warpgroup, so each arrival follows a commit, which waits for all.
        plgpu.barrier_arrive(cluster_barrier)
        plgpu.barrier_wait(cluster_barrier)
        pl.when(split == 0)(finish)

        # A block outlives those that read its shared memory or arrive at its barrier.
        pl.when(split > 0)(lambda: plgpu.barrier_arrive(cluster_barrier))
        plgpu.barrier_wait(cluster_barrier)
    elif splits == 1:
        finish()
    else:
        plgpu.copy_smem_to_gmem(o_s, out_g.at[row, head, split])
        plgpu.copy_smem_to_gmem(l_s, lse_g.at[row, head, split, 0])
        plgpu.copy_smem_to_gmem(m_s, lse_g.at[row, head, split, 1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge(os, ls, ms, shape):
    """Combine the splits by their maxima; a split that saw nothing has l = 0 and any m."""
    ms = [jnp.where(l > 0, m, _LOWEST) for l, m in zip(ls, ms, strict=True)]
    m = functools.reduce(jnp.maximum, ms)
    weights = [jnp.exp2(part - m) for part in ms]
    l = sum(w * part for w, part in zip(weights, ls, strict=True))
    o = sum(
        lax.broadcast_in_dim(w, shape, [1]) * plgpu.load(part, layout=_TILE)
        for w, part in zip(weights, os, strict=True)
    )
    return o, l, m


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
