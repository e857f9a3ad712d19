"""Multiplies int8 codes in shared memory: they become 16-bit operands in registers of Hopper.

wgmma takes a transposed operand only from shared memory, and only in 16 bits. `plgpu.mma` takes all
operands from registers, so each code is loaded once and nothing is written back. Two codes side by
side are loaded as 16 bits. To avoid exchanges between threads, rows or columns are in another
order: `beside_codes` loads the other operand in the same order, `in_order` restores that of a
result.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.hopper.fragments import and_or, constant, element, i32, left_of, ptx
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, transforms_of

# A thread has two slots of a pair of codes in a register, a warp 8 pairs.
_PAIRS_BY_SLOTS = mgpu.TiledLayout(
    plgpu.Tiling(((32, 16), (8, 8), (1, 2))),
    warp_dims=(-6,),
    lane_dims=(-4, -3),
    vector_dim=-1,
    _check_canonical=False,
).canonicalize()
# A thread has four columns of a row in a register.
_FOUR_COLUMNS = mgpu.TiledLayout(
    plgpu.Tiling(((8, 16), (4,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-3, -2),
    vector_dim=-1,
    _check_canonical=False,
).canonicalize()


def codes(ref: Any, dtype: Any) -> Array:
    """Load codes [M, K] as a left operand, with columns in the order of `beside_codes`.

    Args:
      ref: shared memory [M, K] int8 with `transforms_of(K, 1)`, M a multiple of 64, K of 32.
      dtype: bfloat16 or float16.
    """
    m, k = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms_of(k, 1)),),
        return_type=plgpu.ShapeDtypeStruct((m, k), dtype, layout=left_of(dtype)),
    )
    def run(_, ref):
        words = _load(_as_pairs(ref), left_of(jnp.int16).to_mgpu())
        # Of 16 pairs: two rows of the first 8 pairs, then of the others.
        registers = []
        for a, b in words.reshape(-1, 2):
            (a_even, a_odd), (b_even, b_odd) = (_widened(one, dtype) for one in (a, b))
            registers += [a_even, b_even, a_odd, b_odd]
        return _fragment(registers, (m, k), left_of(dtype), dtype)

    return run(ref)


def beside_codes(ref: Any) -> Array:
    """Load x [M, K] as a right operand [K, M] for `codes`.

    Args:
      ref: shared memory [M, K] of 16 bits with `transforms_of(K, 2)`, M a multiple of 8.
    """
    (m, k), dtype = ref.shape, jnp.dtype(ref.dtype)
    layout = plgpu.Layout.MMA_RHS(dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms_of(k, 2)),),
        return_type=plgpu.ShapeDtypeStruct((k, m), dtype, layout=layout),
    )
    def run(_, ref):
        loaded = mgpu.FragmentedArray.load_tiled(
            ref, _swizzle(ref, 2), layout=_FOUR_COLUMNS, optimized=False
        )
        registers = []
        for four in loaded.registers.reshape(m // 8, k // 16).T.flat:
            pairs = mgpu_utils.bitcast(four, ir.VectorType.get((2,), i32()))
            halves = element(pairs, 0), element(pairs, 1)
            # Columns 0 and 2 of four, then 1 and 3.
            registers += [
                ptx(f"prmt.b32 $0, $1, $2, {order}", *halves) for order in ("0x5410", "0x7632")
            ]
        return _fragment(registers, (k, m), layout, dtype)

    return run(ref)


def transposed_codes(ref: Any, dtype: Any) -> Array:
    """Load codes [K, M] as a left operand [M, K]. `in_order` restores the rows of its products.

    Args:
      ref: shared memory [K, M] int8 with `transforms_of(M, 1)`, K a multiple of 16, M of 64.
      dtype: bfloat16 or float16.
    """
    k, m = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms_of(m, 1)),),
        return_type=plgpu.ShapeDtypeStruct((m, k), dtype, layout=left_of(dtype)),
    )
    def run(_, ref):
        pairs = mgpu_utils.memref_transpose(_as_pairs(ref), (1, 0, 3, 2))
        words = _load(pairs, _PAIRS_BY_SLOTS)
        registers = [half for one in words for half in _widened(one, dtype)]
        return _fragment(registers, (m, k), left_of(dtype), dtype)

    return run(ref)


def put_codes(ref: Any, values: Array) -> None:
    """Store codes [M, K] int8 in `LAYOUT` into shared memory without transforms.

    Mosaic's own store also loads what was there, and refuses patterns with bank conflicts, as this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def run(_, ref, values):
        values.store_untiled(ref, optimized=False)

    run(ref, values)


def multiplied(left: Array, right: Array) -> Array:
    """left [M, K] · right [K, N], K a multiple of 32. Its halves do not wait for each other."""
    m, k = left.shape
    blank = plgpu.layout_cast(jnp.zeros((m, right.shape[1]), jnp.float32), LAYOUT)
    halves = slice(0, k // 2), slice(k // 2, k)
    first, second = (plgpu.mma(blank, left[:, half], right[half]) for half in halves)
    return first + second


def in_order(y: Array) -> Array:
    """A product [M, N] fp32 of `transposed_codes`, in `LAYOUT`, with its rows in order.

    Of each 16 rows, row r of y is row 2 r of the result, or row 2 r - 15 if r is 8 or more.
    """

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(y.shape, y.dtype, layout=LAYOUT),
    )
    def run(_, y):
        lane = arith.remui(mgpu_utils.thread_idx(), constant(32))
        row, column = arith.divui(lane, constant(4)), arith.remui(lane, constant(4))
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(row, constant(2)), constant(0))
        half = arith.addi(arith.muli(arith.divui(row, constant(2)), constant(4)), column)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers = []
        for rows in y.registers.reshape(-1, 2):
            for source in (half, arith.addi(half, constant(16))):
                found = []
                for i in (0, 1):  # its two columns
                    first, second = (_from_lane(element(r, i), source) for r in rows)
                    found.append(arith.select(odd, second, first))
                registers.append(vector.from_elements(pair, found))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(y.registers.shape),
            _layout=y.layout,
            _is_signed=None,
        )

    return run(y)


def _as_pairs(ref: ir.Value) -> ir.Value:
    """Tiles of int8 [.., .., 8, width] as tiles of 16 bits."""
    kind = ir.MemRefType(ref.type)
    *shape, width = kind.shape
    pairs = ir.MemRefType.get(
        (*shape, width // 2), ir.IntegerType.get_signless(16), memory_space=kind.memory_space
    )
    return mgpu_utils.ptr_as_memref(mgpu_utils.memref_ptr(ref), pairs)


def _swizzle(ref: ir.Value, itemsize: int) -> int:
    return ir.MemRefType(ref.type).shape[-1] * itemsize


def _load(pairs: ir.Value, layout: mgpu.TiledLayout) -> np.ndarray:
    """Words of two pairs each, in the order of the layout."""
    shape = ir.MemRefType(pairs.type).shape
    loaded = mgpu.FragmentedArray.load_tiled(
        pairs, max(shape[-2:]) * 2, layout=layout, is_signed=True, optimized=False
    )
    words = [mgpu_utils.bitcast(register, i32()) for register in loaded.registers.flat]
    return np.array(words, dtype=object)


def _widened(codes: ir.Value, dtype: Any) -> tuple[ir.Value, ir.Value]:
    """Codes 0 and 2 of a word, and codes 1 and 3, as pairs of 16-bit floats.

    With l the low 7 bits of a code, the code is (128 + l) - 128, or - 256 if its high bit is 1:
    numbers that bfloat16 holds in its mantissa. float16 holds 1024 and all bits.
    """
    if dtype == jnp.bfloat16:
        values = []
        for moved in (codes, arith.shrui(codes, constant(8))):
            based = and_or(moved, 0x007F007F, constant(0x43004300))
            offset = and_or(moved, 0x00800080, constant(0x43004300))
            values.append(ptx("sub.bf16x2 $0, $1, $2", based, offset))
        return tuple(values)
    codes = arith.xori(codes, constant(0x80808080))
    based = (
        and_or(moved, 0x00FF00FF, constant(0x64006400))
        for moved in (codes, arith.shrui(codes, constant(8)))
    )
    return tuple(ptx("sub.f16x2 $0, $1, $2", value, constant(0x64806480)) for value in based)


def _fragment(
    registers: list[ir.Value], shape: tuple[int, int], layout: Any, dtype: Any
) -> mgpu.FragmentedArray:
    half = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
    pair, layout = ir.VectorType.get((2,), half), layout.to_mgpu()
    registers = [mgpu_utils.bitcast(register, pair) for register in registers]
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=None,
    )


def _from_lane(value: ir.Value, lane: ir.Value) -> ir.Value:
    """Another lane's value in fp32."""
    bits = mgpu_utils.bitcast(value, i32())
    code = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff"
    moved = mgpu_utils.inline_ptx(
        f"{code};", bits, lane, result_types=i32(), convergent=True, has_side_effects=True
    )
    return mgpu_utils.bitcast(moved, value.type)
