"""The kernel of decode attention: one split of a row's cache for one KV head; see `decode`."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.hopper.cache_row import CacheRow
from fdjax.pallas_kernels.attention.hopper.decode_combine import merge, tile_rows, write_result
from fdjax.pallas_kernels.attention.hopper.decode_front import (
    load_front,
    receive_token,
    rotate_rows,
    write_token,
)
from fdjax.pallas_kernels.attention.hopper.decode_tiles import COLUMN, ROW, TILE
from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST
from fdjax.pallas_kernels.hopper.conditional import cond, when

# A split is healthy if its denominator is within 2^±64.
_SAFE_LOG2 = 64
# m moves to the maximum of the first block if that is further away from φ than this, in log2.
_NEAR_LOG2 = 32
_LARGEST = 2.0**126
# A bit of `visible`. It is set for all slots of a block of `block_kv` if no query sees some slot of
# the block.
HOLES = -(2**31)


def decode_kernel(
    inputs,
    outputs,
    smem,
    *,
    t,
    group,
    tiles,
    by_token,
    spec,
    config,
    entry_slots=None,
    norm_eps=None,
    interpreted=False,
):
    """One block of the grid (row, tile of query rows, split).

    Args:
      inputs: arrays in device memory by name: q [B,Hkv·tiles,R,D], with `by_token` [B,R,Hkv,D], or
        qkv [B,Hkv,G+2,D] and rotation [B,2,D] of a new token; k, v, in int8 with k_scales and
        v_scales; lengths [B] without that token; layer, pages, phi, slopes, visible [B,S] if any,
        sinks [Hkv·tiles,R], and norms [2,2,D] fp32, the scales of q and of k, unchanged and with
        the halves of D exchanged.
      outputs: arrays by name: o in the shape of q, or for `combine` partial o
        [B,Hkv·tiles,splits,D,R] and lm [B,Hkv·tiles,splits,2,R]. Optional are lse [B,Hkv·tiles,R]
        and reruns [B,Hkv·tiles,splits] int32, 1 for each block that ran again.
      smem: buffers and barriers by name.
      t: query tokens per row.
      group: G, query heads per KV head.
      tiles: number of tiles that the G·T query rows of a KV head are cut into.
      by_token: the tile's rows are tokens, and q and o have the axis of tokens first.
      spec, config, entry_slots: see `decode_mosaic`.
      norm_eps: eps of the norms of q and k, or None.
      interpreted: whether the interpreter runs the kernel. It cannot multiply operands in
        registers.
    """
    q_s, k_s, v_s, p_s = (smem[name] for name in ("q", "k", "v", "p"))
    partial = [smem[name] for name in ("o", "l", "m")]
    (d, padded), bk, splits = partial[0].shape, config.block_kv, config.splits
    row, tile, split = (lax.axis_index(axis) for axis in ("row", "tile", "split"))
    zero = row * 0
    head = lax.div(tile, jnp.int32(tiles))
    first_query = lax.rem(tile, jnp.int32(tiles)) * padded
    if "qkv" in inputs:
        load_front(inputs, smem, row, head)
    else:
        # Rows past G·T are outside q: TMA loads zeros for them and does not store them.
        source = inputs["q"].at[tile_rows(row, tile, padded, by_token)]
        plgpu.copy_gmem_to_smem(source, q_s, smem["q_arrived"])
    cache_row = functools.partial(CacheRow, inputs, row=row, head=head, entry_slots=entry_slots)
    caches = {name: cache_row(name=name) for name in "kv"}
    int8 = "k_scales" in inputs
    scales = {f"{name}_scales": None for name in "kv" if int8}
    scales = {name: cache_row(name=name, axis=-1) for name in scales}
    paged = "pages" in inputs

    def load(start, stage, entry=None):
        buffers = k_s, v_s, *(smem[name] for name in scales)
        for cache, loaded in zip((*caches.values(), *scales.values()), buffers, strict=True):
            source = cache.block(start, bk, entry)
            to = loaded.at[stage, pl.ds(0, source.shape[0])]
            plgpu.copy_gmem_to_smem(source, to, smem["loaded"].at[stage])
        if "visible" in inputs:
            source = inputs["visible"].at[row, pl.ds(start, bk)]
            plgpu.copy_gmem_to_smem(source, smem["visible"].at[stage], smem["loaded"].at[stage])

    # Without a window, splits take blocks in turn. So a split's first block does not depend on the
    # length of the row, and its load starts before the length is read.
    in_turn = spec.window is None
    if in_turn:
        load(split * bk, zero)
    n = inputs["lengths"][row]
    # Number of slots to read from the cache. A new token is added at the end.
    cached = n
    if "qkv" in inputs:
        n = n + 1
    end_block = lax.div(cached + (bk - 1), jnp.int32(bk))
    if in_turn:
        first, stride = split, splits
        # The first block was requested already. If it is past the length, no query sees it.
        count = jnp.maximum(lax.div(end_block - split + (splits - 1), jnp.int32(splits)), 1)
    else:
        start_block = lax.div(jnp.maximum(n - t + 1 - spec.window, 0), jnp.int32(bk))
        chunk = lax.div(end_block - start_block + (splits - 1), jnp.int32(splits))
        first, stride = jnp.minimum(start_block + split * chunk, end_block), 1
        count = jnp.minimum(chunk, end_block - first)

    # The largest tile has no registers left to mask slots that are read twice. A block lies in one
    # page.
    ends_with_cache = bk * padded < 128 * 32 and not paged

    def block_start(step):
        """First slot of a step. The last block ends where the cached slots end, rounded up to 8.

        So it may begin with slots of the previous block. A first block that was requested before
        the length was known is not moved.
        """
        start = (first + step * stride) * bk
        if not ends_with_cache:
            return start
        end = jnp.maximum(lax.div(cached + 7, jnp.int32(8)) * 8 - bk, 0)
        moved = jnp.minimum(start, end)
        return jnp.where(step == 0, start, moved) if in_turn else moved

    def query_rows():
        """[block, R] the index among the head's G·T query rows of each column."""
        return plgpu.broadcasted_iota(jnp.int32, (bk, padded), 1, layout=TILE) + first_query

    def per_row(values):
        """[block, R] the value of each query row's head, from `values` per query head."""
        rows = query_rows()
        spread = jnp.zeros_like(rows).astype(jnp.float32)
        for g in range(group):
            spread = jnp.where(
                rows % group == g if t > 1 else rows == g, values[head * group + g], spread
            )
        return spread

    def marks(step):
        """The part of `visible` [block] of a step, in shared memory."""
        return smem["visible"].at[lax.rem(step, jnp.int32(config.stages))]

    def visible(step):
        """[block, R] each: whether a query row sees a slot, and slot minus query position."""
        if "visible" in inputs:
            bits = plgpu.load(marks(step), layout=COLUMN)
            bits = lax.broadcast_in_dim(bits, (bk, padded), [0])
            token = lax.div(query_rows(), jnp.full_like(bits, group))
            own = jnp.zeros_like(bits)
            for i in range(t):
                own = jnp.where(token == i, 1 << i, own)
            return (bits & own) != 0, None
        slots = plgpu.broadcasted_iota(jnp.int32, (bk, padded), 0, layout=TILE) + block_start(step)
        query = n - 1
        if t > 1:
            rows = query_rows()
            query = n - t + lax.div(rows, jnp.full_like(rows, group))
        distance = slots - query
        seen = distance <= 0 if cached is n else distance < 0
        if ends_with_cache:
            seen = seen & (slots >= (first + step * stride) * bk)
        if spec.window is not None:
            seen = seen & (distance > -spec.window)
        return seen, distance

    def log2_scores(z):
        """Turn products q·k into scores in units of log2, without position bias."""
        if spec.soft_cap is not None:
            return jnp.tanh(z * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E)
        return z * (spec.scale * LOG2E)

    def receive_queries():
        plgpu.barrier_wait(smem["q_arrived"])
        if "qkv" in inputs:
            rotate_rows(smem, group, norm_eps)

            @when(split == 0)
            def _():
                smem["score"][...] = log2_scores(receive_token(smem, group))

    def widened(codes):
        """Codes [block, D] as the left operand of a product, without rounding."""
        found = plgpu.load(codes, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        return plgpu.layout_cast(found.astype(q_s.dtype), TILE)

    def scales_of(name, step):
        """[block, R] the scale of each slot."""
        stage = lax.rem(step, jnp.int32(config.stages))
        found = plgpu.load(smem[name].at[stage], layout=COLUMN)
        return lax.broadcast_in_dim(found, (bk, padded), [0])

    def weights(step, p, seen):
        """P [block, R] as the left factor of V: with the scales of V if V has some."""
        if not int8:
            return p
        return jnp.where(seen, p * scales_of("v_scales", step), 0.0).astype(q_s.dtype)

    def second_operand(step, values):
        """V [block, D] as the product takes it. Codes of dead slots are finite."""
        if not int8:
            zero_dead_values(step, values)
            return values
        smem["wide"][...] = widened(values)
        return smem["wide"]

    def scores(step, keys):
        """[block, R] each: scores in units of log2, and whether they are visible."""

        def product(acc):
            plgpu.wgmma(acc, keys, q_s.at[pl.ds(0, padded)].T)
            return acc[...]

        if int8:
            keys = widened(keys)
        if int8 and interpreted:
            smem["wide"][...] = keys
            plgpu.commit_smem()
            keys = smem["wide"]

        z = pl.run_scoped(product, plgpu.ACC((bk, padded), jnp.float32))
        if int8:
            z = z * scales_of("k_scales", step)
        z = log2_scores(z)
        seen, distance = visible(step)
        if "slopes" in inputs:
            z = z + per_row(inputs["slopes"]) * LOG2E * distance.astype(jnp.float32)
        return z, seen

    def zero_dead_values(step, values):
        """Zero the values of dead slots: they may be NaN, and 0 * NaN is NaN."""
        begin = block_start(step)
        if "visible" in inputs:
            any_dead = marks(step)[0] < 0
        else:
            any_dead = begin + bk > cached

        @when(any_dead)
        def _():
            if "visible" in inputs:
                bits = plgpu.load(marks(step), layout=COLUMN)
                live = lax.broadcast_in_dim(bits & ~HOLES, (bk, 64), [0]) != 0
            else:
                slots = plgpu.broadcasted_iota(jnp.int32, (bk, 64), 0, layout=TILE) + begin
                live = slots < cached
            for column in range(0, d, 64):
                part = values.at[:, pl.ds(column, 64)]
                found = plgpu.load(part, layout=TILE)
                part[...] = jnp.where(live, found, jnp.zeros_like(found))

    # P is rounded once, after it is multiplied by scales.
    p_dtype = jnp.float32 if int8 else q_s.dtype

    def down(values, size):
        """Broadcast values [R] to [size, R]."""
        return lax.broadcast_in_dim(values, (size, padded), [1])

    def put(p):
        p_s.T[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

    def pipeline(step, carry, first_pass):
        """Run step(i, keys [block, D], values, carry) over the blocks, and load ahead of it.

        The first pass receives the queries while its first blocks are in flight.
        """
        stages = config.stages

        def load_block(i, entry=None):
            load(block_start(i), lax.rem(i, jnp.int32(stages)), entry)

        def entry_of(i):
            return caches["k"].entry_at(block_start(i)) if paged else zero

        def body(i, carry):
            carry, entry = carry
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(smem["loaded"].at[stage])
            carry = step(i, k_s.at[stage], v_s.at[stage], carry)
            when(i + stages < count)(lambda: load_block(i + stages, entry))
            # The entry is looked up a step ahead, because the load would wait for the lookup.
            return carry, entry_of(i + stages + 1)

        begun = 1 if first_pass and in_turn else 0
        lax.fori_loop(begun, jnp.minimum(count, stages), lambda i, _: load_block(i), None)
        if first_pass:
            receive_queries()
        return lax.fori_loop(0, count, body, (carry, entry_of(stages)))[0]

    blank = plgpu.layout_cast(jnp.zeros((bk, padded), jnp.float32), TILE)

    def attend_unified():
        """o [D, R], l [R], m [R] of this split, with a constant m after the first block."""

        def nearest(m, z, seen):
            """φ, or the maximum of the first block if that is far from φ."""
            top = jnp.where(seen, z, LOWEST).max(axis=0)
            far = jnp.where(jnp.abs(top - m) > _NEAR_LOG2, top, m)
            return plgpu.layout_cast(jnp.where(top > LOWEST, far, m), ROW)

        def accumulate(acc):
            def step(i, keys, values, carry):
                l, m = carry
                z, seen = scores(i, keys)
                m = cond(
                    i == 0,
                    lambda: nearest(m, z, seen),
                    lambda: plgpu.layout_cast(m, ROW),
                )
                p = jnp.where(seen, jnp.exp2(z - down(m, bk)), 0.0).astype(p_dtype)
                values = second_operand(i, values)
                put(weights(i, p, seen))
                plgpu.wgmma(acc, values.T, p_s.T)
                l = l + p.astype(jnp.float32)
                plgpu.wgmma_wait(0)
                return l, m

            if "phi" in inputs:
                m = per_row(inputs["phi"]).max(axis=0) * LOG2E
            else:
                m = plgpu.layout_cast(jnp.zeros((padded,), jnp.float32), ROW)
            l, m = pipeline(step, (blank, m), first_pass=True)
            return acc[...], l, m

        o, l, m = pl.run_scoped(accumulate, plgpu.ACC((d, padded), jnp.float32))
        return o, l.sum(axis=0), m

    def attend_with_running_maximum():
        """The same as `attend_unified`, with the running maximum of the split."""

        def step(i, keys, values, carry):
            o, l, m = carry
            z, seen = scores(i, keys)
            m_new = jnp.maximum(m, jnp.where(seen, z, LOWEST).max(axis=0))
            p = jnp.where(seen, jnp.exp2(z - down(m_new, bk)), 0.0).astype(p_dtype)
            values = second_operand(i, values)
            put(weights(i, p, seen))
            rescale = jnp.exp2(m - m_new)
            l = l * down(rescale, bk) + p.astype(jnp.float32)
            o = o * down(rescale, d)

            def product(acc):
                plgpu.wgmma(acc, values.T, p_s.T)
                return acc[...]

            o = o + pl.run_scoped(product, plgpu.ACC((d, padded), jnp.float32))
            return o, l, m_new

        o = plgpu.layout_cast(jnp.zeros((d, padded), jnp.float32), TILE)
        m = plgpu.layout_cast(jnp.full((padded,), LOWEST, jnp.float32), ROW)
        o, l, m = pipeline(step, (o, blank, m), first_pass=not config.unified)
        return o, l.sum(axis=0), m

    if config.unified:
        o, l, m = attend_unified()
        rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (padded,), 0), ROW) + first_query
        last = n - t + lax.div(rows, jnp.full_like(rows, group))
        seen = jnp.minimum(last + 1, cached)
        if in_turn:
            seen = seen - first * bk
        else:
            seen = jnp.minimum((first + count) * bk, seen)
            seen = seen - jnp.maximum(first * bk, last - spec.window + 1)
        seen = jnp.where(rows < group * t, seen, 0)
        out_of_range = jnp.where(
            l >= 2.0**-_SAFE_LOG2, jnp.where(l <= 2.0**_SAFE_LOG2, 0.0, 1.0), 1.0
        )
        broken = jnp.where(jnp.abs(o) < _LARGEST, 0.0, 1.0).max(axis=0)
        # A row that sees no slot of this split has l = 0, which is healthy.
        broken = jnp.where(seen > 0, jnp.maximum(broken, out_of_range), 0.0)
        reruns = broken.max() > 0
        part = cond(reruns, attend_with_running_maximum, lambda: (o, l, m))
    else:
        reruns = jnp.bool_(False)
        part = attend_with_running_maximum()
    if "reruns" in outputs:
        outputs["reruns"][row, tile, split] = reruns.astype(jnp.int32)

    def with_token(*parts):
        """Merge parts (o, l, m) with the new token and the sinks, each a part of one slot."""
        if "sinks" in inputs:
            sink = plgpu.load(inputs["sinks"].at[tile], layout=ROW, optimized=False)
            sink = sink.astype(jnp.float32) * LOG2E
            nothing = plgpu.layout_cast(jnp.zeros((d, padded), jnp.float32), TILE)
            parts += ((nothing, jnp.ones_like(sink), sink),)
        if "qkv" in inputs:
            value = plgpu.load(smem["new"].at[1], layout=COLUMN).astype(jnp.float32)
            value = lax.broadcast_in_dim(value, (d, padded), [0])
            score = plgpu.load(smem["score"], layout=ROW)
            parts += ((value, jnp.ones_like(score), score),)
        return parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))

    def load_part(peer):
        o, l, m = (plgpu.cluster_ref(ref, {"split": peer}) for ref in partial)
        return plgpu.load(o, layout=TILE), *(plgpu.load(ref, layout=ROW) for ref in (l, m))

    def save(part):
        for ref, values in zip(partial, part, strict=True):
            ref[...] = values

    def finish():
        others = map(load_part, range(1, splits if config.cluster else 1))
        write_result(*with_token(part, *others), smem["out"], smem.get("lse"))
        plgpu.commit_smem()
        if config.cluster:
            plgpu.barrier_arrive(smem["cluster"])
        if "qkv" in inputs:
            # The last block may contain the slot, so it must have been loaded.
            write_token(caches, smem, cached)
        place = tile_rows(row, tile, padded, by_token)
        plgpu.copy_smem_to_gmem(smem["out"], outputs["o"].at[place])
        if "lse" in outputs:
            plgpu.copy_smem_to_gmem(smem["lse"], outputs["lse"].at[row, tile])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if config.cluster:
        when(split > 0)(lambda: save(part))
        # One thread arrives for a warpgroup. The commit before waits for all its threads.
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["cluster"])
        plgpu.barrier_wait(smem["cluster"])
        when(split == 0)(finish)

        # A block must not end before others have read its shared memory or arrived at its barrier.
        when(split > 0)(lambda: plgpu.barrier_arrive(smem["cluster"]))
        plgpu.barrier_wait(smem["cluster"])
    elif splits == 1:
        finish()
    else:
        save(cond(split == 0, lambda: with_token(part), lambda: part))
        plgpu.commit_smem()
        if "qkv" in inputs:
            when(split == 0)(lambda: write_token(caches, smem, cached))
        o_s, l_s, m_s = partial
        plgpu.copy_smem_to_gmem(o_s, outputs["o"].at[row, tile, split])
        plgpu.copy_smem_to_gmem(l_s, outputs["lm"].at[row, tile, split, 0])
        plgpu.copy_smem_to_gmem(m_s, outputs["lm"].at[row, tile, split, 1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
