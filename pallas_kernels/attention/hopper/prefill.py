"""Prefill attention on Hopper: two-level tiling, alternating warpgroups, a unified maximum.

FastAttention (Lin et al. 2024), section 4.1 and appendix B, and FlashDecoding++ (Hong et al. 2024),
section 3. Tiles of the first level are loaded to shared memory by TMA: 128 query rows of a head,
and the slots of the cache that they see, block by block. Tiles of the second level are 64 query
rows, which one of two warpgroups multiplies and exponentiates. The warpgroups alternate at the
tensor cores, so that one computes its exponentials while the other multiplies. A turn queues P·V of
a block and Q·K of the next; it passes to the other warpgroup when only Q·K is left. A third
warpgroup only loads.

    p = 2^(s·log2(e) − φ),   l = Σ p,   o = Σ p·v / l

φ is a constant of the head, so the loop needs no maximum and no rescaling. l sums the rounded P
that enters P·V, so a row dominated by one key returns its value exactly. Each lane sums its own
part; lanes are added up once, at the end.

**Exactness.** A tile is exact if each of its rows has 2^-60 ≤ l ≤ 2^100 and a finite o:
- bf16 has the exponent range of fp32, so P loses only mantissa bits;
- a term that fp32 flushed to zero (below 2^-126) is below 2^-66·l;
- every overflow shows in l or in o, and NaN fails both checks.
The check runs once per tile, not per score. A tile that fails runs again with a running maximum
(online softmax), on the device, in the same launch. fp16 ends at 65504 and has no such range: in
fp16, and with `unified=False`, every tile uses the running maximum from the start.

**Few tiles.** A short prompt behind a long cache has too few tiles for all multiprocessors. Then
each tile has several blocks, which see different parts of the cache, and XLA merges their results
in fp32.

**Masks.** No mask is stored in memory. Blocks of slots that no row of a tile sees are skipped.
Blocks that every row sees take a path without masking. The others compare positions.

It must spend 4·D FLOPs on each visible (query, key) pair.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.attention.cache import cache_features, features_of
from fdjax.pallas_kernels.attention.hopper.cache_row import CacheRow, check_pages
from fdjax.pallas_kernels.attention.hopper.prefill_front import WRITE_CHUNK_HOPPER
from fdjax.pallas_kernels.attention.hopper.widen import can_widen, rows_at_once, widened_pages
from fdjax.pallas_kernels.attention.merge import merge_parts
from fdjax.pallas_kernels.attention.operands import row_slots, slots_are_tiled, take_layer
from fdjax.pallas_kernels.attention.prefill_tiles import (
    COLUMN,
    MATRIX,
    SAFE,
    operands,
    scale_and_mask,
    visible_blocks,
)
from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST
from fdjax.pallas_kernels.attention.spec import ALL_FEATURES
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import cond, when

_ROWS = 64  # query rows of a warpgroup: M of wgmma
_CONSUMERS = 2  # warpgroups that compute
_TILE = _CONSUMERS * _ROWS
_SLOTS_OF_A_SPLIT = 1024  # fewer were not measured, see benchmarks/LOG.md
_MOST_SPLITS = 8
_BLOCKS = {64: (128, 4), 96: (128, 2), 128: (128, 2), 256: (64, 2)}  # slots, stages; by D


@dataclasses.dataclass(frozen=True)
class PrefillAttentionConfig:
    """Tile sizes and options.

    Attributes:
      block_kv: slots per step, a multiple of 64. Above 128 the registers do not hold two products
        in flight, and the compiler waits for each.
      stages: steps in flight, each 2 · block_kv · D · 2 bytes of shared memory.
      unified: use the unified maximum; False uses a running maximum.
      skip_masks: skip masking in blocks that every row sees; False masks every block.
      splits: number of parts of the cache that different blocks see.
    """

    block_kv: int = 128
    stages: int = 2
    unified: bool = True
    skip_masks: bool = True
    splits: int = 1

    def __post_init__(self):
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"prefill_attention: block_kv must be a multiple of 64, got {self}")
        if self.stages < 2:
            raise ValueError(f"prefill_attention: stages must be at least 2, got {self}")
        if self.splits < 1:
            raise ValueError(f"prefill_attention: splits must be at least 1, got {self}")


def default_config(d: int) -> PrefillAttentionConfig:
    """The fastest on an H100 at D = 64 and 128 (benchmarks/LOG.md); otherwise one that fits."""
    block_kv, stages = _BLOCKS[d]
    return PrefillAttentionConfig(block_kv=block_kv, stages=stages)


def _splits(tiles: int, slots: int) -> int:
    """Number of parts of the cache for this many tiles, so that most multiprocessors have one."""
    return max(1, min(MULTIPROCESSORS // tiles, slots // _SLOTS_OF_A_SPLIT, _MOST_SPLITS))


@functools.partial(
    jax.jit, static_argnames=("spec", "return_lse", "config", "split_cache", "interpret")
)
def prefill_mosaic(
    q,
    k,
    v,
    lengths,
    offsets,
    *,
    spec,
    return_lse=True,
    config=None,
    split_cache=True,
    interpret=None,
    **named,
):
    """`prefill_attention`; returns o [B,T,H,D] and lse [B,T,H] or None.

    With `split_cache` the default tiling depends on the number of rows, and so does the order of
    the sums.

    Jitted, so that the layers of a model share one lowering. `named` are `phi` [H], `layer`, `rows`
    [B] int32, the row of k and v for each row of q, and `pages` [B,N].
    """
    b, t, h, d = q.shape
    tiles = pl.cdiv(t, _TILE)
    if config is None:
        config = default_config(d)
        if split_cache and spec.window is None:
            pages = named.get("pages")
            slots = k.shape[-2] * (1 if pages is None else pages.shape[1])
            config = dataclasses.replace(config, splits=_splits(b * h * tiles, slots))
    splits = config.splits
    # With ALiBi, the sums of a part of the cache that is far away would be too small.
    far = splits > 1 and spec.alibi is not None
    if q.dtype == jnp.float16 or not spec.unified or far:
        config = dataclasses.replace(config, unified=False)
    if t % 8:
        q = jnp.pad(q, ((0, 0), (0, -t % 8), (0, 0), (0, 0)))
    check_pages("prefill_attention", k, named.get("pages"), config.block_kv)
    inputs = operands(q, k, v, lengths, offsets, spec=spec, **named)
    partial = jnp.dtype(jnp.float32 if splits > 1 else q.dtype)
    outputs = dict(o=jax.ShapeDtypeStruct((splits * b, *q.shape[1:]), partial))
    if return_lse or splits > 1:
        # A one-dimensional store is not clipped at the end of the array, so lse is padded.
        outputs["lse"] = jax.ShapeDtypeStruct((splits * b, h, tiles * _TILE), jnp.float32)

    swizzle = 128 if d % 64 == 0 else 64

    def smem(*shape, swizzle=swizzle, dtype=q.dtype):
        tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    # What is too large is stored in parts.
    o_width = d if d <= 128 else 64
    if splits > 1:
        o_width = 64 if d == 64 else 32

    bk, stages = config.block_kv, config.stages
    loaded = plgpu.Barrier(num_barriers=stages)
    consumed = plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages)
    scratch = dict(
        q=smem(_CONSUMERS, _ROWS, d),
        k=smem(stages, bk, d),
        v=smem(stages, bk, d),
        o=smem(
            _CONSUMERS, _ROWS, o_width, swizzle=128 if o_width == 32 else swizzle, dtype=partial
        ),
        unsafe=plgpu.SMEM((_CONSUMERS, _ROWS), jnp.float32),
        again=plgpu.SMEM((_CONSUMERS,), jnp.int32),
        q_full=plgpu.Barrier(num_barriers=_CONSUMERS),
        k_full=loaded,
        v_full=loaded,
        tail_full=plgpu.Barrier(),
        k_empty=consumed,
        v_empty=consumed,
        turn=plgpu.Barrier(num_barriers=_CONSUMERS),
        voted=plgpu.Barrier(num_arrivals=_CONSUMERS),
    )
    if "lse" in outputs:
        scratch["lse"] = plgpu.SMEM((_CONSUMERS, _ROWS), jnp.float32)
    if interpret is not None:  # the interpreter takes no operand of a product from registers
        scratch["p"] = smem(_CONSUMERS, _ROWS, bk, swizzle=128)

    def body(*refs):
        refs = iter(refs)
        _prefill_kernel(
            *({name: next(refs) for name in names} for names in (inputs, outputs, scratch)),
            t=t,
            spec=spec,
            config=config,
        )

    # The last axis of a grid is the fastest, so neighbours are tiles of one head. With the axes of
    # heads and tiles exchanged, it ran at 0.54 of the speed.
    out = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        kernel_name="prefill_attention",
        scratch_types=tuple(scratch.values()),
        grid=(h, tiles, splits * b),
        grid_names=("head", "tile", "row"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*inputs.values())
    o, lse = out[0][:, :t], out[1].transpose(0, 2, 1)[:, :t] if "lse" in outputs else None
    if splits > 1:
        o, lse = merge_parts(*(a.reshape(splits, b, *a.shape[1:]) for a in (o, lse)))
    return o.astype(q.dtype), lse if return_lse else None


def _prefill_kernel(
    # q [B,T,H,D], k, v [(L,)B,Hkv,S,D], lengths, offsets [B], (layer, rows, pages, phi, slopes)
    inputs,
    outputs,  # o [N·B,T,H,D], (lse [N·B,H,T]), with N splits
    scratch,
    *,
    t,
    spec,
    config,
):
    out_row, head, warpgroup = (lax.axis_index(axis) for axis in ("row", "head", "warpgroup"))
    batch = inputs["q"].shape[0]
    row, split = lax.rem(out_row, batch), lax.div(out_row, batch)
    kv_head = lax.div(head, inputs["q"].shape[2] // inputs["k"].shape[-3])
    cache_row = inputs["rows"][row] if "rows" in inputs else row
    k, v = (CacheRow(inputs, name, cache_row, kv_head) for name in "kv")
    # Tiles that see the most slots start first.
    first = (pl.cdiv(t, _TILE) - 1 - lax.axis_index("tile")) * _TILE
    length = jnp.minimum(inputs["lengths"][row], k.slots)
    offset = inputs["offsets"][row]
    blocks = visible_blocks(
        first, length, offset, t=t, rows=_TILE, block_kv=config.block_kv, spec=spec
    )
    if config.splits > 1:
        blocks = blocks.part(split, config.splits)
    if not config.skip_masks:
        blocks = blocks._replace(bare_begin=blocks.begin, bare_end=blocks.begin)

    @when(warpgroup == _CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @when(blocks.steps > 0)
        def _():
            for w in range(_CONSUMERS):
                rows = inputs["q"].at[row, pl.ds(first + w * _ROWS, _ROWS), head]
                plgpu.copy_gmem_to_smem(rows, scratch["q"].at[w], scratch["q_full"].at[w])

        _produce(k, v, length, blocks, scratch, config)

    @when(warpgroup < _CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(first + warpgroup * _ROWS, _ROWS)
        _consume(
            outputs["o"].at[out_row, rows, head],
            outputs["lse"].at[out_row, head, rows] if "lse" in outputs else None,
            inputs["phi"][head] if "phi" in inputs else None,
            inputs["slopes"][head] if "slopes" in inputs else None,
            offset + first + warpgroup * _ROWS,
            jnp.minimum(offset + t, length),
            length,
            blocks,
            scratch,
            spec=spec,
            config=config,
        )


def _produce(k, v, length, blocks, scratch, config):
    """Load k, v block by block, and a second time if the consumers vote for a rerun."""
    k_s, v_s, tail_full = (scratch[name] for name in ("k", "v", "tail_full"))
    k_full, v_full, k_empty, v_empty = (
        scratch[name] for name in ("k_full", "v_full", "k_empty", "v_empty")
    )
    bk, stages = config.block_kv, config.stages

    def copy(cache, j, target, arrived):
        # A cache may have fewer slots than a block.
        source = cache.block(j * bk, bk)
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, source.shape[0])], arrived)

    def load(j, loaded):
        slot = lax.rem(loaded, stages)
        live = length - j * bk
        when(loaded >= stages)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
        copy(k, j, k_s.at[slot], k_full.at[slot])
        when(loaded >= stages)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
        when(live >= bk)(lambda: copy(v, j, v_s.at[slot], v_full.at[slot]))

        @when(live < bk)
        def _():
            copy(v, j, v_s.at[slot], tail_full)
            plgpu.barrier_wait(tail_full)
            _zero_dead(v_s.at[slot], live)
            plgpu.commit_smem()
            plgpu.barrier_arrive(v_full.at[slot])

        return loaded + 1

    loaded = lax.fori_loop(blocks.begin, blocks.end, load, jnp.int32(0))
    if config.unified:
        plgpu.barrier_wait(scratch["voted"])
        loaded = cond(
            _is_again(scratch),
            lambda: lax.fori_loop(blocks.begin, blocks.end, load, loaded),
            lambda: loaded,
        )
    for slot in range(stages):

        @when(slot < loaded)
        def _(slot=slot):
            plgpu.barrier_wait(k_empty.at[slot])
            plgpu.barrier_wait(v_empty.at[slot])


def _zero_dead(values, live):
    """Zero the values of dead slots: they may be NaN, and 0 * NaN is NaN."""
    bk, d = values.shape
    width = 64 if d % 64 == 0 else 32
    for start in range(0, bk, 64):
        slots = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=MATRIX) + start
        for column in range(0, d, width):
            part = values.at[pl.ds(start, 64), pl.ds(column, width)]
            x = plgpu.load(part, layout=MATRIX)
            part[...] = jnp.where(slots < live, x, jnp.zeros_like(x))


def _widened(p):
    """Convert bf16 [64,N] to fp32 with one instruction per element; `astype` needs two."""

    @plgpu.inline_mgpu(
        arg_types=(MATRIX,),
        return_type=plgpu.ShapeDtypeStruct(p.shape, jnp.float32, layout=MATRIX),
    )
    def widen(_, p):
        word, single = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def apart(pair):
            pair = mgpu_utils.bitcast(pair, word)
            halves = (
                arith.shli(pair, mgpu_utils.c(16, word)),
                arith.andi(pair, mgpu_utils.c(-(2**16), word)),
            )
            halves = [arith.bitcast(single, half) for half in halves]
            return vector.from_elements(ir.VectorType.get((2,), single), halves)

        registers = np.array([apart(pair) for pair in p.registers.flat], dtype=object)
        registers = registers.reshape(p.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=p.layout, _is_signed=None)

    return widen(p)


def _is_again(scratch):
    again = scratch["again"]
    return again[0] + again[1] > 0


def _consume(
    out,  # [64,D]
    lse,  # [64] or None
    phi,  # scalars or None
    slope,
    top,  # position of the first row
    bottom,  # position of the first row of padding
    length,
    blocks,
    scratch,
    *,
    spec,
    config,
):
    """Attention of one warpgroup's 64 query rows."""
    warpgroup = lax.axis_index("warpgroup")
    q_s, o_s, unsafe_s = (scratch[name].at[warpgroup] for name in ("q", "o", "unsafe"))
    lse_s, p_s = (scratch[n].at[warpgroup] if n in scratch else None for n in ("lse", "p"))
    k_s, v_s, turn = (scratch[name] for name in ("k", "v", "turn"))
    k_full, v_full, k_empty, v_empty = (
        scratch[name] for name in ("k_full", "v_full", "k_empty", "v_empty")
    )
    bk, d = config.block_kv, q_s.shape[-1]
    dtype = q_s.dtype
    position = top + plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=COLUMN)

    def across(x, n):
        return lax.broadcast_in_dim(x, (_ROWS, n), [0])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def take_turn():
        plgpu.barrier_wait(turn.at[warpgroup])

    def pass_turn():
        plgpu.barrier_arrive(turn.at[1 - warpgroup])

    def log2_scores(z, j, masked, shift):
        options = dict(spec=spec, slope=slope, shift=shift, masked=masked)
        return scale_and_mask(z, j * bk, position, length, **options)

    def before(stage):
        return lax.rem(stage + config.stages - 1, config.stages)

    def scores(j, stage, masked, shift=None):
        plgpu.barrier_wait(k_full.at[stage])

        def product(acc):
            plgpu.wgmma(acc, q_s, k_s.at[stage].T)
            plgpu.wgmma_wait(1)  # waits for P·V of the previous block
            pass_turn()
            when(j > blocks.begin)(lambda: plgpu.barrier_arrive(v_empty.at[before(stage)]))
            # A wait at the use of V would be slower. The compiler would move work below it, and
            # that work should run beside the exponentials.
            plgpu.barrier_wait(v_full.at[stage])
            return acc[...]

        z = pl.run_scoped(product, plgpu.ACC((_ROWS, bk), jnp.float32))
        plgpu.barrier_arrive(k_empty.at[stage])
        return log2_scores(z, j, masked, shift)

    def add_values(acc, z, l, stage):
        """Queue acc += P·V; returns l [64,8] plus sums of P over columns that are 8 apart."""
        # Without the barrier the compiler converts every element twice, one by one, in the unit
        # that is busy with the exponentials.
        p = lax.optimization_barrier(jnp.exp2(z).astype(dtype))
        wide = _widened(p) if p_s is None and dtype == jnp.bfloat16 else p.astype(jnp.float32)
        l, p = lax.optimization_barrier((l + sum(wide[:, i : i + 8] for i in range(0, bk, 8)), p))
        take_turn()
        if p_s is not None:
            p_s[...] = p
            plgpu.commit_smem()
            p = p_s
        plgpu.wgmma(acc, p, v_s.at[stage])
        return l

    def over_blocks(block, done, carry):
        """Run block(j, stage, carry, masked) over the blocks of slots."""

        def step(j, carry, *, masked):
            return block(j, lax.rem(done + j - blocks.begin, config.stages), carry, masked)

        masked = functools.partial(step, masked=True)
        when(warpgroup == 1)(take_turn)  # runs half a block behind the other warpgroup
        if spec.window is not None:
            carry = lax.fori_loop(blocks.begin, blocks.bare_begin, masked, carry)
        bare = functools.partial(step, masked=False)
        carry = lax.fori_loop(blocks.bare_begin, blocks.bare_end, bare, carry)
        carry = lax.fori_loop(blocks.bare_end, blocks.end, masked, carry)
        plgpu.wgmma_wait(0)
        last = before(done + blocks.steps)
        when(blocks.steps > 0)(lambda: plgpu.barrier_arrive(v_empty.at[last]))
        when(warpgroup == 0)(pass_turn)
        return carry

    zero = full((_ROWS,), 0.0, COLUMN)
    nothing = full((_ROWS, 8), 0.0, MATRIX)

    def attend_unified(acc):
        """o and l of all blocks, with φ as the maximum."""

        def block(j, stage, l, masked):
            l = add_values(acc, scores(j, stage, masked, phi), l, stage)
            if masked:  # frees registers, which masking needs
                plgpu.wgmma_wait(0)
            return l

        l = over_blocks(block, 0, nothing)
        return acc[...], l.sum(axis=1)

    def attend_with_running_maximum(done):
        """o, l and the maximum m of each row over all blocks, after `done` steps of a first run."""

        def block(j, stage, carry, masked):
            o, l, m = carry
            z = scores(j, stage, masked)
            new = jnp.maximum(m, z.max(axis=1))
            shrink = jnp.exp2(m - new)

            def product(acc):
                added = add_values(acc, z - across(new, bk), nothing, stage)
                return acc[...], l * shrink + added.sum(axis=1)

            values, l = pl.run_scoped(product, plgpu.ACC((_ROWS, d), jnp.float32))
            return o * across(shrink, d) + values, l, new

        start = (full((_ROWS, d), 0.0, MATRIX), zero, full((_ROWS,), LOWEST, COLUMN))
        return over_blocks(block, done, start)

    def store(o, l, m):
        """Store o / l, and the logsumexp if asked for; m is in natural units."""
        seen = (position < bottom) & (l > 0.0)
        width = o_s.shape[-1]
        inverse = across(jnp.where(seen, 1.0 / l, 0.0), width)
        if lse is not None:
            lse_s[...] = jnp.where(seen, m + jnp.log(l), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_s, lse)
        for column in range(0, d, width):
            part = o if width == d else o[:, column : column + width]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_s[...] = jnp.where(inverse > 0.0, part * inverse, 0.0).astype(o_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s, out.at[:, pl.ds(column, width)])

    when(blocks.steps > 0)(lambda: plgpu.barrier_wait(scratch["q_full"].at[warpgroup]))

    def run_with_running_maximum(done):
        o, l, m = attend_with_running_maximum(done)
        store(o, l, m * (1 / LOG2E))

    if not config.unified:
        run_with_running_maximum(0)
    else:
        o, l = pl.run_scoped(attend_unified, plgpu.ACC((_ROWS, d), jnp.float32))
        finite = (o * 0.0).sum(axis=1) == 0.0  # 0 · x is 0 for every finite x
        safe = (l >= SAFE[0]) & (l <= SAFE[1]) & finite
        # The first rows of a tile may see nothing of a later part of the cache.
        sees = position < bottom
        if spec.causal:
            sees &= position >= blocks.begin * bk
        unsafe_s[...] = jnp.where(safe, 0.0, jnp.where(sees, 1.0, 0.0))
        store(o, l, zero if phi is None else zero + phi)  # commits unsafe_s as well
        unsafe = plgpu.load(unsafe_s, layout=MATRIX.reduce(0))
        scratch["again"][warpgroup] = unsafe.max(axis=0).astype(jnp.int32)
        plgpu.barrier_arrive(scratch["voted"])
        plgpu.barrier_wait(scratch["voted"])

        @when(_is_again(scratch))
        def _():
            plgpu.wait_smem_to_gmem(0)  # the second store of a tile must come after the first
            run_with_running_maximum(blocks.steps)

    plgpu.wait_smem_to_gmem(0)


def _fits(shape: Shape) -> str | None:
    if shape["d"] not in _BLOCKS:
        return f"needs D of 64, 96, 128 or 256, got {shape['d']}"
    return needs_half(shape) or slots_are_tiled(shape)


def _run(q, k, v, *live, batch_invariant, layer, rows, pages, **keywords):
    keywords["split_cache"] = not batch_invariant
    if not features_of(k):
        return prefill_mosaic(q, k, v, *live, layer=layer, rows=rows, pages=pages, **keywords)
    # The rows' slots are dequantised once and read many times.
    if pages is None or not can_widen(k):
        return prefill_mosaic(q, *take_layer(k, v, layer, rows, pages), *live, **keywords)

    def attend(group):
        q, lengths, offsets, table = group
        keys, values, table = widened_pages(k, v, lengths, pages=table, layer=layer)
        return prefill_mosaic(q, keys, values, lengths, offsets, pages=table, **keywords)

    operands = q, *live, pages
    count = rows_at_once(len(q), row_slots(k, pages))
    if count == len(q):
        return attend(operands)
    groups = jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]), operands)
    results = lax.map(attend, groups)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)


PREFILL_HOPPER = Implementation(
    *("prefill_attention", "mosaic_gpu", _run),
    can=ALL_FEATURES | cache_features("int8"),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    append=WRITE_CHUNK_HOPPER,
)
