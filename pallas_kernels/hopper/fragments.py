"""Unpacks quantised weights in registers, as a left operand of Hopper's tensor cores.

The words are in the layout "bricks". Values become bf16 or fp16 by placing their bits into the
mantissa of a power of two and subtracting it, because converting integers is slow.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from fdjax.pallas_kernels.bricks import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT
from fdjax.pallas_kernels.quantised import BITS

BYTE_LAYOUT = plgpu.Layout.WGMMA_8BIT  # of a left operand of wgmma in 8 bits

_THREADS = 128
_ROWS = 16  # rows of the weight of an instruction


def unpacked(
    bricks: Any,
    kind: str,
    dtype: Any,
    start: int,
    width: int,
    zeros: Array | None = None,
    exponents: tuple[Array, ...] = (),
    layout: Any = LAYOUT,
):
    """Load some rows of a column of bricks from shared memory.

    Args:
      bricks: reference to int32 words [n, 2 or 4, 256] of n bricks along K.
      kind: "int4" | "int8" | "fp8" | "fp4".
      dtype: bfloat16 or float16.
      start, width: first row, and number of rows; multiples of 32.
      zeros: [64] fp32 in `LAYOUT.reduce(1)`, whole numbers that are subtracted from codes; default
        8 for int4, 128 for int8. fp8 and fp4 have none.
      exponents: for fp4 in bf16, the bits of the scales in float8_e8m0fnu: [64] int32 in
        `LAYOUT.reduce(1)` for each 32 rows.
      layout: `LAYOUT` for wgmma, or `left_of(dtype)` for `multiplied`.

    Returns:
      codes - zeros [64, width] in `layout`, times the scales of `exponents`, without rounding.
    """
    dtype = jnp.dtype(dtype)
    arrays = exponents if zeros is None else (zeros,)
    layouts = (LAYOUT.reduce(1),) * len(arrays)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *layouts),
        return_type=plgpu.ShapeDtypeStruct((BRICK, width), dtype, layout=layout),
    )
    def run(_, ref, *arrays):
        half = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), half)
        offsets = _offsets(arrays[0], kind, half) if zeros is not None else None
        powers = [_powers(array) for array in arrays[: len(exponents)]]
        registers = []
        for i, words in enumerate(loaded_words(ref, kind, start // _ROWS, width // _ROWS)):
            # Two columns, 8 apart, of two rows; then the same columns of the rows 8 further on.
            factors = powers[i * _ROWS // 32] if powers else offsets
            made = _UNPACK[kind](words, dtype, factors)
            registers += [mgpu_utils.bitcast(value, pair) for value in made]
        return _fragment(registers, width, layout)

    return run(bricks, *arrays)


def dequantised(
    bricks: Any,
    kind: str,
    dtype: Any,
    start: int,
    width: int,
    scales: tuple[Array, ...],
    zeros: tuple[Array, ...] = (),
    *,
    short: bool = False,
):
    """Load some rows of a column of bricks from shared memory, times their scales.

    The product of a code and its scale is rounded once, as by `dequantise`. There is an exception:
    in bfloat16, unless the kind is int8 with zeros, codes are multiplied by the scale as a sum of
    two bfloat16. If its mantissa has more bits than that of float16, the error is up to 0.51 units
    in the last place, not 0.5.

    Args:
      bricks, kind, dtype, start, width: as for `unpacked`; kind is not "fp4".
      scales: [64] fp32 in `LAYOUT.reduce(1)` for each group of rows; groups have the same size, a
        multiple of 16.
      zeros: whole numbers of the same form, see `unpacked`; empty for the default.
      short: whether bfloat16 holds the scales without rounding.

    Returns:
      [64, width] in `LAYOUT`.
    """
    dtype = jnp.dtype(dtype)
    layouts = (LAYOUT.reduce(1),) * (len(scales) + len(zeros))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *layouts),
        return_type=plgpu.ShapeDtypeStruct((BRICK, width), dtype, layout=LAYOUT),
    )
    def run(_, ref, *arrays):
        half = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), half)
        factors = [_columns(array) for array in arrays[: len(scales)]]
        offsets = [_offsets(array, kind, half) for array in arrays[len(scales) :]]
        wide = kind == "int8" and (zeros or dtype != jnp.bfloat16)
        if not wide and dtype == jnp.bfloat16:
            factors = [[_two_terms(scale, short) for scale in columns] for columns in factors]
        registers = []
        for i, words in enumerate(loaded_words(ref, kind, start // _ROWS, width // _ROWS)):
            group = i * _ROWS * len(scales) // width
            offset = offsets[group] if offsets else None
            if wide:
                values = _unpack_int8(words, dtype, offset, factors[group])
            else:
                codes = _UNPACK[kind](words, dtype, offset)
                # The registers of the two columns alternate.
                values = [_scaled(code, factors[group][r % 2]) for r, code in enumerate(codes)]
            registers += [mgpu_utils.bitcast(value, pair) for value in values]
        return _fragment(registers, width, LAYOUT)

    return run(bricks, *scales, *zeros)


_HALVES_OF_FP8 = """{
.reg .b32 ordered;
.reg .b16 first, second;
prmt.b32 ordered, $2, $2, 0x3120;
mov.b32 {first, second}, ordered;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}"""


def byte_codes(bricks: Any, kind: str, start: int, width: int):
    """Load some rows of a column of bricks of 8 bits from shared memory, as they are.

    Args:
      bricks, start, width: as for `unpacked`.
      kind: "fp8" | "int8".

    Returns:
      [64, width] float8_e4m3fn, or int8 after 128 is subtracted, in `BYTE_LAYOUT`, with the rows of
      the weight in the order of `in_byte_order`, so that no threads exchange codes.
    """
    dtype = byte_dtype(kind)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((BRICK, width), dtype, layout=BYTE_LAYOUT),
    )
    def run(_, ref):
        byte = i8() if kind == "int8" else ir.Float8E4M3FNType.get()
        quad = ir.VectorType.get((4,), byte)
        registers = []
        for words in loaded_words(ref, kind, start // _ROWS, width // _ROWS):
            if kind == "int8":
                words = [arith.xori(word, constant(0x80808080)) for word in words]
            # The codes of the first column, then those of the one 8 further on.
            registers += [
                mgpu_utils.bitcast(ptx(f"prmt.b32 $0, $1, $2, {codes}", *words), quad)
                for codes in (0x6420, 0x7531)
            ]
        return _fragment(registers, width, BYTE_LAYOUT, True if kind == "int8" else None)

    return run(bricks)


def byte_dtype(kind: str) -> Any:
    """The dtype of codes of 8 bits that tensor cores multiply."""
    return jnp.int8 if kind == "int8" else jnp.float8_e4m3fn


def in_byte_order(x: Array) -> Array:
    """The values of x [..., K] in the order of the codes of `byte_codes`.

    Of 16 successive rows of the weight, a thread holds two pairs that are 8 apart. With 8 bits, it
    must hold four successive ones.
    """
    k = x.shape[-1]
    return x.reshape(-1, k // _ROWS, 2, 4, 2).swapaxes(2, 3).reshape(x.shape)


def left_of(dtype: Any) -> Any:
    """The layout of the left operand of `multiplied`."""
    return plgpu.Layout.MMA_LHS(dtype)


def loaded_right(x: Any) -> Array:
    """Load x [M, K] from shared memory as the right operand of `multiplied`."""
    return plgpu.load(x.T, layout=plgpu.Layout.MMA_RHS(x.dtype), optimized=False)


def multiplied(left: Array, right: Array) -> Array:
    """left [64, K] · right [K, M] in `LAYOUT`, each warp for itself, without a wait.

    The compiler mixes these instructions with those that unpack the next weights. It moves nothing
    past the wait that wgmma needs.
    """
    blank = plgpu.layout_cast(jnp.zeros((BRICK, right.shape[1]), jnp.float32), LAYOUT)
    return plgpu.mma(blank, left, right)


def loaded_words(ref: ir.Value, kind: str, first: int, count: int) -> list[list[ir.Value]]:
    """A thread's words of some instructions of 16 rows: one for int4, two for 8 bits."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    thread = arith.remui(mgpu_utils.thread_idx(), constant(_THREADS))
    thread = arith.index_cast(index, arith.muli(thread, constant(4)))
    flat = mgpu_utils.memref_fold(ref, 0, 3)
    each = BITS[kind] // 4  # words of an instruction
    words = []
    at, end = first * each, (first + count) * each
    while at < end:
        # Four words of a thread lie side by side.
        quad, inside = divmod(at, 4)
        size = min(4 - inside, end - at)
        offset = mgpu_utils.c(quad * 4 * _THREADS + inside, index)
        loaded = vector.load(ir.VectorType.get((size,), i32), flat, [arith.addi(thread, offset)])
        words += [
            vector.extract(loaded, dynamic_position=[], static_position=[i]) for i in range(size)
        ]
        at += size
    return [words[i : i + each] for i in range(0, len(words), each)]


def _fragment(
    registers: list[ir.Value], width: int, layout: Any, is_signed: bool | None = None
) -> mgpu.FragmentedArray:
    """The left operand [64, width] of a thread's registers."""
    layout = layout.to_mgpu()
    shape = layout.registers_shape((BRICK, width))
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=is_signed,
    )


def _columns(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """A thread's values of its two columns."""
    return [
        vector.extract(register, dynamic_position=[], static_position=[0])
        for register in array.registers.flat
    ]


def _two_terms(scale: ir.Value, short: bool) -> list[ir.Value]:
    """bfloat16 numbers whose sum is the scale in fp32, each twice in a word, the largest last."""
    half = ir.BF16Type.get()
    high = arith.truncf(half, scale)
    terms = [high]
    if not short:
        rest = arith.subf(scale, arith.extf(ir.F32Type.get(), high))
        terms.insert(0, arith.truncf(half, rest))
    pair, word = ir.VectorType.get((2,), half), ir.IntegerType.get_signless(32)
    return [mgpu_utils.bitcast(vector.from_elements(pair, [t, t]), word) for t in terms]


def _scaled(codes: ir.Value, factor: list[ir.Value] | ir.Value) -> ir.Value:
    """A pair of codes times a scale: the terms of `_two_terms` for bfloat16, fp32 for float16."""
    if isinstance(factor, list):
        product = constant(0x80008000)
        for term in factor:
            product = ptx("fma.rn.bf16x2 $0, $1, $2, $3", codes, term, product)
        return product
    pair, single = ir.VectorType.get((2,), ir.F16Type.get()), ir.F32Type.get()
    codes = mgpu_utils.bitcast(codes, pair)
    low, high = (
        arith.mulf(
            arith.extf(single, vector.extract(codes, dynamic_position=[], static_position=[i])),
            factor,
        )
        for i in (0, 1)
    )
    return ptx("cvt.rn.f16x2.f32 $0, $1, $2", high, low, kinds="f")


def _offsets(zeros: mgpu.FragmentedArray, kind: str, half: ir.Type) -> list[ir.Value]:
    """Offsets to subtract from the unpacked codes of a thread's two columns, see `_unpack_int4`."""
    single, pair = ir.F32Type.get(), ir.VectorType.get((2,), half)
    base = 2.0**23 if kind == "int8" else 128.0 if half == ir.BF16Type.get() else 1024.0
    offsets = []
    for register in zeros.registers.flat:
        zero = vector.extract(register, dynamic_position=[], static_position=[0])
        offset = arith.subf(mgpu_utils.c(-base, single), zero)
        if kind == "int4":
            offset = arith.truncf(half, offset)
            both = vector.from_elements(pair, [offset, offset])
            offset = mgpu_utils.bitcast(both, ir.IntegerType.get_signless(32))
        offsets.append(offset)
    return offsets


def _powers(exponents: mgpu.FragmentedArray) -> list[ir.Value]:
    """The scales of a thread's two columns, twice each, as bf16: their bits are its exponent."""
    powers = []
    for register in exponents.registers.flat:
        exponent = vector.extract(register, dynamic_position=[], static_position=[0])
        powers.append(arith.muli(exponent, constant(1 << 7 | 1 << 23)))
    return powers


def i8() -> ir.Type:
    """The type of a byte."""
    return ir.IntegerType.get_signless(8)


def i32() -> ir.Type:
    """The type of a word."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> ir.Value:
    """A word."""
    return mgpu_utils.c(value - (value >> 31 << 32), i32())


def element(values: ir.Value, i: int) -> ir.Value:
    """Element i of a vector."""
    return vector.extract(values, dynamic_position=[], static_position=[i])


def ptx(code: str, *operands: ir.Value, kinds: str = "r") -> ir.Value:
    """The word that an instruction makes of operands, whose kinds are constraints of PTX."""
    constraints = ",".join(["=r", *[kinds] * len(operands)])
    return llvm.inline_asm(ir.IntegerType.get_signless(32), list(operands), f"{code};", constraints)


def and_or(word: ir.Value, mask: int, base: ir.Value) -> ir.Value:
    """(word & mask) | base in one instruction."""
    return ptx("lop3.b32 $0, $1, $2, $3, 0xEA", word, constant(mask), base)


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a · b + c in fp32."""
    code = "fma.rn.f32 $0, $1, $2, $3;"
    return mgpu_utils.inline_ptx(code, a, b, c, result_types=ir.F32Type.get())


def elements(register: ir.Value) -> list[ir.Value]:
    """Both elements of a pair."""
    return [element(register, i) for i in range(2)]


def from_pairs(pairs: list[list[ir.Value]], like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """An array with the layout of another one, from the two fp32 values of each register."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    registers = [vector.from_elements(kind, pair) for pair in pairs]
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(like.registers.shape),
        _layout=like.layout,
        _is_signed=None,
    )


def index(value: ir.Value) -> ir.Value:
    """A word as an index."""
    return arith.index_cast(ir.IndexType.get(), value)


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Index of the warp in its warpgroup, and of the thread in its warp."""
    thread = mgpu_utils.thread_idx()
    warp = arith.remui(arith.divui(thread, constant(32)), constant(4))
    return warp, arith.remui(thread, constant(32))


def halves_of(words: ir.Value, dtype: ir.Type) -> ir.Value:
    """A flat view of int32 words as values of 16 bits."""
    kind = ir.MemRefType(words.type)
    size = 2 * int(np.prod(kind.shape))
    halves = ir.MemRefType.get((size,), dtype, memory_space=kind.memory_space)
    return mgpu_utils.ptr_as_memref(mgpu_utils.memref_ptr(words), halves)


def _pair_type(dtype: Any) -> str:
    return "bf16x2" if dtype == jnp.bfloat16 else "f16x2"


def _unpack_int4(words: list[ir.Value], dtype: Any, offsets: list[ir.Value] | None):
    """128 + code has the code in the last bits of bf16's mantissa, 1024 + code in fp16's."""
    (word,) = words
    if dtype == jnp.bfloat16:
        base, one, middle = 0x43004300, 0x3F803F80, 0xC308C308
    else:
        base, one, middle = 0x64006400, 0x3C003C00, 0xE408E408
    offsets = offsets or [constant(middle)] * 2
    values = []
    for i in range(4):
        shifted = arith.shrui(word, constant(4 * i)) if i else word
        based = and_or(shifted, 0x000F000F, constant(base))
        code = f"fma.rn.{_pair_type(dtype)} $0, $1, $2, $3"
        values.append(ptx(code, based, constant(one), offsets[i % 2]))
    return values


def _unpack_int8(
    words: list[ir.Value],
    dtype: Any,
    offsets: list[ir.Value] | None,
    scales: list[ir.Value] | None = None,
):
    """2^23 + code has the code in the last byte of fp32's mantissa.

    `scales` are of the two columns, in fp32. Values are multiplied before they are rounded.

    With the default offset 128, all is done in pairs of 16 bits. In fp16, 1024 + c has the code c
    in its last byte. In bf16, with l the low 7 bits of a code c, c - 128 is (128 + l) - 128 if its
    high bit is 1, else (128 + l) - 256. All of them are exact.
    """
    if dtype == jnp.float16 and offsets is None and scales is None:
        values = []
        for word in words:
            for low in (0, 1):
                selected = f"prmt.b32 $0, $1, $2, {0x5050 + low + (low + 2 << 8)}"
                based = ptx(selected, word, constant(0x6400))
                code = "fma.rn.f16x2 $0, $1, $2, $3"
                values.append(ptx(code, based, constant(0x3C003C00), constant(0xE480E480)))
        return values
    if dtype == jnp.bfloat16 and offsets is None and scales is None:
        values = []
        for word in words:
            for byte in (0, 1):
                shifted = arith.shrui(word, constant(8)) if byte else word
                based = and_or(shifted, 0x007F007F, constant(0x43004300))
                code = "lop3.b32 $0, $1, $2, $3, 0x6A"  # (word & mask) ^ base
                offset = ptx(code, shifted, constant(0x00800080), constant(0xC380C380))
                values.append(
                    ptx("fma.rn.bf16x2 $0, $1, $2, $3", based, constant(0x3F803F80), offset)
                )
        return values
    single, power = ir.F32Type.get(), constant(0x4B000000)
    offsets = offsets or [mgpu_utils.c(-(2.0**23) - 128, single)] * 2
    values = []
    for word in words:
        for byte in (0, 1):
            low, high = (
                arith.addf(
                    arith.bitcast(single, ptx(f"prmt.b32 $0, $1, $2, {0x7650 + b}", word, power)),
                    offsets[byte],
                )
                for b in (byte, byte + 2)
            )
            if scales:
                low, high = (arith.mulf(value, scales[byte]) for value in (low, high))
            code = f"cvt.rn.{_pair_type(dtype)}.f32 $0, $1, $2"
            values.append(ptx(code, high, low, kinds="f"))
    return values


def _unpack_fp8(words: list[ir.Value], dtype: Any, offsets: None):
    """fp16 has an instruction. The bits of e4m3 give a bf16 that is smaller by 2^120."""
    values = []
    for word in words:
        if dtype == jnp.float16:
            values += halves_of_fp8(word)
            continue
        for moved in (arith.shli(word, constant(8)), word):
            rest = arith.shrui(arith.andi(moved, constant(0x7F007F00)), constant(4))
            small = and_or(moved, 0x80008000, rest)
            code = "fma.rn.bf16x2 $0, $1, $2, $3"
            values.append(ptx(code, small, constant(0x7B807B80), constant(0x80008000)))
    return values


def halves_of_fp8(word: ir.Value) -> list[ir.Value]:
    """A word of `bricks` in fp8 as pairs of fp16: bytes 0 and 2, then 1 and 3."""
    return mgpu_utils.inline_ptx(_HALVES_OF_FP8, word, result_types=[i32()] * 2)


def _unpack_fp4(words: list[ir.Value], dtype: Any, powers: list[ir.Value] | None):
    """The bits of e2m1 are those of a bf16 that is smaller by 2^126, of an fp16 by 2^14.

    `bricks` says where the bits are.
    """
    (word,) = words
    power = constant(0x7E807E80 if dtype == jnp.bfloat16 else 0x74007400)
    second = arith.andi(arith.shli(word, constant(2)), constant(0x80C080C0))
    smalls = [
        arith.andi(arith.shli(word, constant(6)), constant(0x81C081C0)),
        and_or(arith.shrui(word, constant(6)), 0x01000100, second),
        arith.andi(word, constant(0x81C081C0)),
        arith.andi(ptx("shf.r.wrap.b32 $0, $1, $1, 4", word), constant(0x81C081C0)),
    ]
    values = []
    for i, small in enumerate(smalls):
        if dtype != jnp.bfloat16:
            rest = arith.shli(arith.andi(small, constant(0x01C001C0)), constant(3))
            small = and_or(small, 0x80008000, rest)
        code = f"fma.rn.{_pair_type(dtype)} $0, $1, $2, $3"
        value = ptx(code, small, power, constant(0x80008000))
        if powers:
            value = ptx(code, value, powers[i % 2], constant(0x80008000))
        values.append(value)
    return values


_UNPACK: dict[str, Callable] = {
    "int4": _unpack_int4,
    "int8": _unpack_int8,
    "fp8": _unpack_fp8,
    "fp4": _unpack_fp4,
}
