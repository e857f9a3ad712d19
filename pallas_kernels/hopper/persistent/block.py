"""A block of the grid: its place, its shared memory, and what it tells the others."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.persistent import counters
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, CLUSTERS, TILE_BRICKS, X_SLOTS

Layer = int | Array
Pair = tuple[Array, Array]


class Work:
    """What a block needs to know of a stage.

    Attributes:
      tiles: parts of the work, which blocks take in turn.
      split: blocks of a cluster that share a tile.
      copies: asynchronous copies that fill one tile of the ring.
    """

    tiles: int
    split: int
    copies: int


class Share(NamedTuple):
    """A block's part of a stage.

    Attributes:
      first, stride, count: its tiles.
      rank: which part of each tile, where blocks share them.
    """

    first: Array
    stride: int
    count: Array
    rank: Array


class Block:
    """What stages know of the block that they run in.

    Attributes:
      gmem, smem: references to global and shared memory, by name.
      stages: of a layer.
      layers: how many.
      config: how many tiles are on their way: `ahead` of the next stage, the others as stages say.
      cluster, rank: of the block.
      zero: no constant, so that slices from it on may reach past an end, where TMA fills up.
      padded: rows of x, filled up to a multiple of 8.
      rows: all of them.
      dtype: of x and weights.
    """

    def __init__(
        self,
        gmem: dict[str, Any],
        smem: dict[str, Any],
        *,
        stages: Sequence[Work],
        layers: int,
        config: Any,
    ):
        self.gmem, self.smem = gmem, smem
        self.stages, self.layers, self.config = stages, layers, config
        self.cluster, self.rank = lax.axis_index("cluster"), lax.axis_index("rank")
        self.zero = self.rank * 0
        self.padded, self.dtype = smem["x"].shape[1], smem["x"].dtype
        self.rows = pl.ds(pl.multiple_of(self.zero, 8), self.padded)
        self._slots = smem["w"].shape[0]
        self._copies = max(stage.copies for stage in stages)
        self._row = gmem["index"][0] if "index" in gmem else None

    def share(self, stage: Work) -> Share:
        """This block's part of a stage."""
        if stage.split > 1:
            first, stride, rank = self.cluster, CLUSTERS, self.rank
        else:
            first, stride, rank = self.cluster * 2 + self.rank, MULTIPROCESSORS, self.zero
        return Share(first, stride, lax.div(stage.tiles - first + stride - 1, stride), rank)

    # Layers. One alone is unrolled, and its number is known.

    def for_layers(self, body: Callable[[Layer, Any], Any], carry: Any) -> Any:
        """`lax.fori_loop` over all layers."""
        if self.layers == 1:
            return body(0, carry)
        return lax.fori_loop(0, self.layers, body, carry)

    def following(self, layer: Layer) -> Layer:
        """The next layer, or the last."""
        return 0 if self.layers == 1 else jnp.minimum(layer + 1, self.layers - 1)

    def is_followed(self, stage: Work) -> bool:
        """Whether any stage comes after this one, in some layer at least."""
        return self.layers > 1 or stage is not self.stages[-1]

    # The ring of weights.

    def w_slot(self, at: Array) -> Array:
        """Where the at-th tile since the start is in the ring."""
        return lax.rem(at, self._slots)

    def bring_tile(self, tiles: Pair, in_flight: int, sources: Callable[[], Sequence[Any]]) -> Pair:
        """One more tile for the ring, once there is room, and less than `in_flight` on their way.

        Args:
          tiles: that were asked for, and that have been waited for.
          sources: gives references to global memory, of equal size, that make up the tile; called
            when there is room.
        """
        loaded, seen = tiles
        slot = self.w_slot(loaded)

        @when(loaded >= self._slots)
        def _():
            plgpu.barrier_wait(self.smem["w_used"].at[slot])

        def await_tile(_, seen):
            plgpu.barrier_wait(self.smem["w_arrived"].at[self.w_slot(seen)])
            return seen + 1

        too_many = jnp.maximum(loaded - seen - (min(in_flight, self._slots) - 1), 0)
        seen = lax.fori_loop(0, too_many, await_tile, seen)
        tiles = loaded + 1, seen

        arrived = self.smem["w_arrived"].at[slot]
        copies = sources()
        each = TILE_BRICKS // len(copies)
        for at, source in enumerate(copies):
            target = self.smem["w"].at[slot, bricks(at * each, each)]
            plgpu.copy_gmem_to_smem(source, target, arrived)
        for _ in range(len(copies), self._copies):
            plgpu.barrier_arrive(arrived)
        return tiles

    # The ring of x.

    def x_slot(self, at: Array) -> Array:
        """Where the at-th brick since the start is in the ring."""
        return lax.rem(at, X_SLOTS)

    def bring_brick(self, loaded: Array, source: Any) -> Array:
        """One more brick of x, or the first rows of one; `loaded` counts them."""
        slot = self.x_slot(loaded)

        @when(loaded >= X_SLOTS)
        def _():
            plgpu.barrier_wait(self.smem["x_used"].at[slot])

        target = self.smem["x"].at[slot]
        if source.shape[0] != self.padded:
            target = target.at[pl.ds(0, source.shape[0])]
        plgpu.copy_gmem_to_smem(source, target, self.smem["x_arrived"].at[slot])
        return loaded + 1

    # Within the block: when weights of the next stage may be asked for.

    def finish_tile(self, stage: Work, i: Array) -> None:
        """Call `mark_done` after this block's last tile of a stage, unless it is the last stage."""
        if self.is_followed(stage):
            when(i == self.share(stage).count - 1)(self.mark_done)

    def mark_done(self) -> None:
        """Let `await_done` pass: this block has finished its part of a stage."""
        plgpu.barrier_arrive(self.smem["done"])

    def worked_before(self, layer: Layer, at: int) -> Array | None:
        """Whether this block works on the stage before the at-th; None if no stage comes before."""
        if at == 0 and self.layers == 1:
            return None
        worked = self.share(self.stages[at - 1]).count > 0
        return worked if at else worked & (layer > 0)

    def await_done(self, worked: Array | None, now: Array) -> None:
        """If `now`, wait until this block has finished the stage before, if it `worked` on it."""
        if worked is not None:
            when(worked & now)(lambda: plgpu.barrier_wait(self.smem["done"]))

    # Among all blocks.

    def signal(self, layer: Layer) -> None:
        """Count a tile as finished."""
        counters.signal(self._counter(layer))

    def await_stages(self, layer: Layer, at: int) -> None:
        """Wait until all blocks have finished what is before the at-th stage."""
        if at:
            counters.wait(self._counter(layer), sum(stage.tiles for stage in self.stages[:at]))
        else:
            of_a_layer = sum(stage.tiles for stage in self.stages)
            when(layer > 0)(lambda: counters.wait(self._counter(layer - 1), of_a_layer))

    def _counter(self, layer: Layer) -> Any:
        return self.gmem["counters"].at[layer if self._row is None else self._row]


def bricks(start: Array | int, count: int) -> Any:
    """A slice of rows or columns."""
    return pl.ds(start * BRICK, count * BRICK)


def brick_of(ref: Any, rows: Any, at: Array) -> Any:
    """The at-th brick of columns of [M,N], which may have its columns in parts: [M,_,_,D]."""
    if len(ref.shape) == 2:
        return ref.at[rows, bricks(at, 1)]
    _, _, parts, d = ref.shape
    of_part = d // BRICK
    whole = of_part * parts
    head, part = lax.div(at, whole), lax.rem(lax.div(at, of_part), parts)
    return ref.at[rows, head, part, bricks(lax.rem(at, of_part), 1)]
