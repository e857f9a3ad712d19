"""Activations as pairs of int8 digits, so that Hopper multiplies quantised weights as integers.

int4 becomes int8 in 3 instructions for 8 codes, where bfloat16 takes 11. Tensor cores then need
activations in int8, too. A value x is written as s · (128 · high + low), where s belongs to the 64
columns of a brick in one row: their largest |x| over 16256. The error is about s / 2, less than
what rounding the largest of them to bfloat16 makes. Sums of products of digits are exact in int32.

The digits of a brick of columns are int32 words [places, 20]. A row has two places, one after the
other: 64 bytes of high digits and s, then 64 bytes of low digits. Their other words mean nothing,
they make each place begin in another bank of shared memory. Rows 0 and 1 of 8 lie 8 places apart:
so a thread finds the results of both digits of the two columns that `LAYOUT` gives to it. Columns
are in the order in which a word of `bricks` has its rows.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from fdjax.pallas_kernels.bricks import BITS, BRICK
from fdjax.pallas_kernels.hopper.coding import Coding
from fdjax.pallas_kernels.hopper.fragments import (
    constant,
    element,
    elements,
    fma,
    from_pairs,
    halves_of,
    i32,
    index,
    loaded_words,
    ptx,
    warp_and_lane,
)
from fdjax.pallas_kernels.hopper.reduction import COLUMNS, all_over_rows
from fdjax.pallas_kernels.hopper.tiles import LAYOUT

DIGIT_WORDS = 20
_SCALE = 16  # index of s among the words of a place
_BASE_BITS = 7
_LARGEST = 127 << _BASE_BITS
# |x| below this counts as 0, so that inverses are finite.
_SMALLEST = 1e-30
# 16 columns of x in the order of their bytes: four successive ones meet the codes of one word.
_ORDER = [2 * t + i for t in range(4) for i in (0, 8, 1, 9)]

_LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_MULTIPLY = (
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def places(rows: int) -> int:
    """Number of places for some rows of x. Odd rows have places only if there are several."""
    return 8 if rows == 1 else 16 * -(-rows // 8)


def place(row: int | Array) -> int | Array:
    """The place of the high digits of a row; the next one has the low digits."""
    return 16 * (row // 8) + 8 * (row % 2) + 2 * (row % 8 // 2)


def as_digits(x: Array) -> Array:
    """Digits [K/64, places, 20] int32 of x [M, K]."""
    m, k = x.shape
    x = x.astype(jnp.float32).reshape(m, k // BRICK, BRICK)
    largest = jnp.abs(x).max(axis=2, keepdims=True)
    whole = jnp.round(x * _inverse(largest)).astype(jnp.int32)
    high = (whole + (1 << _BASE_BITS - 1)) >> _BASE_BITS
    digits = jnp.stack([high, whole - (high << _BASE_BITS)], axis=2)
    digits = digits.reshape(m, -1, 2, 4, 16)[..., np.array(_ORDER)].astype(jnp.int8)
    words = lax.bitcast_convert_type(digits.reshape(m, -1, 2, BRICK // 4, 4), jnp.int32)
    scale = lax.bitcast_convert_type(largest / _LARGEST, jnp.int32)[:, :, None]
    scale = jnp.pad(scale, ((0, 0), (0, 0), (0, 1), (0, DIGIT_WORDS - _SCALE - 1)))
    words = jnp.concatenate([words, scale], axis=3).transpose(1, 0, 2, 3)
    made = jnp.zeros((k // BRICK, places(m), DIGIT_WORDS), jnp.int32)
    at = np.array([place(row) + digit for row in range(m) for digit in (0, 1)])
    return made.at[:, at].set(words.reshape(k // BRICK, 2 * m, DIGIT_WORDS))


def _inverse(largest: Array) -> Array:
    """What values are multiplied by before they are rounded."""
    root = lax.rsqrt(largest)  # a kernel takes longer to divide
    return jnp.where(largest > _SMALLEST, _LARGEST * root * root, 0.0)


def put_digits(targets: Sequence[Any], bricks: Sequence[Array], memory: Any) -> None:
    """Store the digits of bricks of columns into shared memory.

    Args:
      targets: a reference to int32 words [places, 20] for each brick.
      bricks: [64, M] fp32 in `LAYOUT`, M a multiple of 8: transposed. With 8 places, only the even
        columns are stored.
      memory: shared memory [4 M] fp32 for each brick, see `all_over_rows`.
    """
    eights = [b[:, c : c + COLUMNS] for b in bricks for c in range(0, b.shape[1], COLUMNS)]
    largest = all_over_rows([jnp.abs(eight) for eight in eights], "max", memory)
    each = len(eights) // len(bricks)
    for i, target in enumerate(targets):
        some = slice(i * each, (i + 1) * each)
        _put(target, eights[some], largest[some])


def _put(target: Any, eights: list[Array], largest: list[Array]) -> None:
    """Store the digits of a brick, whose columns have these largest values."""
    scales = [x * (1 / _LARGEST) for x in largest]
    inverses = [_inverse(x) for x in largest]
    of_columns = [LAYOUT.reduce(0)] * len(eights)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[LAYOUT] * len(eights), *of_columns, *of_columns)
    )
    def run(_, target, *arrays):
        n = len(arrays) // 3
        halves = halves_of(target, ir.IntegerType.get_signless(16))
        warp, lane = warp_and_lane()
        row, column = arith.divui(lane, constant(4)), arith.remui(lane, constant(4))
        # Two successive bytes: rows r and r + 8 of the warp's 16 rows.
        own = arith.addi(arith.muli(warp, constant(8)), row)
        count = 2 if ir.MemRefType(target.type).shape[0] > 8 else 1
        for i, (eight, scale, inverse) in enumerate(
            zip(arrays[:n], arrays[n : 2 * n], arrays[2 * n :], strict=True)
        ):
            for odd in range(count):
                first = arith.addi(arith.muli(column, constant(2)), constant(16 * i + 8 * odd))
                first = arith.muli(first, constant(DIGIT_WORDS))
                factor = element(inverse.registers.flat[0], odd)
                pairs = [
                    _digits(arith.mulf(element(register, odd), factor))
                    for register in eight.registers.flat
                ]
                at = arith.addi(arith.muli(first, constant(2)), own)
                for digit, bytes_ in enumerate(zip(*pairs, strict=True)):
                    place_at = arith.addi(at, constant(2 * DIGIT_WORDS * digit))
                    memref.store(_two_bytes(*bytes_), halves, [index(place_at)])
                bits = mgpu_utils.bitcast(element(scale.registers.flat[0], odd), i32())
                at = arith.addi(first, constant(_SCALE))
                memref.store(bits, mgpu_utils.memref_fold(target, 0, 2), [index(at)])

    run(target, *eights, *scales, *inverses)


def multiplied_digits(
    totals: Sequence[Array],
    bricks: Sequence[Any],
    x: Any,
    kind: str,
    scales: Sequence[Array] = (),
    zeros: Sequence[Array] = (),
) -> list[Array]:
    """totals + scales · ((bricks - zeros) · x), for several bricks and one brick of columns of x.

    Args:
      totals: [64, M] fp32 in `LAYOUT` for each brick.
      bricks: references to packed words [1, 2 or 4, 256] in shared memory.
      x: reference to digits [places, 20] in shared memory.
      kind: "int4" | "int8".
      scales: of the columns of each brick, [64] fp32 in `LAYOUT.reduce(1)`; default 1.
      zeros: as scales; default 8 for int4, 128 for int8. They multiply the sum of x.
    """
    n = len(totals)
    made = [plgpu.ShapeDtypeStruct(t.shape, jnp.float32, layout=LAYOUT) for t in totals]

    @plgpu.inline_mgpu(
        arg_types=(
            *[plgpu.RefType()] * (n + 1),
            *[LAYOUT] * n,
            *[LAYOUT.reduce(1)] * (len(scales) + len(zeros)),
        ),
        return_type=made,
    )
    def run(_, *arrays):
        bricks, x, totals, columns = arrays[:n], arrays[n], arrays[n + 1 :][:n], arrays[2 * n + 1 :]
        columns = [[element(register, 0) for register in c.registers.flat] for c in columns]
        scales_of, zeros_of = columns[: len(scales)], columns[len(scales) :]
        tiles = ir.MemRefType(x.type).shape[0] // 8
        rights, of_rows = _right_operands(x, tiles, _FACTOR[kind])
        of_x = []
        if zeros:
            one = [constant(_ONES[kind])] * 4
            of_x = [_whole(*_products([one, one], right)[:2]) for right in rights]
        results = []
        for i, (brick, total) in enumerate(zip(bricks, totals, strict=True)):
            lefts = _LEFT[kind](loaded_words(brick, kind, 0, 4))
            factors = scales_of[i] if scales else [None] * 2
            registers = [elements(register) for register in total.registers.flat]
            for tile, (right, of_row) in enumerate(zip(rights, of_rows, strict=True)):
                sums = _products(lefts, right)
                eight, odd = divmod(tile, 2)
                for row, factor in enumerate(factors):  # rows r and r + 8 of a warp's 16
                    value = _whole(sums[2 * row], sums[2 * row + 1])
                    if zeros:
                        middle = mgpu_utils.c(float(2 ** (BITS[kind] - 1)), ir.F32Type.get())
                        below = arith.subf(middle, zeros_of[i][row])
                        value = fma(below, of_x[tile], value)
                    scale = of_row if factor is None else arith.mulf(of_row, factor)
                    pair = registers[2 * eight + row]
                    pair[odd] = fma(value, scale, pair[odd])
            results.append(from_pairs(registers, total))
        return results

    return run(*bricks, x, *totals, *scales, *zeros)


def _products(lefts: list[list[ir.Value]], right: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Sums of a thread: high and low digits of row r of the warp's 16, then of row r + 8."""
    sums: Sequence[ir.Value] = [constant(0)] * 4
    for half, left in enumerate(lefts):
        operands = *left, *right[2 * half : 2 * half + 2], *sums
        sums = mgpu_utils.inline_ptx(
            _MULTIPLY, *operands, result_types=[i32()] * 4, convergent=True
        )
    return sums


def _right_operands(
    x: ir.Value, tiles: int, factor: float
) -> tuple[list[tuple[ir.Value, ...]], list[ir.Value]]:
    """For each 8 places: digits as right operands, and s of a thread's row times a factor."""
    _, lane = warp_and_lane()
    # ldmatrix loads four matrices of 8 places and 16 columns. Each lane names one place of one.
    of_matrix, matrix = arith.remui(lane, constant(8)), arith.divui(lane, constant(8))
    own = arith.addi(
        arith.muli(of_matrix, constant(DIGIT_WORDS)), arith.muli(matrix, constant(BRICK // 16))
    )
    pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(x), [own], i32())
    words = mgpu_utils.memref_fold(x, 0, 2)
    column = arith.muli(arith.remui(lane, constant(4)), constant(2 * DIGIT_WORDS))
    rights, of_rows = [], []
    for tile in range(tiles):
        first = tile * 8 * DIGIT_WORDS
        address = mgpu_utils.getelementptr(pointer, [first], i32())
        rights.append(
            mgpu_utils.inline_ptx(
                _LOAD, address, result_types=[i32()] * 4, has_side_effects=True, convergent=True
            )
        )
        at = index(arith.addi(column, constant(first + _SCALE)))
        scale = mgpu_utils.bitcast(memref.load(words, [at]), ir.F32Type.get())
        of_rows.append(arith.mulf(scale, mgpu_utils.c(factor, ir.F32Type.get())))
    return rights, of_rows


def _left_int4(words: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """16 (code - 8) as the left operands of two products: a code is the high half of a byte."""
    lefts = []
    for (word,) in words:
        for moved in (arith.shli(word, constant(4)), word):
            # (word ^ first) & second
            code = "lop3.b32 $0, $1, $2, $3, 0x28"
            lefts.append(ptx(code, moved, constant(0x80808080), constant(0xF0F0F0F0)))
    return [lefts[:4], lefts[4:]]


def _left_int8(words: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """code - 128 as the left operands of two products."""
    lefts = []
    for pair in words:
        codes = [arith.xori(word, constant(0x80808080)) for word in pair]
        lefts += [ptx(f"prmt.b32 $0, $1, $2, {o}", *codes) for o in ("0x6240", "0x7351")]
    return [lefts[:4], lefts[4:]]


_LEFT = {"int4": _left_int4, "int8": _left_int8}
_FACTOR = {"int4": 1 / 16, "int8": 1.0}
_ONES = {"int4": 0x10101010, "int8": 0x01010101}  # 1 as a left operand


def _digits(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """High and low digits of a value between -16256 and 16256, rounded."""
    whole = ptx("cvt.rni.s32.f32 $0, $1", value, kinds="f")
    high = arith.shrsi(arith.addi(whole, constant(1 << _BASE_BITS - 1)), constant(_BASE_BITS))
    return high, arith.subi(whole, arith.shli(high, constant(_BASE_BITS)))


def _whole(high: ir.Value, low: ir.Value) -> ir.Value:
    """128 · high + low in fp32."""
    whole = arith.addi(arith.shli(high, constant(_BASE_BITS)), low)
    return arith.sitofp(ir.F32Type.get(), whole)


def _two_bytes(first: ir.Value, second: ir.Value) -> ir.Value:
    """The low bytes of two words side by side."""
    both = ptx("prmt.b32 $0, $1, $2, 0x0040", first, second)
    return arith.trunci(ir.IntegerType.get_signless(16), both)


DIGITS = Coding(DIGIT_WORDS, 2, places, place, as_digits, put_digits, multiplied_digits)
