"""Quantised weights as Hopper's tensor cores take them: packed for it, and unpacked in registers.

A brick of 64 columns and 64 rows of a weight [K,N] is the left operand, transposed, of four wgmma
instructions. Each of the 128 threads holds 8 of its values per instruction. The packed brick lists,
for one thread after the other, exactly these values, so that threads read 16 bytes each and nothing
has to be exchanged. A word holds the 8 values of int4 of an instruction, or half of them in 8 bits.

Values become bf16 or fp16 by placing their bits into the mantissa of a power of two, and
subtracting it: no instruction converts integers (`_unpack_int4`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu.fragmented_array import ir, arith, llvm, vector

from fdjax.pallas_kernels.hopper.tiles import LAYOUT

BRICK = 64
_THREADS = 128
BITS = {"int4": 4, "int8": 8, "fp8": 8}


def brick_words(kind: str) -> tuple[int, int]:
    """Shape of the int32 words of a packed brick. TMA copies at most 256 values at once."""
    return BITS[kind] // 2, 256


def pack(q: Array, kind: str) -> Array:
    """Pack integers [K,N], multiples of 64, into bricks [N/64, K/64, words].

    Args:
      q: [..., K, N] integers: -8..7 for "int4", -128..127 for "int8", the bits 0..255 for "fp8".
      kind: "int4" | "int8" | "fp8".

    Returns:
      [..., N/64, K/64, 2 or 4, 256] int32.
    """
    bits = BITS[kind]
    *lead, k, n = q.shape
    q = q.astype(jnp.int32) + {"int4": 8, "int8": 128, "fp8": 0}[kind]
    # Column: warp, half, lane row. Row: instruction, half, lane column, pair.
    q = q.reshape(*lead, k // 64, 4, 2, 4, 2, n // 64, 4, 2, 8)
    order = (5, 0, 6, 8, 3, 1, 2, 7, 4)  # brick n, brick k | warp, row, column | values
    axes = len(lead)
    q = q.transpose(*range(axes), *(axes + a for a in order))
    q = q.reshape(*lead, n // 64, k // 64, _THREADS, 4, 4, 2)
    # [..., thread, instruction, register, pair]
    if bits == 4:
        shifts = jnp.arange(4)[:, None] * 4 + jnp.arange(2) * 16
        words = (q << shifts).sum((-2, -1), dtype=jnp.int32)  # [..., thread, instruction]
    else:
        # Two registers a word.
        q = q.reshape(*lead, n // 64, k // 64, _THREADS, 4, 2, 2, 2)
        shifts = jnp.arange(2)[:, None] * 8 + jnp.arange(2) * 16
        words = (q << shifts).sum((-2, -1), dtype=jnp.int32)  # [..., thread, instruction, 2]
        # The first 16 bytes of all threads, then the others.
        words = words.reshape(*lead, n // 64, k // 64, _THREADS, 2, 4)
        words = jnp.swapaxes(words, -3, -2)
    return words.reshape(*lead, n // 64, k // 64, *brick_words(kind))


def unpacked(bricks: Any, kind: str, dtype: Any, width: int = BRICK) -> Array:
    """Load packed bricks from shared memory as a left operand of wgmma.

    Args:
      bricks: reference to int32 words [n, 2 or 4, 256] of n bricks along K.
      kind: "int4" | "int8" | "fp8".
      dtype: bfloat16 or float16.

    Returns:
      [64, 64·n] in `LAYOUT`. fp8 is returned scaled by 2^-120 in bfloat16, 2^-8 in float16.
    """
    count = bricks.shape[0]
    dtype = jnp.dtype(dtype)
    shape = (BRICK, BRICK * count)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=LAYOUT),
    )
    def run(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()
        half = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), half)
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(_THREADS, i32))
        at = arith.index_cast(index, arith.muli(thread, mgpu_utils.c(4, i32)))
        flat = mgpu_utils.memref_fold(ref, 0, 3)
        quads = BITS[kind] // 4
        words = []
        for brick in range(count):
            for quad in range(quads):
                offset = mgpu_utils.c((brick * quads + quad) * 4 * _THREADS, index)
                loaded = vector.load(
                    ir.VectorType.get((4,), i32), flat, [arith.addi(at, offset)]
                )
                words += [
                    vector.extract(loaded, dynamic_position=[], static_position=[i])
                    for i in range(4)
                ]
        unpack = _UNPACK[kind]
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        # Registers of a brick's four instructions.
        each = len(words) // (4 * count)
        flat_shape = registers.shape
        grid = np.empty((8 * count, 2), dtype=object)  # 8 columns each, then halves of the rows
        for instruction in range(4 * count):
            made = unpack(words[instruction * each : (instruction + 1) * each], dtype, i32)
            for i, value in enumerate(made):
                grid[2 * instruction + i // 2, i % 2] = mgpu_utils.bitcast(value, pair)
        registers = grid.reshape(flat_shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(bricks)


def _word(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu_utils.c(value - (value >> 31 << 32), i32)


def _asm(i32, code: str, *operands):
    constraints = ",".join(["=r", *["r"] * len(operands)])
    return llvm.inline_asm(i32, list(operands), code, constraints)


def _unpack_int4(words, dtype, i32):
    """128 + q has q in the last four bits of bf16's mantissa, 1024 + q in those of fp16's."""
    (word,) = words
    if dtype == jnp.bfloat16:
        base, one, offset, kind = 0x43004300, 0x3F803F80, 0xC308C308, "bf16x2"
    else:
        base, one, offset, kind = 0x64006400, 0x3C003C00, 0xE408E408, "f16x2"
    values = []
    for i in range(4):
        shifted = arith.shrui(word, _word(4 * i)) if i else word
        masked = _asm(i32, "lop3.b32 $0, $1, $2, $3, 0xEA;", shifted, _word(0x000F000F), _word(base))
        values.append(_asm(i32, f"fma.rn.{kind} $0, $1, $2, $3;", masked, _word(one), _word(offset)))
    return values


def _unpack_int8(words, dtype, i32):
    """2^23 + q has q in the last byte of fp32's mantissa."""
    values = []
    magic = mgpu_utils.c(0x4B000000, i32)
    for word in words:
        for low in (0, 1):
            halves = []
            for byte in (low, low + 2):
                bits = _asm(i32, f"prmt.b32 $0, $1, $2, {0x7650 + byte:#x};", word, magic)
                single = arith.bitcast(ir.F32Type.get(), bits)
                halves.append(
                    arith.subf(single, mgpu_utils.c(2.0**23 + 128, ir.F32Type.get()))
                )
            suffix = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
            values.append(
                llvm.inline_asm(
                    i32,
                    [halves[1], halves[0]],
                    f"cvt.rn.{suffix}.f32 $0, $1, $2;",
                    "=r,f,f",
                )
            )
    return values


def _unpack_fp8(words, dtype, i32):
    """The bits of e4m3 are those of a bf16 whose exponent is smaller by 120, of an fp16's by 8."""
    shift, power, kind = (4, 0x7B807B80, "bf16x2") if dtype == jnp.bfloat16 else (1, 0x5C005C00, "f16x2")
    values = []
    for word in words:
        for low in (0, 1):
            moved = arith.shli(word, mgpu_utils.c(8, i32)) if low == 0 else word
            bits = arith.shrui(
                arith.andi(moved, _word(0x7F007F00)), _word(shift)
            )
            bits = _asm(i32, "lop3.b32 $0, $1, $2, $3, 0xEA;", moved, _word(0x80008000), bits)
            values.append(
                _asm(i32, f"fma.rn.{kind} $0, $1, $2, $3;", bits, _word(power), _word(0x80008000))
            )
    return values


_UNPACK: dict[str, Callable] = {"int4": _unpack_int4, "int8": _unpack_int8, "fp8": _unpack_fp8}
