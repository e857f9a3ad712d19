"""Reductions over rows by two warpgroups at once, which the interpreter cannot run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.reduction import WORDS, meet, over_rows
from fdjax.pallas_kernels.hopper.tiles import LAYOUT

SETS = 64
SHAPE = jax.ShapeDtypeStruct((2, SETS, 64, 8), jnp.float32)


def _reduced(x, op):
    """Reduce x [2, SETS, 64, 8] over rows, each half by a warpgroup of its own, and repeat that."""

    def kernel(x, y, memory):
        warpgroup = lax.axis_index("warpgroup")
        memory = memory.at[warpgroup]

        def one(i, _):
            values = plgpu.load(x.at[warpgroup, i], layout=LAYOUT, optimized=False)
            reduced = over_rows(values, op, memory)
            y.at[warpgroup, i][...] = lax.broadcast_in_dim(reduced, values.shape, [1])
            meet()

        lax.fori_loop(0, SETS, one, None)

    return plgpu.kernel(
        kernel,
        out_type=SHAPE,
        scratch_types=(plgpu.SMEM((2, WORDS), jnp.float32),),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(x)


@pytest.mark.deviceless
@pytest.mark.parametrize("op", ["sum", "max"])
def test_compiles(op):
    from deviceless import compile_for

    compile_for("h100", functools.partial(_reduced, op=op), SHAPE)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["sum", "max"])
def test_two_warpgroups_reduce_at_once(op):
    # Whole numbers, so that the order of a sum does not matter.
    x = np.random.default_rng(0).integers(-1000, 1000, SHAPE.shape).astype(np.float32)
    x[1, 3, 17, 5] = np.nan
    want = np.broadcast_to(getattr(np, op)(x, axis=2, keepdims=True), x.shape)
    run = jax.jit(functools.partial(_reduced, op=op))
    for _ in range(20):
        np.testing.assert_array_equal(run(x), want)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"must have the shape \(64, 8\), got \(64, 16\)"):
        over_rows(jnp.zeros((64, 16)), "sum", None)
