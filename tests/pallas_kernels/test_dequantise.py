"""The kernel that dequantises bricks: what it refuses, compiled, and on a GPU the bits of XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.hopper.dequantise import dequantise_bricks
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, in_layout, random_quantised

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

H100 = Plan(device_kind="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))
FORMATS = {
    "int4": WeightFormat("int4", 64, scales="bfloat16"),
    "int4 with zeros": WeightFormat("int4", 32, zeros=True),
    "int8": WeightFormat("int8", 320),
    "fp8": WeightFormat("fp8", 64, scales="bfloat16"),
    "MXFP4": WeightFormat("fp4", 32, scales="float8_e8m0fnu"),
}


def weight(form, shape=(320, 2, 192), stack=(3,)):
    return random_quantised(jax.random.key(0), form.empty(shape, stack), 0.02)


@pytest.mark.parametrize(
    ("form", "layout", "dtype"),
    [
        (FORMATS["int8"], "plain", "bfloat16"),
        (FORMATS["int8"], "bricks", "float32"),
        (WeightFormat("int4", 80), "bricks", "bfloat16"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_do(form, layout, dtype):
    q = in_layout(weight(form), layout)
    with pytest.raises(NotImplementedError, match=f"dequantise_bricks: cannot make {dtype} of "):
        dequantise_bricks(q, dtype)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["int4 with zeros", "fp8", "MXFP4"])
def test_compiles_without_spills(name, monkeypatch, capfd):
    from deviceless import compile_for

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    q = jax.eval_shape(lambda: in_layout(weight(FORMATS[name]), "bricks"))
    compile_for("h100", functools.partial(dequantise_bricks, dtype=jnp.bfloat16), q)
    assert "0 bytes spill stores, 0 bytes spill loads" in "".join(capfd.readouterr())


@pytest.mark.deviceless
def test_runs_for_products_of_mxfp4():
    from deviceless import compile_for, kernel_names

    run = functools.partial(matmul, gate="silu", plan=H100)
    x = jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16)
    for name, kernel in (("int4", "tall_gemm_kernel"), ("MXFP4", "dequantise_kernel")):
        form = FORMATS[name]
        q = jax.eval_shape(lambda form=form: in_layout(weight(form, (256, 2, 192), ()), "bricks"))
        names = kernel_names(compile_for("h100", run, x, q))
        assert [name for name in names if name.endswith("_kernel")] == [kernel]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(320, 2, 192), (320, 64)], ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_bits_on_a_gpu(form, shape, dtype):
    plain = weight(form, shape)
    want = jax.vmap(functools.partial(dequantise, dtype=dtype))(plain)
    q = in_layout(plain, "bricks")
    run = jax.jit(functools.partial(dequantise_bricks, dtype=dtype))
    np.testing.assert_array_equal(run(q), want)
    one, first = (jax.tree.map(lambda a: a[0], tree) for tree in (q, want))
    np.testing.assert_array_equal(run(one), first)
