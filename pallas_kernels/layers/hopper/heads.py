"""Attention of a decode step as a stage of a persistent kernel.

A block computes one KV head of a row, 64 slots at a time, with a running maximum. If there are few
heads, the two blocks of a cluster share a head: they take its tiles in turn and merge their results
through shared memory. With very few heads, several clusters share one, and the first of them merges
their results through global memory. The new token is put into its place in the last tile in shared
memory, so that attention need not wait until the cache holds it.

If two warpgroups compute, they share the tiles of their block. The first one rotates the queries
and finishes the head; the second hands its result over, merged with that of the other block.

A cache in int8 is multiplied from registers, see `codes`. Its tiles have 128 slots, so that they
fill a slot of the ring; each warpgroup takes half of each. Their scales are loaded into registers
one tile ahead. The second warpgroup rounds the new token, and computes its score apart.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import LARGEST
from fdjax.pallas_kernels.attention.hopper.cache_row import CacheRow
from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST
from fdjax.pallas_kernels.hopper.codes import (
    beside_codes,
    codes,
    in_order,
    multiplied,
    transposed_codes,
)
from fdjax.pallas_kernels.hopper.coding import Coding
from fdjax.pallas_kernels.hopper.conditional import cond, when
from fdjax.pallas_kernels.hopper.fragments import loaded_right
from fdjax.pallas_kernels.hopper.persistent import exchange, handover, words
from fdjax.pallas_kernels.hopper.persistent.block import Block, Layer, Pair, bricks
from fdjax.pallas_kernels.hopper.persistent.memory import Memory
from fdjax.pallas_kernels.hopper.persistent.row_input import RowInput
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, PARTS, TOKEN_SLOTS
from fdjax.pallas_kernels.hopper.persistent.stage import Stage
from fdjax.pallas_kernels.hopper.reduction import WORDS, meet, over_rows
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load, put

HEAD_DIM = 2 * BRICK
# Where "reduced" has the scales of key and value of a new token, by column, and its scores.
_SCALES = 4 * WORDS
_SCORES = _SCALES + PARTS


@dataclasses.dataclass(frozen=True)
class Heads(Stage):
    """Attention of queries, key and value "y" [M,Hkv,G+2,D], with the result "o" [M,Hkv,G,D].

    If products need x coded, so is "o" [Hkv·G·D/64,places,words], see `Coding`.

    "k" and "v" [L,M,Hkv,S,D], or pools of "pages" [M,N], hold the keys and values of earlier
    tokens; "lengths" [M] has their numbers. "cos" and "sin" [M,D/2] rotate queries and key. With
    `int8`, "k_scales" and "v_scales" are the scales of the caches.

    If several clusters share a head, all but the first send their results to "parts"
    [M,Hkv,clusters-1] places, see `new_parts`.

    Attributes:
      rows, kv_heads, group: M, Hkv, G.
      cache_slots: S.
      split: number of blocks of a cluster that share a KV head.
      scale: multiplies q·k.
      clusters: number of clusters that share a KV head; more than one only if `split` is 2.
      int8: whether the caches are in int8.
    """

    rows: int
    kv_heads: int
    group: int
    cache_slots: int
    split: int
    scale: float
    clusters: int = 1
    int8: bool = False

    copies = 4  # halves of keys and of values
    barrier = handover.ATTENTION

    @property
    def tiles(self) -> int:
        """Number of clusters' shares in the KV heads of all rows."""
        return self.rows * self.kv_heads * self.clusters

    @property
    def tile(self) -> int:
        """Slots of a tile of the cache."""
        return 2 * BRICK if self.int8 else BRICK

    @property
    def sharing(self) -> int:
        """Number of blocks that share a KV head."""
        return self.split * self.clusters

    def _unit(self, block: Block, i: Array) -> Array:
        share = block.share(self)
        return jnp.minimum(share.first + i * share.stride, self.tiles - 1)

    def _head(self, block: Block, i: Array) -> tuple[Array, Array]:
        """(row, KV head) of this block's i-th head."""
        unit = self._unit(block, i)
        if self.clusters > 1:
            unit = lax.div(unit, self.clusters)
        return lax.div(unit, self.kv_heads), lax.rem(unit, self.kv_heads)

    def _part(self, block: Block, i: Array) -> Array:
        """Index of this block's cluster among those that share the KV head."""
        return lax.rem(self._unit(block, i), self.clusters)

    def _rank(self, block: Block, i: Array) -> Array:
        """Index of this block among those that share the KV head."""
        rank = block.share(self).rank
        return rank if self.clusters == 1 else self._part(block, i) * self.split + rank

    def _cache_tiles(self, block: Block, i: Array, filled: Array) -> tuple[Array, Array]:
        """Number of tiles, the new token's included, and number of this block's, at least one."""
        tiles = lax.div(filled, self.tile) + 1
        mine = lax.div(tiles - self._rank(block, i) + self.sharing - 1, self.sharing)
        return tiles, jnp.maximum(mine, 1)

    def bring_weights(
        self, block: Block, layer: Layer, worked: Array | None, tiles: Pair
    ) -> tuple[Array, Pair]:
        """Load keys and values."""
        gmem, config, share = block.gmem, block.config, block.share(self)

        def bring_head(i, carry):
            row, head = self._head(block, i)
            rank = self._rank(block, i)
            filled = gmem["lengths"][row]
            tiles_in_all, mine = self._cache_tiles(block, i, filled)
            caches = self._caches(gmem, row, head, layer)

            def bring(j, carry):
                count, tiles = carry
                block.await_done(worked, count == config.ahead)

                def copies(slot):
                    tile = rank + self.sharing * j
                    if self.int8:
                        starts = [self._code_start(2 * tile + half, filled) for half in range(2)]
                        sources = [cache.block(s, BRICK) for cache in caches for s in starts]
                        targets = [block.smem["codes"].at[slot, at] for at in range(4)]
                        return list(zip(sources, targets, strict=True))
                    if self.clusters > 1:  # a block without a tile loads an existing one
                        tile = jnp.minimum(tile, tiles_in_all - 1)
                    start = tile * BRICK
                    sources = [
                        cache.block(start, BRICK).at[:, bricks(half, 1)]
                        for cache in caches
                        for half in range(2)
                    ]
                    return block.into_bricks(slot, sources)

                tiles = block.bring_tile(tiles, config.cache, copies)
                return count + 1, tiles

            return lax.fori_loop(0, mine, bring, carry)

        return lax.fori_loop(0, share.count, bring_head, (jnp.int32(0), tiles))

    def _caches(self, gmem, row, head, layer) -> list[CacheRow]:
        """Keys and values of a KV head."""
        return [CacheRow(gmem, name, row, head, layer) for name in "kv"]

    def _scales(self, gmem, row, head, layer) -> list[CacheRow]:
        """Scales of keys and values of a KV head."""
        return [CacheRow(gmem, f"{n}_scales", row, head, layer, axis=-1) for n in "kv"]

    def _code_start(self, half: Array, filled: Array) -> Array:
        """First slot of half a tile in int8, or of an existing half if the row ends before."""
        last = jnp.minimum(lax.div(filled, BRICK), self.cache_slots // BRICK - 1)
        return jnp.minimum(half, last) * BRICK

    def bring_x(self, block: Block, layer: Layer, loaded: Array) -> Array:
        """Load queries, key and value of the new token."""
        mine = block.share(self).count

        def bring(i, loaded):
            row, head = self._head(block, i)
            # TMA zero-fills missing parts.
            source = block.gmem["y"].at[row, head, pl.ds(block.zero, PARTS)]
            if block.coding:
                block.bring_token(layer * mine + i, source)
                return loaded
            for half in range(2):
                loaded = block.bring_brick(loaded, source.at[:, bricks(half, 1)])
            return loaded

        return lax.fori_loop(0, mine, bring, loaded)

    def row_input(self, block: Block) -> RowInput:
        """Queries, key and value of the new token, if they come in words."""
        share, parts = block.share(self), self.group + 2
        # Blocks have several heads only if no clusters share one.
        head = lax.div(share.first, self.clusters)
        return RowInput(
            first=block.words["y"] + head * (parts * HEAD_DIM),
            apart=share.stride * parts * HEAD_DIM,
            bricks=2 * parts,
            exist=2 * parts,
            in_rows=1,
            tiles=share.count,
            squares=-1,
        )

    def compute(self, block: Block, layer: Layer, used: Pair) -> Pair:
        """Compute attention of this block's KV heads. With `int8`, two warpgroups must do so."""
        mine = block.share(self).count

        def store_is_under_way(i):
            """Whether the store of this block's head number i may still be running."""
            return (i >= 0) & ((self.split == 1) | (lax.rem(i, self.split) == block.rank))

        def arrive(i):
            if block.sends_words:
                return

            @when(store_is_under_way(i))
            def _():
                plgpu.wait_smem_to_gmem(0)
                block.signal(layer)

        def fetch(i):
            """Length, cos, sin and first scales for head i, from global memory; requested early."""
            row, _ = self._head(block, i)
            filled = block.gmem["lengths"][row]
            rotation = (
                plgpu.load(block.gmem[name].at[row], layout=LAYOUT.reduce(1), optimized=False)
                for name in ("cos", "sin")
            )
            scales = self._scales_of(block, layer, i, filled, jnp.int32(0)) if self.int8 else ()
            return filled, *rotation, *scales

        def one(i, carry):
            (w_used, x_used), (filled, cos, sin, *scales) = carry
            at = layer * mine + i if block.coding else x_used
            self._receive(block, cos, sin, self._token(block, at))
            following = fetch(i + 1)
            before = functools.partial(arrive, i - 1)
            self._attend(block, layer, i, filled, w_used, scales, before)
            x_used += 0 if block.coding else 2
            return (w_used + self._cache_tiles(block, i, filled)[1], x_used), following

        used, _ = lax.fori_loop(0, mine, one, (used, fetch(jnp.int32(0))))

        def finish():
            arrive(mine - 1)
            when(mine > 0)(block.mark_done)

        block.by(0, finish)
        return used

    def _token(self, block, at) -> list[Array]:
        """Halves [64, 8] of queries, key and value, from place `at` of their ring on."""
        smem = block.smem
        if block.coding:
            slot = lax.rem(at, TOKEN_SLOTS)
            plgpu.barrier_wait(smem["token_arrived"].at[slot])
            halves = [load(smem["token"].at[slot, :, bricks(half, 1)].T) for half in range(2)]
            plgpu.barrier_arrive(smem["token_used"].at[slot])
            return halves
        halves = []
        slots = [block.x_slot(at + half) for half in range(2)]
        for slot in slots:
            plgpu.barrier_wait(smem["x_arrived"].at[slot])
            halves.append(load(smem["x"].at[slot, pl.ds(0, PARTS)].T))
        for slot in slots:
            plgpu.barrier_arrive(smem["x_used"].at[slot])
        return halves

    def _receive(self, block, cos, sin, halves) -> None:
        """Apply RoPE to queries and the new token, and keep both."""
        smem = block.smem
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last token has left shared memory
        cos, sin = (lax.broadcast_in_dim(a, (BRICK, PARTS), [0]) for a in (cos, sin))
        a, b = halves
        turned = a * cos - b * sin, b * cos + a * sin

        def begin():
            for half in range(2):
                put(smem["q"].at[:, bricks(half, 1)], turned[half])
            if not self.int8:
                for which, values in enumerate((turned, halves)):
                    for half in range(2):
                        token = _column(values[half], self.group + which)
                        smem["new"].at[2 * which + half][...] = token.astype(block.dtype)
            if self.int8:
                meet()
            else:  # wgmma and TMA read it
                plgpu.commit_smem()
            if block.computing > 1:
                plgpu.barrier_arrive(smem["q_made"])

        def follow():
            if self.int8:
                self._round_token(block, turned, halves)
            plgpu.barrier_wait(smem["q_made"])

        block.by(0, begin)
        if block.computing > 1:
            block.by(1, follow)

    def _round_token(self, block, turned, halves) -> None:
        """Keep codes, scales and scores of the new key and value, which are columns of halves."""
        smem = block.smem
        columns = plgpu.broadcasted_iota(jnp.int32, halves[0].shape, 1, layout=LAYOUT)
        values = [
            jnp.where(columns == self.group, t, h).astype(block.dtype).astype(jnp.float32)
            for t, h in zip(turned, halves, strict=True)
        ]
        largest = functools.reduce(jnp.maximum, map(jnp.abs, values))
        scale = over_rows(largest, "max", _memory(block, 0)) / LARGEST
        divisor = _down(jnp.where(scale > 0, scale, 1.0))
        rounded = [jnp.clip(jnp.round(v / divisor), -LARGEST, LARGEST) for v in values]
        for which in range(2):
            for half in range(2):
                target = smem["new_codes"].at[which, bricks(half, 1)]
                target[...] = _column(rounded[half], self.group + which).astype(jnp.int8)
        smem["reduced"].at[pl.ds(_SCALES, PARTS)][...] = scale
        products = (
            q.astype(block.dtype).astype(jnp.float32)
            * lax.broadcast_in_dim(_column(c * _down(scale), self.group), q.shape, [0])
            for q, c in zip(turned, rounded, strict=True)
        )
        scores = over_rows(sum(products), "sum", _memory(block, 1))
        smem["reduced"].at[pl.ds(_SCORES, PARTS)][...] = scores
        meet()

    def _attend(self, block, layer, i, filled, w_used, scales, arrive_before) -> None:
        """Attention of a KV head of a row to this block's tiles of slots."""
        row, head = self._head(block, i)
        tiles_in_all, mine = self._cache_tiles(block, i, filled)
        rank = self._rank(block, i)
        if self.int8:
            o, l, m = self._attend_codes(block, layer, i, filled, w_used, scales)
            o = in_order(o)
            result = o[:BRICK], o[BRICK:], l, _down(m)
        else:
            *o, l, m = self._attend_values(block, rank, filled, w_used, tiles_in_all, mine)
            result = *o, l, _down(m)
        token_is_mine = lax.rem(tiles_in_all - 1, self.sharing) == rank
        caches = self._caches(block.gmem, row, head, layer)
        write = functools.partial(_write_token, block, caches, filled)
        if self.int8:
            new_scales = self._scales(block.gmem, row, head, layer)
            write = functools.partial(_write_codes, block, self.group, caches, new_scales, filled)
        write = functools.partial(when(token_is_mine & (filled < self.cache_slots)), write)

        def follow():
            added = self._with_token(block, result, token_is_mine) if self.int8 else result
            self._hand_over(block, layer, i, added)
            if self.int8:
                write()

        def finish():
            arrive_before()
            store = functools.partial(self._store, block, layer, row, head)
            if self.clusters > 1:
                store = functools.partial(self._merge_clusters, block, layer, i, row, head)
            self._merge(block, layer, i, result, store)
            if not self.int8:
                write()

        if block.computing > 1:
            block.by(1, follow)
        block.by(0, finish)

    def _merge_clusters(self, block, layer, i, row, head, mine) -> None:
        """Merge the results of all clusters that share the head in the first of them."""
        parts, part = block.gmem["parts"].at[row, head], self._part(block, i)
        flag = words.flag_of(layer)

        @when(part > 0)
        def _():
            exchange.send(parts.at[part - 1], mine, flag)

        @when(part == 0)
        def _():
            def add(other, carry):
                found = exchange.receive(parts.at[other], 4, (BRICK, PARTS), flag)
                return _merged(carry, tuple(found))

            merged = lax.fori_loop(0, self.clusters - 1, add, mine)
            self._store(block, layer, row, head, merged)

    def _store(self, block, layer, row, head, result) -> None:
        """Begin to store the result of a KV head, o over the sum of l."""
        *o, l, _ = result
        inverse = _down(1.0 / l.sum(axis=0))
        results = [part * inverse for part in o]
        if block.sends_words:
            for half, values in enumerate(results):
                first = block.words["o"] + head * (self.group * HEAD_DIM) + half * BRICK
                values, flag = values.astype(block.dtype), words.flag_of(layer)
                words.send(block.gmem["words"], first, values, flag, self.group, HEAD_DIM)
            return
        if block.coding:
            self._store_coded(block, row, head, results)
            return
        for half, values in enumerate(results):
            put(block.smem["o"].at[half], values)
        plgpu.commit_smem()
        for half in range(2):
            target = block.gmem["o"].at[row, head, pl.ds(block.zero, PARTS), bricks(half, 1)]
            plgpu.copy_smem_to_gmem(block.smem["o"].at[half], target)

    def _store_coded(self, block, row, head, results) -> None:
        """Begin to store the result of a KV head, coded."""
        made, coding = block.smem["o_coded"], block.coding
        coding.put([made.at[half] for half in range(2)], results, _memory(block, 0, 2))
        plgpu.commit_smem()

        def store(query, _):
            for half in range(2):
                brick = 2 * (head * self.group + query) + half
                target = block.gmem["o"].at[brick, pl.ds(coding.place(row), coding.of_row)]
                source = made.at[half, pl.ds(coding.place(query), coding.of_row)]
                plgpu.copy_smem_to_gmem(source, target)

        lax.fori_loop(0, self.group, store, None)

    def _attend_values(self, block, rank, filled, w_used, tiles_in_all, mine) -> list[Array]:
        """Attention in 16 bits: o in two halves [64, 8], l [64, 8] and m [8].

        One warpgroup takes two tiles at once, or two take them in turn.
        """
        step = functools.partial(self._step, block, rank, filled, w_used, tiles_in_all)
        carry = _blank(BRICK), _blank(BRICK), _blank(BRICK), _lowest()
        if block.computing > 1:

            def one_of_two(j, carry):
                def pass_by():
                    block.pass_by("w", block.w_slot(w_used + j))
                    return carry

                attend = functools.partial(step, j, 1, 0, carry)
                return cond(lax.rem(j, 2) == block.index, attend, pass_by)

            return lax.fori_loop(0, mine, one_of_two, carry)
        pairs = lax.div(mine, 2)
        carry = lax.fori_loop(0, pairs, functools.partial(step, 0, 2), carry)
        one = functools.partial(step, 2 * pairs, 1)
        return lax.fori_loop(0, lax.rem(mine, 2), one, carry)

    def _step(self, block, rank, filled, w_used, tiles_in_all, first, count, j, carry):
        """Attention to `count` tiles at once, which waits less often than one tile at a time.

        The carry is o in two halves [64, 8], l [64, 8] as partial sums in each row, and m [8].
        """
        smem = block.smem
        *o, l, m = carry
        at = [first + j * count + i for i in range(count)]
        slots = [block.w_slot(w_used + i) for i in at]
        tiles = [[smem["w"].at[slot, bricks(b, 1)] for b in range(4)] for slot in slots]
        for i, slot in zip(at, slots, strict=True):
            which = rank + self.sharing * i
            plgpu.barrier_wait(smem["w_arrived"].at[slot])
            inside = filled - which * BRICK
            last = which >= tiles_in_all - 1
            when(last)(functools.partial(_add_token, smem["new"], smem["w"].at[slot], inside))

        def products(*accs):
            for tile, acc in zip(tiles, accs, strict=True):
                for half in range(2):
                    plgpu.wgmma(acc, tile[half], smem["q"].at[:, bricks(half, 1)].T)
            plgpu.wgmma_wait(0)
            return [acc[...] * (self.scale * LOG2E) for acc in accs]

        accumulator = plgpu.ACC((BRICK, PARTS), jnp.float32)
        scores = pl.run_scoped(products, *[accumulator] * count)
        inside = plgpu.broadcasted_iota(jnp.int32, (BRICK, PARTS), 0, layout=LAYOUT)
        seen = [inside + (rank + self.sharing * i) * BRICK <= filled for i in at]
        tops = [jnp.where(s, z, LOWEST) for s, z in zip(seen, scores, strict=True)]
        top = over_rows(functools.reduce(jnp.maximum, tops), "max", _memory(block, 0))
        m_new = jnp.maximum(m, top)
        rescale = _down(jnp.exp2(m - m_new))
        l = l * rescale
        for i, (s, z) in enumerate(zip(seen, scores, strict=True)):
            p = jnp.where(s, jnp.exp2(z - _down(m_new)), 0.0).astype(block.dtype)
            put(smem["p"].at[i + block.index], p)
            l = l + p.astype(jnp.float32)
        plgpu.commit_smem()

        def weighted(*accs):
            for i, tile in enumerate(tiles):
                for half, acc in enumerate(accs):
                    plgpu.wgmma(acc, tile[2 + half].T, smem["p"].at[i + block.index].T)
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accs]

        new = pl.run_scoped(weighted, *[accumulator] * 2)
        for slot in slots:
            plgpu.barrier_arrive(smem["w_used"].at[slot])
        return *(a * rescale + b for a, b in zip(o, new, strict=True)), l, m_new

    def _half(self, block, i, tile) -> Array:
        """Index in the row of this warpgroup's 64 slots of this block's tile."""
        return 2 * (self._rank(block, i) + self.sharing * tile) + block.index

    def _scales_of(self, block, layer, i, filled, tile) -> list[Array]:
        """Load the scales [64] of keys and values of this warpgroup's half of a tile."""
        start = self._code_start(self._half(block, i, tile), filled)
        return [
            plgpu.load(scales.block(start, BRICK), layout=LAYOUT.reduce(1), optimized=False)
            for scales in self._scales(block.gmem, *self._head(block, i), layer)
        ]

    def _attend_codes(self, block, layer, i, filled, w_used, scales) -> tuple[Array, Array, Array]:
        """Attention in int8 to half of each tile: o [128, 8], l [64, 8] and m [8].

        o is not `in_order` yet.
        """
        smem = block.smem
        q = beside_codes(smem["q"])
        inside = plgpu.broadcasted_iota(jnp.int32, (BRICK, PARTS), 0, layout=LAYOUT)

        def step(tile, carry):
            o, l, m, *scales = carry
            following = self._scales_of(block, layer, i, filled, tile + 1)
            of_keys, of_values = (lax.broadcast_in_dim(s, l.shape, [0]) for s in scales)
            slot = block.w_slot(w_used + tile)
            plgpu.barrier_wait(smem["w_arrived"].at[slot])
            z = multiplied(codes(smem["codes"].at[slot, block.index], block.dtype), q)
            z = z * of_keys * (self.scale * LOG2E)
            seen = inside + self._half(block, i, tile) * BRICK < filled
            z = jnp.where(seen, z, LOWEST)
            m_new = jnp.maximum(m, over_rows(z, "max", _memory(block, 0)))
            rescale = jnp.exp2(m - m_new)
            # float16 has too small a range for P times a scale.
            left = transposed_codes(smem["codes"].at[slot, 2 + block.index], jnp.bfloat16)
            plgpu.barrier_arrive(smem["w_used"].at[slot])
            p = jnp.where(seen, jnp.exp2(z - _down(m_new)), 0.0)
            put(smem["p"].at[block.index], jnp.where(seen, p * of_values, 0.0))
            meet()
            o = o * lax.broadcast_in_dim(rescale, o.shape, [1])
            o = plgpu.mma(o, left, loaded_right(smem["p"].at[block.index]))
            return o, l * _down(rescale) + p, m_new, *following

        steps = self._cache_tiles(block, i, filled)[1]
        carry = _blank(HEAD_DIM), _blank(BRICK), _lowest(), *scales
        return lax.fori_loop(0, steps, step, carry)[:3]

    def _with_token(self, block, result, is_mine) -> tuple[Array, ...]:
        """Add the new token, in int8, to (o in two halves, l, maximum), if it is this block's."""
        *o, l, m = result
        scores = block.smem["reduced"].at[pl.ds(_SCORES, PARTS)]
        score = _down(load(scores, LAYOUT.reduce(0)) * (self.scale * LOG2E))
        top = jnp.where(is_mine, jnp.maximum(m, score), m)
        weight = jnp.where(is_mine, jnp.exp2(score - top), 0.0)
        rescale = jnp.exp2(m - top)
        first = plgpu.broadcasted_iota(jnp.int32, l.shape, 0, layout=LAYOUT) == 0
        l = l * rescale + jnp.where(first, weight, 0.0)
        codes = block.smem["new_codes"].at[1]
        values = (load(codes.at[bricks(half, 1)], LAYOUT.reduce(1)) for half in range(2))
        values = (lax.broadcast_in_dim(value, weight.shape, [0]) for value in values)
        weight *= block.smem["reduced"][_SCALES + self.group + 1]
        halves = (part * rescale + weight * value for part, value in zip(o, values, strict=True))
        return *halves, l, top

    def _hand_over(self, block, layer, i, mine) -> None:
        """Give the result of the second warpgroup to the first, merged with the other block's."""
        if self.split > 1:
            received = functools.partial(self._received, block, layer, i, mine)
            mine = cond(self._is_owner(block, i), received, lambda: mine)
        handover.put(block.smem["part"], mine)
        plgpu.barrier_arrive(block.smem["handed_over"])

    def _received(self, block, layer, i, mine) -> tuple[Array, ...]:
        """A result merged with that of the other block of the cluster."""
        at, before = self._barrier(block), block.handed_over(layer, self, i)
        return _merged(mine, handover.receive(block.smem["part"], 4, PARTS, at, before, self.group))

    def _barrier(self, block) -> handover.Barrier:
        return handover.Barrier(block.smem["handover"], self.barrier)

    def _merge(self, block, layer, i, mine, finish) -> None:
        """Merge the results of all warpgroups of the cluster; its owner `finish`es them."""
        part = block.smem["part"]
        if block.computing > 1:  # `_hand_over` has received the other block's
            plgpu.barrier_wait(block.smem["handed_over"])
            mine = _merged(mine, handover.take(part, 4, PARTS))
        if self.split == 1:
            finish(mine)
            return

        @when(~self._is_owner(block, i))
        def _():
            handover.send(part, mine, self._barrier(block), 1 - block.rank, self.group)

        @when(self._is_owner(block, i))
        def _():
            finish(mine if block.computing > 1 else self._received(block, layer, i, mine))

    def _is_owner(self, block, i) -> Array:
        """Whether this block finishes its cluster's head number i."""
        return lax.rem(i, 2) == block.rank


def _blank(rows: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((rows, PARTS), jnp.float32), LAYOUT)


def _lowest() -> Array:
    return plgpu.layout_cast(jnp.full((PARTS,), LOWEST, jnp.float32), LAYOUT.reduce(0))


def _down(values: Array) -> Array:
    """Broadcast values [R] to [64, R]."""
    return lax.broadcast_in_dim(values, (BRICK, values.shape[0]), [1])


def _add_token(token, tile, inside) -> None:
    """Put the new key and value into their slot of a tile, and zeros into the slots after it."""
    at = plgpu.broadcasted_iota(jnp.int32, (BRICK, BRICK), 0, layout=LAYOUT)

    def put_brick(b, _):
        brick = tile.at[bricks(b, 1)]
        found = plgpu.load(brick, layout=LAYOUT, optimized=False)
        new = plgpu.load(token.at[b], layout=LAYOUT.reduce(0), optimized=False)
        new = lax.broadcast_in_dim(new, found.shape, [1])
        live = jnp.where(at < inside, found, jnp.zeros_like(found))
        brick[...] = jnp.where(at == inside, new, live)

    lax.fori_loop(0, 4, put_brick, None)
    plgpu.commit_smem()


def _write_token(block, caches, slot) -> None:
    """Begin to write the new key and value to the cache."""
    for b in range(4):
        target = caches[b // 2].token(slot).at[bricks(b % 2, 1)]
        plgpu.copy_smem_to_gmem(block.smem["new"].at[b], target)


def _write_codes(block, group, caches, scales, slot) -> None:
    """Begin to write the new key and value to a cache in int8, with their scales."""
    plgpu.commit_smem()
    for i in range(2):
        plgpu.copy_smem_to_gmem(block.smem["new_codes"].at[i], caches[i].token(slot))
        scales[i].token(slot)[...] = block.smem["reduced"][_SCALES + group + i]


def _column(columns: Array, index: int) -> Array:
    """One of columns [64, 8]."""
    at = plgpu.broadcasted_iota(jnp.int32, columns.shape, 1, layout=LAYOUT)
    return jnp.where(at == index, columns, 0.0).sum(axis=1)


def _memory(block, which: int, count: int = 1) -> Any:
    """Some of two pieces of this warpgroup's memory for `over_rows`, from number `which` on."""
    return block.smem["reduced"].at[pl.ds((2 * block.index + which) * WORDS, count * WORDS)]


def _merged(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """Merge two results (o in two halves, l, maximum), all [64, 8]."""
    *o, l, m = one
    *o_other, l_other, m_other = other
    top = jnp.maximum(m, m_other)
    weight, weight_other = jnp.exp2(m - top), jnp.exp2(m_other - top)
    pairs = zip((*o, l), (*o_other, l_other), strict=True)
    return *(a * weight + b * weight_other for a, b in pairs), top


def new_parts(rows: int, kv_heads: int, clusters: int) -> Any:
    """Empty places for "parts": o in two halves, l, the maximum; each [64, 8], for one launch."""
    return exchange.empty_places((rows, kv_heads, clusters - 1), 4 * PARTS)


def heads_memory(
    dtype: Any, int8: bool = False, sends_words: bool = False, coding: Coding | None = None
) -> Memory:
    """Shared memory of `Heads`. `sends_words` and `coding` are properties of `Block`."""
    results = {} if sends_words or coding else {"o": ((2, PARTS, BRICK), dtype)}
    if int8:
        token = {"new_codes": ((2, HEAD_DIM), jnp.int8)}
    else:
        token = {"new": ((4, BRICK), dtype)}  # halves of key and value of a new token
    return Memory(
        matrices={
            "q": ((PARTS, HEAD_DIM), dtype),
            "p": ((2, PARTS, BRICK), jnp.bfloat16 if int8 else dtype),
            **results,
        },
        # For two warpgroups: `_memory`, and scales and scores of the new token.
        vectors=token
        | {"part": handover.places(4, PARTS)}
        | {"reduced": ((4 * WORDS + 2 * PARTS,), jnp.float32)}
        | ({"o_coded": ((2, coding.places(PARTS), coding.words), jnp.int32)} if coding else {}),
        barriers={"q_made": 1, "handed_over": 1},
    )
