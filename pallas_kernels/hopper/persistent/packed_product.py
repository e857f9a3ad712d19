"""A linear layer with quantised weights as a stage of a persistent kernel.

Packed bricks arrive in the ring of weights and are unpacked in registers, while the tensor cores
multiply other bricks. Scales are applied to the sums of each group of rows, in fp32. One
warpgroup cannot unpack as fast as memory delivers, so a second one takes every other brick of K and
hands its sums over through shared memory.
"""

import dataclasses
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

    def assist(self, block: Block, layer: Layer, used: Pair) -> Pair:
        """Compute the second warpgroup's share of the sums."""
        share, smem = block.share(self), block.smem

        def run(i, used):
            sums = self._sums(block, layer, share.first + i * share.stride, i, used, 1)
            plgpu.barrier_wait(smem["sums_read"])
            for c, values in enumerate(sums):
                smem["sums"].at[c][...] = values
            plgpu.barrier_arrive(smem["sums_made"])
            return self._after_tile(block, used)

        return lax.fori_loop(0, share.count, run, used)

    def _multiply(
        self, block: Block, layer: Layer, tile: Array, i: Array, used: Pair
    ) -> list[Array]:
        smem = block.smem
        totals = self._sums(block, layer, tile, i, used, 0)
        plgpu.barrier_wait(smem["sums_made"])
        totals = [total + load(smem["sums"].at[c]) for c, total in enumerate(totals)]
        plgpu.barrier_arrive(smem["sums_read"])
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

    def _sums(
        self, block: Block, layer: Layer, tile: Array, i: Array, used: Pair, assistant: int
    ) -> list[Array]:
        """One warpgroup's share of this block's sums: [64, padded] for each piece.

        In every slot of x, one warpgroup takes the first brick and the other the second.
        """
        smem, group = block.smem, self.packing.group
        w_used, x_used = used
        x_slots, layout = self.deep // 2, left_of(block.dtype)
        # Slots of x between two waits: enough for four bricks of the weight.
        together = -(-4 // self.pieces)

        def weight(slot, piece, at):
            words = smem["words"].at[slot, pl.ds(piece * self.deep + 2 * at + assistant, 1)]
            return unpacked(words, self.packing.kind, block.dtype, 0, BRICK, layout=layout)

        def product(step, totals):
            if self.norm and not assistant:
                middle = (i == 0) & (step == self.steps // 2)
                when(middle)(lambda: self._prepare(block))
            slot = block.w_slot(w_used + step)
            plgpu.barrier_wait(smem["w_arrived"].at[slot])
            scaled = list(totals)

            columns = pl.ds(assistant * BRICK, BRICK)
            for first in range(0, x_slots, together):
                ats = range(first, min(first + together, x_slots))
                places = [block.x_slot(x_used + step * x_slots + at) for at in ats]
                for place in places:
                    plgpu.barrier_wait(smem["x_arrived"].at[place])
                rights = [loaded_right(smem["x"].at[place, :, columns]) for place in places]
                for place in places:
                    plgpu.barrier_arrive(smem["x_used"].at[place])
                for at, right in zip(ats, rights, strict=True):
                    for piece in range(self.pieces):
                        value = multiplied(weight(slot, piece, at), right)
                        if group:
                            row = piece * self._groups + (2 * at + assistant) * BRICK // group
                            scale = load(smem["scales"].at[slot, row], LAYOUT.reduce(1))
                            value = value * lax.broadcast_in_dim(scale, value.shape, [0])
                        scaled[piece] += value
            plgpu.barrier_arrive(smem["w_used"].at[slot])
            return scaled

        blank = plgpu.layout_cast(jnp.zeros((BRICK, block.padded), jnp.float32), LAYOUT)
        return lax.fori_loop(0, self.steps, product, [blank] * self.pieces)
