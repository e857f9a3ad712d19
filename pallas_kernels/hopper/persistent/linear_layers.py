"""The linear layers of a decoder's layer as stages of a persistent kernel."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fdjax.pallas_kernels.hopper.persistent.memory import Memory
from fdjax.pallas_kernels.hopper.persistent.product import Norm, Product, Scaled
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK, CLUSTERS, MAX_ROWS, TILE_BRICKS


def projection(weight: str, *, width: int, n: int, eps: float) -> Product:
    """Q, K and V of the residual stream [M, width]; n are the columns of the weight."""
    # Wide tiles where they make enough blocks.
    n //= BRICK
    wide = 2 if n >= CLUSTERS * 2 else 1
    deep, norm = TILE_BRICKS // wide, Norm("next_squares", eps)
    return Product(weight, "next_x", width // BRICK, n, wide, deep, 1, norm=norm, y="y")


def after_attention(
    *, width: int, heads: int, hidden: int, gate: str, eps: float
) -> tuple[Product, Product, Product]:
    """Output projection of o [M, heads], gate and up, and down to the residual stream."""
    width, heads, hidden = (size // BRICK for size in (width, heads, hidden))
    mlp = Scaled("mlp_x", "mlp_scale", "mlp_squares")
    following = Scaled("next_x", "next_scale", "next_squares", next_layer=True)
    norm = Norm("mlp_squares", eps)
    return (
        Product("out", "o", heads, width, 1, 4, 2, residual="x", scaled=mlp),
        Product("gate_up", "mlp_x", width, hidden, 2, 1, 1, gate, norm, y="hidden"),
        Product("down", "hidden", hidden, width, 1, 4, 2, y="x_out", scaled=following),
    )


def products_memory(stages: Sequence[Product], *, rows: int, width: int, dtype: Any) -> Memory:
    """Shared memory of these stages, for a residual stream [rows, width]."""
    rounds = -(-(width // BRICK) // CLUSTERS)
    square_tiles = -(-width // BRICK**2)
    wide = max(stage.wide for stage in stages)
    return Memory(
        matrices={
            "kept": ((rounds, rows, BRICK), dtype),  # the residual stream, this block's part
            "y": ((wide, rows, BRICK), dtype),
            "partial": ((BRICK, rows), jnp.float32),
            "squares": ((square_tiles, BRICK, rows), jnp.float32),
        },
        vectors={
            "square_row": ((rows,), jnp.float32),
            "factors": ((rows,), jnp.float32),
        },
        barriers={
            "kept_arrived": rounds,
            "mlp_squares_arrived": square_tiles,
            "next_squares_arrived": square_tiles,
            "partial_arrived": 1,
        },
    )


def check_products(op: str, *, rows: int, width: int, sizes: tuple[int, ...], dtype: Any) -> None:
    """Raise NotImplementedError for what products cannot do.

    Args:
      op: that was called.
      rows, width: of the residual stream.
      sizes: K and N of all products.
    """
    op = f"{op}: 'mosaic_gpu'"
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{op} takes 16-bit floats, got {dtype}")
    if not 1 <= rows <= MAX_ROWS:
        raise NotImplementedError(f"{op} takes 1..{MAX_ROWS} rows, got {rows}")
    if any(size % BRICK for size in sizes):
        raise NotImplementedError(f"{op} needs sizes that are multiples of {BRICK}, got {sizes}")
    # TMA fills up a single tile of 8 sums of squares, not the last of several.
    if width // BRICK > 8 and width % (8 * BRICK):
        raise NotImplementedError(
            f"{op} needs a width of up to {8 * BRICK} or a multiple of it, got {width}"
        )
