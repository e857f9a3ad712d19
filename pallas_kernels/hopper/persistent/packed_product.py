"""A linear layer with quantised weights as a stage of a persistent kernel.

Packed bricks arrive in the ring of weights and are unpacked in registers, while the tensor cores
multiply other bricks. Scales are applied to the sums of each group of rows, in fp32. One
warpgroup cannot unpack as fast as memory delivers: instructions of a warp wait for each other. So
several share the bricks of a tile, and hand their sums to the first through shared memory.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import left_of, loaded_right, multiplied, unpacked
from fdjax.pallas_kernels.hopper.persistent.block import Block, Copies, Layer, Pair, bricks
from fdjax.pallas_kernels.hopper.persistent.memory import Packing
from fdjax.pallas_kernels.hopper.persistent.product import Product
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load


@dataclasses.dataclass(frozen=True)
class PackedProduct(Product):
    """x · weight, with bricks [L·parts·N/64, K/64, ...] and scales [L, G, N] or [L, G, 2, N].

    Attributes:
      packing: how the weights are quantised.
    """

    packing: Packing | None = None

    @property
    def copies(self) -> int:
        """Number of copies that fill a tile: bricks, and scales if groups have their own."""
        return self.pieces * (2 if self.packing.group else 1)

    @property
    def unpackers(self) -> int:
        """Number of warpgroups that share the bricks of a tile."""
        return self.packing.unpackers

    @property
    def _groups(self) -> int:
        """Number of groups along a tile."""
        return self.deep * BRICK // self.packing.group

    def _row(self, layer: Layer, tile: Array, piece: int) -> Array:
        """Index of the column brick of a piece of a tile."""
        part, column = divmod(piece, self.wide)
        return (layer * self.parts + part) * self.n + tile * self.wide + column

    def tile_copies(
        self, block: Block, layer: Layer, tile: Array, at: Array, slot: Array
    ) -> Copies:
        """Copies of bricks and their scales into a slot."""
        smem, copies = block.smem, []
        for piece in range(self.pieces):
            words, deep = block.gmem[self.weight], self.deep
            source = words.at[self._row(layer, tile, piece), pl.ds(at * deep, deep)]
            copies.append((source, smem["words"].at[slot, pl.ds(piece * deep, deep)]))
            if self.packing.group:
                groups = pl.ds(at * self._groups, self._groups)
                source = self._scales(block, layer, groups, tile, piece)
                target = smem["scales"].at[slot, pl.ds(piece * self._groups, self._groups)]
                copies.append((source, target))
        return copies

    def _scales(self, block: Block, layer: Layer, groups: Any, tile: Array, piece: int) -> Any:
        """Scales of a piece of a tile, in global memory."""
        part, column = divmod(piece, self.wide)
        part = (part,) if self.gate else ()
        columns = bricks(tile * self.wide + column, 1)
        return block.gmem[f"{self.weight}_scales"].at[layer, groups, *part, columns]

    def _bricks(self, index: int) -> list[tuple[int, int]]:
        """The bricks of a tile that warpgroup `index` multiplies: (slot of x, piece).

        A slot of x has two bricks. Even warpgroups take the first, odd ones the second.
        """
        pairs = itertools.product(range(self.deep // 2), range(self.pieces))
        return list(pairs)[index // 2 :: self.unpackers // 2]

    def _pieces(self, index: int) -> list[int]:
        """The pieces of a tile to which warpgroup `index` adds."""
        return sorted({piece for _, piece in self._bricks(index)})

    @property
    def handed(self) -> int:
        """Number of pieces of sums that the other warpgroups hand to the first."""
        return sum(len(self._pieces(index)) for index in range(1, self.unpackers))

    def _places(self, index: int) -> list[tuple[int, int]]:
        """(place, piece) of the sums that warpgroup `index` hands over, in the buffer "sums"."""
        before = sum(len(self._pieces(other)) for other in range(1, index))
        return [(before + i, piece) for i, piece in enumerate(self._pieces(index))]

    def assist(self, block: Block, layer: Layer, used: Pair, index: int) -> Pair:
        """Compute another warpgroup's share of the sums, and hand them to the first."""
        share, smem = block.share(self), block.smem

        def run(i, used):
            sums = self._sums(block, i, used, index)
            plgpu.barrier_wait(smem["sums_read"])
            for place, piece in self._places(index):
                smem["sums"].at[place][...] = sums[piece]
            plgpu.barrier_arrive(smem["sums_made"])
            return self._after_tile(block, used)

        return lax.fori_loop(0, share.count, run, used)

    def _multiply(
        self, block: Block, layer: Layer, tile: Array, i: Array, used: Pair
    ) -> list[Array]:
        smem = block.smem
        totals = self._sums(block, i, used, 0)
        plgpu.barrier_wait(smem["sums_made"])
        for index in range(1, self.unpackers):
            for place, piece in self._places(index):
                handed = load(smem["sums"].at[place])
                totals[piece] = totals[piece] + handed if piece in totals else handed
        plgpu.barrier_arrive(smem["sums_read"])
        totals = [totals[piece] for piece in range(self.pieces)]
        if self.packing.group:
            return totals
        scaled = []
        for piece, total in enumerate(totals):
            # The last tile may reach past the end.
            inside = jnp.minimum(tile, (self.n - 1 - piece % self.wide) // self.wide)
            source = self._scales(block, layer, 0, inside, piece)
            scale = plgpu.load(source, layout=LAYOUT.reduce(1), optimized=False)
            scaled.append(total * lax.broadcast_in_dim(scale.astype(jnp.float32), total.shape, [0]))
        return scaled

    def _sums(self, block: Block, i: Array, used: Pair, index: int) -> dict[int, Array]:
        """The share of warpgroup `index` in this block's sums: [64, padded] for its pieces."""
        smem, group = block.smem, self.packing.group
        w_used, x_used = used
        x_slots, layout = self.deep // 2, left_of(block.dtype)
        odd, pieces = index % 2, self._pieces(index)
        # Slots of x between two waits: enough for four bricks of the weight.
        together = -(-2 * self.unpackers // self.pieces)
        blank = plgpu.layout_cast(jnp.zeros((BRICK, block.padded), jnp.float32), LAYOUT)

        def weight(slot, piece, at):
            words = smem["words"].at[slot, pl.ds(piece * self.deep + 2 * at + odd, 1)]
            return unpacked(words, self.packing.kind, block.dtype, 0, BRICK, layout=layout)

        def product(step, totals):
            if self.norm and index == 0:
                middle = (i == 0) & (step == self.steps // 2)
                when(middle)(lambda: self._prepare(block))
            slot = block.w_slot(w_used + step)
            plgpu.barrier_wait(smem["w_arrived"].at[slot])
            totals = dict(zip(pieces, totals, strict=True))
            columns = pl.ds(odd * BRICK, BRICK)
            for first in range(0, x_slots, together):
                ats = range(first, min(first + together, x_slots))
                places = {at: block.x_slot(x_used + step * x_slots + at) for at in ats}
                for place in places.values():
                    plgpu.barrier_wait(smem["x_arrived"].at[place])
                mine = [(at, piece) for at, piece in self._bricks(index) if at in ats]
                rights = {
                    at: loaded_right(smem["x"].at[places[at], :, columns])
                    for at in dict.fromkeys(at for at, _ in mine)
                }
                for place in places.values():
                    plgpu.barrier_arrive(smem["x_used"].at[place])
                for at, piece in mine:
                    value = multiplied(weight(slot, piece, at), rights[at])
                    if group:
                        row = piece * self._groups + (2 * at + odd) * BRICK // group
                        scale = load(smem["scales"].at[slot, row], LAYOUT.reduce(1))
                        value = value * lax.broadcast_in_dim(scale, value.shape, [0])
                    totals[piece] += value
            plgpu.barrier_arrive(smem["w_used"].at[slot])
            return [totals[piece] for piece in pieces]

        totals = lax.fori_loop(0, self.steps, product, [blank] * len(pieces))
        return dict(zip(pieces, totals, strict=True))
