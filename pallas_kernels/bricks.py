"""The layout "bricks" of quantised weights, in the order that Hopper's tensor cores need.

A brick has 64 columns and 64 rows of a weight [K,N]. Transposed, it is the left operand of four
wgmma instructions of 16 rows each. Each of the 128 threads of a warpgroup holds 8 of its values per
instruction: two successive rows, of 2 columns (8 apart) and 2 groups of rows (8 apart). A packed
brick stores the values of one thread after another. So threads read 16 bytes at once and exchange
nothing. A word holds the 8 codes of 4 bits of an instruction, or 4 codes of 8 bits.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4}
BRICK = 64
_THREADS = 128
_INSTRUCTIONS = 4
# Axes of the rows of a weight: brick, instruction, half, quarter, pair; then of its columns: brick,
# warp, half, eighth. In a brick: warp, eighth, quarter (together a thread), instruction, halves of
# rows and columns, pair.
_ROWS, _COLUMNS = (_INSTRUCTIONS, 2, 4, 2), (4, 2, 8)
_ORDER = (5, 0, 6, 8, 3, 1, 2, 7, 4)
# In bf16, the sign of e2m1 is bit 15, its exponent bits 8 and 7, its fraction bit 6. Three of the
# four codes of each half of a word have their bits at these distances, so that a kernel rotates the
# word and needs one mask. No order of the bits does so for four codes: the other code needs two.
# (bits of a half that move from their place in int4, how far to the left)
_FP4_MOVES = ((0x0037, 0), (0x0088, 6), (0x0040, 8), (0x7700, -2), (0x8800, 4))


def brick_words(kind: str) -> tuple[int, int]:
    """Shape of the int32 words of a brick. TMA copies at most 256 values of an axis."""
    return BITS[kind] // 2, 256


def pack_bricks(codes: Array, kind: str) -> Array:
    """Pack codes [K, ..., N] into bricks.

    Args:
      codes: unsigned integers; 64 divides K and N.
      kind: "int4" | "int8" | "fp8" | "fp4".

    Returns:
      [..., N/64, K/64, 2 or 4, 256] int32.
    """
    k, *outs, n = codes.shape
    codes = jnp.moveaxis(codes.astype(jnp.uint32), 0, -2).reshape(-1, k, n)
    codes = codes.reshape(-1, k // BRICK, *_ROWS, n // BRICK, *_COLUMNS)
    codes = codes.transpose(0, *(1 + axis for axis in _ORDER))
    if BITS[kind] == 4:  # halves of rows, halves of columns, pair
        shifts = _shifts((8, 4, 16), codes.ndim)
        words = (codes << shifts).sum((-3, -2, -1), dtype=jnp.uint32)
        if kind == "fp4":
            moved = (_rotated(words & _twice(mask), left) for mask, left in _FP4_MOVES)
            words = functools.reduce(jnp.bitwise_or, moved)
    else:
        words = (codes << _shifts((0, 8, 16), codes.ndim)).sum((-2, -1), dtype=jnp.uint32)
        # The first 16 bytes of all threads, then the second.
        words = words.reshape(-1, n // BRICK, k // BRICK, _THREADS, 2, 4).swapaxes(-3, -2)
    words = words.reshape(*outs, n // BRICK, k // BRICK, *brick_words(kind))
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack_bricks(words: Array, kind: str) -> Array:
    """The inverse of `pack_bricks`: codes [K, ..., N] uint8."""
    *outs, columns, rows, _, _ = words.shape
    words = lax.bitcast_convert_type(words, jnp.uint32)
    if kind == "fp4":
        moved = (_rotated(words, -left) & _twice(mask) for mask, left in _FP4_MOVES)
        words = functools.reduce(jnp.bitwise_or, moved)
    if BITS[kind] == 8:
        words = words.reshape(-1, 2, _THREADS, 4).swapaxes(-3, -2)
        words = words.reshape(-1, _THREADS, _INSTRUCTIONS, 2, 1, 1)
        steps = 0, 8, 16
    else:
        words = words.reshape(-1, _THREADS, _INSTRUCTIONS, 1, 1, 1)
        steps = 8, 4, 16
    codes = (words >> _shifts(steps, words.ndim)) & jnp.uint32(2 ** BITS[kind] - 1)
    codes = codes.astype(jnp.uint8).reshape(-1, columns, rows, 4, 8, 4, _INSTRUCTIONS, 2, 2, 2)
    inverse = sorted(range(len(_ORDER)), key=_ORDER.__getitem__)
    codes = codes.transpose(0, *(1 + axis for axis in inverse))
    codes = codes.reshape(*outs, rows * BRICK, columns * BRICK)
    return jnp.moveaxis(codes, -2, 0)


def _twice(mask: int) -> Array:
    """A mask of both halves of a word."""
    return jnp.uint32(mask << 16 | mask)


def _rotated(words: Array, left: int) -> Array:
    left %= 32
    return words << jnp.uint32(left) | words >> jnp.uint32(32 - left) if left else words


def _shifts(steps: tuple[int, int, int], ndim: int) -> Array:
    """Shifts of the codes of a word along the last axes: halves of rows and columns, pairs."""
    index = lax.iota(jnp.uint32, 8)  # not a constant, which an interpreted kernel could not hold
    bits = index >> 2, index >> 1 & 1, index & 1
    shifts = sum(bit * jnp.uint32(step) for bit, step in zip(bits, steps, strict=True))
    return shifts.reshape(*[1] * (ndim - 3), 2, 2, 2)
