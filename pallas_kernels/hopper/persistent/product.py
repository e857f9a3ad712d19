"""A linear layer as a stage of a persistent kernel, fused with its neighbours.

No product normalises its own input. The product before it writes x · scale and the sums of squares
of x, which later scale the accumulators. The residual stream stays in shared memory: a block owns
the same columns of it in every product that adds to it.
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
from fdjax.pallas_kernels.hopper.persistent import handover, words
from fdjax.pallas_kernels.hopper.persistent.block import (
    Block,
    Copies,
    Layer,
    Pair,
    brick_of,
    bricks,
)
from fdjax.pallas_kernels.hopper.persistent.exchange import Exchange
from fdjax.pallas_kernels.hopper.persistent.row_input import RowInput
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.persistent.stage import Stage
from fdjax.pallas_kernels.hopper.tiles import KERNEL_ACTIVATIONS, LAYOUT, load, put


@dataclasses.dataclass(frozen=True)
class InputNorm:
    """RMS norm of the input of a product.

    Attributes:
      squares: name of the sums of squares, one for each brick of columns of x before scaling.
      eps: added to the mean square.
    """

    squares: str
    eps: float


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Writes x · scale for a later product whose input is normalised.

    Attributes:
      x, squares: names of the results: x · scale, and the sums of squares of x.
      scale: name of the scales [L, E].
      next_layer: whether to use the scale of the next layer.
    """

    x: str
    scale: str
    squares: str
    next_layer: bool = False


@dataclasses.dataclass(frozen=True)
class Product(Stage):
    """x · weight.

    Attributes:
      weight: name of the weights [L, K, N], or [L, K, 2, N] with a gate.
      x: name of the input [M, K].
      k, n: K and N in bricks.
      wide, deep: columns and rows of a tile of the weight, in bricks.
      split: number of blocks of a cluster that share K.
      gate: name of the activation, or None.
      norm: RMS norm of x, or None.
      residual: name of the residual stream before the first layer, if this product is the first
        that adds to it.
      y: name of the result, or None. With `scaled`, it is the residual stream after the last layer.
      scaled: add the product to the residual stream, and write this for the next norm.
      exchange: sums the product over devices first, or None.
    """

    weight: str
    x: str
    k: int
    n: int
    wide: int
    deep: int
    split: int
    gate: str | None = None
    norm: InputNorm | None = None
    residual: str | None = None
    y: str | None = None
    scaled: Scaled | None = None
    exchange: Exchange | None = None

    barrier = handover.PRODUCTS

    @property
    def parts(self) -> int:
        """2 for gate and up, 1 without a gate."""
        return 2 if self.gate else 1

    @property
    def pieces(self) -> int:
        """Pieces of a tile of the weight, each with its own accumulator."""
        return self.parts * self.wide

    @property
    def copies(self) -> int:
        """Number of copies that fill a tile."""
        return self.pieces

    @property
    def tiles(self) -> int:
        """Number of tiles of columns."""
        return -(-self.n // self.wide)

    @property
    def steps(self) -> int:
        """Number of tiles along a block's share of K."""
        return -(-self.k // (self.deep * self.split))

    def bring_weights(
        self, block: Block, layer: Layer, worked: Array | None, tiles: Pair
    ) -> tuple[Array, Pair]:
        """Load this block's tiles of the weight."""
        config, share = block.config, block.share(self)

        def bring(i, tiles):
            tile, step = share.first + lax.div(i, self.steps) * share.stride, lax.rem(i, self.steps)
            block.await_done(worked, i == config.ahead)
            at = share.rank * self.steps + step
            copies = functools.partial(self.tile_copies, block, layer, tile, at)
            in_flight = config.shared if self.split > 1 else config.alone
            return block.bring_tile(tiles, in_flight, copies)

        count = share.count * self.steps
        return count, lax.fori_loop(0, count, bring, tiles)

    def tile_copies(
        self, block: Block, layer: Layer, tile: Array, at: Array, slot: Array
    ) -> Copies:
        """Copies of tile number `tile` of columns and number `at` of rows into a slot."""
        weight, ks = block.gmem[self.weight], bricks(at * self.deep, self.deep)
        columns = [bricks(tile * self.wide + c, 1) for c in range(self.wide)]
        if self.gate:
            sources = [weight.at[layer, ks, half, c] for half in range(2) for c in columns]
        else:
            sources = [weight.at[layer, ks, c] for c in columns]
        return block.into_bricks(slot, sources)

    def bring_x(self, block: Block, layer: Layer, loaded: Array) -> Array:
        """Load this block's share of x for each tile of columns, and residual and squares once."""
        share = block.share(self)
        each = self.steps * self.deep // block.x_bricks

        def bring(i, loaded):
            at = share.rank * each + lax.rem(i, each)
            return block.bring_brick(loaded, self.x_source(block, at))

        # Residual and squares are needed later than the first bricks of x.
        ahead = jnp.minimum(share.count * each, block.x_slots)
        loaded = lax.fori_loop(0, ahead, bring, loaded)
        when(share.count > 0)(functools.partial(self._bring_rest, block, layer))
        return lax.fori_loop(ahead, share.count * each, bring, loaded)

    def x_source(self, block: Block, at: Array) -> Any:
        """Number `at` of the pieces of x that fill a slot of its ring."""
        return brick_of(block.gmem[self.x], block.rows, at)

    def row_input(self, block: Block) -> RowInput:
        """This block's share of x, if it comes in words."""
        share = block.share(self)
        each = self.steps * self.deep
        first = share.rank * each
        return RowInput(
            first=block.words[self.x] + first * BRICK,
            apart=0,
            bricks=each,
            # Rows of the last tile that do not exist stand for 0.
            exist=jnp.clip(self.k - first, 0, each),
            in_rows=0,
            tiles=share.count,
            squares=block.words[self.norm.squares] if self.norm else -1,
        )

    def _bring_rest(self, block: Block, layer: Layer) -> None:
        """Load the residual stream and the sums of squares."""
        gmem, smem = block.gmem, block.smem
        if self.residual:
            when(layer == 0)(functools.partial(self.bring_residual, block))
        if self.norm:
            name = self.norm.squares
            for i in range(smem["squares"].shape[0]):
                source = gmem[name].at[bricks(block.zero + i, 1), block.rows]
                plgpu.copy_gmem_to_smem(source, smem["squares"].at[i], smem[f"{name}_arrived"])

    def bring_residual(self, block: Block) -> None:
        """Load the residual stream before the first layer."""
        residual, share = block.smem["residual"], block.share(self)
        for i in range(residual.shape[0]):
            columns = bricks(share.first + i * share.stride, 1)
            source = block.gmem[self.residual].at[block.rows, columns]
            plgpu.copy_gmem_to_smem(source, residual.at[i], block.smem["residual_arrived"])

    def compute(self, block: Block, layer: Layer, used: Pair) -> Pair:
        """Compute this block's tiles of columns."""
        run = functools.partial(self._compute_tile, block, layer)
        return lax.fori_loop(0, block.share(self).count, run, used)

    def _compute_tile(self, block: Block, layer: Layer, i: Array, used: Pair) -> Pair:
        """Compute tile number i of this block."""
        share = block.share(self)
        tile = share.first + i * share.stride
        scale = None
        if self.scaled:  # loaded early: it comes from global memory
            scale_layer = block.following(layer) if self.scaled.next_layer else layer
            source = block.gmem[self.scaled.scale].at[scale_layer, bricks(tile, 1)]
            scale = plgpu.load(source, layout=LAYOUT.reduce(1), optimized=False)
        finish = functools.partial(self._share, block, layer, i, tile, scale)
        self._multiply(block, layer, tile, i, used, finish)
        w_used, x_used = used
        return w_used + self.steps, x_used + self.steps * self.deep // block.x_bricks

    def _share(self, block, layer, i, tile, scale, products) -> None:
        """Finish a tile, or hand this block's sums to the other block that shares it."""
        if self.split == 1:
            self._finish(block, layer, i, tile, products, scale)
            return
        smem, owner = block.smem, lax.rem(i, 2)

        @when(owner != block.rank)
        def _():
            barrier = handover.Barrier(smem["handover"], self.barrier)
            handover.send(smem["partial"], products, barrier, owner, block.columns)
            block.finish_tile(self, i)

        when(owner == block.rank)(lambda: self._finish(block, layer, i, tile, products, scale))

    def _multiply(
        self,
        block: Block,
        layer: Layer,
        tile: Array,
        i: Array,
        used: Pair,
        finish: Callable[[list[Array]], None],
    ) -> None:
        """Call `finish` with this block's share of a tile's sums: [64, padded] for each piece."""
        block.by(0, lambda: finish(self._products(block, i, used)))
        if block.computing > 1:  # the others help with other stages only
            block.by(1, lambda: self._pass_by(block, used))

    def _pass_by(self, block: Block, used: Pair) -> None:
        """Wait and arrive at the barriers of a tile's products as if this warpgroup computed."""
        w_used, x_used = used

        def pass_step(step, _):
            block.pass_by("w", block.w_slot(w_used + step))
            for k in range(self.deep):
                block.pass_by("x", block.x_slot(x_used + step * self.deep + k))

        lax.fori_loop(0, self.steps, pass_step, None)

    def _products(self, block: Block, i: Array, used: Pair) -> list[Array]:
        """The sums of `_multiply`, by a single warpgroup."""
        smem = block.smem
        w_used, x_used = used
        middle = self.steps // 2

        def x_slots(step):
            return (block.x_slot(x_used + step * self.deep + k) for k in range(self.deep))

        def release(step):
            plgpu.barrier_arrive(smem["w_used"].at[block.w_slot(w_used + step)])
            for x_slot in x_slots(step):
                plgpu.barrier_arrive(smem["x_used"].at[x_slot])

        def accumulate(*accumulators):
            def product(step, _):
                if self.norm:
                    when((i == 0) & (step == middle))(functools.partial(self._prepare, block))
                slot, at = block.w_slot(w_used + step), list(x_slots(step))
                plgpu.barrier_wait(smem["w_arrived"].at[slot])
                for x_slot in at:
                    plgpu.barrier_wait(smem["x_arrived"].at[x_slot])
                for k, x_slot in enumerate(at):
                    for c, accumulator in enumerate(accumulators):
                        w = smem["w"].at[slot, bricks(c * self.deep + k, 1)]
                        plgpu.wgmma(accumulator, w.T, smem["x"].at[x_slot].T)
                # The products of the previous step have finished reading their tiles.
                plgpu.wgmma_wait(self.deep * self.pieces)
                when(step > 0)(lambda: release(step - 1))

            lax.fori_loop(0, self.steps, product, None)
            plgpu.wgmma_wait(0)
            release(self.steps - 1)
            return [accumulator[...] for accumulator in accumulators]

        accumulator = plgpu.ACC((BRICK, block.padded), jnp.float32)
        return pl.run_scoped(accumulate, *[accumulator] * self.pieces)

    def _prepare(self, block: Block) -> None:
        """Turn sums of squares into the norm's factors, while weights are in flight."""
        smem = block.smem
        if block.sends_words:
            plgpu.barrier_wait(smem["factor_arrived"])
            return
        plgpu.barrier_wait(smem[f"{self.norm.squares}_arrived"])
        squares = [load(smem["squares"].at[at]) for at in range(smem["squares"].shape[0])]
        mean = sum(jnp.sum(part, axis=0) for part in squares) / (self.k * BRICK)
        smem["factors"][...] = lax.rsqrt(mean + self.norm.eps)
        plgpu.commit_smem()

    def _finish(self, block, layer, i, tile, products, scale) -> None:
        """Turn a tile's sums into results and store them."""
        smem = block.smem
        total = list(products)
        if self.split > 1:
            barrier = handover.Barrier(smem["handover"], self.barrier)
            before = block.handed_over(layer, self, i)
            others = handover.receive(
                *(smem["partial"], self.pieces, block.padded, barrier, before, block.columns)
            )
            total = [one + other for one, other in zip(total, others, strict=True)]
        if self.norm:
            factors = plgpu.load(smem["factors"], layout=LAYOUT.reduce(0), optimized=False)
            total = [t * lax.broadcast_in_dim(factors, t.shape, [1]) for t in total]
        if self.gate:
            act = KERNEL_ACTIVATIONS[self.gate]
            total = [act(total[c]) * total[self.wide + c] for c in range(self.wide)]
        if self.exchange:
            total = [self.exchange.sum(block.gmem, layer, tile, total[0])]
        if self.scaled:
            total = self._added(block, layer, i, tile, total[0], scale)
        if block.sends_words:
            self._send(block, layer, tile, total)
        else:
            (self._store_scaled if self.scaled else self._store)(block, tile, total)
            plgpu.wait_smem_to_gmem(0)
            if block.is_followed(self):
                block.signal(layer)
        block.finish_tile(self, i)

    def _added(self, block, layer, i, tile, value, scale) -> list[Array]:
        """Add to the residual stream; returns [x · scale [64, M], sums of squares of x [M]]."""
        smem, columns = block.smem, bricks(tile, 1)
        residual = smem["residual"].at[i]
        if self.residual:
            # Before the first tile that this block finishes.
            when((i < self.split) & (layer == 0))(
                lambda: plgpu.barrier_wait(smem["residual_arrived"])
            )
        rounded = (value + load(residual.T)).astype(block.dtype)
        residual.T[...] = rounded
        if self.y:

            @when(layer == block.layers - 1)
            def _():
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(residual, block.gmem[self.y].at[block.rows, columns])
                plgpu.wait_smem_to_gmem(0)

        x = rounded.astype(jnp.float32)
        scaled = x * lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, [0])
        return [scaled, jnp.sum(x * x, axis=0)]

    def _send(self, block, layer, tile, values) -> None:
        """Send results in words."""
        gmem, first = block.gmem["words"], block.words
        if self.scaled:
            scaled, squares = values
            flag = words.flag_of(layer + int(self.scaled.next_layer))
            at = first[self.scaled.x] + tile * BRICK
            words.send(gmem, at, scaled.astype(block.dtype), flag)
            words.send_first(gmem, first[self.scaled.squares] + 2 * tile, squares, flag)
            return
        for c, value in enumerate(values):
            at = first[self.y] + (tile * self.wide + c) * BRICK
            words.send(gmem, at, value.astype(block.dtype), words.flag_of(layer))

    def _store(self, block, tile, values) -> None:
        """Begin to store results that do not belong to the residual stream."""
        copies = self._put(block, self.y, tile * self.wide, values)
        plgpu.commit_smem()
        for copy in copies:
            plgpu.copy_smem_to_gmem(*copy)

    def _store_scaled(self, block, tile, values) -> None:
        """Begin to store x · scale and the sums of squares."""
        gmem, smem = block.gmem, block.smem
        scaled, squares = values
        (copy,) = self._put(block, self.scaled.x, tile, [scaled])
        smem["square_row"][...] = squares
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(*copy)
        plgpu.copy_smem_to_gmem(smem["square_row"], gmem[self.scaled.squares].at[tile])

    def _put(self, block: Block, name: str, first: Array, values: list[Array]) -> Copies:
        """Put columns of bricks of a result, from number `first` on, into shared memory.

        Returns what to copy to global memory.
        """
        copies = []
        for c, value in enumerate(values):
            source = block.smem["y"].at[c]
            put(source, value)
            copies.append((source, brick_of(block.gmem[name], block.rows, first + c)))
        return copies
