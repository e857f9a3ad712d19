"""All layers of a decode step, as one persistent kernel for Hopper.

Every block of the grid runs Q, K and V, attention, output projection, gate and up, and down of one
layer after the other. Between two of them is a barrier of all blocks; one row is sent in words
instead, see `persistent.words`. One warpgroup computes, or two if weights or caches are quantised.
One loads the inputs of products. One loads weights, keys and values through a single ring. These
do not depend on the results of other blocks, so their loads continue while blocks wait for each
other. See `chain_mosaic` for the products, `heads` for attention, `digits` and `halves` for the
activations beside quantised weights.

Weights and caches are stacked over the layers: separate arrays would need hundreds of descriptors.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from fdjax.pallas_kernels.attention.cache import cache_features, features_of
from fdjax.pallas_kernels.attention.hopper.cache_row import by_name, check_pages
from fdjax.pallas_kernels.attention.operands import row_slots, slots_are_tiled
from fdjax.pallas_kernels.dispatch import Capability, Implementation, Shape
from fdjax.pallas_kernels.hopper.persistent import words
from fdjax.pallas_kernels.hopper.persistent.counters import new_counters
from fdjax.pallas_kernels.hopper.persistent.exchange import new_inbox
from fdjax.pallas_kernels.hopper.persistent.launch import launch
from fdjax.pallas_kernels.hopper.persistent.linear_layers import (
    after_attention,
    products_fit,
    products_memory,
    projection,
    room_for,
)
from fdjax.pallas_kernels.hopper.persistent.memory import Packing
from fdjax.pallas_kernels.hopper.persistent.product import Product
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, CLUSTERS, PARTS
from fdjax.pallas_kernels.layers.hopper.heads import (
    HEAD_DIM,
    Heads,
    heads_memory,
    new_parts,
)
from fdjax.pallas_kernels.quantised import BITS, BRICKS, QTensor

# Registers of each warpgroup, see `launch`.
_REGISTERS = 240, 128, 120
_CODES_REGISTERS = 168, 104, 72
_PACKED_REGISTERS = 184, 72, 72

# Quantised weights: the largest number of rows, and groups of rows that share a scale; 0 is all.
_MAX_PACKED_ROWS = 16
_PACKED_GROUPS = 0, 64, 128


@dataclasses.dataclass(frozen=True)
class DecodeLayersConfig:
    """How many tiles of 32 kB a block has in flight.

    Attributes:
      shared: tiles in products where two blocks share K, so that nearly all blocks have work.
      alone: tiles in other products, where 96 or fewer blocks have work.
      cache: tiles of keys and values.
      ahead: tiles of the next stage that a block requests while it still works on this one.
      clusters: most clusters of two blocks that share a KV head.
    """

    shared: int = 2
    alone: int = 2
    cache: int = 4
    ahead: int = 2
    clusters: int = 1

    def __post_init__(self):
        if min(self.shared, self.alone, self.cache, self.clusters) < 1 or self.ahead < 0:
            raise ValueError(
                "decode_layers: must have shared, alone, cache and clusters >= 1 and ahead >= 0, "
                f"got {self}"
            )


def layers_mosaic(
    x, k, v, lengths, cos, sin, *, weights, eps, gate, scale, pages=None, ranks=1, config=None
):
    """`decode_layers`, for sizes that `LAYERS_HOPPER` supports."""
    m, d = len(x), k.shape[-1]
    check_pages("decode_layers", k, pages, BRICK)
    width, dtype = x.shape[1], x.dtype
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    x32 = x.astype(jnp.float32)
    packing = _packing(weights, m)
    next_x = x32 * weights.attention_norm[:1].astype(jnp.float32)
    if packing:
        next_x = packing.coding.coded(next_x[: 1 if m == 1 else None])
    else:
        next_x = next_x.astype(dtype)
    squares = (x32 * x32).reshape(len(x), width // BRICK, BRICK).sum(axis=2).T
    k, v = (jax.tree.map(jax.new_ref, cache) for cache in (k, v))
    operands = {
        "x": x,
        "next_x": next_x,
        "next_squares": squares,
        **by_name(k, v),
        "lengths": lengths.astype(jnp.int32),
        "pages": None if pages is None else pages.astype(jnp.int32),
        "cos": cos.reshape(m, d // 2),
        "sin": sin.reshape(m, d // 2),
        **_products(weights),
        "mlp_scale": weights.mlp_norm,
        "next_scale": weights.attention_norm,
    }
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    slots = row_slots(k, pages)
    shared = max(n for n in (1, 2, 4) if n <= _most_clusters(m, k.shape[2], slots))
    if config is None:
        config = DecodeLayersConfig(clusters=shared)
    elif features_of(k):  # tables are measured without int8, whose tiles take longer to compute
        config = dataclasses.replace(config, clusters=max(config.clusters, shared))
    sizes = {
        "heads": weights.out.shape[-2],
        "hidden": weights.down.shape[-2],
        "n": math.prod(weights.qkv.shape[1:] if packing else weights.qkv.shape[2:]),
    }
    x = _launch(
        operands,
        rows=m,
        slots=slots,
        sizes=sizes,
        gate=gate,
        eps=eps,
        scale=scale,
        packing=packing,
        ranks=ranks,
        config=config,
    )
    return x[:m], *(jax.tree.map(jax.freeze, cache) for cache in (k, v))


def _products(weights) -> dict[str, jax.Array]:
    """Operands of the products by name: weights, or packed bricks and their scales."""
    named = {name: getattr(weights, name) for name in ("qkv", "out", "gate_up", "down")}
    if not isinstance(weights.out, QTensor):
        named["qkv"] = weights.qkv.reshape(*weights.qkv.shape[:2], -1)
        return named
    words = {name: w.words.reshape(-1, *w.words.shape[-3:]) for name, w in named.items()}
    factors = {f"{name}_scales": w.scales for name, w in named.items()}
    if weights.out.zeros is not None:
        factors |= {f"{name}_zeros": w.zeros for name, w in named.items()}
    return words | factors


def _packing(weights, rows) -> Packing | None:
    w = weights.out
    if not isinstance(w, QTensor):
        return None
    group = 0 if w.group == w.shape[0] else w.group
    return _packing_of(w.kind, group, w.scales.dtype, rows, w.zeros is not None)


def _packing_of(kind: str, group: int, scales, rows: int, zeros: bool) -> Packing:
    # Sums of more columns would not fit into registers.
    wide = 48 // (-(-rows // 8) * 8)
    return Packing(kind, group or None, jnp.dtype(scales), wide, rows, zeros)


def _launch(operands, *, rows, slots, sizes, gate, eps, scale, packing, ranks, config):
    padded, width = operands["x"].shape
    dtype = operands["x"].dtype
    layers, _, kv_heads, _, d = operands["k"].shape
    heads, hidden, n = sizes["heads"], sizes["hidden"], sizes["n"]
    parts = n // (kv_heads * d)
    group = parts - 2
    int8 = "k_scales" in operands
    stages = _stages(
        *(rows, width, heads, hidden, n),
        *(kv_heads, group, slots),
        gate=gate,
        eps=eps,
        scale=scale,
        packing=packing,
        ranks=ranks,
        clusters=config.clusters,
        int8=int8,
    )
    results = {"x_out": ((padded, width), dtype)}
    next_x, next_squares = operands.pop("next_x"), operands.pop("next_squares")
    first_words = None
    # int4 is faster with barriers (benchmarks/LOG.md, 2026-11-27). More rows need too many words.
    if rows == 1 and not packing:
        sent, first_words = words.new_words(
            {
                "next_x": words.as_words(next_x[0]),
                "next_squares": words.as_pairs(next_squares[:, 0]),
            },
            {
                "o": heads,
                "mlp_x": width,
                "mlp_squares": 2 * width // BRICK,
                **{s.y: s.tiles * s.wide * BRICK for s in (stages[0], stages[-2])},
            },
        )
        operands["words"] = jax.new_ref(sent)
    else:
        operands |= {
            "next_x": jax.new_ref(next_x),
            "next_squares": jax.new_ref(next_squares),
            "counters": new_counters(layers),
        }
        results |= {
            "y": ((padded, kv_heads, parts, d), dtype),
            "o": ((padded, kv_heads, group, d), dtype),
            "mlp_x": ((padded, width), dtype),
            "mlp_squares": ((width // BRICK, padded), jnp.float32),
            "hidden": ((padded, hidden), dtype),
        }
        if packing:
            for name, columns in {"o": heads, "mlp_x": width, "hidden": hidden}.items():
                results[name] = (columns // BRICK, *packing.brick_of_x), jnp.int32
    if ranks > 1:
        operands["inbox"] = new_inbox(ranks, padded, width)
    if (clusters := stages[1].clusters) > 1:
        operands["parts"] = new_parts(rows, kv_heads, clusters)
    products = [stage for stage in stages if isinstance(stage, Product)]
    sends_words = first_words is not None
    memory = products_memory(
        products, rows=padded, width=width, dtype=dtype, sends_words=sends_words
    )
    registers = _PACKED_REGISTERS if packing else _CODES_REGISTERS if int8 else _REGISTERS
    made = launch(
        *("layers_kernel", operands, results, stages),
        layers=layers,
        memory=memory | heads_memory(dtype, int8, sends_words, packing and packing.coding),
        config=config,
        registers=registers,
        approx_math=True,
        packing=packing,
        words=first_words,
        codes=int8,
    )
    return made["x_out"]


def _stages(
    m,
    width,
    heads,
    hidden,
    n,
    kv_heads,
    group,
    cache_slots,
    *,
    gate,
    eps,
    scale,
    packing=None,
    ranks=1,
    clusters=1,
    int8=False,
):
    # Blocks that share a head finish it sooner. With many heads, sharing would only add work.
    split = 2 if m * kv_heads <= CLUSTERS else 1
    clusters = max(1, min(clusters, CLUSTERS // (m * kv_heads)))
    return (
        projection("qkv", width=width, n=n, eps=eps, packing=packing),
        Heads(m, kv_heads, group, cache_slots, split, scale, clusters, int8),
        *after_attention(
            width=width,
            heads=heads,
            hidden=hidden,
            gate=gate,
            eps=eps,
            packing=packing,
            ranks=ranks,
        ),
    )


def _fits(shape: Shape) -> str | None:
    m, width, hidden, heads, n = (shape[key] for key in ("m", "width", "hidden", "k", "n"))
    if problem := products_fit(shape, (width, heads, hidden)):
        return problem
    parts = n // (shape["hkv"] * shape["d"])
    if shape["d"] != HEAD_DIM or parts > PARTS:
        return (
            f"takes D of {HEAD_DIM} and up to {PARTS - 2} queries per KV head, "
            f"got {shape['d']} and {parts - 2}"
        )
    if problem := slots_are_tiled(shape):
        return problem
    packing = None
    if kind := next((kind for kind in BITS if kind in shape), None):
        group = shape[kind]
        if "ranks" in shape or m > _MAX_PACKED_ROWS or group not in _PACKED_GROUPS:
            return (
                f"takes quantised weights on one device, with up to {_MAX_PACKED_ROWS} rows and "
                f"groups of 64, 128 or all rows, got {m} rows and groups of {group or 'all'}"
            )
        if "zeros" in shape and not group:
            return "takes zeros only with groups of 64 or 128 rows"
        packing = _packing_of(kind, group, jnp.float32, m, "zeros" in shape)
    sizes = m, width, heads, hidden, n, shape["hkv"], parts - 2, shape["s"]
    stages = _stages(*sizes, gate="silu", eps=0.0, scale=1.0, packing=packing)
    # An int8 cache takes at least as much.
    others = heads_memory(jnp.bfloat16, int8=True, coding=packing and packing.coding)
    return room_for(stages, rows=m, width=width, others=others, packing=packing)


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True for quantised weights and up to 8 rows.

    1 and 8 rows were faster than layer by layer (benchmarks/LOG.md, 2026-11-27 for int4,
    2026-11-30 for int8 and fp8). More rows were not measured. Zeros were not timed: they add a
    fifth to the instructions of a product, and layer by layer takes half as long again.
    """
    return capability is not None and shape["m"] <= 8 and any(kind in shape for kind in BITS)


# The fastest on an H100 and on an H200, whose memory is faster.
LAYERS_CANDIDATES = (
    DecodeLayersConfig(),
    DecodeLayersConfig(alone=3),
    DecodeLayersConfig(alone=3, ahead=3),
)


def _most_clusters(rows: int, kv_heads: int, slots: int) -> int:
    """Most clusters that may share a KV head: each block has at least two tiles of the cache."""
    return max(1, min(CLUSTERS // (rows * kv_heads), slots // (4 * BRICK)))


def _candidates(shape: Shape) -> tuple[DecodeLayersConfig, ...]:
    most = _most_clusters(shape["m"], shape["hkv"], shape["s"])
    shared = (
        DecodeLayersConfig(alone=alone, clusters=n)
        for n in (2, 4, 8)
        if n <= most
        for alone in (2, 3)
    )
    return *LAYERS_CANDIDATES, *shared


LAYERS_HOPPER = Implementation(
    *("decode_layers", "mosaic_gpu", layers_mosaic),
    # Features of a decoder block. The kernel uses a running maximum and ignores φ.
    can=frozenset({"attention.rope", "attention.phi", "attention.unified", "tensor_parallel"})
    | {"weight.int4", "weight.int8", "weight.fp8", "weight.zeros", f"weight.layout.{BRICKS}"}
    | {"weight.rounded_activations"}  # which may be in fp8, but need not
    | cache_features("int8"),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=DecodeLayersConfig,
    candidates=_candidates,
    parts=("matmul", "linear_chain", "decode_attention"),
    forced=False,
)
