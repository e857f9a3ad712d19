"""The linear layers of a decoder layer as stages of a persistent kernel."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fdjax.pallas_kernels.dispatch import Shape, needs_half
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.persistent import handover
from fdjax.pallas_kernels.hopper.persistent.exchange import ROUNDS, Exchange
from fdjax.pallas_kernels.hopper.persistent.memory import NO_MEMORY, Memory, Packing, with_rings
from fdjax.pallas_kernels.hopper.persistent.packed_product import PackedProduct
from fdjax.pallas_kernels.hopper.persistent.product import InputNorm, Product, Scaled
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, CLUSTERS, MAX_ROWS, TILE_BRICKS
from fdjax.pallas_kernels.hopper.persistent.stage import Stage


def projection(
    weight: str, *, width: int, n: int, eps: float, packing: Packing | None = None
) -> Product:
    """Projection of the residual stream [M, width] to Q, K and V, n columns in all."""
    # Tiles are wide if there are still enough of them for all blocks.
    n //= BRICK
    if packing:
        norm = InputNorm("next_squares", eps)
        return _packed(packing, weight, "next_x", width // BRICK, n, norm=norm, y="y")
    wide = 2 if n >= CLUSTERS * 2 else 1
    deep, norm = TILE_BRICKS // wide, InputNorm("next_squares", eps)
    return Product(weight, "next_x", width // BRICK, n, wide, deep, 1, norm=norm, y="y")


def after_attention(
    *,
    width: int,
    heads: int,
    hidden: int,
    gate: str,
    eps: float,
    packing: Packing | None = None,
    ranks: int = 1,
) -> tuple[Product, Product, Product]:
    """Three stages: output projection of o [M, heads], gate and up, and down to [M, width].

    Each of `ranks` devices has a part of heads and of hidden. They sum the results of the output
    projection and of down.
    """
    width, heads, hidden = (size // BRICK for size in (width, heads, hidden))
    mlp = Scaled("mlp_x", "mlp_scale", "mlp_squares")
    following = Scaled("next_x", "next_scale", "next_squares", next_layer=True)
    norm = InputNorm("mlp_squares", eps)
    sums = [Exchange(ranks, i) if ranks > 1 else None for i in range(ROUNDS)]
    out = {"residual": "x", "scaled": mlp, "exchange": sums[0]}
    down = {"y": "x_out", "scaled": following, "exchange": sums[1]}
    if packing:
        return (
            _packed(packing, "out", "o", heads, width, **out),
            _packed(packing, "gate_up", "mlp_x", width, hidden, gate, norm=norm, y="hidden"),
            _packed(packing, "down", "hidden", hidden, width, **down),
        )
    # A device's part of an MLP is narrow: with wide tiles, a third of the blocks would have work.
    wide = 1 if ranks > 1 and hidden < CLUSTERS * 2 else 2
    deep = TILE_BRICKS // (2 * wide)
    # Two blocks share K if each cluster then has one tile. In a second round, few would have work.
    split = 2 if width <= CLUSTERS else 1
    return (
        Product("out", "o", heads, width, 1, TILE_BRICKS, split, **out),
        Product("gate_up", "mlp_x", width, hidden, wide, deep, 1, gate, norm, y="hidden"),
        Product("down", "hidden", hidden, width, 1, TILE_BRICKS, split, **down),
    )


def _packed(
    packing: Packing, weight: str, x: str, k: int, n: int, gate: str | None = None, **fields: Any
) -> PackedProduct:
    """A product with quantised weights. Two blocks share K: it keeps nearly all blocks at work."""
    parts = 2 if gate else 1
    # One wide tile for a cluster saves time between tiles, but takes registers.
    most = min(packing.wide, packing.bricks // 2) // parts
    wide = 1 if "scaled" in fields else max(min(-(-n // CLUSTERS), most), 1)
    most = packing.bricks // (parts * wide) // 2 * 2
    # There are few tiles, so the last one should not be mostly empty.
    deep = min(range(most, 0, -2), key=lambda deep: -(-k // (2 * deep)) * (deep + 1))
    return PackedProduct(weight, x, k, n, wide, deep, 2, gate, packing=packing, **fields)


def products_memory(
    stages: Sequence[Product], *, rows: int, width: int, dtype: Any, sends_words: bool = False
) -> Memory:
    """Shared memory of these stages for a residual stream [rows, width].

    `sends_words` is the property of `Block`.
    """
    adding = next(stage for stage in stages if stage.scaled)
    rounds = -(-adding.tiles * adding.split // MULTIPROCESSORS)
    square_tiles = -(-width // BRICK**2)
    wide = max(stage.wide for stage in stages)
    packed = any(isinstance(stage, PackedProduct) for stage in stages)
    most = max(stage.pieces for stage in stages)
    shared = {stage.pieces for stage in stages if stage.split > 1}
    if sends_words:
        stored, arrived = {}, {"factor_arrived": 1}
    else:
        stored = {
            "y": ((wide, rows, BRICK), dtype),
            "squares": ((square_tiles, BRICK, rows), jnp.float32),
        }
        arrived = dict.fromkeys(("mlp_squares_arrived", "next_squares_arrived"), square_tiles)
    sums, made = {}, {}
    if packed:
        sums = {"sums": handover.places(most, rows)}
        pieces = max(stage.wide for stage in stages if stage.results)
        made = {
            "made": ((pieces, *stages[0].packing.brick_of_x), jnp.int32),  # coded results
            "largest": ((4 * pieces * rows,), jnp.float32),
        }
    return Memory(
        matrices={
            "residual": ((rounds, rows, BRICK), dtype),  # the residual stream, this block's part
            **stored,
        },
        vectors={
            "partial": handover.places(max(shared, default=1), rows),
            **sums,
            **made,
            "square_row": ((rows,), jnp.float32),
            "factors": ((rows,), jnp.float32),
        },
        barriers={
            "residual_arrived": rounds,
            **arrived,
            **({"sums_made": 1, "sums_read": 1} if packed else {}),
        },
    )


def products_fit(shape: Shape, sizes: tuple[int, ...]) -> str | None:
    """Check for `Implementation.fits`: whether products can run these sizes.

    Args:
      shape: shape of the op, with the residual stream [m, width].
      sizes: K and N of all products.
    """
    if problem := needs_half(shape):
        return problem
    if not 1 <= shape["m"] <= MAX_ROWS:
        return f"takes 1..{MAX_ROWS} rows, got {shape['m']}"
    if any(size % BRICK for size in sizes):
        return f"needs sizes that are multiples of {BRICK}, got {sizes}"
    # TMA zero-fills a single tile of 8 sums of squares, but not the last of several tiles.
    if (width := shape["width"]) // BRICK > 8 and width % (8 * BRICK):
        return f"needs a width of up to {8 * BRICK} or a multiple of it, got {width}"
    return None


def room_for(
    stages: Sequence[Stage],
    *,
    rows: int,
    width: int,
    others: Memory = NO_MEMORY,
    packing: Packing | None = None,
) -> str | None:
    """Check for `Implementation.fits`: whether shared memory holds stages in half precision.

    Args:
      stages: the stages of one layer.
      rows, width: shape of the residual stream.
      others: shared memory of the stages that are not products.
    """
    dtype = jnp.dtype(jnp.bfloat16)
    padded = -(-rows // 8) * 8
    products = [stage for stage in stages if isinstance(stage, Product)]
    memory = products_memory(products, rows=padded, width=width, dtype=dtype) | others
    copies = max(stage.copies for stage in stages)
    if with_rings(memory, padded, dtype, copies, packing) is None:
        return f"has no room in shared memory for {rows} rows of width {width}"
    return None
