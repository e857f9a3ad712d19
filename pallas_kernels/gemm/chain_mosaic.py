"""The linear layers between two attentions of a decode step, as one persistent kernel for Hopper.

Output projection, gate and up, down, and Q, K and V of the next layer read 405 MB of weights in
Llama 2 7B. As four launches each starts and ends with memory idle, for about 2 us. Here a block of
the grid goes through all four products, and a barrier of all blocks stands between two of them.
One warpgroup multiplies, one brings x, one brings weights: those of the next product do not depend
on the barrier, so memory goes on while blocks wait for each other, as long as there is room.

What it rests on, measured on an H100 (benchmarks/LOG.md, 2026-11-22):

* All columns of a product are under way at once, in rows of memory that are as wide as can be:
  the tiles of `_stages`. Two blocks of a cluster share K where N makes too few of them.
* Few tiles of 32 kB in flight for a block; with more, memory is read in worse order.
* An answer of the memory system queues behind what is in flight. So a block asks for weights of
  the next product, all but the first two at most, when it has told the others that its part of
  this one is done, not before.
* No product scales its input by a norm: the one before writes x · scale, and the sums of squares
  of its columns beside, which become a factor of the accumulators.
* The counters of finished tiles are zeroed once for all layers of a step.

As the blocks wait for each other, all of them must run at once: 132, one to a multiprocessor. A
plan asks the device whether it has as many. Two processes that share a GPU through MPS, which runs
their kernels side by side, could wait for each other's blocks forever; name "xla" for
`linear_chain` there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.conditional import when
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.tiles import (
    KERNEL_ACTIVATIONS,
    LAYOUT,
    load,
    matrix,
    shared_bytes,
)

MAX_ROWS = 32
_CLUSTERS = MULTIPROCESSORS // 2
_BRICK = 64  # rows and columns of weight, and columns of x, that are copied and multiplied at once
_TILE_BRICKS = 4  # of a slot in the ring of weights, 32 kB
_X_SLOTS = 12
_SMEM_BYTES = 223 * 1024  # what a block may take, less its barriers and what sums take
_COUNTER_STRIDE = 32  # int32, so that no two layers share a line


@dataclasses.dataclass(frozen=True)
class LinearChainConfig:
    """How many tiles of weights, of 32 kB each, are on their way to a block.

    The default is enough for all but the last percent; tables know better (benchmarks/LOG.md).

    Attributes:
      shared: in products where two blocks share K, so that nearly all blocks have a part.
      alone: in the others, where 96 or fewer do.
      ahead: of the next product, while the block still works on its part of one.
    """

    shared: int = 2
    alone: int = 2
    ahead: int = 0

    def __post_init__(self):
        if self.shared < 1 or self.alone < 1 or self.ahead < 0:
            raise ValueError(f"linear_chain: must have tiles in flight, got {self}")


@dataclasses.dataclass(frozen=True)
class _Stage:
    """One product of the chain.

    Attributes:
      weight, x: operands, by name.
      k, n: of the weight, in bricks; of each half, with a gate.
      wide, deep: bricks of a tile.
      split: blocks of a cluster that share K.
      gate: activation.
      squares: sums of squares of x before its scale, if it is to be normalised.
      y: result, by name.
      scaled: what becomes of the result beside, x · scale of the next norm: (its name, the name of
        the scale, that of its squares). The residual is added before.
    """

    weight: str
    x: str
    k: int
    n: int
    wide: int
    deep: int
    split: int
    gate: str | None = None
    squares: str | None = None
    y: str | None = None
    scaled: tuple[str, str, str] | None = None

    @property
    def parts(self) -> int:
        return 2 if self.gate else 1

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return -(-self.n // self.wide)

    @property
    def steps(self) -> int:
        """Tiles of a block along its share of K."""
        return -(-self.k // (self.deep * self.split))


def _stages(width: int, heads: int, hidden: int, following: int, gate: str) -> list[_Stage]:
    """The four products; sizes in bricks."""
    # Wide tiles where they make enough blocks.
    wide = 2 if following >= _CLUSTERS * 2 else 1
    deep = _TILE_BRICKS // wide
    return [
        _Stage("out", "o", heads, width, 1, 4, 2, scaled=("mlp_x", "mlp_scale", "mlp_squares")),
        _Stage("gate_up", "mlp_x", width, hidden, 2, 1, 1, gate, "mlp_squares", "hidden"),
        _Stage(
            *("down", "hidden", hidden, width, 1, 4, 2),
            y="x_out",
            scaled=("next_x", "next_scale", "next_squares"),
        ),
        _Stage("next", "next_x", width, following, wide, deep, 1, None, "next_squares", "y"),
    ]


def chain_counters(chains: int) -> Any:
    """A reference to zeros [chains, ...] int32: a row for each chain of a step, to be used once."""
    return jax.new_ref(jnp.zeros((chains, _COUNTER_STRIDE), jnp.int32))


def chain_mosaic(
    o: Array,
    x: Array,
    counters: Any,
    index: Array | int,
    *,
    out: Array,
    mlp_norm: RMSNorm,
    gate_up: Array,
    down: Array,
    next_norm: RMSNorm,
    following: Array,
    gate: str,
    config: LinearChainConfig | None = None,
) -> tuple[Array, Array]:
    """`linear_chain` of o [M,H·D] and x [M,E].

    Raises:
      NotImplementedError: dtypes or sizes that TMA or wgmma do not take, or more than 32 rows.
    """
    m, dtype = x.shape[0], x.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"linear_chain: 'mosaic_gpu' takes 16-bit floats, got {dtype}")
    if not 1 <= m <= MAX_ROWS:
        raise NotImplementedError(f"linear_chain: 'mosaic_gpu' takes 1..{MAX_ROWS} rows, got {m}")
    sizes = (*out.shape, down.shape[0], following.shape[1])
    if any(size % _BRICK for size in sizes):
        raise NotImplementedError(
            f"linear_chain: 'mosaic_gpu' needs sizes that are multiples of {_BRICK}, got {sizes}"
        )
    # TMA fills up a single tile of 8 sums of squares, not the last of several.
    if x.shape[1] // _BRICK > 8 and x.shape[1] % (8 * _BRICK):
        raise NotImplementedError(
            f"linear_chain: 'mosaic_gpu' needs a width of up to {8 * _BRICK} or a multiple of it, "
            f"got {x.shape[1]}"
        )
    if mlp_norm.eps != next_norm.eps:
        raise NotImplementedError("linear_chain: 'mosaic_gpu' needs norms with one eps")
    if m > 8 and m % 8:  # TMA fills up a single tile of rows, not the last of several.
        o, x = (jnp.pad(a, ((0, -m % 8), (0, 0))) for a in (o, x))
    operands = {
        "o": o,
        "x": x,
        "out": out,
        "mlp_scale": mlp_norm.scale,
        "gate_up": gate_up,
        "down": down,
        "next_scale": next_norm.scale,
        "next": following,
        "index": jnp.asarray(index, jnp.int32).reshape(1),
        "counters": counters,
    }
    config = config or LinearChainConfig()
    x, y = _launch(operands, gate=gate, eps=mlp_norm.eps, config=config)
    return x[:m], y[:m]


# A function of its own under jit, so that layers share one lowering.
@functools.partial(jax.jit, static_argnames=("gate", "eps", "config"))
def _launch(operands, *, gate, eps, config):
    m, width = operands["x"].shape
    dtype = operands["x"].dtype
    padded = -(-m // 8) * 8
    heads, hidden = operands["out"].shape[0], operands["down"].shape[0]
    following = operands["next"].shape[1]
    sizes = (size // _BRICK for size in (width, heads, hidden, following))
    stages = _stages(*sizes, gate)
    results = {
        "x_out": ((m, width), dtype),
        "y": ((m, following), dtype),
        "mlp_x": ((padded, width), dtype),
        "mlp_squares": ((width // _BRICK, padded), jnp.float32),
        "hidden": ((padded, hidden), dtype),
        "next_x": ((padded, width), dtype),
        "next_squares": ((width // _BRICK, padded), jnp.float32),
    }
    rounds = -(-(width // _BRICK) // _CLUSTERS)
    square_tiles = -(-width // _BRICK**2)
    wide = max(stage.wide for stage in stages)
    most_copies = max(stage.parts * stage.wide for stage in stages)
    brick = (padded, _BRICK)
    buffers = {
        "kept": ((rounds, *brick), dtype),  # x + out, this block's part
        "y": ((wide, *brick), dtype),
        "partial": ((_BRICK, padded), jnp.float32),
        "squares": ((square_tiles, _BRICK, padded), jnp.float32),
        "x": ((_X_SLOTS, *brick), dtype),
    }
    slot_bytes = _TILE_BRICKS * _BRICK * _BRICK * dtype.itemsize
    slots = (_SMEM_BYTES - shared_bytes(buffers)) // slot_bytes
    if slots < 2:
        raise NotImplementedError(
            f"linear_chain: no room in shared memory for {m} rows of width {width}"
        )
    buffers["w"] = ((slots, _TILE_BRICKS * _BRICK, _BRICK), dtype)
    scratch = {name: matrix(*buffer) for name, buffer in buffers.items()}
    scratch |= {
        "square_row": plgpu.SMEM((padded,), jnp.float32),
        "factors": plgpu.SMEM((padded,), jnp.float32),
        "w_arrived": plgpu.Barrier(num_arrivals=most_copies, num_barriers=slots),
        "w_used": plgpu.Barrier(num_barriers=slots),
        "x_arrived": plgpu.Barrier(num_barriers=_X_SLOTS),
        "x_used": plgpu.Barrier(num_barriers=_X_SLOTS),
        "kept_arrived": plgpu.Barrier(num_arrivals=rounds),
        "mlp_squares_arrived": plgpu.Barrier(num_arrivals=square_tiles),
        "next_squares_arrived": plgpu.Barrier(num_arrivals=square_tiles),
        "partial_arrived": plgpu.Barrier(),
        "told": plgpu.Barrier(),
    }

    def chain_kernel(*refs):
        gmem = dict(zip((*operands, *results), refs, strict=True))
        pl.run_scoped(functools.partial(body, gmem), **scratch, collective_axes="warpgroup")

    def body(gmem, **smem):
        cluster, rank = lax.axis_index("cluster"), lax.axis_index("rank")
        rows = pl.ds(pl.multiple_of(rank * 0, 8), padded)
        counter = gmem["counters"].at[gmem["index"][0]]

        def share(stage):
            """First tile of columns of this block, distance to the next, how many, and its K."""
            if stage.split > 1:
                first, stride, k_rank = cluster, _CLUSTERS, rank
            else:
                first, stride, k_rank = cluster * 2 + rank, MULTIPROCESSORS, rank * 0
            return first, stride, lax.div(stage.tiles - first + stride - 1, stride), k_rank

        def bricks(start, count):
            return pl.ds(start * _BRICK, count * _BRICK)

        def bring_weights():
            # Tiles that were asked for, and how many of them have been waited for.
            tiles = jnp.int32(0), jnp.int32(0)
            for before, stage in zip((None, *stages), stages, strict=False):
                count = share(stage)[2] * stage.steps
                bring = functools.partial(bring_tile, before, stage)
                tiles = lax.fori_loop(0, count, bring, tiles)
                await_told(before, count <= config.ahead)

        def await_told(before, now):
            if before is not None:
                told = now & (share(before)[2] > 0)
                when(told)(lambda: plgpu.barrier_wait(smem["told"]))

        def bring_tile(before, stage, i, tiles):
            """The block's i-th tile of weights."""
            loaded, seen = tiles
            first, stride, _, k_rank = share(stage)
            tile, step = first + lax.div(i, stage.steps) * stride, lax.rem(i, stage.steps)
            slot = lax.rem(loaded, slots)
            arrived = smem["w_arrived"].at[slot]
            await_told(before, i == config.ahead)

            @when(loaded >= slots)
            def _():
                plgpu.barrier_wait(smem["w_used"].at[slot])

            def await_tile(_, seen):
                plgpu.barrier_wait(smem["w_arrived"].at[lax.rem(seen, slots)])
                return seen + 1

            in_flight = min(config.shared if stage.split > 1 else config.alone, slots)
            too_many = jnp.maximum(loaded - seen - (in_flight - 1), 0)
            seen = lax.fori_loop(0, too_many, await_tile, seen)

            ks = bricks((k_rank * stage.steps + step) * stage.deep, stage.deep)
            copies = [(p, c) for p in range(stage.parts) for c in range(stage.wide)]
            for at, (part, column) in enumerate(copies):
                columns = bricks(tile * stage.wide + column, 1)
                plgpu.copy_gmem_to_smem(
                    gmem[stage.weight].at[(ks, part, columns) if stage.gate else (ks, columns)],
                    smem["w"].at[slot, bricks(at * stage.deep, stage.deep)],
                    arrived,
                )
            for _ in range(len(copies), most_copies):
                plgpu.barrier_arrive(arrived)
            return loaded + 1, seen

        def bring_x():
            loaded, written = jnp.int32(0), 0
            for stage in stages:
                _, _, mine, k_rank = share(stage)
                if written:
                    _wait(counter, written)
                written += stage.tiles
                each = stage.steps * stage.deep

                def bring(i, loaded, stage=stage, each=each, k_rank=k_rank):
                    slot = lax.rem(loaded, _X_SLOTS)

                    @when(loaded >= _X_SLOTS)
                    def _():
                        plgpu.barrier_wait(smem["x_used"].at[slot])

                    source = gmem[stage.x].at[rows, bricks(k_rank * each + lax.rem(i, each), 1)]
                    plgpu.copy_gmem_to_smem(source, smem["x"].at[slot], smem["x_arrived"].at[slot])
                    return loaded + 1

                # What is needed last comes after the first of x.
                ahead = jnp.minimum(mine * each, _X_SLOTS)
                loaded = lax.fori_loop(0, ahead, bring, loaded)
                when(mine > 0)(functools.partial(bring_rest, stage))
                loaded = lax.fori_loop(ahead, mine * each, bring, loaded)

        def bring_rest(stage):
            if stage.weight == "out":
                for i in range(rounds):
                    source = gmem["x"].at[rows, bricks(cluster + i * _CLUSTERS, 1)]
                    plgpu.copy_gmem_to_smem(source, smem["kept"].at[i], smem["kept_arrived"])

            if stage.squares:
                for i in range(square_tiles):
                    source = gmem[stage.squares].at[bricks(rank * 0 + i, 1), rows]
                    arrived = smem[f"{stage.squares}_arrived"]
                    plgpu.copy_gmem_to_smem(source, smem["squares"].at[i], arrived)

        def multiply():
            used = (jnp.int32(0), jnp.int32(0))  # tiles of weights, bricks of x
            for stage in stages:
                mine = share(stage)[2]
                run = functools.partial(multiply_tile, stage)
                used = lax.fori_loop(0, mine, run, used)

        def multiply_tile(stage, i, used):
            """The block's i-th tile of columns."""
            first, stride, mine, _ = share(stage)
            tile = first + i * stride
            w_used, x_used = used
            count = stage.parts * stage.wide
            middle = stage.steps // 2

            def accumulate(*accumulators):  # [64, padded] each
                def release(step):
                    plgpu.barrier_arrive(smem["w_used"].at[lax.rem(w_used + step, slots)])
                    for k in range(stage.deep):
                        at = lax.rem(x_used + step * stage.deep + k, _X_SLOTS)
                        plgpu.barrier_arrive(smem["x_used"].at[at])

                def product(step, _):
                    if stage.squares:
                        when((i == 0) & (step == middle))(functools.partial(prepare, stage))
                    slot = lax.rem(w_used + step, slots)
                    at = [
                        lax.rem(x_used + step * stage.deep + k, _X_SLOTS) for k in range(stage.deep)
                    ]
                    plgpu.barrier_wait(smem["w_arrived"].at[slot])
                    for x_slot in at:
                        plgpu.barrier_wait(smem["x_arrived"].at[x_slot])
                    for k, x_slot in enumerate(at):
                        for c, accumulator in enumerate(accumulators):
                            w = smem["w"].at[slot, bricks(c * stage.deep + k, 1)]
                            plgpu.wgmma(accumulator, w.T, smem["x"].at[x_slot].T)
                    # Products of the previous step are done with their tiles.
                    plgpu.wgmma_wait(stage.deep * count)
                    when(step > 0)(lambda: release(step - 1))

                lax.fori_loop(0, stage.steps, product, None)
                plgpu.wgmma_wait(0)
                release(stage.steps - 1)
                return [accumulator[...] for accumulator in accumulators]

            scale = None
            if stage.scaled:  # early, as it comes from memory
                source = gmem[stage.scaled[1]].at[bricks(tile, 1)]
                scale = plgpu.load(source, layout=LAYOUT.reduce(1), optimized=False)
            products = pl.run_scoped(
                accumulate, *[plgpu.ACC((_BRICK, padded), jnp.float32)] * count
            )
            if stage.split == 1:
                finish(stage, i, tile, mine, products, scale)
            else:
                owner = lax.rem(i, 2)

                @when(owner != rank)
                def _():
                    plgpu.async_store_smem(
                        products[0],
                        smem["partial"],
                        barrier=smem["partial_arrived"],
                        cluster_idx=owner,
                        cluster_dim="rank",
                        optimized=False,
                    )
                    when(i == mine - 1)(lambda: plgpu.barrier_arrive(smem["told"]))

                when(owner == rank)(lambda: finish(stage, i, tile, mine, products, scale))
            return w_used + stage.steps, x_used + stage.steps * stage.deep

        def prepare(stage):
            """Sums of squares to what the norm multiplies by, while weights are on their way."""
            plgpu.barrier_wait(smem[f"{stage.squares}_arrived"])
            squares = [load(smem["squares"].at[at]) for at in range(square_tiles)]
            mean = sum(jnp.sum(part, axis=0) for part in squares) / (stage.k * _BRICK)
            smem["factors"][...] = lax.rsqrt(mean + eps)
            plgpu.commit_smem()

        def finish(stage, i, tile, mine, products, scale):
            """Sums to results."""
            total = list(products)
            if stage.split > 1:
                plgpu.barrier_wait(smem["partial_arrived"])
                total[0] += load(smem["partial"])
            if stage.squares:
                factors = plgpu.load(smem["factors"], layout=LAYOUT.reduce(0), optimized=False)
                total = [t * lax.broadcast_in_dim(factors, t.shape, [1]) for t in total]
            if stage.gate:
                act = KERNEL_ACTIVATIONS[stage.gate]
                total = [act(total[c]) * total[stage.wide + c] for c in range(stage.wide)]
            if stage.scaled:
                name, _, squares_name = stage.scaled
                kept = smem["kept"].at[i]
                if stage.y is None:
                    # Of this block's tiles, the first that it finishes.
                    when(i < stage.split)(lambda: plgpu.barrier_wait(smem["kept_arrived"]))
                rounded = (total[0] + load(kept.T)).astype(dtype)
                kept.T[...] = rounded
                x = rounded.astype(jnp.float32)
                total = [x * lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, [0])]
                stores = [(smem["y"].at[0], gmem[name], tile)]
                if stage.y:
                    stores += [(kept, gmem[stage.y], tile)]
            else:
                columns = [tile * stage.wide + c for c in range(stage.wide)]
                stores = [(smem["y"].at[c], gmem[stage.y], at) for c, at in enumerate(columns)]
            for c, y in enumerate(total):
                smem["y"].at[c].T[...] = y.astype(dtype)
            plgpu.commit_smem()
            for source, target, column in stores:
                plgpu.copy_smem_to_gmem(source, target.at[rows, bricks(column, 1)])
            if stage.scaled:
                smem["square_row"][...] = jnp.sum(x * x, axis=0)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem["square_row"], gmem[squares_name].at[tile])
            plgpu.wait_smem_to_gmem(0)
            if stage is not stages[-1]:
                _signal(counter)
                when(i == mine - 1)(lambda: plgpu.barrier_arrive(smem["told"]))

        for index, (run, registers) in enumerate(
            ((multiply, 232), (bring_x, 104), (bring_weights, 40))
        ):

            @when(lax.axis_index("warpgroup") == index)
            def _(run=run, registers=registers):
                action = "increase" if registers > 168 else "decrease"
                plgpu.set_max_registers(registers, action=action)
                run()

    x, y, *_ = plgpu.kernel(
        chain_kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results.values()],
        grid=(_CLUSTERS,),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    return x, y


def _signal(counter) -> None:
    """Count a tile as finished, once all threads of the warpgroup are here."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counter):
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.memref_ptr(counter)).signal(1, memory_scope="gpu")

    signal(counter)


def _wait(counter, tiles: int) -> None:
    """Wait until so many tiles are finished, in all blocks."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, counter):
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(counter))
        semaphore.wait(tiles, decrement=False, memory_scope="gpu")
        mgpu.inline_ptx("fence.proxy.async;", has_side_effects=True)  # TMA reads what they wrote

    wait(counter)
