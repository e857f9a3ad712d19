"""Activations as float16, so that Hopper multiplies weights in fp8 without rounding either.

e4m3 becomes float16 in 3 instructions for 4 codes. bfloat16 takes 10. A value of x is divided by a
power of two, that of the largest of the 64 columns of a brick in its row. So it keeps 11 bits,
unless it is smaller than the largest by 2^14; bfloat16 has 8 bits. Sums are in fp32.

A brick of columns is int32 words [places, 36]. A row has one place: 64 values in order, and the
power of two. Its other words make each place begin in another bank of shared memory.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from fdjax.pallas_kernels.bricks import BRICK
from fdjax.pallas_kernels.hopper.coding import Coding
from fdjax.pallas_kernels.hopper.fragments import (
    constant,
    element,
    elements,
    fma,
    from_pairs,
    halves_of,
    halves_of_fp8,
    i32,
    index,
    loaded_words,
    warp_and_lane,
)
from fdjax.pallas_kernels.hopper.reduction import COLUMNS, all_over_rows
from fdjax.pallas_kernels.hopper.tiles import LAYOUT

HALF_WORDS = 36
_SCALE = 32  # index of the power of two among the words of a place
_EXPONENT = 0x7F800000  # of fp32
_INVERSE = 254 << 23  # less the bits of a power of two: those of its inverse

_LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def half_places(rows: int) -> int:
    """Number of places for some rows of x."""
    return 8 * -(-rows // 8)


def _place(row: int | Array) -> int | Array:
    return row


def as_halves(x: Array) -> Array:
    """Words [K/64, places, 36] int32 of x [M, K]."""
    m, k = x.shape
    x = x.astype(jnp.float32).reshape(m, k // BRICK, BRICK)
    bits = lax.bitcast_convert_type(jnp.abs(x).max(axis=2), jnp.int32) & _EXPONENT
    inverse = lax.bitcast_convert_type(_INVERSE - bits, jnp.float32)
    halves = (x * inverse[:, :, None]).astype(jnp.float16)
    words = lax.bitcast_convert_type(halves.reshape(m, -1, BRICK // 2, 2), jnp.int32)
    rest = jnp.pad(bits[:, :, None], ((0, 0), (0, 0), (0, HALF_WORDS - _SCALE - 1)))
    words = jnp.concatenate([words, rest], axis=2).swapaxes(0, 1)
    return jnp.pad(words, ((0, 0), (0, half_places(m) - m), (0, 0)))


def put_halves(targets: Sequence[Any], bricks: Sequence[Array], memory: Any) -> None:
    """Store bricks of columns into shared memory.

    Args:
      targets: a reference to int32 words [places, 36] for each brick.
      bricks: [64, M] fp32 in `LAYOUT`, M a multiple of 8: transposed.
      memory: shared memory [4 M] fp32 for each brick, see `all_over_rows`.
    """
    eights = [b[:, c : c + COLUMNS] for b in bricks for c in range(0, b.shape[1], COLUMNS)]
    largest = all_over_rows([jnp.abs(eight) for eight in eights], "max", memory)
    each = len(eights) // len(bricks)
    for i, target in enumerate(targets):
        some = slice(i * each, (i + 1) * each)
        _put(target, eights[some], largest[some])


def _put(target: Any, eights: list[Array], largest: list[Array]) -> None:
    """Store a brick, whose columns have these largest values."""
    of_columns = [LAYOUT.reduce(0)] * len(eights)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[LAYOUT] * len(eights), *of_columns))
    def run(_, target, *arrays):
        n = len(arrays) // 2
        halves, words = halves_of(target, ir.F16Type.get()), mgpu_utils.memref_fold(target, 0, 2)
        warp, lane = warp_and_lane()
        row, column = arith.divui(lane, constant(4)), arith.remui(lane, constant(4))
        row = arith.addi(arith.muli(warp, constant(16)), row)
        for i, (eight, most) in enumerate(zip(arrays[:n], arrays[n:], strict=True)):
            for odd in range(2):
                first = arith.addi(arith.muli(column, constant(2)), constant(8 * i + odd))
                first = arith.muli(first, constant(HALF_WORDS))
                bits = mgpu_utils.bitcast(element(most.registers.flat[0], odd), i32())
                bits = arith.andi(bits, constant(_EXPONENT))
                inverse = arith.subi(constant(_INVERSE), bits)
                inverse = arith.bitcast(ir.F32Type.get(), inverse)
                at = arith.addi(arith.muli(first, constant(2)), row)
                for j, register in enumerate(eight.registers.flat):  # rows r and r + 8
                    value = arith.mulf(element(register, odd), inverse)
                    value = arith.truncf(ir.F16Type.get(), value)
                    memref.store(value, halves, [index(arith.addi(at, constant(8 * j)))])
                memref.store(bits, words, [index(arith.addi(first, constant(_SCALE)))])

    run(target, *eights, *largest)


def multiplied_halves(
    totals: Sequence[Array],
    bricks: Sequence[Any],
    x: Any,
    kind: str,
    scales: Sequence[Array] = (),
) -> list[Array]:
    """totals + scales · (bricks · x), for several bricks and one brick of columns of x.

    Args:
      totals: [64, M] fp32 in `LAYOUT` for each brick.
      bricks: references to words [1, 4, 256] in shared memory.
      x: reference to words [places, 36] in shared memory.
      kind: "fp8".
      scales: of the columns of each brick, [64] fp32 in `LAYOUT.reduce(1)`; default 1.
    """
    n = len(totals)
    made = [plgpu.ShapeDtypeStruct(t.shape, jnp.float32, layout=LAYOUT) for t in totals]

    @plgpu.inline_mgpu(
        arg_types=(
            *[plgpu.RefType()] * (n + 1),
            *[LAYOUT] * n,
            *[LAYOUT.reduce(1)] * len(scales),
        ),
        return_type=made,
    )
    def run(_, *arrays):
        bricks, x, totals, columns = arrays[:n], arrays[n], arrays[n + 1 :][:n], arrays[2 * n + 1 :]
        columns = [[element(register, 0) for register in c.registers.flat] for c in columns]
        rights, of_rows = _right_operands(x, ir.MemRefType(x.type).shape[0] // 8)
        results = []
        for i, (brick, total) in enumerate(zip(bricks, totals, strict=True)):
            lefts = _left(loaded_words(brick, kind, 0, 4))
            registers = [elements(register) for register in total.registers.flat]
            for tile, (right, powers) in enumerate(zip(rights, of_rows, strict=True)):
                sums = _products(lefts, right)
                for row in range(2):  # rows r and r + 8 of a warp's 16
                    pair = registers[2 * tile + row]
                    for odd, power in enumerate(powers):
                        scale = arith.mulf(power, columns[i][row]) if scales else power
                        pair[odd] = fma(sums[2 * row + odd], scale, pair[odd])
            results.append(from_pairs(registers, total))
        return results

    return run(*bricks, x, *totals, *scales)


def _left(words: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """The left operands of four products, of 16 rows of the weight each."""
    return [
        [
            half
            for word in pair
            # Bytes 0 and 2 are codes of a column, 1 and 3 those of the column 8 further.
            for half in halves_of_fp8(word)
        ]
        for pair in words
    ]


def _products(lefts: list[list[ir.Value]], right: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Sums of a thread: two columns of row r of the warp's 16, then of row r + 8."""
    single = ir.F32Type.get()
    sums: Sequence[ir.Value] = [mgpu_utils.c(0.0, single)] * 4
    for i, left in enumerate(lefts):
        operands = *left, *right[2 * i : 2 * i + 2], *sums
        sums = mgpu_utils.inline_ptx(
            _MULTIPLY, *operands, result_types=[single] * 4, convergent=True
        )
    return sums


def _right_operands(
    x: ir.Value, tiles: int
) -> tuple[list[list[ir.Value]], list[tuple[ir.Value, ir.Value]]]:
    """For each 8 places: right operands of four products, and the powers of a thread's two rows."""
    _, lane = warp_and_lane()
    # ldmatrix loads four matrices of 8 places and 8 columns. Each lane names one place of one.
    of_matrix, matrix = arith.remui(lane, constant(8)), arith.divui(lane, constant(8))
    own = arith.addi(arith.muli(of_matrix, constant(HALF_WORDS)), arith.muli(matrix, constant(4)))
    pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(x), [own], i32())
    words = mgpu_utils.memref_fold(x, 0, 2)
    column = arith.muli(arith.remui(lane, constant(4)), constant(2 * HALF_WORDS))
    rights, of_rows = [], []
    for tile in range(tiles):
        first, right = tile * 8 * HALF_WORDS, []
        for half in (0, BRICK // 4):
            address = mgpu_utils.getelementptr(pointer, [first + half], i32())
            right += mgpu_utils.inline_ptx(
                _LOAD, address, result_types=[i32()] * 4, has_side_effects=True, convergent=True
            )
        rights.append(right)
        ats = [arith.addi(column, constant(first + _SCALE + odd * HALF_WORDS)) for odd in (0, 1)]
        loaded = [memref.load(words, [index(at)]) for at in ats]
        of_rows.append(tuple(mgpu_utils.bitcast(bits, ir.F32Type.get()) for bits in loaded))
    return rights, of_rows


HALVES = Coding(HALF_WORDS, 1, half_places, _place, as_halves, put_halves, multiplied_halves)
