"""Prefill attention on Hopper: two-level tiling, warpgroups that take turns, a unified maximum.

FastAttention (Lin et al. 2024), section 4.1 and appendix B, and FlashDecoding++ (Hong et al. 2024),
section 3. The first level of tiles is what TMA brings to shared memory: the query rows of a block
and `block_kv` slots of the cache, `stages` of them in flight. The second is what one warpgroup
takes through the tensor cores and the vector units, 64 query rows at a time. Two warpgroups take
turns at the tensor cores, so that the exponentials of one run under the products of the other.
A block of the grid stays and takes tile after tile, the longest first.

    p = 2^(s·log2(e) − φ),   l = Σ p,   o = Σ p·v / l

with the constant φ of the head: no maximum and no rescaling in the loop. l sums the rounded P that
enters P·V, so a row dominated by one key returns its value exactly.

**Staying exact.** A tile is right where each of its rows has 2^-60 ≤ l ≤ 2^100 and a finite o:
- bf16 has the exponents of fp32, so P loses nothing but its mantissa;
- a term that fp32 flushed to zero (below 2^-126) is below 2^-66·l;
- everything that overflowed shows in l or in o, which NaN fails as well.
The tiles that are not are computed again at the end, with a running maximum (online softmax), by
the block that found them: no host, no second launch. fp16 ends at 65504 and has no such range, so
there, and with `unified=False`, all tiles run that way.

**Masks.** There is none in memory. Blocks of slots that no row of a tile sees are skipped, those
that every row sees take a path without masking, and the others compare positions.

It cannot avoid 4·D FLOPs for each (query, key) pair that is seen.
"""

import dataclasses
import functools
import heapq
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.masks import Masking

_LOG2E = math.log2(math.e)
_SAFE = (2.0**-60, 2.0**100)
# Below every score, and finite: the difference of two is zero, not NaN.
_LOWEST = -(2.0**120)

_ROWS = 64  # query rows of a warpgroup: M of wgmma
_BLOCKS = 132  # multiprocessors of an H100; one block fits on each
_MAX_TILES = 1024  # of a block: each has its flags in shared memory
_BLOCK_KV = {64: 256, 96: 128, 128: 128, 256: 64}  # by D

_ACC = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class PrefillAttentionConfig:
    """How the work is cut.

    Attributes:
      block_kv: slots per step, a multiple of 64.
      stages: steps in flight, each 2 · block_kv · D · 2 bytes of shared memory.
      consumers: warpgroups of 64 query rows that compute, 2 or 3.
      unified: False runs online softmax.
      skip_masks: False takes every block of slots as one that needs masking.
      blocks: blocks of the grid.
    """

    block_kv: int = 128
    stages: int = 2
    consumers: int = 2
    unified: bool = True
    skip_masks: bool = True
    blocks: int = _BLOCKS

    def __post_init__(self):
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"prefill_attention: block_kv must be a multiple of 64, got {self}")
        if self.stages < 2 or self.consumers not in (1, 2, 3) or self.blocks < 1:
            raise ValueError(
                f"prefill_attention: needs 2 stages or more and 1 to 3 consumers, got {self}"
            )


def default_config(d: int) -> PrefillAttentionConfig:
    """What measured best on an H100 (benchmarks/LOG.md)."""
    return PrefillAttentionConfig(block_kv=_BLOCK_KV[d])


class _Tile(NamedTuple):
    """Query rows of one head, and the blocks of slots they see; scalars in registers."""

    row: Array
    head: Array
    first: Array  # query
    length: Array
    offset: Array
    begin: Array
    bare_begin: Array  # from here every row sees every slot,
    bare_end: Array  # to here
    end: Array

    @property
    def steps(self):
        return self.end - self.begin


def _prefill_kernel(
    inputs,
    outputs,
    scratch,
    *,
    t,
    group,
    scale,
    masking,
    config,
):
    q, k, v = (inputs[name] for name in "qkv")
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    consumers, stages, bk = config.consumers, config.stages, config.block_kv
    tile_rows = consumers * _ROWS
    rows, _, heads, d = q.shape
    dtype = q.dtype
    if "layer" in inputs:
        index = inputs["layer"][0]
        k, v = k.at[index], v.at[index]
    slots = k.shape[-2]
    tiles = inputs["tiles"]
    count = tiles[block, 0]
    q_s, k_s, v_s, bad_s, redo_s = (scratch[name] for name in ("q", "k", "v", "bad", "redo"))
    o_s, p_s, lse_s, turn = (scratch.get(name) for name in ("o", "p", "lse", "turn"))
    q_full, k_full, v_full, tail_full = (scratch[f"{name}_full"] for name in (*"qkv", "tail"))
    q_empty, k_empty, v_empty = (scratch[f"{name}_empty"] for name in "qkv")
    voted = scratch["voted"]

    def tile_at(n):
        tile = tiles[block, jnp.minimum(n, count - 1) + 1]
        row_and_head = lax.rem(tile, rows * heads)
        row = lax.div(row_and_head, heads)
        first = lax.div(tile, rows * heads) * tile_rows
        length = jnp.minimum(inputs["lengths"][row], slots)
        offset = inputs["offsets"][row]
        top = offset + first
        bottom = jnp.minimum(jnp.minimum(top + tile_rows, offset + t), length)
        seen = bottom if masking.causal else length
        end = jnp.where(bottom > top, lax.div(seen + (bk - 1), bk), 0)
        bare_end = lax.div(top + 1 if masking.causal else length, bk)
        if masking.window is None:
            begin = bare_begin = jnp.int32(0)
        else:
            lowest = top - (masking.window - 1)
            begin = jnp.minimum(lax.div(jnp.maximum(lowest, 0), bk), end)
            bare_begin = lax.div(jnp.maximum(lowest + tile_rows - 1, 0) + (bk - 1), bk)
        bare_begin = jnp.clip(bare_begin, begin, end)
        bare_end = jnp.clip(bare_end, bare_begin, end)
        if not config.skip_masks:
            bare_begin = bare_end = end
        head = lax.rem(row_and_head, heads)
        return _Tile(row, head, first, length, offset, begin, bare_begin, bare_end, end)

    def is_flagged(n):
        flags = redo_s[0, n]
        for w in range(1, consumers):
            flags = flags + redo_s[w, n]
        return flags > 0

    def where_flagged(step):
        return lambda n, done: lax.cond(is_flagged(n), lambda: step(n, done), lambda: done)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def load(n, done):
            tile = tile_at(n)
            kv_head = lax.div(tile.head, group)

            @pl.when(tile.steps > 0)
            def _():
                for w in range(consumers):
                    plgpu.barrier_wait(q_empty.at[w])
                    at = (tile.row, pl.ds(tile.first + w * _ROWS, _ROWS), tile.head)
                    plgpu.copy_gmem_to_smem(q.at[at], q_s.at[w], q_full.at[w])

            def load_block(j, _):
                slot = lax.rem(done + j - tile.begin, stages)
                at = (tile.row, kv_head, pl.ds(j * bk, bk))
                plgpu.barrier_wait(k_empty.at[slot])
                plgpu.copy_gmem_to_smem(k.at[at], k_s.at[slot], k_full.at[slot])
                plgpu.barrier_wait(v_empty.at[slot])
                live = tile.length - j * bk

                @pl.when(live >= bk)
                def _():
                    plgpu.copy_gmem_to_smem(v.at[at], v_s.at[slot], v_full.at[slot])

                @pl.when(live < bk)
                def _():
                    plgpu.copy_gmem_to_smem(v.at[at], v_s.at[slot], tail_full)
                    plgpu.barrier_wait(tail_full)
                    zero_dead_values(v_s.at[slot], live)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(v_full.at[slot])

            lax.fori_loop(tile.begin, tile.end, load_block, None)
            return done + tile.steps

        def zero_dead_values(values, live):
            """Slots past the length may hold NaN, which a probability of zero does not stop."""
            width = 64 if d % 64 == 0 else 32
            for start in range(0, bk, 64):
                numbers = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=_ACC) + start
                for column in range(0, d, width):
                    part = values.at[pl.ds(start, 64), pl.ds(column, width)]
                    x = plgpu.load(part, layout=_ACC)
                    part[...] = jnp.where(numbers < live, x, jnp.zeros_like(x))

        done = lax.fori_loop(0, count, load, jnp.int32(0))
        if config.unified:
            plgpu.barrier_wait(voted)
            lax.fori_loop(0, count, where_flagged(load), done)
        for w in range(consumers):
            plgpu.barrier_wait(q_empty.at[w])
        for slot in range(stages):
            plgpu.barrier_wait(k_empty.at[slot])
            plgpu.barrier_wait(v_empty.at[slot])

    @pl.when(warpgroup < consumers)
    def _consume():
        plgpu.set_max_registers(232 if consumers < 3 else 160, action="increase")
        q_w = q_s.at[warpgroup]

        def arrive():
            if turn is not None:
                plgpu.barrier_arrive(turn)

        def wait():
            if turn is not None:
                plgpu.barrier_wait(turn)

        def across(x, n):
            return lax.broadcast_in_dim(x, (_ROWS, n), [0])

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        plgpu.barrier_arrive(q_empty.at[warpgroup])
        for slot in range(stages):
            plgpu.barrier_arrive(k_empty.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])

        def release_queries():
            plgpu.barrier_arrive(q_empty.at[warpgroup])

        def attend(n, done, *, unified):
            tile = tile_at(n)
            begin, end = tile.begin, tile.end
            top = tile.offset + tile.first + warpgroup * _ROWS
            position = top + plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_ROW)
            phi = inputs["phi"][tile.head] * _LOG2E if "phi" in inputs and unified else None
            slope = inputs["slopes"][tile.head] * _LOG2E if "slopes" in inputs else None

            @pl.when(tile.steps > 0)
            def _():
                plgpu.barrier_wait(q_full.at[warpgroup])

            def slot_of(j):
                return lax.rem(done + j - begin, stages)

            def bent(z, j, masked):
                """Scores in units of log2, less φ."""
                if masking.soft_cap is not None:
                    # tanh(x) = 1 - 2 / (exp(2x) + 1)
                    twice = jnp.exp2(z * (2 * _LOG2E * scale / masking.soft_cap))
                    z = masking.soft_cap * _LOG2E * (1.0 - 2.0 / (twice + 1.0))
                    z = z if phi is None else z - phi
                elif phi is not None:
                    z = z * (scale * _LOG2E) - phi
                else:
                    z = z * (scale * _LOG2E)
                start = j * bk
                if masking.alibi is None and not masked:
                    return z
                column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, bk), 1, layout=_ACC)
                if masking.alibi is not None:
                    distance = column - across(position - start, bk)
                    z = z + slope * distance.astype(jnp.float32)
                if masked:
                    stop = tile.length - start
                    if masking.causal:
                        stop = across(jnp.minimum(position - start + 1, stop), bk)
                    z = jnp.where(column < stop, z, -jnp.inf)
                    if masking.window is not None:
                        lowest = across(position - (start + masking.window - 1), bk)
                        z = jnp.where(column >= lowest, z, -jnp.inf)
                return z

            def scores(j, masked):
                slot = slot_of(j)
                plgpu.barrier_wait(k_full.at[slot])

                def product(acc):
                    plgpu.wgmma(acc, q_w, k_s.at[slot].T)

                    pl.when(j > begin)(arrive)
                    wait()
                    return acc[...]

                z = pl.run_scoped(product, plgpu.ACC((_ROWS, bk), jnp.float32))
                plgpu.barrier_arrive(k_empty.at[slot])

                if o_s is not None:
                    pl.when(j + 1 == end)(release_queries)
                return bent(z, j, masked)

            def add_values(acc, z, l, slot):
                """acc += P·V; returns l + the row sums of P."""
                # Without the barrier the compiler converts every element twice over, one by one,
                # in the unit that is busy with the exponentials.
                p = lax.optimization_barrier(jnp.exp2(z).astype(dtype))
                l, p = lax.optimization_barrier((l + p.astype(jnp.float32).sum(axis=1), p))
                arrive()
                plgpu.barrier_wait(v_full.at[slot])
                wait()
                if p_s is not None:
                    p_s[warpgroup] = p
                    plgpu.commit_smem()
                    p = p_s.at[warpgroup]
                plgpu.wgmma(acc, p, v_s.at[slot])
                return l

            def unified_block(j, l, *, acc, masked):
                slot = slot_of(j)
                l = add_values(acc, scores(j, masked), l, slot)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_empty.at[slot])
                return l

            def online_block(j, carry, *, masked):
                o, l, m = carry
                slot = slot_of(j)
                z = scores(j, masked)
                new = jnp.maximum(m, z.max(axis=1))
                shrink = jnp.exp2(m - new)

                def product(acc):
                    total = add_values(acc, z - across(new, bk), l * shrink, slot)
                    return acc[...], total

                pv, l = pl.run_scoped(product, plgpu.ACC((_ROWS, d), jnp.float32))
                plgpu.barrier_arrive(v_empty.at[slot])
                return o * across(shrink, d) + pv, l, new

            def over_blocks(block, carry):
                masked = functools.partial(block, masked=True)
                if masking.window is not None:
                    carry = lax.fori_loop(begin, tile.bare_begin, masked, carry)
                bare = functools.partial(block, masked=False)
                carry = lax.fori_loop(tile.bare_begin, tile.bare_end, bare, carry)
                return lax.fori_loop(tile.bare_end, end, masked, carry)

            zero = full((_ROWS,), 0.0, _ROW)
            if unified:

                def run(acc):
                    l = over_blocks(functools.partial(unified_block, acc=acc), zero)
                    return acc[...], l

                o, l = pl.run_scoped(run, plgpu.ACC((_ROWS, d), jnp.float32))
            else:
                start = (full((_ROWS, d), 0.0, _ACC), zero, full((_ROWS,), _LOWEST, _ROW))
                o, l, m = over_blocks(online_block, start)

            # Not after the first product of the next tile: the other warpgroup is not kept from
            # its last product by this one's epilogue.
            pl.when(tile.steps > 0)(arrive)

            live = position < tile.length
            if unified:
                finite = (o * 0.0).sum(axis=1) == 0.0  # 0 · x is 0 for every finite x
                safe = (l >= _SAFE[0]) & (l <= _SAFE[1]) & finite
                bad_s[warpgroup] = jnp.where(safe, 0.0, jnp.where(live, 1.0, 0.0))
                plgpu.commit_smem()
                bad = plgpu.load(bad_s.at[warpgroup], layout=_ACC.reduce(0))
                redo_s[warpgroup, n] = bad.max(axis=0).astype(jnp.int32)
            seen = live & (l > 0.0)
            inverse = across(jnp.where(seen, 1.0 / l, 0.0), d)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out = q_w if o_s is None else o_s.at[warpgroup]
            out[...] = jnp.where(inverse > 0.0, o * inverse, 0.0).astype(dtype)
            first = tile.first + warpgroup * _ROWS
            if lse_s is not None:
                if not unified:
                    base = m * (1 / _LOG2E)
                else:
                    base = 0.0 if phi is None else phi * (1 / _LOG2E)
                lse_s[warpgroup] = jnp.where(seen, base + jnp.log(l), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, outputs["o"].at[tile.row, pl.ds(first, _ROWS), tile.head])
            if lse_s is not None:
                plgpu.copy_smem_to_gmem(
                    lse_s.at[warpgroup], outputs["lse"].at[tile.row, tile.head, pl.ds(first, _ROWS)]
                )
            if o_s is None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(tile.steps > 0)(release_queries)
            return done + tile.steps

        def sweep(step, done):
            # The second warpgroup runs half a block behind the first.
            @pl.when(warpgroup == 1)
            def _():
                arrive()
                wait()

            arrive()
            done = lax.fori_loop(0, count, step, done)

            @pl.when(warpgroup == 0)
            def _():
                wait()
                arrive()

            wait()
            plgpu.wait_smem_to_gmem(0)
            return done

        done = sweep(functools.partial(attend, unified=config.unified), jnp.int32(0))
        if config.unified:
            plgpu.barrier_arrive(voted)
            plgpu.barrier_wait(voted)
            sweep(where_flagged(functools.partial(attend, unified=False)), done)


def _check_supported(q: Array, s: int) -> None:
    d = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"prefill_attention: mosaic_gpu needs bfloat16 or float16, got {q.dtype}"
        )
    if d not in _BLOCK_KV:
        raise NotImplementedError(
            f"prefill_attention: mosaic_gpu needs D of 64, 96, 128 or 256, got {d}"
        )
    if s % 8:  # TMA takes tiles of 8 slots
        raise NotImplementedError(
            f"prefill_attention: mosaic_gpu needs S to be a multiple of 8, got {s}"
        )


@functools.lru_cache(maxsize=256)
def _schedule(rows: int, heads: int, steps: tuple[int, ...], blocks: int) -> np.ndarray:
    """[blocks, 1 + most] int32: how many tiles each block takes, and which.

    Tile i · rows · heads + x is the i-th of row and head x and takes steps[i]. Row by row, the
    longest tiles first, all heads of one tile beside each other, each to the block that is done
    first: neighbours then read the same slots and pages at the same time, which is worth a third.
    """
    queue = [(0.0, block) for block in range(blocks)]
    taken = [[] for _ in range(blocks)]
    for row in range(rows):
        for i in sorted(range(len(steps)), key=lambda i: -steps[i]):
            for head in range(heads):
                done, block = queue[0]
                taken[block].append((i * rows + row) * heads + head)
                heapq.heapreplace(queue, (done + steps[i] + 1.5, block))
    table = np.zeros((blocks, 1 + max(map(len, taken))), np.int32)
    for line, tiles in zip(table, taken, strict=True):
        line[0] = len(tiles)
        line[1 : 1 + len(tiles)] = tiles
    return table


@functools.partial(
    jax.jit, static_argnames=("scale", "masking", "return_lse", "config", "interpret")
)
def prefill_mosaic(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    *,
    layer: Array | int | None = None,
    scale: float,
    masking: Masking,
    phi: Array | None = None,
    return_lse: bool = True,
    config: PrefillAttentionConfig | None = None,
    interpret=None,
) -> tuple[Array, Array | None]:
    """Arguments of `prefill_attention`; returns o [B,T,H,D] and lse [B,T,H] or None.

    Jitted, so that the layers of a model share one lowering.
    """
    b, t, h, d = q.shape
    kv_heads, s = k.shape[-3:-1]
    _check_supported(q, s)
    config = config or default_config(d)
    if q.dtype == jnp.float16:
        config = dataclasses.replace(config, unified=False)
    if t % 8:
        q = jnp.pad(q, ((0, 0), (0, -t % 8), (0, 0), (0, 0)))
    bk, consumers, stages = config.block_kv, config.consumers, config.stages
    tile_rows = consumers * _ROWS
    tiles = pl.cdiv(t, tile_rows)
    blocks = min(b * h * tiles, max(config.blocks, pl.cdiv(b * h * tiles, _MAX_TILES)))
    steps = (pl.cdiv(s, bk),) * tiles
    if masking.causal:
        before = max(s - t, 0)
        steps = tuple(pl.cdiv(before + (i + 1) * tile_rows, bk) for i in range(tiles))
    table = _schedule(b, h, steps, blocks)
    operands = dict(tiles=jnp.asarray(table), lengths=lengths.astype(jnp.int32))
    operands |= dict(offsets=offsets.astype(jnp.int32), q=q, k=k, v=v)
    if layer is not None:
        operands["layer"] = jnp.asarray(layer, jnp.int32).reshape(1)
    if phi is not None:
        operands["phi"] = phi.astype(jnp.float32)
    if masking.alibi is not None:
        operands["slopes"] = jnp.array(masking.alibi, jnp.float32)
    outputs = dict(o=jax.ShapeDtypeStruct(q.shape, q.dtype))
    if return_lse:
        # A store of one row is not cut off at the end of the array.
        outputs["lse"] = jax.ShapeDtypeStruct((b, h, tiles * tile_rows), jnp.float32)

    swizzle = 128 if d % 64 == 0 else 64

    def smem(*shape, swizzle=swizzle):
        return plgpu.SMEM(
            shape,
            q.dtype,
            transforms=(
                plgpu.TilingTransform((8, swizzle // 2)),
                plgpu.SwizzleTransform(swizzle),
            ),
        )

    scratch = dict(
        q=smem(consumers, _ROWS, d),
        k=smem(stages, bk, d),
        v=smem(stages, bk, d),
        bad=plgpu.SMEM((consumers, _ROWS), jnp.float32),
        redo=plgpu.SMEM((consumers, table.shape[1] - 1), jnp.int32),
        q_full=plgpu.Barrier(num_barriers=consumers),
        q_empty=plgpu.Barrier(num_barriers=consumers),
        k_full=plgpu.Barrier(num_barriers=stages),
        k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        tail_full=plgpu.Barrier(),
        voted=plgpu.Barrier(num_arrivals=consumers),
    )
    if interpret is not None:  # which takes no operand from registers
        scratch["p"] = smem(consumers, _ROWS, bk, swizzle=128)
    if d <= 128:
        scratch["o"] = smem(consumers, _ROWS, d)
    if return_lse:
        scratch["lse"] = plgpu.SMEM((consumers, _ROWS), jnp.float32)
    if consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_arrivals=2)

    def body(*refs):
        refs = iter(refs)
        _prefill_kernel(
            *({name: next(refs) for name in names} for names in (operands, outputs, scratch)),
            t=t,
            group=h // kv_heads,
            scale=scale,
            masking=masking,
            config=config,
        )

    out = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        kernel_name="prefill_attention",
        scratch_types=tuple(scratch.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands.values())
    o = out[0][:, :t]
    return o, out[1].transpose(0, 2, 1)[:, :t] if return_lse else None
