"""The linear layers of a decoder layer as stages of a persistent kernel."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fdjax.pallas_kernels.dispatch import Shape, needs_half
from fdjax.pallas_kernels.hopper.persistent.memory import NO_MEMORY, Memory, with_rings
from fdjax.pallas_kernels.hopper.persistent.product import InputNorm, Product, Scaled
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, CLUSTERS, MAX_ROWS, TILE_BRICKS
from fdjax.pallas_kernels.hopper.persistent.stage import Stage


def projection(weight: str, *, width: int, n: int, eps: float) -> Product:
    """Projection of the residual stream [M, width] to Q, K and V, n columns in all."""
    # Wide tiles where they still occupy enough blocks.
    n //= BRICK
    wide = 2 if n >= CLUSTERS * 2 else 1
    deep, norm = TILE_BRICKS // wide, InputNorm("next_squares", eps)
    return Product(weight, "next_x", width // BRICK, n, wide, deep, 1, norm=norm, y="y")


def after_attention(
    *, width: int, heads: int, hidden: int, gate: str, eps: float
) -> tuple[Product, Product, Product]:
    """Three stages: output projection of o [M, heads], gate and up, and down to [M, width]."""
    width, heads, hidden = (size // BRICK for size in (width, heads, hidden))
    mlp = Scaled("mlp_x", "mlp_scale", "mlp_squares")
    following = Scaled("next_x", "next_scale", "next_squares", next_layer=True)
    norm = InputNorm("mlp_squares", eps)
    return (
        Product("out", "o", heads, width, 1, 4, 2, residual="x", scaled=mlp),
        Product("gate_up", "mlp_x", width, hidden, 2, 1, 1, gate, norm, y="hidden"),
        Product("down", "hidden", hidden, width, 1, 4, 2, y="x_out", scaled=following),
    )


def products_memory(stages: Sequence[Product], *, rows: int, width: int, dtype: Any) -> Memory:
    """Shared memory of these stages for a residual stream [rows, width]."""
    rounds = -(-(width // BRICK) // CLUSTERS)
    square_tiles = -(-width // BRICK**2)
    wide = max(stage.wide for stage in stages)
    return Memory(
        matrices={
            "residual": ((rounds, rows, BRICK), dtype),  # the residual stream, this block's part
            "y": ((wide, rows, BRICK), dtype),
            "partial": ((BRICK, rows), jnp.float32),
            "squares": ((square_tiles, BRICK, rows), jnp.float32),
        },
        vectors={
            "square_row": ((rows,), jnp.float32),
            "factors": ((rows,), jnp.float32),
        },
        barriers={
            "residual_arrived": rounds,
            "mlp_squares_arrived": square_tiles,
            "next_squares_arrived": square_tiles,
            "partial_arrived": 1,
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
    stages: Sequence[Stage], *, rows: int, width: int, others: Memory = NO_MEMORY
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
    if with_rings(memory, padded, dtype, max(stage.copies for stage in stages)) is None:
        return f"has no room in shared memory for {rows} rows of width {width}"
    return None
