"""The flat GEMM, interpreted: every copy and barrier of its inner loop, and its refusals.

`test_matmul.py` tests its results on a GPU, together with all other implementations. The
interpreter does not support clusters (`split` above 1), so they are tested on a GPU only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.gemm.hopper.flat_gemm import FlatGemmConfig, matmul_flat_gemm
from fdjax.pallas_kernels.gemm.linear import matmul
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.plan import Plan

from . import oracle
from .tolerance import assert_matmul, assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

try:
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
except ImportError:  # it has no public name, and its place differs between versions
    get_races = None

EPS = 1e-5
SMALL = FlatGemmConfig(block_n=64, block_k=64, stages=3)
TALL = FlatGemmConfig(block_n=64, block_k=64, stages=2, block_m=128)


def product_operands(
    m,
    k,
    n,
    *,
    norm=False,
    bias=False,
    gate=None,
    activation=None,
    residual=False,
    dtype=jnp.bfloat16,
):
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * rng.normal(size=shape)).astype(dtype)

    columns = (2, n) if gate else (n,)
    norms = {
        False: lambda: None,
        True: lambda: RMSNorm(normal(k, scale=0.2, mean=1.0), EPS),
        "layer": lambda: LayerNorm(normal(k, scale=0.2, mean=1.0), normal(k), EPS),
        "layer without bias": lambda: LayerNorm(normal(k, scale=0.2, mean=1.0), None, EPS),
    }
    return {
        "x": normal(m, k, mean=isinstance(norm, str)),
        "w": normal(k, *columns, scale=k**-0.5),
        "norm": norms[norm](),
        "bias": normal(*columns) if bias else None,
        "gate": gate,
        "activation": activation,
        "residual": normal(m, n) if residual else None,
    }


def check_product(y, operands) -> None:
    norm = operands["norm"]
    shift = (norm.bias,) if isinstance(norm, LayerNorm) else ()
    exact = oracle.matmul(**operands | {"norm": norm and (norm.scale, norm.eps, *shift)})
    assert_matmul(
        y,
        exact,
        dtype=str(operands["x"].dtype),
        result=str(y.dtype),
        k=operands["x"].shape[1],
        normed=norm is not None,
        fused=False,
    )


def _interpret(operands, config, dtype=jnp.bfloat16, layer=None) -> np.ndarray:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = jax.device_get(matmul_flat_gemm(**operands, layer=layer, dtype=dtype, config=config))
    assert get_races is None or not get_races().races_found
    return y


ALL = dict(norm=True, bias=True, gate="silu", residual=True)
UP = dict(norm="layer", bias=True, activation="gelu")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (dict(m=8, k=640, n=128), SMALL),  # goes around the ring more than twice
        (dict(m=3, k=64, n=64, bias=True), SMALL),  # fewer steps than stages
        (dict(m=8, k=192, n=192), FlatGemmConfig(128, 128, 2)),  # partial blocks of K and of N
        (dict(m=5, k=448, n=64, **ALL), SMALL),
        slow(dict(m=72, k=192, n=64), SMALL),  # two blocks of rows
        slow(dict(m=100, k=192, n=64, **ALL), TALL),  # one block of rows
        slow(dict(m=136, k=64, n=64, residual=True), TALL),
        (dict(m=12, k=128, n=64, **ALL), SMALL),  # two groups of rows
        slow(dict(m=9, k=64, n=64, residual=True), SMALL),  # three groups of equal size
        (dict(m=11, k=128, n=64, residual=True), SMALL),  # rows that must be padded
        slow(dict(m=4, k=128, n=64, bias=True, dtype=jnp.float16), SMALL),
        slow(
            dict(m=2, k=512, n=64, norm=True), FlatGemmConfig(64, 64, 8)
        ),  # as many stages as rows
        (dict(m=1, k=320, n=128, **UP), SMALL),
        slow(
            dict(m=7, k=128, n=64, norm="layer without bias"), SMALL
        ),  # no spare rows: one tile more
        slow(dict(m=12, k=128, n=64, **UP), SMALL),  # two groups of rows
        slow(
            dict(m=1, k=320, n=32, norm=True, bias=True), SMALL
        ),  # a block without all its columns
        slow(dict(m=8, k=64, n=8, residual=True), SMALL),
    ],
    ids=str,
)
def test_interpreted_without_races(shape, config):
    operands = product_operands(**shape)
    check_product(_interpret(operands, config), operands)


def test_interpreted_layer():
    operands = product_operands(2, 64, 64)
    stack = operands | {"w": np.stack([np.full_like(operands["w"], np.nan), operands["w"]])}
    y = _interpret(stack, SMALL, layer=np.int32(1))
    assert_same_bits(y, _interpret(operands, SMALL))


def test_interpreted_fp32_result():
    operands = product_operands(2, 64, 64, norm=True)
    check_product(_interpret(operands, SMALL, dtype=jnp.float32), operands)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_n=96), "block_n must be 64, 128, 192 or 256, got 96"),
        (dict(block_n=320), "block_n must be 64, 128, 192 or 256, got 320"),
        (dict(block_k=32), "block_k must be 64, 128, 192 or 256, got 32"),
        (dict(stages=1), "stages must be at least 2, got 1"),
        (dict(split=9), "split must be in 1..8, got 9"),
        (dict(block_m=32), "block_m must be 64 or 128, got 32"),
    ],
)
def test_configs_that_cannot_be(change, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(SMALL, **change)
    assert str(error.value) == f"flat_gemm: {message}"


@pytest.mark.parametrize(
    ("m", "k", "n", "config", "message"),
    [
        (2, 96, 64, None, "mosaic_gpu needs K and N that are multiples of 64, got 96 and 64"),
        (2, 64, 72, None, "mosaic_gpu needs K and N that are multiples of 64, got 64 and 72"),
        (
            *(64, 4096, 256, FlatGemmConfig(256, 256, 4)),
            "FlatGemmConfig(block_n=256, block_k=256, stages=4, split=1, block_m=64) does not "
            "fit into shared memory at M = 64",
        ),
    ],
)
def test_what_it_cannot_do(m, k, n, config, message):
    x, w = jnp.zeros((m, k), jnp.bfloat16), jnp.zeros((k, n), jnp.bfloat16)
    run = functools.partial(matmul, implementation="mosaic_gpu")
    if config is not None:
        run = functools.partial(matmul_flat_gemm, dtype=jnp.bfloat16, config=config)
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(run, x, w)
    assert str(error.value) == f"matmul: {message}"


@pytest.mark.parametrize("columns", [512, 8448, 12288, 16896, 32768])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_there_is_room_where_nothing_was_measured(gate, columns):
    """The default tiling has room for all fusions wherever the heuristic runs the kernel."""
    plan = Plan(device_kind="some Hopper", compute_capability=(9, 0))
    shape = dict(k=2112, n=columns, itemsize=2, gate=int(gate is not None), fused=1)

    def product(x, w, scale, bias, residual):
        fused = dict(norm=RMSNorm(scale, EPS), bias=bias, gate=gate, residual=residual)
        return matmul(x, w, **fused, preferred_element_type=jnp.float32, plan=plan)

    for m in (1, 23, 32):
        assert plan.choose("matmul", m=m, **shape).implementation == "mosaic_gpu"
        n = (2, columns // 2) if gate else (columns,)
        shapes = (m, 2112), (2112, *n), (2112,), n, (m, n[-1])
        halves = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        traced = jax.make_jaxpr(product)(*halves)
        assert "flat_gemm_kernel" in str(traced)


@pytest.mark.parametrize(
    ("m", "layer_norm"), [(8, True), (16, True), (21, True), (28, True), (24, False), (64, False)]
)
def test_there_is_room_for_a_norm_of_few_columns(m, layer_norm):
    """A router's product, which a plan may name at any number of rows."""

    def product(x, w, scale, bias, residual):
        norm = LayerNorm(scale, scale, EPS) if layer_norm else RMSNorm(scale, EPS)
        fused = dict(norm=norm, bias=bias, residual=residual)
        return matmul_flat_gemm(x, w, **fused, dtype=jnp.float32)

    shapes = (m, 2048), (2048, 128), (2048,), (128,), (m, 128)
    halves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    assert jax.eval_shape(product, *halves).shape == (m, 128)


def _run(operands, config) -> np.ndarray:
    run = jax.jit(
        lambda o, gate, activation: matmul_flat_gemm(
            **o, gate=gate, activation=activation, dtype=jnp.bfloat16, config=config
        ),
        static_argnums=(1, 2),
    )
    names = "gate", "activation"
    arrays = {name: operand for name, operand in operands.items() if name not in names}
    return jax.device_get(run(arrays, *(operands[name] for name in names)))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("fused", [{}, ALL, UP], ids=["plain", "fused", "LayerNorm"])
def test_clusters(split, fused):
    """The result is right, and equal to one block's except for the order of a few sums."""
    operands = product_operands(16, 1984, 192, **fused)
    check_product(_run(operands, dataclasses.replace(SMALL, split=split)), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [65, 100, 128, 200])
@pytest.mark.parametrize(
    ("config", "fused"),
    [
        *((TALL, fused) for fused in ({}, ALL, dict(residual=True))),
        *((FlatGemmConfig(64, 64, 6, 2), fused) for fused in ({}, ALL, dict(residual=True))),
        # The partial sums of this configuration leave no room for a gate.
        *((FlatGemmConfig(128, 64, 4, 2, 128), fused) for fused in ({}, dict(residual=True))),
    ],
    ids=str,
)
def test_tall(m, config, fused):
    operands = product_operands(m, 1984, 192, **fused)
    check_product(_run(operands, config), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
def test_a_thousand_reruns_have_the_same_bits(split):
    operands = jax.device_put(product_operands(8, 4096, 4096, norm=True, residual=True))
    config = dataclasses.replace(SMALL, split=split)

    @jax.jit
    def differing(x, w, norm, residual):
        def run(x):
            return matmul_flat_gemm(
                x, w, norm=norm, residual=residual, dtype=jnp.float32, config=config
            )

        first = run(x)

        def compare(i, count):
            # The input depends on i, so that the run is not moved out of the loop.
            again = run(x + (0 * i).astype(x.dtype))
            return count + (again != first).any().astype(jnp.int32)

        return jax.lax.fori_loop(0, 1000, compare, jnp.int32(0))

    assert differing(*(operands[n] for n in ("x", "w", "norm", "residual"))) == 0
