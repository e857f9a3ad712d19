"""A linear layer with quantised weights as a stage of a persistent kernel.

Packed bricks arrive in the ring of weights. They are unpacked in registers, to int8, or to float16
if they are in fp8, while the tensor cores multiply other bricks. x comes in the same type, see
`digits` and `halves`. Scales are applied to the sums of each brick, in fp32. One warpgroup cannot
unpack as fast as memory delivers: instructions of a warp wait for each other. So two share the
bricks of a tile, and one hands its sums to the other through shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.persistent import handover
from fdjax.pallas_kernels.hopper.persistent.block import Block, Copies, Layer, Pair, bricks
from fdjax.pallas_kernels.hopper.persistent.memory import Packing
from fdjax.pallas_kernels.hopper.persistent.product import Product
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load


@dataclasses.dataclass(frozen=True)
class PackedProduct(Product):
    """x · weight, with bricks [L·parts·N/64, K/64, ...] and scales [L, G, N] or [L, G, 2, N].

    Zeros, if there are any, have the shape of scales.

    Attributes:
      packing: how the weights are quantised.
    """

    packing: Packing | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results that later products read."""
        return (self.y,) if self.gate else (self.scaled.x,) if self.scaled else ()

    @property
    def copies(self) -> int:
        """Number of copies that fill a tile: bricks, and what each group has."""
        return self.parts * (1 + len(self.packing.factors))

    @property
    def _groups(self) -> int:
        """Number of groups along a tile."""
        return self.deep * BRICK // self.packing.group

    def tile_copies(
        self, block: Block, layer: Layer, tile: Array, at: Array, slot: Array
    ) -> Copies:
        """Copies of bricks, and of their scales and zeros, into a slot."""
        smem, wide, deep, copies = block.smem, self.wide, self.deep, []
        for part in range(self.parts):
            # Past the end lie other bricks or zeros. They make columns that do not exist.
            columns = pl.ds((layer * self.parts + part) * self.n + tile * wide, wide)
            source = block.gmem[self.weight].at[columns, pl.ds(at * deep, deep)]
            target = smem["words"].at[slot, pl.ds(part * wide * deep, wide * deep)]
            copies.append((source, target.reshape(wide, deep, *target.shape[1:])))
            for name in self.packing.factors:
                groups, rows = pl.ds(at * self._groups, self._groups), wide * self._groups
                columns = bricks(tile * wide, wide)
                source = self._factors(name, block, layer, groups, part, columns)
                target = smem[name].at[slot, pl.ds(part * rows, rows)]
                copies.append((source, target.reshape(self._groups, wide * BRICK)))
        return copies

    def _factors(
        self, name: str, block: Block, layer: Layer, groups: Any, part: int, columns: Any
    ) -> Any:
        """Scales or zeros of some columns, in global memory."""
        part = (part,) if self.gate else ()
        return block.gmem[f"{self.weight}_{name}"].at[layer, groups, *part, columns]

    def slots_at_once(self, ring: int) -> int:
        """Slots of x between two waits: enough for four bricks of the weight, if possible.

        They divide the slots of a tile, and are fewer than the ring has, or none would be released.
        """
        x_slots, wanted = self.deep // 2, -(-4 // self.pieces)
        possible = [n for n in range(1, min(x_slots, ring - 1) + 1) if x_slots % n == 0]
        return next((n for n in possible if n >= wanted), possible[-1])

    def x_source(self, block: Block, at: Array) -> Any:
        """Two bricks of x."""
        return block.gmem[self.x].at[pl.ds(2 * at, 2)]

    def _put(self, block: Block, name: str, first: Array, values: list[Array]) -> Copies:
        """As for `Product`, but results that later products read are coded."""
        if name not in self.results:
            return super()._put(block, name, first, values)
        sources = [block.smem["made"].at[c] for c in range(len(values))]
        self.packing.coding.put(sources, values, block.smem["largest"])
        return [(source, block.gmem[name].at[first + c]) for c, source in enumerate(sources)]

    def _multiply(
        self,
        block: Block,
        layer: Layer,
        tile: Array,
        i: Array,
        used: Pair,
        finish: Callable[[list[Array]], None],
    ) -> None:
        smem = block.smem
        sums = self._sums(block, i, used)

        @when(block.index == 1)
        def _():
            plgpu.barrier_wait(smem["sums_read"])
            handover.put(smem["sums"], sums)
            plgpu.barrier_arrive(smem["sums_made"])

        @when(block.index == 0)
        def _():
            plgpu.barrier_wait(smem["sums_made"])
            others = handover.take(smem["sums"], self.pieces, block.padded)
            totals = [one + other for one, other in zip(sums, others, strict=True)]
            plgpu.barrier_arrive(smem["sums_read"])
            finish(totals if self.packing.group else self._scaled(block, layer, tile, totals))

    def _scaled(self, block: Block, layer: Layer, tile: Array, totals: list[Array]) -> list[Array]:
        """Sums times the scales of their columns."""
        scaled = []
        for piece, total in enumerate(totals):
            part, column = divmod(piece, self.wide)
            # The last tile may reach past the end.
            inside = jnp.minimum(tile * self.wide + column, self.n - 1)
            source = self._factors("scales", block, layer, 0, part, bricks(inside, 1))
            scale = plgpu.load(source, layout=LAYOUT.reduce(1), optimized=False)
            scaled.append(total * lax.broadcast_in_dim(scale.astype(jnp.float32), total.shape, [0]))
        return scaled

    def _sums(self, block: Block, i: Array, used: Pair) -> list[Array]:
        """This warpgroup's share of the block's sums: [64, padded] for each piece.

        A slot of x has two bricks. The first warpgroup takes the first, the other the second.
        """
        smem, group, odd = block.smem, self.packing.group, block.index
        w_used, x_used = used
        x_slots = self.deep // 2
        together = self.slots_at_once(block.x_slots)
        blank = plgpu.layout_cast(jnp.zeros((BRICK, block.padded), jnp.float32), LAYOUT)

        def product(step, totals):
            if self.norm:
                middle = (block.index == 0) & (i == 0) & (step == self.steps // 2)
                when(middle)(lambda: self._prepare(block))
            slot = block.w_slot(w_used + step)
            plgpu.barrier_wait(smem["w_arrived"].at[slot])
            if x_slots == together:
                totals = products(step, slot, 0, totals)
            else:
                some = functools.partial(products, step, slot)
                totals = lax.fori_loop(0, x_slots // together, some, totals)
            plgpu.barrier_arrive(smem["w_used"].at[slot])
            return totals

        def products(step, slot, part, totals):
            ats = [part * together + at for at in range(together)]
            of_x = [block.x_slot(x_used + step * x_slots + at) for at in ats]
            for x_slot in of_x:
                plgpu.barrier_wait(smem["x_arrived"].at[x_slot])
            for at, x_slot in zip(ats, of_x, strict=True):
                first = 2 * at + odd
                words = [
                    smem["words"].at[slot, pl.ds(piece * self.deep + first, 1)]
                    for piece in range(self.pieces)
                ]
                of_group = {
                    name: factors(name, slot, lax.div(first * BRICK, group))
                    for name in self.packing.factors
                }
                x, kind = smem["coded"].at[x_slot, odd], self.packing.kind
                totals = self.packing.coding.multiplied(totals, words, x, kind, **of_group)
            for x_slot in of_x:
                plgpu.barrier_arrive(smem["x_used"].at[x_slot])
            return totals

        def factors(name, slot, at):
            rows = (
                (part * self._groups + at) * self.wide + column
                for part in range(self.parts)
                for column in range(self.wide)
            )
            return [load(smem[name].at[slot, row], LAYOUT.reduce(1)) for row in rows]

        return lax.fori_loop(0, self.steps, product, [blank] * self.pieces)
