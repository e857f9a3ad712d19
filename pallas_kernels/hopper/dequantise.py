"""Dequantises weights in bricks on Hopper, into memory, for products that read them many times.

A block unpacks 4 bricks along K of a column of bricks. The result has the bits of `dequantise`: a
code without its zero is exact, and its product with the scale is rounded once. It reads each
code once and writes each weight once: 0.56 + 2 bytes per weight for int4 with groups of 32.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, brick_words
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import unpacked
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load, matrix, put
from fdjax.pallas_kernels.quantised import BRICKS, QTensor, check

_DEEP = 4  # bricks of a block


def dequantise_bricks(q: QTensor, dtype: jnp.dtype) -> Array:
    """`dequantise` as a Mosaic GPU kernel, also for a stack of weights.

    Args:
      q: a weight in bricks, or a stack of weights, with groups of 32 or of a multiple of 64 rows.
      dtype: bfloat16 or float16.

    Returns:
      [..., K, N] or [..., K, 2, N].

    Raises:
      ValueError: the arrays do not fit together.
      NotImplementedError: another layout, group or dtype.
    """
    check(q, "dequantise_bricks", stacked=bool(q.stack))
    if q.layout != BRICKS or jnp.dtype(dtype).itemsize != 2 or (q.group != 32 and q.group % BRICK):
        raise NotImplementedError(
            f"dequantise_bricks: cannot make {jnp.dtype(dtype)} of {q.format}, layout {q.layout}"
        )
    (k, *outs), count = q.shape, q.stack[0] if q.stack else 1
    parts, n = (1, *outs)[-2:]
    operands = {"words": q.words.reshape(count, parts, *q.words.shape[-4:])}
    operands["scales"] = q.scales.astype(jnp.float32).reshape(count, -1, parts, n)
    if q.zeros is not None:
        operands["zeros"] = q.zeros.astype(jnp.float32).reshape(count, -1, parts, n)
    unit = min(q.group, BRICK)
    scratch = {
        "words": plgpu.SMEM((_DEEP, *brick_words(q.kind)), jnp.int32),
        "y": matrix((_DEEP, BRICK, BRICK), jnp.dtype(dtype)),
        "arrived": plgpu.Barrier(),
    }

    def kernel(*refs):
        gmem = dict(zip((*operands, "y"), refs, strict=False))
        smem = dict(zip(scratch, refs[len(gmem) :], strict=True))
        weight, part, column, deep = map(lax.axis_index, ("weight", "part", "column", "deep"))
        columns = pl.ds(column * BRICK, BRICK)
        words = gmem["words"].at[weight, part, column, pl.ds(deep * _DEEP, _DEEP)]
        plgpu.copy_gmem_to_smem(words, smem["words"], smem["arrived"])

        def factor(name, row):
            """Scales or zeros [64] of the columns in the group of a row. Rows may lie past K."""
            group = jnp.minimum(lax.div(row, q.group), k // q.group - 1)
            return load(gmem[name].at[weight, group, part, columns], LAYOUT.reduce(1))

        starts = range(0, _DEEP * BRICK, unit)
        factors = {
            name: [factor(name, deep * (_DEEP * BRICK) + start) for start in starts]
            for name in ("scales", "zeros")
            if name in gmem
        }
        plgpu.barrier_wait(smem["arrived"])
        for i, start in enumerate(starts):
            zeros = factors["zeros"][i] if "zeros" in factors else None
            codes = unpacked(smem["words"], q.kind, dtype, start, unit, zeros)
            scale = lax.broadcast_in_dim(factors["scales"][i], codes.shape, [0])
            brick, row = divmod(start, BRICK)
            put(smem["y"].at[brick, pl.ds(row, unit)], codes.astype(jnp.float32) * scale)
        plgpu.commit_smem()
        for brick in range(_DEEP):
            at = deep * _DEEP + brick

            @when(at < k // BRICK)
            def _(brick=brick, at=at):
                target = gmem["y"].at[weight, pl.ds(at * BRICK, BRICK), part, columns]
                plgpu.copy_smem_to_gmem(smem["y"].at[brick], target)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "dequantise_kernel"
    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((count, k, parts, n), dtype),
        scratch_types=tuple(scratch.values()),
        grid=(count, parts, -(-k // (_DEEP * BRICK)), n // BRICK),
        grid_names=("weight", "part", "deep", "column"),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    return y.reshape(*q.stack, *q.shape)
