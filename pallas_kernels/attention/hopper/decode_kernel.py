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
from fdjax.pallas_kernels.hopper.codes import (
    beside_codes,
    codes,
    in_order,
    multiplied,
    transposed_codes,
)
from fdjax.pallas_kernels.hopper.conditional import cond, when
from fdjax.pallas_kernels.hopper.fragments import loaded_right

# A split is healthy if its denominator is within 2^±64.
_SAFE_LOG2 = 64
# m moves to the maximum of the first block if that is further away from φ than this, in log2.
_NEAR_LOG2 = 32
_LARGEST = 2.0**126
# Most query rows that stay in registers beside an int8 cache. More would spill.
_HELD_QUERIES = 16
# A bit of `visible`. It is set for all slots of a block of `block_kv` if no query sees some slot of
# the block.
HOLES = -(2**31)


def decode_kernel(inputs, outputs, smem, **options):
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
      **options: of `_Split`.
    """
    _Split(inputs, outputs, smem, **options).run()


class _Split:
    """The part of a row's cache that a block of the grid reads, for a tile of queries.

    Arrays [block, R] have a row for each slot of a step, and a column for each query row. Scores
    are in units of log2.

    Attributes:
      row, tile, split: index of the block in the grid.
      head: index of the KV head.
      first_query: the tile's first row of the head's G·T query rows.
      d, padded: D and R.
      bk: slots of a step.
      caches, scales: rows of the caches, and of their scales in int8, by name.
      in_turn: whether splits take blocks of slots in turn, and not each a stretch of them. Then a
        split's first block does not depend on the row's length.
      cached: number of slots to read from the cache, once the length is read.
      n: the same, with a new token.
      first, stride, count: the blocks of this split, `count` of them from `first` on.
    """

    def __init__(
        self,
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
        """Prepare the work without reading memory.

        Args:
          inputs, outputs, smem: see `decode_kernel`.
          t: query tokens per row.
          group: G, query heads per KV head.
          tiles: number of tiles that the G·T query rows of a KV head are cut into.
          by_token: the tile's rows are tokens, and q and o have the axis of tokens first.
          spec, config, entry_slots: see `decode_mosaic`.
          norm_eps: eps of the norms of q and k, or None.
          interpreted: whether the interpreter runs the kernel. It cannot multiply operands in
            registers.
        """
        self.inputs, self.outputs, self.smem = inputs, outputs, smem
        self.t, self.group, self.by_token, self.entry_slots = t, group, by_token, entry_slots
        self.spec, self.config, self.norm_eps = spec, config, norm_eps
        self.interpreted = interpreted
        self.partial = [smem[name] for name in ("o", "l", "m")]
        (self.d, self.padded), self.bk = self.partial[0].shape, config.block_kv
        self.row, self.tile, self.split = (lax.axis_index(a) for a in ("row", "tile", "split"))
        self.zero = self.row * 0
        self.head = lax.div(self.tile, jnp.int32(tiles))
        self.first_query = lax.rem(self.tile, jnp.int32(tiles)) * self.padded
        self.appends, self.paged = "qkv" in inputs, "pages" in inputs
        self.int8, self.marked = "k_scales" in inputs, "visible" in inputs
        self.in_turn = spec.window is None
        # The largest tile has no registers left to mask slots that are read twice. A block lies in
        # one page.
        self.ends_with_cache = self.bk * self.padded < 128 * 32 and not self.paged
        # P is rounded once, after it is multiplied by scales.
        self.p_dtype = jnp.float32 if self.int8 else smem["q"].dtype

    def run(self):
        """Attend, and store the result of this split or of all splits."""
        self._request_queries()
        open_row = functools.partial(
            CacheRow, self.inputs, row=self.row, head=self.head, entry_slots=self.entry_slots
        )
        self.caches = {name: open_row(name=name) for name in "kv"}
        names = ("k_scales", "v_scales") if self.int8 else ()
        self.scales = {name: open_row(name=name, axis=-1) for name in names}
        if self.in_turn:
            self._load(self.split * self.bk, self.zero)
        self._choose_blocks()
        part, reruns = self._attend()
        if "reruns" in self.outputs:
            place = self.row, self.tile, self.split
            self.outputs["reruns"][place] = reruns.astype(jnp.int32)
        if self.config.cluster:
            self._finish_in_cluster(part)
        elif self.config.splits == 1:
            self._finish(part)
        else:
            self._store_part(part)

    # The queries.

    def _request_queries(self):
        if self.appends:
            load_front(self.inputs, self.smem, self.row, self.head)
            return
        # Rows past G·T are outside q: TMA loads zeros for them and does not store them.
        place = tile_rows(self.row, self.tile, self.padded, self.by_token)
        source = self.inputs["q"].at[place]
        plgpu.copy_gmem_to_smem(source, self.smem["q"], self.smem["q_arrived"])

    def _receive_queries(self):
        """Wait for the queries. Those of a new token are rotated, and meet its key."""
        plgpu.barrier_wait(self.smem["q_arrived"])
        if self.appends:
            rotate_rows(self.smem, self.group, self.norm_eps)

            @when(self.split == 0)
            def _():
                score = receive_token(self.smem, self.group)
                self.smem["score"][...] = self._log2_scores(score)

        if self.int8 and self.padded <= _HELD_QUERIES:
            self.queries = self._right()

    def _query_rows(self):
        """[block, R] the index among the head's G·T query rows of each column."""
        rows = plgpu.broadcasted_iota(jnp.int32, (self.bk, self.padded), 1, layout=TILE)
        return rows + self.first_query

    def _per_row(self, values):
        """[block, R] the value of each query row's head, from `values` per query head."""
        rows, group = self._query_rows(), self.group
        spread = jnp.zeros_like(rows).astype(jnp.float32)
        for g in range(group):
            is_g = rows % group == g if self.t > 1 else rows == g
            spread = jnp.where(is_g, values[self.head * group + g], spread)
        return spread

    # The blocks of slots.

    def _choose_blocks(self):
        """Read the row's length, and choose the blocks of this split."""
        bk, splits = self.bk, self.config.splits
        n = self.inputs["lengths"][self.row]
        self.cached = self.n = n
        if self.appends:
            self.n = n + 1
        end_block = lax.div(self.cached + (bk - 1), jnp.int32(bk))
        if self.in_turn:
            self.first, self.stride = self.split, splits
            # The first block was requested already. If it is past the length, no query sees it.
            count = lax.div(end_block - self.split + (splits - 1), jnp.int32(splits))
            self.count = jnp.maximum(count, 1)
            return
        start = jnp.maximum(self.n - self.t + 1 - self.spec.window, 0)
        start_block = lax.div(start, jnp.int32(bk))
        chunk = lax.div(end_block - start_block + (splits - 1), jnp.int32(splits))
        self.first, self.stride = jnp.minimum(start_block + self.split * chunk, end_block), 1
        self.count = jnp.minimum(chunk, end_block - self.first)

    def _block_start(self, step):
        """First slot of a step. The last block ends where the cached slots end, rounded up to 8.

        So it may begin with slots of the previous block. A first block that was requested before
        the length was known is not moved.
        """
        start = (self.first + step * self.stride) * self.bk
        if not self.ends_with_cache:
            return start
        end = jnp.maximum(lax.div(self.cached + 7, jnp.int32(8)) * 8 - self.bk, 0)
        moved = jnp.minimum(start, end)
        return jnp.where(step == 0, start, moved) if self.in_turn else moved

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    def _load(self, start, stage, entry=None):
        """Request the keys and values of slots from `start` on, with what belongs to them."""
        smem = self.smem
        rows = *self.caches.values(), *self.scales.values()
        buffers = smem["k"], smem["v"], *(smem[name] for name in self.scales)
        for cache, loaded in zip(rows, buffers, strict=True):
            source = cache.block(start, self.bk, entry)
            to = loaded.at[stage, pl.ds(0, source.shape[0])]
            plgpu.copy_gmem_to_smem(source, to, smem["loaded"].at[stage])
        if self.marked:
            source = self.inputs["visible"].at[self.row, pl.ds(start, self.bk)]
            plgpu.copy_gmem_to_smem(source, smem["visible"].at[stage], smem["loaded"].at[stage])

    def _load_block(self, step, entry=None):
        self._load(self._block_start(step), self._stage(step), entry)

    def _pipeline(self, step, carry, first_pass):
        """Run step(i, keys [block, D], values, carry) over the blocks, and load ahead of it.

        The first pass receives the queries while its first blocks are in flight.
        """
        stages, smem = self.config.stages, self.smem

        def entry_of(i):
            return self.caches["k"].entry_at(self._block_start(i)) if self.paged else self.zero

        def body(i, carry):
            carry, entry = carry
            stage = self._stage(i)
            plgpu.barrier_wait(smem["loaded"].at[stage])
            carry = step(i, smem["k"].at[stage], smem["v"].at[stage], carry)
            when(i + stages < self.count)(lambda: self._load_block(i + stages, entry))
            # The entry is looked up a step ahead, because the load would wait for the lookup.
            return carry, entry_of(i + stages + 1)

        begun = 1 if first_pass and self.in_turn else 0
        end = jnp.minimum(self.count, stages)
        lax.fori_loop(begun, end, lambda i, _: self._load_block(i), None)
        if first_pass:
            self._receive_queries()
        return lax.fori_loop(0, self.count, body, (carry, entry_of(stages)))[0]

    # What a step computes.

    def _marks(self, step):
        """The part of `visible` [block] of a step, in shared memory."""
        return self.smem["visible"].at[self._stage(step)]

    def _visible(self, step):
        """[block, R] each: whether a query row sees a slot, and slot minus query position."""
        shape = self.bk, self.padded
        if self.marked:
            bits = plgpu.load(self._marks(step), layout=COLUMN)
            bits = lax.broadcast_in_dim(bits, shape, [0])
            token = lax.div(self._query_rows(), jnp.full_like(bits, self.group))
            own = jnp.zeros_like(bits)
            for i in range(self.t):
                own = jnp.where(token == i, 1 << i, own)
            return (bits & own) != 0, None
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + self._block_start(step)
        query = self.n - 1
        if self.t > 1:
            rows = self._query_rows()
            query = self.n - self.t + lax.div(rows, jnp.full_like(rows, self.group))
        distance = slots - query
        seen = distance < 0 if self.appends else distance <= 0
        if self.ends_with_cache:
            seen = seen & (slots >= (self.first + step * self.stride) * self.bk)
        if self.spec.window is not None:
            seen = seen & (distance > -self.spec.window)
        return seen, distance

    def _log2_scores(self, z):
        """Turn products q·k into scores, without position bias."""
        scale, soft_cap = self.spec.scale, self.spec.soft_cap
        if soft_cap is not None:
            return jnp.tanh(z * (scale / soft_cap)) * (soft_cap * LOG2E)
        return z * (scale * LOG2E)

    def _scores(self, step, keys):
        """[block, R] each: scores, and whether they are visible."""
        queries = self.smem["q"].at[pl.ds(0, self.padded)].T

        def product(acc):
            plgpu.wgmma(acc, keys, queries)
            return acc[...]

        if self.int8:
            z = self._products(keys) * self._scales_of("k_scales", step)
        else:
            z = pl.run_scoped(product, plgpu.ACC((self.bk, self.padded), jnp.float32))
        z = self._log2_scores(z)
        seen, distance = self._visible(step)
        if "slopes" in self.inputs:
            z = z + self._per_row(self.inputs["slopes"]) * LOG2E * distance.astype(jnp.float32)
        return z, seen

    def _down(self, values, size):
        """Broadcast values [R] to [size, R]."""
        return lax.broadcast_in_dim(values, (size, self.padded), [1])

    def _exponentials(self, z, seen, m):
        """P [block, R], the exponentials of scores less m [R]."""
        p = jnp.where(seen, jnp.exp2(z - self._down(m, self.bk)), 0.0)
        return p.astype(self.p_dtype)

    def _factors(self, step, p, values):
        """V [block, D] and P [block, R] as a product takes them, P in shared memory."""
        self._zero_dead_values(step, values)
        p_s = self.smem["p"]
        p_s.T[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        return values.T, p_s.T

    def _zero_dead_values(self, step, values):
        """Zero the values of dead slots: they may be NaN, and 0 * NaN is NaN."""
        begin, shape = self._block_start(step), (self.bk, 64)
        any_dead = self._marks(step)[0] < 0 if self.marked else begin + self.bk > self.cached

        @when(any_dead)
        def _():
            if self.marked:
                bits = plgpu.load(self._marks(step), layout=COLUMN)
                live = lax.broadcast_in_dim(bits & ~HOLES, shape, [0]) != 0
            else:
                slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + begin
                live = slots < self.cached
            for column in range(0, self.d, 64):
                part = values.at[:, pl.ds(column, 64)]
                found = plgpu.load(part, layout=TILE)
                part[...] = jnp.where(live, found, jnp.zeros_like(found))

    # Caches in int8.

    def _right(self):
        """Queries as the right operand of `_products`."""
        queries = self.smem["q"].at[pl.ds(0, self.padded)]
        return queries[...].T if self.interpreted else beside_codes(queries)

    def _products(self, keys):
        """[block, R] the products of codes of K [block, D] and the queries."""
        dtype = self.smem["q"].dtype
        queries = self.queries if self.padded <= _HELD_QUERIES else self._right()
        if self.interpreted:
            return _dot(keys[...].astype(dtype), queries)
        return multiplied(codes(keys, dtype), queries)

    def _add_values(self, o, step, p, seen, values):
        """o [D, R] and the product of values and P [block, R]; `_in_order` restores its rows."""
        p_s = self.smem["p"]
        # Codes of dead slots are finite.
        p = jnp.where(seen, p * self._scales_of("v_scales", step), 0.0).astype(p_s.dtype)
        if self.interpreted:
            o = o + _dot(values[...].astype(p.dtype).T, p)
            plgpu.commit_smem()  # the interpreter wants a fence before new codes are loaded
            return o
        # Loaded first: the compiler moves no load past the barrier of a store.
        left = transposed_codes(values, p.dtype)
        p_s.T[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
        return plgpu.mma(o, left, loaded_right(p_s))

    def _in_order(self, o):
        return in_order(o) if self.int8 and not self.interpreted else o

    def _scales_of(self, name, step):
        """[block, R] the scale of each slot."""
        found = plgpu.load(self.smem[name].at[self._stage(step)], layout=COLUMN)
        return lax.broadcast_in_dim(found, (self.bk, self.padded), [0])

    # Attention.

    def _attend(self):
        """((o [D, R], l [R], m [R]) of this split, whether it ran again)."""
        no_sum = self._blank(self.bk)
        again = functools.partial(self._attend_with_running_maximum, no_sum)
        if not self.config.unified:
            return again(), jnp.bool_(False)
        part = self._attend_unified(no_sum)
        reruns = self._is_unsafe(*part[:2])
        return cond(reruns, again, lambda: part), reruns

    def _blank(self, size):
        """Zeros [size, R]."""
        return plgpu.layout_cast(jnp.zeros((size, self.padded), jnp.float32), TILE)

    def _attend_unified(self, no_sum):
        """o [D, R], l [R], m [R] of this split, with a constant m after the first block.

        The sum l [block, R] of exponentials starts as `no_sum`.
        """

        def nearest(m, z, seen):
            """φ, or the maximum of the first block if that is far from φ."""
            top = jnp.where(seen, z, LOWEST).max(axis=0)
            far = jnp.where(jnp.abs(top - m) > _NEAR_LOG2, top, m)
            return plgpu.layout_cast(jnp.where(top > LOWEST, far, m), ROW)

        def accumulate(acc):
            def step(i, keys, values, carry):
                o, l, m = carry
                z, seen = self._scores(i, keys)
                m = cond(
                    i == 0,
                    lambda: nearest(m, z, seen),
                    lambda: plgpu.layout_cast(m, ROW),
                )
                p = self._exponentials(z, seen, m)
                if acc is None:
                    return self._add_values(o, i, p, seen, values), l + p, m
                plgpu.wgmma(acc, *self._factors(i, p, values))
                l = l + p.astype(jnp.float32)
                plgpu.wgmma_wait(0)
                return o, l, m

            if "phi" in self.inputs:
                m = self._per_row(self.inputs["phi"]).max(axis=0) * LOG2E
            else:
                m = plgpu.layout_cast(jnp.zeros((self.padded,), jnp.float32), ROW)
            o = self._blank(self.d) if acc is None else None
            o, l, m = self._pipeline(step, (o, no_sum, m), first_pass=True)
            return self._in_order(o) if acc is None else acc[...], l, m

        if self.int8:
            o, l, m = accumulate(None)
        else:
            o, l, m = pl.run_scoped(accumulate, plgpu.ACC((self.d, self.padded), jnp.float32))
        return o, l.sum(axis=0), m

    def _attend_with_running_maximum(self, no_sum):
        """The same as `_attend_unified`, with the running maximum of the split."""

        def step(i, keys, values, carry):
            o, l, m = carry
            z, seen = self._scores(i, keys)
            m_new = jnp.maximum(m, jnp.where(seen, z, LOWEST).max(axis=0))
            p = self._exponentials(z, seen, m_new)
            if not self.int8:
                factors = self._factors(i, p, values)
            rescale = jnp.exp2(m - m_new)
            l = l * self._down(rescale, self.bk) + p.astype(jnp.float32)
            o = o * self._down(rescale, self.d)
            if self.int8:
                return self._add_values(o, i, p, seen, values), l, m_new

            def product(acc):
                plgpu.wgmma(acc, *factors)
                return acc[...]

            o = o + pl.run_scoped(product, plgpu.ACC((self.d, self.padded), jnp.float32))
            return o, l, m_new

        o = self._blank(self.d)
        m = plgpu.layout_cast(jnp.full((self.padded,), LOWEST, jnp.float32), ROW)
        o, l, m = self._pipeline(step, (o, no_sum, m), first_pass=not self.config.unified)
        return self._in_order(o), l.sum(axis=0), m

    def _is_unsafe(self, o, l):
        """Whether a row's sums of the unified maximum are out of range."""
        seen = self._slots_seen()
        out_of_range = jnp.where(
            l >= 2.0**-_SAFE_LOG2, jnp.where(l <= 2.0**_SAFE_LOG2, 0.0, 1.0), 1.0
        )
        broken = jnp.where(jnp.abs(o) < _LARGEST, 0.0, 1.0).max(axis=0)
        # A row that sees no slot of this split has l = 0, which is healthy.
        broken = jnp.where(seen > 0, jnp.maximum(broken, out_of_range), 0.0)
        return broken.max() > 0

    def _slots_seen(self):
        """[R] number of slots of this split that each query row sees, or less than 1."""
        bk, group = self.bk, self.group
        rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (self.padded,), 0), ROW)
        rows = rows + self.first_query
        last = self.n - self.t + lax.div(rows, jnp.full_like(rows, group))
        seen = jnp.minimum(last + 1, self.cached)
        if self.in_turn:
            seen = seen - self.first * bk
        else:
            seen = jnp.minimum((self.first + self.count) * bk, seen)
            seen = seen - jnp.maximum(self.first * bk, last - self.spec.window + 1)
        return jnp.where(rows < group * self.t, seen, 0)

    # The result.

    def _with_token(self, *parts):
        """Merge parts (o, l, m) with the new token and the sinks, each a part of one slot."""
        if "sinks" in self.inputs:
            sink = plgpu.load(self.inputs["sinks"].at[self.tile], layout=ROW, optimized=False)
            sink = sink.astype(jnp.float32) * LOG2E
            parts += ((self._blank(self.d), jnp.ones_like(sink), sink),)
        if self.appends:
            value = plgpu.load(self.smem["new"].at[1], layout=COLUMN).astype(jnp.float32)
            value = lax.broadcast_in_dim(value, (self.d, self.padded), [0])
            score = plgpu.load(self.smem["score"], layout=ROW)
            parts += ((value, jnp.ones_like(score), score),)
        return parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))

    def _save(self, part):
        for ref, values in zip(self.partial, part, strict=True):
            ref[...] = values

    def _part_of(self, peer):
        """The part (o, l, m) of another split of the cluster."""
        o, l, m = (plgpu.cluster_ref(ref, {"split": peer}) for ref in self.partial)
        return plgpu.load(o, layout=TILE), *(plgpu.load(ref, layout=ROW) for ref in (l, m))

    def _finish(self, part):
        """Merge this part with those of the cluster, and store the result and the new token."""
        smem, others = self.smem, range(1, self.config.splits if self.config.cluster else 1)
        parts = self._with_token(part, *map(self._part_of, others))
        write_result(*parts, smem["out"], smem.get("lse"))
        plgpu.commit_smem()
        if self.config.cluster:
            plgpu.barrier_arrive(smem["cluster"])
        if self.appends:
            # The last block may contain the slot, so it must have been loaded.
            write_token(self.caches, self.scales, smem, self.cached)
        place = tile_rows(self.row, self.tile, self.padded, self.by_token)
        plgpu.copy_smem_to_gmem(smem["out"], self.outputs["o"].at[place])
        if "lse" in self.outputs:
            plgpu.copy_smem_to_gmem(smem["lse"], self.outputs["lse"].at[self.row, self.tile])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _finish_in_cluster(self, part):
        """The first split stores the result of all."""
        cluster = self.smem["cluster"]
        when(self.split > 0)(lambda: self._save(part))
        # One thread arrives for a warpgroup. The commit before waits for all its threads.
        plgpu.commit_smem()
        plgpu.barrier_arrive(cluster)
        plgpu.barrier_wait(cluster)
        when(self.split == 0)(lambda: self._finish(part))

        # A block must not end before others have read its shared memory or arrived at its barrier.
        when(self.split > 0)(lambda: plgpu.barrier_arrive(cluster))
        plgpu.barrier_wait(cluster)

    def _store_part(self, part):
        """Store the part of this split for `combine`."""
        self._save(cond(self.split == 0, lambda: self._with_token(part), lambda: part))
        plgpu.commit_smem()
        if self.appends:
            write = functools.partial(write_token, self.caches, self.scales, self.smem)
            when(self.split == 0)(lambda: write(self.cached))
        o_s, l_s, m_s = self.partial
        place = self.row, self.tile, self.split
        plgpu.copy_smem_to_gmem(o_s, self.outputs["o"].at[place])
        plgpu.copy_smem_to_gmem(l_s, self.outputs["lm"].at[*place, 0])
        plgpu.copy_smem_to_gmem(m_s, self.outputs["lm"].at[*place, 1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
