"""A block of the grid: its index, its shared memory, and its signals to the other blocks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.coding import Coding
from fdjax.pallas_kernels.hopper.conditional import stay_rolled, when
from fdjax.pallas_kernels.hopper.persistent import counters
from fdjax.pallas_kernels.hopper.persistent.sizes import (
    BRICK,
    CLUSTERS,
    TILE_BRICKS,
    TOKEN_SLOTS,
)

Layer = int | Array
Pair = tuple[Array, Array]
Copies = list[tuple[Any, Any]]


class Work:
    """The properties of a stage that a block needs.

    Attributes:
      tiles: number of tiles that the stage's work is cut into; blocks take them in turn.
      split: number of blocks of a cluster that share a tile.
      copies: number of asynchronous copies that fill one tile of the ring.
      barrier: index of the barrier for what the other block of a cluster sends, see `handover`.
      norm, residual: see `Product`; None for other stages.
    """

    tiles: int
    split: int
    copies: int
    barrier: int
    norm: Any = None
    residual: str | None = None


class Share(NamedTuple):
    """A block's part of a stage.

    Attributes:
      first, stride, count: its tiles, `count` of them from `first` in steps of `stride`.
      rank: its part of each tile, if blocks share tiles.
    """

    first: Array
    stride: int
    count: Array
    rank: Array


class Block:
    """The block in which a stage runs.

    Attributes:
      computing: number of warpgroups that compute.
      index: this warpgroup's index among them.
      gmem, smem: references to global and shared memory, by name.
      stages: the stages of one layer.
      layers: number of layers.
      config: the op's limits on tiles in flight. `ahead` is the limit for tiles of the next stage.
        Each stage chooses the limit for its own tiles.
      cluster, rank: index of the block's cluster, and of the block in it.
      zero: a traced 0. A slice that starts here may reach past the end of an array, where TMA
        fills in zeros.
      padded: rows of x, rounded up to a multiple of 8.
      coding: how x is held, or None if it is held as it is.
      x_bricks: number of bricks of columns in a slot of the ring of x.
      rows: the slice that selects all `padded` rows.
      columns: number of rows of x that somebody needs.
      dtype: dtype of x and of the weights.
      words: if one row is sent in words: index of a result's first word, by its name. See `words`.
    """

    def __init__(
        self,
        gmem: dict[str, Any],
        smem: dict[str, Any],
        *,
        stages: Sequence[Work],
        layers: int,
        config: Any,
        columns: int,
        coding: Coding | None = None,
        computing: int = 1,
        words: dict[str, int] | None = None,
    ):
        self.gmem, self.smem, self.computing = gmem, smem, computing
        self.index = lax.axis_index("warpgroup") if computing > 1 else 0
        self.stages, self.layers, self.config = stages, layers, config
        self.cluster, self.rank = lax.axis_index("cluster"), lax.axis_index("rank")
        self.zero = self.rank * 0
        self.words = words or {}
        _, self.padded, _ = smem["residual"].shape
        self.dtype = smem["residual"].dtype
        self.columns, self.coding = columns, coding
        self._x = smem["coded" if coding else "x"]
        self.x_slots, self.x_bricks = self._x.shape[0], 2 if coding else 1
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

    @property
    def sends_words(self) -> bool:
        """Whether results are sent in words, so that nothing waits for a barrier of all blocks."""
        return bool(self.words)

    def by(self, index: int, run: Callable[[], None]) -> None:
        """Let one of the warpgroups that compute run this. A single one runs everything."""
        if self.computing == 1:
            run()
        else:
            when(self.index == index)(run)

    def handed_over(self, layer: Layer, stage: Work, i: Array) -> Array:
        """How often the other block of the cluster has handed over before tile i of a stage.

        Products and attention count apart. Of tiles that two blocks share, they finish every other.
        """
        before, each = jnp.int32(0), jnp.int32(0)
        for other in self.stages:
            if other.split == 1 or other.barrier != stage.barrier:
                continue
            if other is stage:
                before = each
            each += lax.div(self.share(other).count - self.rank + 1, 2)
        return layer * each + before + lax.div(i, 2)

    # Layers. A single layer is unrolled, so that its index is static.

    def for_layers(self, body: Callable[[Layer, Any], Any], carry: Any) -> Any:
        """`lax.fori_loop` over all layers."""
        if self.layers == 1:
            return body(0, carry)
        return lax.fori_loop(0, self.layers, body, carry)

    def following(self, layer: Layer) -> Layer:
        """The next layer, or the last."""
        return 0 if self.layers == 1 else jnp.minimum(layer + 1, self.layers - 1)

    def is_followed(self, stage: Work) -> bool:
        """Whether a stage follows this one in any layer."""
        return self.layers > 1 or stage is not self.stages[-1]

    # The ring of weights.

    def w_slot(self, at: Array) -> Array:
        """Ring slot of tile number `at`, counted since the kernel began."""
        return lax.rem(at, self._slots)

    def bring_tile(self, tiles: Pair, in_flight: int, copies: Callable[[Array], Copies]) -> Pair:
        """Request one more tile, once the ring has room and fewer than `in_flight` are in flight.

        Args:
          tiles: (tiles requested, tiles waited for) since the kernel began.
          in_flight: limit of requested tiles that have not arrived.
          copies: function that returns pairs (reference to global memory, reference to a slot's
            shared memory), which together make up the tile. It is called when the ring has room.

        Returns:
          The updated `tiles`.
        """
        loaded, seen = tiles
        slot = self.w_slot(loaded)

        @when(loaded >= self._slots)
        def _():
            plgpu.barrier_wait(self.smem["w_used"].at[slot])

        def await_tile(_, seen):
            stay_rolled()
            plgpu.barrier_wait(self.smem["w_arrived"].at[self.w_slot(seen)])
            return seen + 1

        too_many = jnp.maximum(loaded - seen - (min(in_flight, self._slots) - 1), 0)
        seen = lax.fori_loop(0, too_many, await_tile, seen)
        tiles = loaded + 1, seen

        arrived = self.smem["w_arrived"].at[slot]
        pairs = copies(slot)
        for source, target in pairs:
            plgpu.copy_gmem_to_smem(source, target, arrived)
        for _ in range(len(pairs), self._copies):
            plgpu.barrier_arrive(arrived)
        return tiles

    def into_bricks(self, slot: Array, sources: Sequence[Any]) -> Copies:
        """Copies of references of equal size into a slot of the ring."""
        each = TILE_BRICKS // len(sources)
        targets = [self.smem["w"].at[slot, bricks(at * each, each)] for at in range(len(sources))]
        return list(zip(sources, targets, strict=True))

    # The ring of x.

    def x_slot(self, at: Array) -> Array:
        """Ring slot of brick number `at`, counted since the kernel began."""
        return lax.rem(at, self.x_slots)

    def bring_brick(self, loaded: Array, source: Any) -> Array:
        """Request one more slot of x, or its first rows; returns `loaded`, the count, plus one."""
        slot = self.x_slot(loaded)

        @when(loaded >= self.x_slots)
        def _():
            plgpu.barrier_wait(self.smem["x_used"].at[slot])

        target = self._x.at[slot]
        if source.shape[0] != target.shape[0]:
            target = target.at[pl.ds(0, source.shape[0])]
        plgpu.copy_gmem_to_smem(source, target, self.smem["x_arrived"].at[slot])
        return loaded + 1

    # The ring of new tokens, if x is coded.

    def bring_token(self, at: Array, source: Any) -> None:
        """Request new token number `at`, counted since the kernel began."""
        slot = lax.rem(at, TOKEN_SLOTS)

        @when(at >= TOKEN_SLOTS)
        def _():
            plgpu.barrier_wait(self.smem["token_used"].at[slot])

        arrived = self.smem["token_arrived"].at[slot]
        plgpu.copy_gmem_to_smem(source, self.smem["token"].at[slot], arrived)

    def pass_by(self, ring: str, slot: Array) -> None:
        """Wait for a slot of ring "w" or "x" and release it.

        A warpgroup must wait for every slot, also for those that it does not need: a barrier tells
        it only whether one phase is over, the next one to wait for.
        """
        plgpu.barrier_wait(self.smem[f"{ring}_arrived"].at[slot])
        plgpu.barrier_arrive(self.smem[f"{ring}_used"].at[slot])

    # Within the block: when weights of the next stage may be requested.

    def finish_tile(self, stage: Work, i: Array) -> None:
        """Call `mark_done` after this block's last tile of a stage, unless it is the last stage."""
        if self.is_followed(stage):
            when(i == self.share(stage).count - 1)(self.mark_done)

    def mark_done(self) -> None:
        """Let `await_done` pass: this block has finished its part of a stage."""
        plgpu.barrier_arrive(self.smem["done"])

    def worked_before(self, layer: Layer, at: int) -> Array | None:
        """Whether this block works on the stage before stage `at`; None if none comes before."""
        if at == 0 and self.layers == 1:
            return None
        worked = self.share(self.stages[at - 1]).count > 0
        return worked if at else worked & (layer > 0)

    def await_done(self, worked: Array | None, now: Array) -> None:
        """If `now`, wait until this block has finished the previous stage, if it `worked` on it."""
        if worked is not None:
            when(worked & now)(lambda: plgpu.barrier_wait(self.smem["done"]))

    # Signals among all blocks.

    def signal(self, layer: Layer) -> None:
        """Count a tile as finished."""
        counters.signal(self._counter(layer))

    def await_stages(self, layer: Layer, at: int) -> None:
        """Wait until all blocks have finished the stages before stage `at` of this layer."""
        if at:
            counters.wait(self._counter(layer), sum(stage.tiles for stage in self.stages[:at]))
        else:
            of_a_layer = sum(stage.tiles for stage in self.stages)
            when(layer > 0)(lambda: counters.wait(self._counter(layer - 1), of_a_layer))

    def _counter(self, layer: Layer) -> Any:
        return self.gmem["counters"].at[layer if self._row is None else self._row]


def bricks(start: Array | int, count: int) -> Any:
    """The slice of `count` bricks of rows or columns, from brick `start` on."""
    return pl.ds(start * BRICK, count * BRICK)


def brick_of(ref: Any, rows: Any, at: Array) -> Any:
    """Brick number `at` of the columns N of [M,N] or [M,_,_,D]."""
    if len(ref.shape) == 2:
        return ref.at[rows, bricks(at, 1)]
    _, _, parts, d = ref.shape
    of_part = d // BRICK
    head, part = lax.div(at, of_part * parts), lax.rem(lax.div(at, of_part), parts)
    return ref.at[rows, head, part, bricks(lax.rem(at, of_part), 1)]
