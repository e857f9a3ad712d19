"""The linear layers between two attentions of a decode step, as one persistent kernel for Hopper.

Output projection, gate and up, down, and Q, K and V of the next layer read 405 MB of weights in
Llama 2 7B. As four launches, each would start and end with about 2 us of idle memory. Here every
block of the grid runs all four products, with a barrier of all blocks between two of them. One
warpgroup multiplies, one loads x, one loads weights. Loading the next weights does not depend on
the barrier, so it continues while blocks wait for each other, as long as there is room.

The design rests on these points, measured on an H100 (benchmarks/LOG.md, 2026-11-22):

* All columns of a product are in flight at once, in rows of memory that are as wide as possible
  (see the tiles in `linear_layers`). If N gives too few blocks, two blocks of a cluster share K.
* Few tiles of 32 kB are in flight per block. With more, memory is read in a worse order.
* A reply of the memory system queues behind the replies in flight. So a block requests weights of
  the next product, except the first few (`ahead`), only after its part of this product is done.
* No product normalises its own input. The product before it writes x · scale and the sums of
  squares of x, which later scale the accumulators.
* The counters of finished tiles are zeroed once for all layers of a step.

The blocks wait for each other, so all 132 must run at once, one on each multiprocessor. A plan asks
the device whether it has as many. Two processes that share a GPU through MPS run their kernels side
by side and could wait for each other's blocks forever. There, name "xla" for `linear_chain`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.pallas_kernels.dispatch import Implementation, Shape, never
from fdjax.pallas_kernels.hopper.persistent.counters import new_counters
from fdjax.pallas_kernels.hopper.persistent.launch import launch
from fdjax.pallas_kernels.hopper.persistent.linear_layers import (
    after_attention,
    products_fit,
    products_memory,
    projection,
    room_for,
)
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK


@dataclasses.dataclass(frozen=True)
class LinearChainConfig:
    """How many tiles of weights, of 32 kB each, a block has in flight.

    The default is within about a percent of the best; tables hold the best (benchmarks/LOG.md).

    Attributes:
      shared: tiles in products where two blocks share K, so that nearly all blocks have work.
      alone: tiles in other products, where 96 or fewer blocks have work.
      ahead: tiles of the next product that a block requests while it still works on this one.
    """

    shared: int = 2
    alone: int = 2
    ahead: int = 0

    def __post_init__(self):
        if self.shared < 1 or self.alone < 1 or self.ahead < 0:
            raise ValueError(
                f"linear_chain: must have shared and alone >= 1 and ahead >= 0, got {self}"
            )


def chain_counters(chains: int) -> Any:
    """A reference to zeros [chains, ...] int32: one row per chain of a step, to be used once."""
    return new_counters(chains)


def chain_mosaic(
    o, x, counters, index, *, out, mlp_norm, gate_up, down, next_norm, following, gate, config=None
):
    """`linear_chain` of o [M,H·D] and x [M,E], for sizes that `CHAIN_HOPPER` supports."""
    m = len(x)
    if m > 8 and m % 8:  # TMA zero-fills a single tile of rows, but not the last of several.
        o, x = (jnp.pad(a, ((0, -m % 8), (0, 0))) for a in (o, x))
    layer = {
        "out": out,
        "mlp_scale": mlp_norm.scale,
        "gate_up": gate_up,
        "down": down,
        "next_scale": next_norm.scale,
        "next": following,
    }
    operands = {
        "o": o,
        "x": x,
        **{name: array[None] for name, array in layer.items()},
        "index": jnp.asarray(index, jnp.int32).reshape(1),
        "counters": counters,
    }
    config = config or LinearChainConfig()
    x, y = _launch(operands, gate=gate, eps=mlp_norm.eps, config=config)
    return x[:m], y[:m]


# Jitted separately, so that layers share one lowering.
@functools.partial(jax.jit, static_argnames=("gate", "eps", "config"))
def _launch(operands, *, gate, eps, config):
    m, width = operands["x"].shape
    dtype = operands["x"].dtype
    padded = -(-m // 8) * 8
    _, heads, _ = operands["out"].shape
    _, hidden, _ = operands["down"].shape
    _, _, following = operands["next"].shape
    stages = _stages(width, heads, hidden, following, gate, eps)
    results = {
        "x_out": ((m, width), dtype),
        "y": ((m, following), dtype),
        "mlp_x": ((padded, width), dtype),
        "mlp_squares": ((width // BRICK, padded), jnp.float32),
        "hidden": ((padded, hidden), dtype),
        "next_x": ((padded, width), dtype),
        "next_squares": ((width // BRICK, padded), jnp.float32),
    }
    made = launch(
        *("chain_kernel", operands, results, stages),
        layers=1,
        memory=products_memory(stages, rows=padded, width=width, dtype=dtype),
        config=config,
        registers=(232, 104, 40),
    )
    return made["x_out"], made["y"]


def _stages(width: int, heads: int, hidden: int, following: int, gate: str, eps: float):
    return (
        *after_attention(width=width, heads=heads, hidden=hidden, gate=gate, eps=eps),
        projection("next", width=width, n=following, eps=eps),
    )


def _fits(shape: Shape) -> str | None:
    sizes = tuple(shape[name] for name in ("k", "width", "hidden", "n"))
    m, (k, width, hidden, n) = shape["m"], sizes
    if problem := products_fit(shape, sizes):
        return problem
    return room_for(_stages(width, k, hidden, n, "silu", 0.0), rows=m, width=width)


def _run(o, x, counters, index, *, plan, **keywords):
    return chain_mosaic(o, x, counters, index, **keywords)


# The default, the fastest on an H100, and the fastest on an H200, whose memory is faster.
CHAIN_CANDIDATES = (
    LinearChainConfig(),
    LinearChainConfig(ahead=2),
    LinearChainConfig(alone=3, ahead=2),
)


def _candidates(shape: Shape) -> tuple[LinearChainConfig, ...]:
    return CHAIN_CANDIDATES


CHAIN_HOPPER = Implementation(
    *("linear_chain", "mosaic_gpu", _run),
    # Features of a decoder block. Its norms are operands, with their offsets already added.
    can=frozenset({"qk_norm", "norm_offset"}),
    fits=_fits,
    heuristic=never,
    capabilities=((9, 0), (9, 1)),
    config=LinearChainConfig,
    candidates=_candidates,
    forced=False,
)
