"""Reduces an array of a warpgroup over its rows, and lets its threads meet.

All warpgroups that run the same code share the memory that Mosaic's own reductions use across
warps, so two of them cannot reduce at once. Here, each brings its own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.hopper.fragments import constant
from fdjax.pallas_kernels.hopper.tiles import LAYOUT

COLUMNS = 8
WORDS = 4 * COLUMNS  # fp32 values of the memory that a reduction takes

_OPS = {"sum": arith.addf, "max": arith.maximumf}
_LANES_OF_A_COLUMN = 4, 8, 16


def meet() -> None:
    """Let all threads of the warpgroup see what each has stored to shared memory.

    TMA and wgmma see it only after `plgpu.commit_smem`, which takes longer.
    """

    @plgpu.inline_mgpu()
    def run(_):
        mgpu_utils.warpgroup_barrier()

    run()


def over_rows(x: Array, op: str, memory: Any) -> Array:
    """Sum or maximum of all rows of x.

    Args:
      x: [64, 8] fp32 in `LAYOUT`.
      op: "sum" | "max".
      memory: shared memory [32] fp32 of this warpgroup alone. Between two uses of it, all threads
        of the warpgroup must meet once more: by `meet`, or by `plgpu.commit_smem`.

    Returns:
      [8] in `LAYOUT.reduce(0)`.
    """
    return all_over_rows([x], op, memory)[0]


def all_over_rows(xs: Sequence[Array], op: str, memory: Any) -> list[Array]:
    """`over_rows` of several arrays, which take as long as one. `memory` has room for each."""
    combine = _OPS[op]
    made = plgpu.ShapeDtypeStruct((COLUMNS,), xs[0].dtype, layout=LAYOUT.reduce(0))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[LAYOUT] * len(xs)), return_type=[made] * len(xs)
    )
    def run(_, memory, *xs):
        # A thread has two columns of two rows. The lanes of its column differ in their rows.
        values = [combine(*x.registers.flat) for x in xs]
        for distance in _LANES_OF_A_COLUMN:
            others = [mgpu_utils.shfl_bfly(value, distance) for value in values]
            values = [combine(*pair) for pair in zip(values, others, strict=True)]
        thread = arith.remui(mgpu_utils.thread_idx(), constant(128))
        warp = arith.divui(thread, constant(32))
        column = arith.muli(arith.remui(thread, constant(4)), constant(2))

        def place(i, warp):
            at = arith.addi(arith.muli(warp, constant(COLUMNS)), column)
            at = arith.addi(at, constant(i * WORDS))
            return [arith.index_cast(ir.IndexType.get(), at)]

        for i, value in enumerate(values):
            vector.store(value, memory, place(i, warp))
        mgpu_utils.warpgroup_barrier()
        layout = xs[0].layout.reduce((0,))
        results = []
        for i, value in enumerate(values):
            parts = [vector.load(value.type, memory, place(i, constant(w))) for w in range(4)]
            total = combine(combine(parts[0], parts[1]), combine(parts[2], parts[3]))
            registers = np.array([total], dtype=object)
            results.append(
                mgpu.FragmentedArray(
                    _registers=registers.reshape(layout.registers_shape((COLUMNS,))),
                    _layout=layout,
                    _is_signed=None,
                )
            )
        return results

    for x in xs:
        if x.shape != (64, COLUMNS):
            raise ValueError(f"must have the shape (64, {COLUMNS}), got {x.shape}")
    return run(memory, *xs)
