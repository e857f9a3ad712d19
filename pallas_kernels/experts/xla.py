"""`moe` through XLA: a loop over tiles of rows that chose the same expert.

`lax.ragged_dot` does not help on a CPU. XLA multiplies all rows by the weights of all experts
there: with 32 experts, 256 rows took 140 times as long as in one product. And a NaN in an expert
that no row chose would reach all rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.dispatch import Implementation
from fdjax.pallas_kernels.experts.routing import ROUTING_FEATURES, Routing, only_live, route
from fdjax.pallas_kernels.gemm.xla import matmul_xla
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES, QTensor, dequantise
from fdjax.pallas_kernels.row_tiles import PREFILL_TILE, in_row_tiles

# Rows of a tile if bits must not depend on the batch: in the decode phase and in prefill.
_FIXED_ROWS = 8, 32
# The largest number of rows of a tile otherwise.
_MOST_ROWS = 128


def tile_rows(m: int, routing: Routing, batch_invariant: bool) -> int:
    """Rows of a tile.

    If bits must not depend on the batch, it has one value in the decode phase and one in prefill,
    as in `in_row_tiles`. Otherwise it follows the mean number of rows of an expert.
    """
    if batch_invariant:
        return _FIXED_ROWS[m >= PREFILL_TILE]
    mean = m * routing.chosen // routing.experts
    return min(_MOST_ROWS, 2 ** mean.bit_length())


def moe_xla(
    x, experts, weights, gate_up, down, gate_up_bias=None, down_bias=None, *, gate: str, tile: int
) -> Array:
    """Sum of the results of `experts` [M,k] times `weights` [M,k], in tiles of `tile` rows.

    An index X stands for no expert.

    Results are added to a row in the order of the experts. At any time, only the weights of one
    tile's expert are dequantised.
    """
    m, chosen = experts.shape
    # The pairs of a row and an expert, in the order of the experts.
    pairs = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    count = jax.tree.leaves(down)[0].shape[0]
    counts = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)
    tiles = -(-counts // tile)
    pair_ends, tile_ends = jnp.cumsum(counts), jnp.cumsum(tiles)
    product = functools.partial(matmul_xla, norm=None, residual=None, dtype=x.dtype)

    def one(i, total):
        expert = jnp.searchsorted(tile_ends, i, side="right").astype(jnp.int32)
        first = i - (tile_ends[expert] - tiles[expert])
        place = pair_ends[expert] - counts[expert] + first * tile
        place = place + jnp.arange(tile, dtype=jnp.int32)
        pair = pairs[jnp.minimum(place, m * chosen - 1)]
        row = pair // chosen

        def own(w):
            w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, expert, keepdims=False), w)
            return dequantise(w, x.dtype) if isinstance(w, QTensor) else w

        hidden = product(x[row], own(gate_up), bias=own(gate_up_bias), gate=gate)
        part = product(hidden, own(down), bias=own(down_bias), gate=None).astype(jnp.float32)
        # Without the barrier, product and sum may be rounded once or twice.
        part = lax.optimization_barrier(part * weights.reshape(-1)[pair][:, None])
        # Pairs past the end belong to another expert.
        row = jnp.where(place < pair_ends[expert], row, m)
        return total.at[row].add(part, mode="drop")

    total = lax.fori_loop(0, tile_ends[-1], one, jnp.zeros(x.shape, jnp.float32))
    return total.astype(x.dtype)


def _run(x, logits, gate_up, down, bias, *biases, routing, gate, live, config, batch_invariant):
    choose = functools.partial(route, routing=routing, bias=bias)
    experts, weights = in_row_tiles(choose, logits) if batch_invariant else choose(logits)
    experts = only_live(experts, live, routing)
    tile = tile_rows(len(x), routing, batch_invariant)
    return moe_xla(x, experts, weights, gate_up, down, *biases, gate=gate, tile=tile)


_CAN = ROUTING_FEATURES | WEIGHT_FEATURES | {"biases", "gate.clamped_swiglu"}
MOE_XLA = Implementation("moe", "xla", _run, can=_CAN)
