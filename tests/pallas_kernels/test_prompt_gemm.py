"""The GEMM for prompts: interpreted, compiled for an H100, and on a GPU.

The interpreter knows no clusters, so blocks that share a weight run only on a GPU.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fdjax.models import describe, parse_config
from fdjax.pallas_kernels.gemm.hopper import prompt_gemm
from fdjax.pallas_kernels.gemm.hopper.prompt_gemm import (
    PROMPT_GEMM,
    PromptGemmConfig,
    matmul_prompt_gemm,
)
from fdjax.pallas_kernels.gemm.linear import MATMUL, matmul
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Plan

from .test_decode_mosaic import INTERPRET
from .test_matmul_mosaic import check_product, get_races, product_operands, slow
from .tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

ALONE, PAIRS = PromptGemmConfig(128, 1, 2), PromptGemmConfig(256, 2, 4)
ALL = dict(norm=True, bias=True, gate="silu", residual=True)
UP = dict(norm="layer", bias=True, activation="gelu")


def run(operands, config=None, *, dtype=jnp.bfloat16, layer=None, interpret=None) -> np.ndarray:
    names = "gate", "activation"
    static = {name: operands[name] for name in names} | {"dtype": dtype, "config": config}
    arrays = {name: value for name, value in operands.items() if name not in names}
    product = functools.partial(matmul_prompt_gemm, **static, interpret=interpret)
    y = jax.device_get(jax.jit(lambda arrays: product(**arrays, layer=layer))(arrays))
    assert interpret is None or get_races is None or not get_races().races_found
    return y


interpreted = functools.partial(run, interpret=INTERPRET)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        slow(dict(m=270, k=192, n=192), ALONE),  # rows and columns past the end
        (dict(m=130, k=1216, n=64, gate="silu", residual=True), ALONE),  # twice around the ring
        slow(dict(m=97, k=128, n=320, residual=True, **UP), PromptGemmConfig(192, 1, 1)),
        slow(dict(m=520, k=64, n=128, bias=True), PromptGemmConfig(128, 1, 3)),  # two groups
        slow(dict(m=64, k=128, n=192, dtype=jnp.float16, **ALL), PromptGemmConfig(256, 1)),
    ],
    ids=str,
)
def test_interpreted_without_races(shape, config):
    operands = product_operands(**shape)
    check_product(interpreted(operands, config), operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "n", "config"),
    [
        # The residual of the next tile must not come before this one's has been taken.
        (64, 320, PromptGemmConfig(128, 1, 2)),
        slow(256, 320, PromptGemmConfig(128, 1, 2)),
        # The last tile of a block and the first of the next are in the same place before copies.
        (64, 384, PromptGemmConfig(192, 1, 2)),
        slow(128, 64, PromptGemmConfig(256, 1, 1)),
    ],
)
def test_interpreted_blocks_with_several_tiles(k, n, config, monkeypatch):
    monkeypatch.setattr(prompt_gemm, "MULTIPROCESSORS", 2)
    operands = product_operands(520 + k, k, n, residual=k < 128 or n > 64)
    check_product(interpreted(operands, config), operands)


def test_interpreted_layer_and_fp32_result():
    operands = product_operands(9, 64, 64, residual=True)
    stack = operands | {"w": np.stack([np.full_like(operands["w"], np.nan), operands["w"]])}
    y = interpreted(stack, ALONE, layer=np.int32(1), dtype=jnp.float32)
    assert_same_bits(y, interpreted(operands, ALONE, dtype=jnp.float32))
    check_product(y, operands)


@pytest.mark.slow
def test_a_wider_residual_is_added_afterwards():
    operands = product_operands(9, 64, 64, residual=True)
    wide = operands | {"residual": operands["residual"].astype(np.float32)}
    y = interpreted(wide, ALONE, dtype=jnp.float32)
    assert_same_bits(y, interpreted(operands, ALONE, dtype=jnp.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_n=64), "block_n must be 128, 192 or 256, got 64"),
        (dict(share=3), "share must be 1 or 2, got 3"),
        (dict(tall=1), "tall must be at least share, got 1"),
    ],
)
def test_configs_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=re.escape(f"prompt_gemm: {message}")):
        PromptGemmConfig(**change)


def test_a_gate_takes_no_tile_of_192_columns():
    shape = dict(m=512, k=4096, n=22016, itemsize=2, gate=1, fused=1)
    assert 192 not in {config.block_n for config in PROMPT_GEMM.candidates(shape)}
    operands = product_operands(300, 64, 192, gate="silu")
    with pytest.raises(NotImplementedError, match="no tile of 192 columns with a gate"):
        run(operands, PromptGemmConfig(192))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(m=256), "needs at least 257 rows, got 256"),
        (dict(k=4128), "needs K and N that are multiples of 64, got 4128 and 4096"),
        (dict(n=4128), "needs K and N that are multiples of 64, got 4096 and 4128"),
        (dict(itemsize=4), "needs bfloat16 or float16, got float32"),
    ],
)
def test_refuses_what_it_cannot_do(change, message):
    shape = dict(m=512, k=4096, n=4096, itemsize=2, gate=0, fused=0)
    assert PROMPT_GEMM.refusal(shape) is None
    assert PROMPT_GEMM.refusal(shape | change) == message


@pytest.mark.parametrize(
    ("m", "k", "n", "expected"),
    [
        (257, 4096, 4096, "mosaic_gpu"),
        (1024, 28672, 8192, "mosaic_gpu"),
        (2048, 4096, 4096, "xla"),
        (256, 4096, 4096, "xla"),  # for the flat GEMM, only a table says so
        (512, 512, 4096, "xla"),
        (512, 4096, 512, "xla"),
        (512, 4096, 128256, "xla"),
    ],
)
def test_where_nothing_was_measured(m, k, n, expected):
    plan = Plan(device_kind="some Hopper", compute_capability=(9, 0))
    shape = dict(m=m, k=k, n=n, itemsize=2, gate=0, fused=0)
    assert plan.choose("matmul", **shape).implementation == expected
    traced = jax.make_jaxpr(functools.partial(matmul, plan=plan))(
        *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n)))
    )
    assert ("prompt_gemm_kernel" in str(traced)) == (expected == "mosaic_gpu")
    # The flat GEMM takes any number of rows by its name.
    assert MATMUL.index(PROMPT_GEMM) == 0
    assert plan.for_several_devices().choose("matmul", **shape).implementation == "xla"


def test_devices_that_share_a_model_do_not_run_it():
    plan = Plan(device_kind="some Hopper", compute_capability=(9, 0))
    config = parse_config(
        dict(model_type="llama", hidden_size=4096, num_attention_heads=32, num_hidden_layers=1)
        | dict(num_key_value_heads=8, intermediate_size=14336, vocab_size=32000)
    )
    one, two = (describe(config, plan=plan, tensor_parallel=n) for n in (1, 2))
    shape = dict(m=512, k=4096, n=6144, itemsize=2, gate=0, fused=0)
    assert one.plan.choose("matmul", **shape).implementation == "mosaic_gpu"
    for model in (two, two.local):
        assert model.plan.choose("matmul", **shape).implementation == "xla"


@pytest.mark.parametrize("tokens", [128, 256, 257, 512, 1024, 1025])
def test_layers_of_a_prompt_run_in_a_loop_where_it_runs(tokens):
    plan = Plan(device_kind="some Hopper", compute_capability=(9, 0))
    data = dict(model_type="llama", hidden_size=4096, num_attention_heads=32, num_hidden_layers=1)
    data |= dict(num_key_value_heads=8, intermediate_size=14336, vocab_size=32000)
    model = describe(parse_config(data), dtype="bfloat16", plan=plan)
    assert model.loops(tokens) == (257 <= tokens <= 1024)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (dict(m=512, n=4096), (128, 1)),
        (dict(m=512, n=12288), (192, 1)),
        (dict(m=512, n=11008, gate=True), (256, 1)),
        (dict(m=4096, n=4096), (256, 2)),
        (dict(m=4096, n=14336, gate=True), (256, 2)),
    ],
    ids=str,
)
def test_default_tilings_are_those_that_were_the_fastest(shape, config):
    assert PromptGemmConfig.for_shape(**shape) == PromptGemmConfig(*config)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("case", "config", "dtype"),
    [
        (dict(m=4096, k=4096, n=12288), None, jnp.bfloat16),
        (dict(m=512, k=4096, n=11008, gate="silu", layers=2), None, jnp.bfloat16),
        (dict(m=504, k=11008, n=4096, **ALL | {"gate": "gelu"}), PAIRS, jnp.bfloat16),
        (dict(m=512, k=4096, n=4096, **UP, residual=True), None, jnp.float32),
        (dict(m=512, k=4096, n=6144), PromptGemmConfig(192, 2), jnp.float32),
    ],
    ids=["qkv", "layer", "gated", "ungated", "fp32"],
)
def test_compiles_without_spills(case, config, dtype, monkeypatch, capfd):
    from deviceless import compile_for, kernel_names, large_copies

    shape, layers = dict(case), case.get("layers")
    shape.pop("layers", None)
    static = {name: shape.get(name) for name in ("gate", "activation")}
    operands = jax.eval_shape(
        lambda: {n: a for n, a in product_operands(**shape).items() if n not in static}
    )
    if layers:
        w = operands["w"]
        operands["w"] = jax.ShapeDtypeStruct((layers, *w.shape), w.dtype)
        operands["layer"] = jax.ShapeDtypeStruct((), jnp.int32)

    def product(operands):
        return matmul_prompt_gemm(**operands, **static, dtype=dtype, config=config)

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for("h100", product, operands)
    assert kernel_names(compiled) == ["prompt_gemm_kernel"]
    assert not large_copies(compiled, 2**20)
    spills = [line for line in capfd.readouterr().out.splitlines() if "spill stores" in line]
    assert spills and all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [ALONE, PAIRS, PromptGemmConfig(128, 2), None], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        dict(m=257, k=1984, n=192),
        dict(m=300, k=4096, n=1088, **ALL),
        dict(m=1024, k=64, n=4096, residual=True),
        dict(m=2056, k=1024, n=320, **UP, residual=True),
        dict(m=520, k=2048, n=1024, gate="gelu_tanh", dtype=jnp.float16),
    ],
    ids=str,
)
def test_on_a_gpu(shape, config):
    operands = product_operands(**shape)
    y = run(operands, config)
    check_product(y, operands)
    # Another tiling adds in the same order.
    assert_same_bits(y, run(operands, PromptGemmConfig(256, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [ALONE, PAIRS], ids=str)
def test_a_layer_and_fp32_results_on_a_gpu(config):
    operands = product_operands(384, 512, 192, residual=True)
    stack = operands | {"w": np.stack([np.full_like(operands["w"], np.nan), operands["w"]])}
    y = run(stack, config, layer=np.int32(1), dtype=jnp.float32)
    check_product(y, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [PromptGemmConfig(128, 1), PromptGemmConfig(256, 2)], ids=str)
def test_hundreds_of_reruns_have_the_same_bits(config):
    operands = jax.device_put(product_operands(1000, 4096, 4096, norm=True, residual=True))

    @jax.jit
    def differing(x, w, norm: RMSNorm, residual):
        def product(x):
            fused = dict(norm=norm, residual=residual)
            return matmul_prompt_gemm(x, w, **fused, dtype=jnp.bfloat16, config=config)

        first = product(x)

        def compare(i, count):
            # The input depends on i, so that the run is not moved out of the loop.
            again = product(x + (0 * i).astype(x.dtype))
            return count + (again != first).any().astype(jnp.int32)

        return lax.fori_loop(0, 500, compare, jnp.int32(0))

    assert differing(*(operands[n] for n in ("x", "w", "norm", "residual"))) == 0
