"""Rounds activations to 8 bits on Hopper, with a scale for each row, and normalises them first.

Memory bound: a row is read and written once, 3 bytes a value. XLA needs a kernel for each of the
norm, the largest value and the codes, which read the row again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from fdjax.pallas_kernels.bricks import BRICK
from fdjax.pallas_kernels.hopper.fragments import byte_dtype, element, i8, i32, in_byte_order
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised

_LARGEST = {"fp8": 448.0, "int8": 127.0}  # of a code
_SMALLEST = 1e-30  # a row of zeros has this scale, times the largest code
_EACH = 16  # successive values of a thread, whose codes it reorders
_THREADS = 128
_MOST_BRICKS = 256  # that TMA copies at once
# The first of a pair is the higher half of a word.
_FOUR_CODES = {
    "fp8": """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $1, $2;
cvt.rn.satfinite.e4m3x2.f32 high, $3, $4;
mov.b32 $0, {low, high};
}""",
    "int8": """{
.reg .b32 first, second, third, fourth;
cvt.rni.s32.f32 first, $2;
cvt.rni.s32.f32 second, $1;
cvt.rni.s32.f32 third, $4;
cvt.rni.s32.f32 fourth, $3;
prmt.b32 first, first, second, 0x0040;
prmt.b32 third, third, fourth, 0x0040;
prmt.b32 $0, first, third, 0x5410;
}""",
}


def rounded_rows(
    x: Array,
    norm: RMSNorm | LayerNorm | None = None,
    *,
    kind: str = "fp8",
    in_xla: bool = False,
) -> tuple[Array, Array]:
    """Codes of norm(x) · c / max|norm(x)|, row by row, where c is the largest code.

    norm(x) is rounded to the dtype of x. A row with a value that is not finite has codes or a scale
    that are NaN.

    Args:
      x: [M,K] bfloat16 or float16; 64 divides K.
      norm: norm of the rows, or None.
      kind: "fp8" | "int8".
      in_xla: use XLA. It also runs for a LayerNorm and for more than 16 384 columns.

    Returns:
      (codes [M,K] float8_e4m3fn or int8 in the order of `in_byte_order`, scales [M] fp32).
    """
    bricks = x.shape[1] // BRICK
    if isinstance(norm, LayerNorm) or bricks > _MOST_BRICKS:
        x, norm = x if norm is None else normalised(x, norm), None
        in_xla = in_xla or bricks > _MOST_BRICKS
    if not in_xla:
        return _launch(x, norm, kind)
    x32 = (x if norm is None else normalised(x, norm)).astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x32), axis=1, keepdims=True), _SMALLEST)
    values = x32 * (_LARGEST[kind] / largest)
    if kind == "int8":  # which has no NaN
        largest += jnp.sum(x32 * 0.0, axis=1, keepdims=True)
        values = jnp.round(values)
    return in_byte_order(values.astype(byte_dtype(kind))), largest[:, 0] / _LARGEST[kind]


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(jax.jit, static_argnums=2)
def _launch(x: Array, norm: RMSNorm | None, kind: str) -> tuple[Array, Array]:
    """One block for each row, of one warpgroup."""
    (m, k), dtype = x.shape, byte_dtype(kind)
    at_once = _EACH * _THREADS // BRICK
    shape = -(-k // (BRICK * at_once)) * at_once, BRICK  # TMA fills the end with zeros
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=_EACH)
    operands = {"x": x.reshape(m, k // BRICK, BRICK)}
    scratch = {"x": plgpu.SMEM(shape, x.dtype), "codes": plgpu.SMEM(shape, dtype)}
    if norm is not None:
        operands["scale"] = norm.scale.reshape(k // BRICK, BRICK)
        scratch["scale"] = plgpu.SMEM(shape, norm.scale.dtype)
    scratch["arrived"] = plgpu.Barrier(num_arrivals=len(operands))

    def kernel(*refs):
        gmem = dict(zip((*operands, "codes", "scales"), refs, strict=False))
        smem = dict(zip(scratch, refs[len(gmem) :], strict=True))
        row = lax.axis_index("row")
        bricks = pl.ds(row * 0, shape[0])  # a static start could not reach past the end
        plgpu.copy_gmem_to_smem(gmem["x"].at[row, bricks], smem["x"], smem["arrived"])
        if norm is not None:
            plgpu.copy_gmem_to_smem(gmem["scale"].at[bricks], smem["scale"], smem["arrived"])
        plgpu.barrier_wait(smem["arrived"])

        def loaded(name):
            return plgpu.load(smem[name], layout=layout, optimized=False).astype(jnp.float32)

        values = loaded("x")
        if norm is not None:
            factor = lax.rsqrt(jnp.sum(values * values) / k + norm.eps)
            values = (values * factor * loaded("scale")).astype(x.dtype).astype(jnp.float32)
        largest = jnp.maximum(jnp.max(jnp.abs(values)), _SMALLEST)
        smem["codes"][...] = _codes(values * (_LARGEST[kind] / largest), layout, kind)
        if kind == "int8":  # which has no NaN
            largest += jnp.sum(values * 0.0)
        gmem["scales"][row] = largest / _LARGEST[kind]
        plgpu.commit_smem()
        # A copy past the end of a row would write to the next one.
        own = smem["codes"].at[pl.ds(0, k // BRICK)]
        plgpu.copy_smem_to_gmem(own, gmem["codes"].at[row])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = f"{kind}_rows_kernel"
    codes, scales = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((m, k // BRICK, BRICK), dtype),
            jax.ShapeDtypeStruct((m,), jnp.float32),
        ),
        scratch_types=tuple(scratch.values()),
        grid=(m,),
        grid_names=("row",),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    return codes.reshape(m, k), scales


def _codes(values: Array, layout: plgpu.Layout, kind: str) -> Array:
    """The codes of values, in the order of `in_byte_order`."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, byte_dtype(kind), layout=layout),
    )
    def run(_, values):
        byte = i8() if kind == "int8" else ir.Float8E4M3FNType.get()
        codes = values.registers.copy()
        for at, register in enumerate(values.registers.flat):
            words = []
            for first in range(0, _EACH // 2, 2):
                four = [element(register, first + i) for i in (1, 0, 9, 8)]
                words.append(mgpu_utils.inline_ptx(_FOUR_CODES[kind], *four, result_types=i32()))
            quads = mgpu_utils.vector_concat(
                [mgpu_utils.bitcast(word, ir.VectorType.get((1,), i32())) for word in words]
            )
            codes.flat[at] = mgpu_utils.bitcast(quads, ir.VectorType.get((_EACH,), byte))
        is_signed = True if kind == "int8" else None
        return mgpu.FragmentedArray(_registers=codes, _layout=values.layout, _is_signed=is_signed)

    return run(values)
