"""All layers of a decode step, as one persistent kernel for Hopper.

A block of the grid goes through Q, K and V, attention, output projection, gate and up, and down of
one layer after the other; a barrier of all blocks stands between two of them. One warpgroup
computes, one brings what is multiplied with weights, one brings weights, keys and values through a
single ring: those do not depend on the barriers, so memory goes on while blocks wait for each
other. See `chain_mosaic` for the products.

Attention. A cluster takes a KV head of a row: its blocks take the 64 slots of a tile in turn, with
the maximum of what they have seen, and merge through shared memory. The new token is put in its
place in the last tile in shared memory, so that nothing waits for the cache to hold it.

Weights and caches are stacked over the layers: as arrays of their own they would be hundreds of
descriptors.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST
from fdjax.pallas_kernels.conditional import when
from fdjax.pallas_kernels.gemm.chain_mosaic import (
    _BRICK,
    _CLUSTERS,
    _COUNTER_STRIDE,
    _SMEM_BYTES,
    _TILE_BRICKS,
    _X_SLOTS,
    MAX_ROWS,
    _signal,
    _Stage,
    _wait,
)
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.tiles import (
    KERNEL_ACTIVATIONS,
    LAYOUT,
    load,
    matrix,
    shared_bytes,
)

_D = 2 * _BRICK
_PARTS = 8  # queries of a KV head, key and value: rows of a tile


@dataclasses.dataclass(frozen=True)
class DecodeLayersConfig:
    """How many tiles of 32 kB are on their way to a block.

    Attributes:
      shared: in products where two blocks share K, so that nearly all blocks have a part.
      alone: in the others, where 96 or fewer do.
      cache: of keys and values.
      ahead: of the next stage, while the block still works on its part of one.
    """

    shared: int = 2
    alone: int = 2
    cache: int = 4
    ahead: int = 2

    def __post_init__(self):
        if min(self.shared, self.alone, self.cache) < 1 or self.ahead < 0:
            raise ValueError(f"decode_layers: must have tiles in flight, got {self}")


def layers_mosaic(
    x: Array,
    k: Array,
    v: Array,
    lengths: Array,
    cos: Array,
    sin: Array,
    *,
    attention_norm: Array,
    qkv: Array,
    out: Array,
    mlp_norm: Array,
    gate_up: Array,
    down: Array,
    eps: float,
    gate: str,
    scale: float,
    config: DecodeLayersConfig | None = None,
) -> tuple[Array, Array, Array]:
    """`decode_layers`.

    Raises:
      NotImplementedError: dtypes or sizes that TMA or wgmma do not take, more than 32 rows, heads
        of other than 128, or more than 6 queries to a KV head.
    """
    layers, m, _, cache_slots, d = k.shape
    width, parts, dtype = x.shape[1], qkv.shape[3], x.dtype
    _check_supported(m, width, out.shape[1], down.shape[1], d, parts, cache_slots, dtype)
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    x32 = x.astype(jnp.float32)
    next_x = (x32 * attention_norm[:1].astype(jnp.float32)).astype(dtype)
    squares = (x32 * x32).reshape(len(x), width // _BRICK, _BRICK).sum(axis=2).T
    k, v = jax.new_ref(k), jax.new_ref(v)
    operands = {
        "x": x,
        "next_x": jax.new_ref(next_x),
        "next_squares": jax.new_ref(squares),
        "k": k,
        "v": v,
        "lengths": lengths.astype(jnp.int32),
        "cos": cos.reshape(m, d // 2),
        "sin": sin.reshape(m, d // 2),
        "qkv": qkv.reshape(layers, width, -1),
        "out": out,
        "mlp_scale": mlp_norm,
        "gate_up": gate_up,
        "down": down,
        "next_scale": attention_norm,
        "counters": jax.new_ref(jnp.zeros((layers, _COUNTER_STRIDE), jnp.int32)),
    }
    config = config or DecodeLayersConfig()
    x = _launch(operands, parts=parts, gate=gate, eps=eps, scale=scale, config=config)
    return x[:m], jax.freeze(k), jax.freeze(v)


def _check_supported(m, width, heads, hidden, d, parts, slots, dtype) -> None:
    op = "decode_layers: 'mosaic_gpu'"
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{op} takes 16-bit floats, got {dtype}")
    if not 1 <= m <= MAX_ROWS:
        raise NotImplementedError(f"{op} takes 1..{MAX_ROWS} rows, got {m}")
    if d != _D or parts > _PARTS:
        raise NotImplementedError(
            f"{op} takes D of {_D} and up to {_PARTS - 2} queries to a KV head, "
            f"got {d} and {parts - 2}"
        )
    if slots % 8:
        raise NotImplementedError(f"{op} needs S to be a multiple of 8, got {slots}")
    if any(size % _BRICK for size in (width, heads, hidden)):
        raise NotImplementedError(
            f"{op} needs sizes that are multiples of {_BRICK}, got {(width, heads, hidden)}"
        )
    if width // _BRICK > 8 and width % (8 * _BRICK):
        raise NotImplementedError(
            f"{op} needs a width of up to {8 * _BRICK} or a multiple of it, got {width}"
        )


def _stages(
    width: int, heads: int, hidden: int, following: int, units: int, gate: str
) -> list[_Stage]:
    """What a layer is made of; sizes in bricks, but for the KV heads of all rows."""
    wide = 2 if following >= _CLUSTERS * 2 else 1
    deep = _TILE_BRICKS // wide
    return [
        _Stage("qkv", "next_x", width, following, wide, deep, 1, None, "next_squares", "y"),
        # Heads that two blocks share are quicker through; whole ones have less to do for each.
        _Stage("kv", "y", 0, units, 1, 1, 2 if units <= _CLUSTERS else 1),
        _Stage("out", "o", heads, width, 1, 4, 2, scaled=("mlp_x", "mlp_scale", "mlp_squares")),
        _Stage("gate_up", "mlp_x", width, hidden, 2, 1, 1, gate, "mlp_squares", "hidden"),
        _Stage(
            *("down", "hidden", hidden, width, 1, 4, 2),
            y="x_out",
            scaled=("next_x", "next_scale", "next_squares"),
        ),
    ]


def _launch(operands, *, parts, gate, eps, scale, config):
    padded, width = operands["x"].shape
    dtype = operands["x"].dtype
    layers, m, kv_heads, cache_slots, d = operands["k"].shape
    group = parts - 2
    heads, hidden = operands["out"].shape[1], operands["down"].shape[1]
    sizes = (size // _BRICK for size in (width, heads, hidden, operands["qkv"].shape[2]))
    stages = _stages(*sizes, m * kv_heads, gate)
    per_layer = sum(stage.tiles for stage in stages)
    results = {
        "x_out": ((padded, width), dtype),
        "y": ((padded, kv_heads, parts, d), dtype),
        "o": ((padded, kv_heads, group, d), dtype),
        "mlp_x": ((padded, width), dtype),
        "mlp_squares": ((width // _BRICK, padded), jnp.float32),
        "hidden": ((padded, hidden), dtype),
    }
    rounds = -(-(width // _BRICK) // _CLUSTERS)
    square_tiles = -(-width // _BRICK**2)
    wide = max(stage.wide for stage in stages)
    most_copies = max(stage.parts * stage.wide for stage in stages)
    brick = (padded, _BRICK)
    buffers = {
        "kept": ((rounds, *brick), dtype),  # the residual stream, this block's part
        "y": ((wide, *brick), dtype),
        "partial": ((_BRICK, padded), jnp.float32),
        "squares": ((square_tiles, _BRICK, padded), jnp.float32),
        "x": ((_X_SLOTS, *brick), dtype),
        "q": ((2, _PARTS, _BRICK), dtype),
        "p": ((2, _PARTS, _BRICK), dtype),
        "o": ((2, _PARTS, _BRICK), dtype),
        "part": ((4, _BRICK, _PARTS), jnp.float32),
    }
    slot_bytes = _TILE_BRICKS * _BRICK * _BRICK * dtype.itemsize
    slots = (_SMEM_BYTES - shared_bytes(buffers) - 1024) // slot_bytes
    if slots < 2:
        raise NotImplementedError(
            f"decode_layers: no room in shared memory for {padded} rows of width {width}"
        )
    buffers["w"] = ((slots, _TILE_BRICKS * _BRICK, _BRICK), dtype)
    scratch = {name: matrix(*buffer) for name, buffer in buffers.items()}
    scratch |= {
        "new": plgpu.SMEM((4, _BRICK), dtype),  # halves of key and value of a new token
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
        "part_arrived": plgpu.Barrier(num_arrivals=4),
        "told": plgpu.Barrier(),
    }

    def layers_kernel(*refs):
        gmem = dict(zip((*operands, *results), refs, strict=True))
        pl.run_scoped(functools.partial(body, gmem), **scratch, collective_axes="warpgroup")

    def body(gmem, **smem):
        cluster, rank = lax.axis_index("cluster"), lax.axis_index("rank")
        zero = rank * 0
        rows = pl.ds(pl.multiple_of(zero, 8), padded)

        def share(stage):
            """First tile of columns of this block, distance to the next, how many, and its K."""
            if stage.split > 1:
                first, stride, k_rank = cluster, _CLUSTERS, rank
            else:
                first, stride, k_rank = cluster * 2 + rank, MULTIPROCESSORS, zero
            return first, stride, lax.div(stage.tiles - first + stride - 1, stride), k_rank

        def bricks(start, count):
            return pl.ds(start * _BRICK, count * _BRICK)

        def head_of(stage, i):
            """Row and KV head of this block's i-th."""
            first, stride, _, _ = share(stage)
            unit = jnp.minimum(first + i * stride, stage.tiles - 1)
            return lax.div(unit, kv_heads), lax.rem(unit, kv_heads)

        def tiles_of(stage, filled):
            """Tiles of slots, the new token's included, and those of this block: one at least."""
            tiles = lax.div(filled, _BRICK) + 1
            mine = lax.div(tiles - share(stage)[3] + stage.split - 1, stage.split)
            return tiles, jnp.maximum(mine, 1)

        def halves(ref, index, at):
            """The columns of a brick in an array [M,Hkv,_,D], of rows `index`."""
            count = ref.shape[2]
            head, part = lax.div(at, 2 * count), lax.rem(lax.div(at, 2), count)
            return ref.at[index, head, part, bricks(lax.rem(at, 2), 1)]

        # Weights, keys and values.

        def bring_weights():
            def bring_layer(layer, tiles):
                for before, stage in zip((stages[-1], *stages), stages, strict=False):
                    waits = share(before)[2] > 0
                    if stage is stages[0]:
                        waits = waits & (layer > 0)
                    bring = bring_cache if stage.weight == "kv" else bring_product
                    count, tiles = bring(layer, stage, waits, tiles)
                    await_told(waits & (count <= config.ahead))
                return tiles

            # Tiles that were asked for, and how many of them have been waited for.
            lax.fori_loop(0, layers, bring_layer, (jnp.int32(0), jnp.int32(0)))

        def await_told(now):
            when(now)(lambda: plgpu.barrier_wait(smem["told"]))

        def reserve(tiles, in_flight):
            """A place in the ring for one more tile, once few enough are on their way."""
            loaded, seen = tiles
            slot = lax.rem(loaded, slots)

            @when(loaded >= slots)
            def _():
                plgpu.barrier_wait(smem["w_used"].at[slot])

            def await_tile(_, seen):
                plgpu.barrier_wait(smem["w_arrived"].at[lax.rem(seen, slots)])
                return seen + 1

            too_many = jnp.maximum(loaded - seen - (min(in_flight, slots) - 1), 0)
            seen = lax.fori_loop(0, too_many, await_tile, seen)
            return slot, (loaded + 1, seen)

        def bring_product(layer, stage, waits, tiles):
            first, stride, mine, k_rank = share(stage)
            copies = [(p, c) for p in range(stage.parts) for c in range(stage.wide)]
            in_flight = config.shared if stage.split > 1 else config.alone

            def bring(i, tiles):
                tile, step = first + lax.div(i, stage.steps) * stride, lax.rem(i, stage.steps)
                await_told(waits & (i == config.ahead))
                slot, tiles = reserve(tiles, in_flight)
                arrived = smem["w_arrived"].at[slot]
                ks = bricks((k_rank * stage.steps + step) * stage.deep, stage.deep)
                for at, (part, column) in enumerate(copies):
                    columns = bricks(tile * stage.wide + column, 1)
                    index = (layer, ks, part, columns) if stage.gate else (layer, ks, columns)
                    plgpu.copy_gmem_to_smem(
                        gmem[stage.weight].at[index],
                        smem["w"].at[slot, bricks(at * stage.deep, stage.deep)],
                        arrived,
                    )
                for _ in range(len(copies), most_copies):
                    plgpu.barrier_arrive(arrived)
                return tiles

            count = mine * stage.steps
            return count, lax.fori_loop(0, count, bring, tiles)

        def bring_cache(layer, stage, waits, tiles):
            def bring_head(i, carry):
                row, head = head_of(stage, i)

                def bring(j, carry):
                    count, tiles = carry
                    await_told(waits & (count == config.ahead))
                    slot, tiles = reserve(tiles, config.cache)
                    arrived = smem["w_arrived"].at[slot]
                    at = bricks(share(stage)[3] + stage.split * j, 1)
                    for b in range(4):
                        cache = gmem["kv"[b // 2]]
                        plgpu.copy_gmem_to_smem(
                            cache.at[layer, row, head, at, bricks(b % 2, 1)],
                            smem["w"].at[slot, bricks(b, 1)],
                            arrived,
                        )
                    for _ in range(4, most_copies):
                        plgpu.barrier_arrive(arrived)
                    return count + 1, tiles

                mine = tiles_of(stage, gmem["lengths"][row])[1]
                return lax.fori_loop(0, mine, bring, carry)

            return lax.fori_loop(0, share(stage)[2], bring_head, (jnp.int32(0), tiles))

        # What they are multiplied with.

        def bring_x():
            def bring_layer(layer, loaded):
                written = 0
                for stage in stages:
                    if written:
                        _wait(gmem["counters"].at[layer], written)
                    else:

                        @when(layer > 0)
                        def _():
                            _wait(gmem["counters"].at[layer - 1], per_layer)

                    written += stage.tiles
                    bring = bring_heads if stage.weight == "kv" else bring_input
                    loaded = bring(layer, stage, loaded)
                return loaded

            lax.fori_loop(0, layers, bring_layer, jnp.int32(0))

        def bring_brick(loaded, source, count=padded):
            slot = lax.rem(loaded, _X_SLOTS)

            @when(loaded >= _X_SLOTS)
            def _():
                plgpu.barrier_wait(smem["x_used"].at[slot])

            to = smem["x"].at[slot]
            to = to if count == padded else to.at[pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(source, to, smem["x_arrived"].at[slot])
            return loaded + 1

        def bring_heads(layer, stage, loaded):
            def bring(i, loaded):
                row, head = head_of(stage, i)
                for half in range(2):
                    # Parts that there are not are filled up with zeros.
                    source = gmem["y"].at[row, head, pl.ds(zero, _PARTS), bricks(half, 1)]
                    loaded = bring_brick(loaded, source, _PARTS)
                return loaded

            return lax.fori_loop(0, share(stage)[2], bring, loaded)

        def bring_input(layer, stage, loaded):
            _, _, mine, k_rank = share(stage)
            each = stage.steps * stage.deep

            def bring(i, loaded):
                at = k_rank * each + lax.rem(i, each)
                x = gmem[stage.x]
                source = halves(x, rows, at) if stage.x == "o" else x.at[rows, bricks(at, 1)]
                return bring_brick(loaded, source)

            # What is needed last comes after the first of x.
            ahead = jnp.minimum(mine * each, _X_SLOTS)
            loaded = lax.fori_loop(0, ahead, bring, loaded)
            when(mine > 0)(functools.partial(bring_rest, layer, stage))
            return lax.fori_loop(ahead, mine * each, bring, loaded)

        def bring_rest(layer, stage):
            if stage.weight == "out":

                @when(layer == 0)
                def _():
                    for i in range(rounds):
                        source = gmem["x"].at[rows, bricks(cluster + i * _CLUSTERS, 1)]
                        plgpu.copy_gmem_to_smem(source, smem["kept"].at[i], smem["kept_arrived"])

            if stage.squares:
                for i in range(square_tiles):
                    source = gmem[stage.squares].at[bricks(zero + i, 1), rows]
                    arrived = smem[f"{stage.squares}_arrived"]
                    plgpu.copy_gmem_to_smem(source, smem["squares"].at[i], arrived)

        # Both together.

        def compute():
            def compute_layer(layer, used):
                for stage in stages:
                    run = attend if stage.weight == "kv" else multiply_all
                    used = run(layer, stage, used)
                return used

            # Tiles of the ring, bricks of x.
            lax.fori_loop(0, layers, compute_layer, (jnp.int32(0), jnp.int32(0)))

        def done(i, stage):
            when(i == share(stage)[2] - 1)(lambda: plgpu.barrier_arrive(smem["told"]))

        def down(values):
            """values [R] as every row of [64, R]."""
            return lax.broadcast_in_dim(values, (_BRICK, values.shape[0]), [1])

        def put(ref, values):
            ref.T[...] = values.astype(dtype)

        def attend(layer, stage, used):
            """This block's KV heads."""
            mine = share(stage)[2]

            def store_is_under_way(i):
                """Whether this block's result of its i-th is not yet known to have arrived."""
                return (i >= 0) & ((stage.split == 1) | (lax.rem(i, stage.split) == rank))

            def arrive(i):
                @when(store_is_under_way(i))
                def _():
                    plgpu.wait_smem_to_gmem(0)
                    _signal(gmem["counters"].at[layer])

            def fetch(i):
                """What of the i-th comes from memory: it is asked for early."""
                row, _ = head_of(stage, i)
                turns = (
                    plgpu.load(gmem[name].at[row], layout=LAYOUT.reduce(1), optimized=False)
                    for name in ("cos", "sin")
                )
                return gmem["lengths"][row], *turns

            def one(i, carry):
                used, (filled, cos, sin) = carry
                receive(cos, sin, used[1])
                following = fetch(i + 1)
                attend_head(layer, stage, i, filled, used[0], functools.partial(arrive, i - 1))
                w_used, x_used = used
                return (w_used + tiles_of(stage, filled)[1], x_used + 2), following

            used, _ = lax.fori_loop(0, mine, one, (used, fetch(jnp.int32(0))))
            arrive(mine - 1)
            when(mine > 0)(lambda: plgpu.barrier_arrive(smem["told"]))
            return used

        def attend_head(layer, stage, i, filled, w_used, arrive_before):
            """A KV head of a row: this block's tiles of slots."""
            row, head = head_of(stage, i)
            tiles_in_all, mine = tiles_of(stage, filled)
            k_rank = share(stage)[3]

            def step(first, count, j, carry):
                """Some tiles at once: less waiting for one thing after the other."""
                *o, l, m = carry
                at = [first + j * count + i for i in range(count)]
                places = [lax.rem(w_used + i, slots) for i in at]
                tiles = [[smem["w"].at[slot, bricks(b, 1)] for b in range(4)] for slot in places]
                for i, slot, tile in zip(at, places, tiles, strict=True):
                    which = k_rank + stage.split * i
                    plgpu.barrier_wait(smem["w_arrived"].at[slot])
                    inside = filled - which * _BRICK
                    when(which >= tiles_in_all - 1)(functools.partial(add_token, tile, inside))

                def products(*accs):
                    for tile, acc in zip(tiles, accs, strict=True):
                        for half in range(2):
                            plgpu.wgmma(acc, tile[half], smem["q"].at[half].T)
                    plgpu.wgmma_wait(0)
                    return [acc[...] * (scale * LOG2E) for acc in accs]

                accumulator = plgpu.ACC((_BRICK, _PARTS), jnp.float32)
                scores = pl.run_scoped(products, *[accumulator] * count)
                inside = plgpu.broadcasted_iota(jnp.int32, blank.shape, 0, layout=LAYOUT)
                seen = [inside + (k_rank + stage.split * i) * _BRICK <= filled for i in at]
                tops = [jnp.where(s, z, LOWEST) for s, z in zip(seen, scores, strict=True)]
                m_new = jnp.maximum(m, functools.reduce(jnp.maximum, tops).max(axis=0))
                rescale = down(jnp.exp2(m - m_new))
                l = l * rescale
                for i, (s, z) in enumerate(zip(seen, scores, strict=True)):
                    p = jnp.where(s, jnp.exp2(z - down(m_new)), 0.0).astype(dtype)
                    put(smem["p"].at[i], p)
                    l = l + p.astype(jnp.float32)
                plgpu.commit_smem()

                def weighted(*accs):
                    for i, tile in enumerate(tiles):
                        for half, acc in enumerate(accs):
                            plgpu.wgmma(acc, tile[2 + half].T, smem["p"].at[i].T)
                    plgpu.wgmma_wait(0)
                    return [acc[...] for acc in accs]

                new = pl.run_scoped(weighted, *[accumulator] * 2)
                for slot in places:
                    plgpu.barrier_arrive(smem["w_used"].at[slot])
                return *(a * rescale + b for a, b in zip(o, new, strict=True)), l, m_new

            blank = plgpu.layout_cast(jnp.zeros((_BRICK, _PARTS), jnp.float32), LAYOUT)
            lowest = plgpu.layout_cast(jnp.full((_PARTS,), LOWEST, jnp.float32), LAYOUT.reduce(0))
            pairs = lax.div(mine, 2)
            carry = blank, blank, blank, lowest
            carry = lax.fori_loop(0, pairs, functools.partial(step, 0, 2), carry)
            one = functools.partial(step, 2 * pairs, 1)
            *o, l, m = lax.fori_loop(0, lax.rem(mine, 2), one, carry)

            arrive_before()
            last_is_mine = lax.rem(tiles_in_all - 1, stage.split) == k_rank
            when(last_is_mine & (filled < cache_slots))(
                lambda: write_token(layer, row, head, filled)
            )
            if stage.split == 1:
                store(row, head, o, l.sum(axis=0))
            else:
                merge(i, row, head, o, l, m)

        def merge(i, row, head, o, l, m):
            """The parts of two blocks, each with its own maximum."""
            owner = lax.rem(i, 2)

            @when(owner != rank)
            def _():
                for at, values in enumerate((*o, l, down(m))):
                    plgpu.async_store_smem(
                        values,
                        smem["part"].at[at],
                        barrier=smem["part_arrived"],
                        cluster_idx=owner,
                        cluster_dim="rank",
                        optimized=False,
                    )

            @when(owner == rank)
            def _():
                plgpu.barrier_wait(smem["part_arrived"])
                *o_other, l_other, m_other = (load(smem["part"].at[at]) for at in range(4))
                top = jnp.maximum(down(m), m_other)
                weight, weight_other = jnp.exp2(down(m) - top), jnp.exp2(m_other - top)
                merged = [a * weight + b * weight_other for a, b in zip(o, o_other, strict=True)]
                total = (l * weight + l_other * weight_other).sum(axis=0)
                store(row, head, merged, total)

        def store(row, head, o, l):
            """Begin to store the result of a KV head."""
            inverse = down(1.0 / l)
            for half in range(2):
                put(smem["o"].at[half], o[half] * inverse)
            plgpu.commit_smem()
            for half in range(2):
                target = gmem["o"].at[row, head, pl.ds(zero, _PARTS), bricks(half, 1)]
                plgpu.copy_smem_to_gmem(smem["o"].at[half], target)

        def receive(cos, sin, x_used):
            """Queries and the new token, with RoPE."""
            cos, sin = (lax.broadcast_in_dim(a, (_BRICK, _PARTS), [0]) for a in (cos, sin))
            halves = []
            for half in range(2):
                slot = lax.rem(x_used + half, _X_SLOTS)
                plgpu.barrier_wait(smem["x_arrived"].at[slot])
                halves.append(load(smem["x"].at[slot, pl.ds(0, _PARTS)].T))
            plgpu.commit_smem()
            for half in range(2):
                plgpu.barrier_arrive(smem["x_used"].at[lax.rem(x_used + half, _X_SLOTS)])
            a, b = halves
            turned = a * cos - b * sin, b * cos + a * sin
            columns = plgpu.broadcasted_iota(jnp.int32, a.shape, 1, layout=LAYOUT)
            for half in range(2):
                put(smem["q"].at[half], turned[half])
                for which, values in ((0, turned[half]), (1, halves[half])):
                    token = jnp.where(columns == group + which, values, 0.0).sum(axis=1)
                    smem["new"].at[2 * which + half][...] = token.astype(dtype)
            plgpu.commit_smem()

        def add_token(tile, inside):
            """The new key and value in their slot of a tile, zeros in those after it."""
            at = plgpu.broadcasted_iota(jnp.int32, (_BRICK, _BRICK), 0, layout=LAYOUT)
            for b in range(4):
                found = plgpu.load(tile[b], layout=LAYOUT, optimized=False)
                new = plgpu.load(smem["new"].at[b], layout=LAYOUT.reduce(0), optimized=False)
                new = lax.broadcast_in_dim(new, found.shape, [1])
                kept = jnp.where(at < inside, found, jnp.zeros_like(found))
                tile[b][...] = jnp.where(at == inside, new, kept)
            plgpu.commit_smem()

        def write_token(layer, row, head, slot):
            for b in range(4):
                target = gmem["kv"[b // 2]].at[layer, row, head, slot, bricks(b % 2, 1)]
                plgpu.copy_smem_to_gmem(smem["new"].at[b], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def multiply_all(layer, stage, used):
            run = functools.partial(multiply, layer, stage)
            return lax.fori_loop(0, share(stage)[2], run, used)

        def multiply(layer, stage, i, used):
            """The block's i-th tile of columns."""
            first, stride, _, _ = share(stage)
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

            norm = None
            if stage.scaled:  # early, as it comes from memory
                # Nothing comes after the last layer.
                which = layer if stage.y is None else jnp.minimum(layer + 1, layers - 1)
                source = gmem[stage.scaled[1]].at[which, bricks(tile, 1)]
                norm = plgpu.load(source, layout=LAYOUT.reduce(1), optimized=False)
            products = pl.run_scoped(
                accumulate, *[plgpu.ACC((_BRICK, padded), jnp.float32)] * count
            )
            if stage.split == 1:
                finish(layer, stage, i, tile, products, norm)
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
                    done(i, stage)

                when(owner == rank)(lambda: finish(layer, stage, i, tile, products, norm))
            return w_used + stage.steps, x_used + stage.steps * stage.deep

        def prepare(stage):
            """Sums of squares to what the norm multiplies by, while weights are on their way."""
            plgpu.barrier_wait(smem[f"{stage.squares}_arrived"])
            squares = [load(smem["squares"].at[at]) for at in range(square_tiles)]
            mean = sum(jnp.sum(part, axis=0) for part in squares) / (stage.k * _BRICK)
            smem["factors"][...] = lax.rsqrt(mean + eps)
            plgpu.commit_smem()

        def finish(layer, stage, i, tile, products, norm):
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
                    when((i < stage.split) & (layer == 0))(
                        lambda: plgpu.barrier_wait(smem["kept_arrived"])
                    )
                rounded = (total[0] + load(kept.T)).astype(dtype)
                kept.T[...] = rounded
                x = rounded.astype(jnp.float32)
                total = [x * lax.broadcast_in_dim(norm.astype(jnp.float32), x.shape, [0])]
                stores = [(smem["y"].at[0], gmem[name].at[rows, bricks(tile, 1)])]
            else:
                columns = [tile * stage.wide + c for c in range(stage.wide)]
                y = gmem[stage.y]
                stores = [
                    (
                        smem["y"].at[c],
                        halves(y, rows, at) if stage.y == "y" else y.at[rows, bricks(at, 1)],
                    )
                    for c, at in enumerate(columns)
                ]
            for c, y in enumerate(total):
                put(smem["y"].at[c], y)
            plgpu.commit_smem()
            for source, target in stores:
                plgpu.copy_smem_to_gmem(source, target)
            if stage.scaled:
                if stage.y:

                    @when(layer == layers - 1)
                    def _():
                        plgpu.copy_smem_to_gmem(kept, gmem[stage.y].at[rows, bricks(tile, 1)])

                smem["square_row"][...] = jnp.sum(x * x, axis=0)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem["square_row"], gmem[squares_name].at[tile])
            plgpu.wait_smem_to_gmem(0)
            _signal(gmem["counters"].at[layer])
            done(i, stage)

        for index, (run, registers) in enumerate(
            ((compute, 240), (bring_x, 128), (bring_weights, 120))
        ):

            @when(lax.axis_index("warpgroup") == index)
            def _(run=run, registers=registers):
                action = "increase" if registers > 168 else "decrease"
                plgpu.set_max_registers(registers, action=action)
                run()

    x, *_ = plgpu.kernel(
        layers_kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results.values()],
        grid=(_CLUSTERS,),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands.values())
    return x
