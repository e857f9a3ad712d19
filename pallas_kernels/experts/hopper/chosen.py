"""Mixture of experts for a few rows on Hopper. It reads the weights of each chosen expert once.

The rows of a decode step choose D <= min(X, M·k) experts. Their weights, D·3·E·F·itemsize bytes,
bound the time. Qwen3-30B-A3B (E 2048, F 768, 8 of 128 experts, bf16) at 3.05 TB/s, with random
routing. FLOPs include rows of padding and rows that did not choose the expert:

  rows  experts   bytes    us  GFLOP
     1        8   75 MB    25    0.6
     8       52  487 MB   160    3.9
    16       82  778 MB   255   12.4
    32      112  1.06 GB  346   33.8   (42 us of the tensor cores)

So there is time to multiply all rows by each chosen expert, and rows are not gathered. Each
distinct expert has a slot. XLA makes two small tables of slots. Two launches follow, both flat
GEMMs with a ring of TMA tiles and swapped operands, see `gemm.hopper.flat_gemm`:

1. hidden[slot] = act(x · gate) * (x · up), a block for each slot and `up_n` columns;
2. part[pair] = hidden[slot][row] · down, a block for each slot and `down_n` columns. It stores only
   the rows that chose the expert. A pair is a row and one of its experts.

Blocks of slots without an expert end at once. XLA sums the weighted parts of a row, in the order in
which the row chose its experts. For a single row, the blocks of a column form a cluster, and the
first does that. Blocks of a cluster may also share K: unpacking quantised weights takes one block
longer than reading them. All sums of a row have a fixed order, so its bits depend neither on the
other rows nor on the tiling, but for the number of blocks that share K.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.dispatch import Capability, Implementation, Shape, needs_half
from fdjax.pallas_kernels.experts.hopper.weights import (
    DenseTiles,
    PackedTiles,
    kernel_scales,
    misfit,
    takes_group,
)
from fdjax.pallas_kernels.experts.routing import ROUTING_FEATURES, only_live, route
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.tiles import (
    LAYOUT,
    gated,
    load,
    matrix,
    put,
    shared_bytes,
)
from fdjax.pallas_kernels.quantised import BITS, PLAIN, WEIGHT_FEATURES, QTensor

_SMEM_BYTES = 227 * 1024 - 256  # shared memory of a block, less its barriers
_MAX_ROWS = 32
_MAX_CLUSTER = 8
# Numbers of experts among which a block finds its own. TMA copies multiples of 16 bytes, and more
# experts would not fit into registers.
_RANKED = range(4, 129, 4)
_PADDING = 8


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Tiling of `moe_chosen`.

    Attributes:
      up_n: hidden values of a block of the first launch, which has as many columns of gate and up.
      up_k, up_stages: rows of its weight tiles, and largest number of tiles in its ring.
      down_n: columns of a block of the second launch.
      down_k, down_stages: like `up_k` and `up_stages`, for the second launch.
      up_split, down_split: number of blocks that share K.
      sums: 1 if the second launch sums the parts of a single row, 0 if XLA does.
    """

    up_n: int = 64
    up_k: int = 64
    up_stages: int = 4
    down_n: int = 64
    down_k: int = 64
    down_stages: int = 6
    up_split: int = 1
    down_split: int = 1
    sums: int = 1

    def __post_init__(self):
        if self.sums not in (0, 1):
            raise ValueError(f"moe: sums must be 0 or 1, got {self.sums}")
        for name in ("up", "down"):
            fields = ("n", "k", "stages", "split")
            n, k, stages, split = (getattr(self, f"{name}_{field}") for field in fields)
            if n not in (64, 128):
                raise ValueError(f"moe: {name}_n must be 64 or 128, got {n}")
            if k not in (64, 128, 192, 256):
                raise ValueError(f"moe: {name}_k must be 64, 128, 192 or 256, got {k}")
            if stages < 2:
                raise ValueError(f"moe: {name}_stages must be at least 2, got {stages}")
            if not 1 <= split <= _MAX_CLUSTER:
                raise ValueError(f"moe: {name}_split must be in 1..{_MAX_CLUSTER}, got {split}")

    @classmethod
    def for_shape(
        cls, m: int, width: int, chosen: int, packed_up: bool = False, packed_down: bool = False
    ) -> "MoeConfig":
        """A tiling for an unmeasured shape.

        Wide blocks copy the rows less often. They need enough columns for all multiprocessors.
        Tiles of quantised weights have more rows. With a single row, one block for each slot and
        column would leave the unpacking to too few warps.
        """
        if m == 1:
            up_k, down_k = (256 if packed else 128 for packed in (packed_up, packed_down))
            stages = [2 if packed_up else 3, 3]
            splits = [2 if packed else 1 for packed in (packed_up, packed_down)]
            return cls(64, up_k, stages[0], 64, down_k, stages[1], *splits)
        wide = not packed_down and m * chosen * (width // 128) >= MULTIPROCESSORS
        return cls(
            up_k=256 if packed_up else 64,
            up_stages=3 if packed_up else 4,
            down_n=128 if wide else 64,
            down_k=256 if packed_down else 64,
            down_stages=4 if wide or packed_down else 6,
        )

    def tiles(
        self, name: str, weight: Array | QTensor, parts: int, dtype: Any
    ) -> DenseTiles | PackedTiles:
        """The tiles of a weight in the launch "up" or "down"."""
        n, k = getattr(self, f"{name}_n"), getattr(self, f"{name}_k")
        if isinstance(weight, QTensor):
            return PackedTiles.of(weight, parts, k, dtype)
        # Stores of rows are clipped only at the end of the whole result, so tiles must divide N.
        return DenseTiles(parts, math.gcd(n, weight.shape[-1]), k, jnp.dtype(dtype))


def moe_chosen(
    x: Array,
    experts: Array,
    weights: Array,
    gate_up: Array | QTensor,
    down: Array | QTensor,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    gate: str,
    logits: Array | None = None,
    live: Array | None = None,
    residual: Array | None = None,
    config: MoeConfig | None = None,
) -> Array:
    """`moe` for chosen experts, as two Mosaic GPU kernels.

    Args:
      x: [M,E] bfloat16 or float16, M at most 32.
      experts: [M,k] int32. X means no expert: nothing is read or added.
      weights: [M,k] fp32.
      gate_up, down, gate_up_bias, down_bias, gate: as for `moe`.
      logits: [1,X] fp32 for one row, or None. The first kernel then finds the experts itself, so it
        need not wait for `experts`. X must be in `_RANKED`.
      live: [1] bool, with `logits`: whether the row chooses any expert.
      residual: as for `moe`.
      config: default `MoeConfig.for_shape`.

    Returns:
      [M,E].

    Raises:
      NotImplementedError: shared memory has no room for the configuration.
    """
    (m, chosen), width = experts.shape, x.shape[1]
    if m == 0:
        return jnp.zeros_like(x)
    hidden_width, count = down.shape[-2], _count(down)
    if config is None:
        is_packed = isinstance(gate_up, QTensor), isinstance(down, QTensor)
        config = MoeConfig.for_shape(m, width, chosen, *is_packed)
    rows = -(-m // 8) * 8
    slots, pairs = slot_tables(experts, count)
    where = {"slots": slots}
    if logits is not None:
        live = jnp.ones((1,), jnp.int32) if live is None else live.astype(jnp.int32)
        where = {"logits": logits[0], "live": live}
    if m > 8:  # TMA fills up to 8 rows to a tile
        x = jnp.pad(x, ((0, rows - m), (0, 0)))
    tiles = config.tiles("up", gate_up, 2, x.dtype)
    operands = {"x": x[None], **where, **_arrays(gate_up, x.dtype)}
    if gate_up_bias is not None:
        operands["bias"] = gate_up_bias
    launch = functools.partial(_launch, rows=rows, slots=len(slots))
    hidden, slots = launch(
        operands,
        gate=gate,
        out=len(slots),
        n=hidden_width,
        tiles=tiles,
        stages=config.up_stages,
        split=config.up_split,
    )
    tiles = config.tiles("down", down, 1, x.dtype)
    operands = {"x": hidden, "slots": slots, **_arrays(down, x.dtype)}
    launch = functools.partial(launch, gate=None, n=width, tiles=tiles, stages=config.down_stages)
    launch = functools.partial(launch, split=config.down_split)
    if m == 1 and config.sums and len(slots) * config.down_split <= _MAX_CLUSTER:
        late = {"weights": weights[0], "down_bias": down_bias, "residual": residual}
        operands |= {name: operand for name, operand in late.items() if operand is not None}
        return launch(operands, out=1)[0]
    parts, _ = launch(operands | {"pairs": pairs}, out=m * chosen)
    parts = parts.reshape(m, chosen, -1).astype(jnp.float32)
    if down_bias is not None:
        parts = parts + down_bias[experts].astype(jnp.float32)
    is_expert = (experts < count)[:, :, None]  # a pair without an expert has no part
    total = jnp.sum(jnp.where(is_expert, parts * weights[:, :, None], 0.0), axis=1)
    total = total.astype(x.dtype)
    return total if residual is None else residual + total


def _count(w: Array | QTensor) -> int:
    return w.stack[0] if isinstance(w, QTensor) else len(w)


def _arrays(w: Array | QTensor, dtype: Any) -> dict[str, Array]:
    """The arrays of a weight by the names of its tiles."""
    if not isinstance(w, QTensor):
        return {"w": w}
    arrays = {"words": w.words, "scales": kernel_scales(w, dtype), "zeros": w.zeros}
    return {name: array for name, array in arrays.items() if array is not None}


def slot_tables(experts: Array, count: int) -> tuple[Array, Array]:
    """Tables of the expert of each slot, and of the pairs that choose it.

    Pair m·k + j is the j-th expert of row m. Each pair has a slot, which is empty if an earlier
    pair has the same expert. If there are fewer experts than pairs, each expert has a slot instead.

    Args:
      experts: [M,k] int32; X is no expert.
      count: X.

    Returns:
      (expert of each slot [S] int32, or -1; its pair of each row [S,32] int32, or -1), where
      S = min(X, M·k).
    """
    m, chosen = experts.shape
    padding = (0, _MAX_ROWS - m), (0, 0)
    number = np.arange(m * chosen, dtype=np.int32)
    if m == 1:  # with one row, no expert occurs twice
        pairs = np.pad(number[:, None], padding[::-1], constant_values=-1)
        return jnp.where(experts[0] < count, experts[0], -1), jnp.asarray(pairs)
    ids = experts.reshape(-1)
    if len(ids) <= count:
        one = ids
        earlier = (ids[:, None] == ids[None]) & (number[:, None] > number[None])
        is_live = (ids < count) & ~jnp.any(earlier, axis=1)
    else:
        one = jnp.arange(count, dtype=jnp.int32)
        is_live = jnp.any(one[:, None] == ids[None], axis=1)
    chooses = jnp.pad(experts, padding, constant_values=-1)[None] == one[:, None, None]
    pair = np.pad(number.reshape(m, chosen), padding)[None]
    return jnp.where(is_live, one, -1), jnp.max(jnp.where(chooses, pair, -1), axis=2)


_STATIC = "gate", "rows", "slots", "out", "n", "tiles", "stages", "split"


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(jax.jit, static_argnames=_STATIC)
def _launch(operands, *, gate, rows, slots, out, n, tiles, stages, split):
    """Launch a kernel with a block for each slot and each tile of columns.

    Args:
      operands: arrays by name: x [1 or S,<=rows,K], the arrays of the weight; slots [S], or logits
        [X] and live [1] of a single row; optional bias [X,2,N]. For the second launch, pairs
        [S,32], or to sum the parts of a single row, weights [S] and optional down_bias [X,N] and
        residual [1,N].
      gate: activation of the first launch, None for the second.
      rows: number of rows with padding.
      slots: S.
      out: the first dimension of the result.
      n: N.
      tiles: `DenseTiles` or `PackedTiles`.
      stages: largest number of tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K.

    Returns:
      ([out,rows,N], or for the second launch [out,N]; slots [S]).
    """
    x, block_n, block_k = operands["x"], tiles.block_n, tiles.block_k
    sums, by_row = "weights" in operands, gate is None
    shared_x, parts, steps = len(x) == 1, tiles.parts, -(-x.shape[2] // (block_k * split))
    # Blocks of a cluster. The first gets the products of the others.
    cluster = split * (slots if sums else 1)
    stage = tiles.stage | {"x": ((rows, block_k), jnp.dtype(x.dtype))}
    # The second launch stores rows one by one, so the buffer cannot be tiled. Padding keeps columns
    # of the sums on different banks.
    buffers = {"y": ((rows, block_n + by_row * _PADDING), x.dtype)}
    if cluster > 1:
        buffers["partial"] = ((cluster - 1, parts, block_n, rows), jnp.float32)
    if "bias" in operands:
        buffers["bias"] = ((2, block_n), operands["bias"].dtype)
    if "pairs" in operands:
        buffers["pairs"] = ((_MAX_ROWS,), jnp.int32)
    room = _SMEM_BYTES - shared_bytes(buffers)
    stages = min(stages, steps, room // shared_bytes(stage))
    if stages < min(2, steps):
        raise NotImplementedError(
            f"moe: tiles of {block_k} x {block_n} do not fit into shared memory at M = {rows}"
        )
    scratch = {
        name: (plgpu.SMEM if name in tiles.vectors else matrix)((stages, *shape), dtype)
        for name, (shape, dtype) in stage.items()
    }
    # Products take slices of x.
    shape, dtype = stage["x"]
    scratch["x"] = matrix((stages, *shape), dtype, most=tiles.unit * dtype.itemsize)
    scratch |= {name: plgpu.SMEM(*buffer) for name, buffer in buffers.items()}
    if not by_row:
        scratch["y"] = matrix(*buffers["y"])
    if cluster > 1:
        scratch["partial"] = matrix(*buffers["partial"])
        scratch["partial_arrived"] = plgpu.Barrier(num_arrivals=(cluster - 1) * parts)
    copies = parts * len(tiles.stage) + 1
    scratch["arrived"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    late_copies = 2 * ("bias" in operands) + ("pairs" in operands)
    if late_copies:
        scratch["late_arrived"] = plgpu.Barrier(num_arrivals=late_copies)

    shape = (out, n) if by_row else (out, rows, n)
    outs = {"y": jax.ShapeDtypeStruct(shape, x.dtype)}
    if "logits" in operands:
        outs["slots"] = jax.ShapeDtypeStruct((slots,), jnp.int32)

    def kernel(*refs):
        gmem = dict(zip((*operands, *outs), refs, strict=True))
        slot, rank = place()
        if "logits" in gmem:
            expert = jnp.where(gmem["live"][0] > 0, _expert_of_rank(gmem["logits"], slot), -1)

            @when((lax.axis_index("n") == 0) & (rank == 0))
            def _():
                gmem["slots"][slot] = expert
        else:
            expert = gmem["slots"][slot]

        def run():
            pl.run_scoped(lambda **smem: body(gmem, slot, expert, smem), **scratch)

        # All blocks of a cluster take part in its sum.
        run() if sums else when(expert >= 0)(run)

    def place():
        """(slot, part of K) of this block."""
        if sums and cluster > 1:
            at = lax.axis_index("part")
            return lax.div(at, split), lax.rem(at, split)
        slot = lax.axis_index("slot")
        return slot, lax.axis_index("part") if cluster > 1 else slot * 0

    def body(gmem, slot, expert, smem):
        expert, rank = jnp.maximum(expert, 0), place()[1]
        column = lax.axis_index("n")
        columns = pl.ds(column * block_n, block_n)
        zero = slot * 0  # slices may pass the end of an array unless their start is a constant
        all_rows = pl.ds(pl.multiple_of(zero, 8), rows)

        def fetch(step, at):
            """Copy a tile of the weight and of x into the ring; past K or M it is zero."""
            arrived, step = smem["arrived"].at[at], rank * steps + step
            for name, part, source in tiles.sources(gmem, expert, column, step):
                plgpu.copy_gmem_to_smem(source, smem[name].at[at, part], arrived)
            ks = pl.ds(step * block_k, block_k)
            source = gmem["x"].at[0 if shared_x else slot, all_rows, ks]
            plgpu.copy_gmem_to_smem(source, smem["x"].at[at], arrived)

        def arrive(step):
            at = lax.rem(step, stages)
            plgpu.barrier_wait(smem["arrived"].at[at])
            return at

        def free(step):
            @when((step >= 0) & (step + stages < steps))
            def _():
                fetch(step + stages, lax.rem(step, stages))

        def fetch_late():
            if "bias" in gmem:
                for part in range(2):
                    source = gmem["bias"].at[expert, part, columns]
                    plgpu.copy_gmem_to_smem(source, smem["bias"].at[part], smem["late_arrived"])
            if "pairs" in gmem:
                source = gmem["pairs"].at[slot]
                plgpu.copy_gmem_to_smem(source, smem["pairs"], smem["late_arrived"])

        for at in range(stages):
            fetch(at + zero, at)
        # Only the first block of a cluster waits for them, and no copy may outlive its block.
        if late_copies:
            fetch_late() if cluster == 1 else when(lax.axis_index("part") == 0)(fetch_late)
        late_operands = of_row(gmem, columns) if sums else None
        products = tiles.sums(smem, rows, steps, arrive, free)
        finish = functools.partial(store, gmem, smem, slot, columns, late_operands)
        if cluster == 1:
            finish([products])
            return
        part = lax.axis_index("part")
        when(part > 0)(functools.partial(send, smem, part, products))

        @when(part == 0)
        def _():
            plgpu.barrier_wait(smem["partial_arrived"])
            others = (
                [load(smem["partial"].at[i, j]) for j in range(parts)] for i in range(cluster - 1)
            )
            finish([products, *others])

    def send(smem, part, products):
        for at, values in enumerate(products):
            plgpu.async_store_smem(
                values,
                smem["partial"].at[part - 1, at],
                barrier=smem["partial_arrived"],
                cluster_idx=0,
                cluster_dim="part",
                optimized=False,
            )

    def store(gmem, smem, slot, columns, late_operands, by_block):
        """Turn the products of all blocks of a cluster into results, and store them."""
        zero = slot * 0
        all_rows = pl.ds(pl.multiple_of(zero, 8), rows)
        by_slot = [
            [
                functools.reduce(operator.add, values)
                for values in zip(*by_block[at : at + split], strict=True)
            ]
            for at in range(0, cluster, split)
        ]
        if sums:
            store_sum(gmem, smem, columns, [products[0] for products in by_slot], late_operands)
            return
        (products,) = by_slot
        if late_copies:
            plgpu.barrier_wait(smem["late_arrived"])
        if "bias" in gmem:
            for part in range(2):
                bias = load(smem["bias"].at[part], LAYOUT.reduce(1))
                products[part] += lax.broadcast_in_dim(bias, products[part].shape, [0])
        put(smem["y"].at[:, pl.ds(0, block_n)], gated(gate, *products) if gate else products[0])
        plgpu.commit_smem()
        if not by_row:
            plgpu.copy_smem_to_gmem(smem["y"], gmem["y"].at[slot, all_rows, columns])
        else:
            for row in range(rows):
                pair = smem["pairs"][row]

                @when(pair >= 0)
                def _(row=row, pair=pair):
                    source = smem["y"].at[row, pl.ds(0, block_n)]
                    plgpu.copy_smem_to_gmem(source, gmem["y"].at[pair, columns])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def vector(source):
        """Values of all columns, repeated for each row: [block_n, rows] fp32."""
        values = load(source, LAYOUT.reduce(1))
        return lax.broadcast_in_dim(values, (block_n, rows), [0])

    def of_row(gmem, columns):
        """(whether each slot has an expert, its weight, its bias or 0; the residual or None)."""
        own = []
        for slot in range(slots):
            expert = gmem["slots"][slot]
            has_bias, source = "down_bias" in gmem, jnp.maximum(expert, 0)
            bias = vector(gmem["down_bias"].at[source, columns]) if has_bias else 0.0
            own.append((expert >= 0, gmem["weights"][slot], bias))
        return own, vector(gmem["residual"].at[0, columns]) if "residual" in gmem else None

    def store_sum(gmem, smem, columns, results, late_operands):
        """Add the weighted results of all slots, and the residual, and store the row."""
        (own, residual), total = late_operands, 0.0
        for part, (is_expert, weight, bias) in zip(results, own, strict=True):
            part = (part.astype(x.dtype).astype(jnp.float32) + bias) * weight
            total += jnp.where(is_expert, part, jnp.zeros_like(part))
        if residual is not None:
            total = total.astype(x.dtype).astype(jnp.float32) + residual
        put(smem["y"].at[:, pl.ds(0, block_n)], total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["y"].at[0, pl.ds(0, block_n)], gmem["y"].at[0, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "moe_up_kernel" if gate else "moe_down_kernel"
    results = plgpu.kernel(
        kernel,
        out_type=tuple(outs.values()),
        **_grid(slots, n // block_n, sums, cluster),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    return results if "logits" in operands else (*results, operands["slots"])


def _grid(slots: int, columns: int, sums: bool, cluster: int) -> dict[str, Any]:
    # Blocks with neighbouring columns run at the same time.
    grid = dict(grid=(slots, columns), grid_names=("slot", "n"))
    if cluster == 1:
        return grid
    if sums:
        grid = dict(grid=(columns,), grid_names=("n",))
    return grid | dict(cluster=(cluster,), cluster_names=("part",))


def _expert_of_rank(logits, rank):
    """Index of the expert at place `rank`, from 0, of the logits [X] in descending order."""
    count = logits.shape[0]
    padded = -(-count // 64) * 64

    def find(copy, copied):
        # TMA fills up the copy. Its end is masked below.
        plgpu.copy_gmem_to_smem(logits.at[pl.ds(rank * 0, padded)], copy, copied)
        plgpu.barrier_wait(copied)
        return _ranked(copy, count, rank)

    return pl.run_scoped(find, plgpu.SMEM((padded,), jnp.float32), plgpu.Barrier())


def _ranked(logits, count, rank):
    """`_expert_of_rank` for logits in shared memory, of which the first `count` are experts."""
    size = logits.shape[0]
    index, other_index = (
        plgpu.broadcasted_iota(jnp.int32, (size, size), axis, layout=LAYOUT) for axis in range(2)
    )
    own, other = (
        lax.broadcast_in_dim(load(logits, LAYOUT.reduce(1 - axis)), (size, size), [axis])
        for axis in range(2)
    )
    if count < size:
        own, other = (
            jnp.where(at < count, values, -jnp.inf)
            for values, at in ((own, index), (other, other_index))
        )
    is_larger = (other > own) | ((other == own) & (other_index < index))
    ranks = jnp.where(is_larger, 1.0, 0.0).sum(axis=1)
    at = plgpu.broadcasted_iota(jnp.int32, ranks.shape, 0, layout=LAYOUT.reduce(1))
    found = jnp.where(ranks == rank.astype(jnp.float32), at.astype(jnp.float32), 0.0).sum()
    # With NaN, several experts have the same rank.
    return jnp.minimum(found.astype(jnp.int32), count - 1)


# (up_n, up_k, up_stages, down_n, down_k, down_stages). The launches are timed separately, so each
# candidate tries a tiling of both.
CANDIDATES = tuple(
    MoeConfig(*c)
    for c in (
        *((64, 64, 4, 64, 64, 6), (64, 64, 8, 128, 64, 4), (64, 128, 3, 64, 128, 4)),
        *((128, 64, 3, 128, 128, 3), (64, 64, 3, 64, 64, 3), (64, 128, 5, 128, 64, 6)),
    )
)


# Bricks of quantised weights are 64 columns wide.
PACKED_CANDIDATES = tuple(
    MoeConfig(*c)
    for c in (
        *((64, 256, 3, 64, 256, 4, 2, 2), (64, 128, 5, 64, 128, 6, 2, 2)),
        *((64, 256, 5, 64, 256, 6), (64, 128, 3, 64, 128, 4, 4, 2), (64, 256, 2, 64, 256, 3)),
    )
)


def _candidates(shape: Shape) -> tuple[MoeConfig, ...]:
    return PACKED_CANDIDATES if any(kind in shape for kind in BITS) else CANDIDATES


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    group = next((shape[kind] for kind in BITS if kind in shape), None)
    if group is not None and not takes_group(group, shape["width"]):
        return f"takes groups of 32, 64, 128, multiples of 256 or all rows, got {group}"
    if shape["m"] > _MAX_ROWS:
        return f"takes up to {_MAX_ROWS} rows, got {shape['m']}"
    return misfit(shape)


def _run(
    x,
    logits,
    gate_up,
    down,
    bias,
    *biases,
    routing,
    gate,
    live,
    config,
    batch_invariant,
    residual=None,
):
    experts, weights = route(logits, routing, bias)
    experts = only_live(experts, live, routing)
    options = {}
    by_logits = routing.features <= {"normalised", "scale"}
    if len(x) == 1 and by_logits and routing.experts in _RANKED:
        options = {"logits": logits.astype(jnp.float32), "live": live}
    operands = x, experts, weights, gate_up, down, *biases
    return moe_chosen(*operands, gate=gate, residual=residual, config=config, **options)


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True on a GPU: an H100 ran the kernels at 10 to 13 times the speed of XLA's."""
    return capability is not None


MOE_CHOSEN = Implementation(
    *("moe", "mosaic_gpu", _run),
    can=ROUTING_FEATURES
    | {"biases", "gate.clamped_swiglu", "residual"}
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}"}),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=MoeConfig,
    candidates=_candidates,
)
