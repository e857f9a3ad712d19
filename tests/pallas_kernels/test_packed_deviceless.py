"""Kernels for quantised weights compiled for an H100: no spills, no weight dequantised."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fdjax.models import describe, parse_config
from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.gemm.hopper.packed_gemm import matmul_packed
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat

pytestmark = pytest.mark.deviceless


def _spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "case",
    [
        dict(m=1, norm=True),
        dict(m=8, k=11008, group=128, residual=True),
        dict(m=16, n=11008, gate="silu", norm=True),
        dict(m=32, n=22016),
        dict(m=1, kind="int8", n=32000, group=4096, result="float32"),
        dict(m=8, kind="fp8", group=64, bias=True, x="float16"),
        dict(m=5, kind="int8", group=128, zeros=True, residual=True),
        dict(m=8, group=32, zeros=True, gate="gelu", n=2048, bias=True),
    ],
    ids=str,
)
def test_compiles_without_spills(case, monkeypatch, capfd):
    from deviceless import compile_for

    case = dict(m=1, k=4096, n=4096, kind="int4", group=128, gate=None, x="bfloat16") | case
    m, k, n, gate = (case[name] for name in ("m", "k", "n", "gate"))
    columns = (2, n) if gate else (n,)
    weight = WeightFormat(case["kind"], case["group"], case.get("zeros", False), layout="bricks")
    operands = {
        "w": jax.eval_shape(lambda: weight.empty((k, *columns))),
        "norm": RMSNorm(_spec(k), 1e-5) if case.get("norm") else None,
        "bias": _spec(*columns) if case.get("bias") else None,
        "residual": _spec(m, n) if case.get("residual") else None,
    }
    run = functools.partial(
        matmul_packed, gate=gate, dtype=jnp.dtype(case.get("result", case["x"]))
    )
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for("h100", run, _spec(m, k, dtype=case["x"]), kwargs=operands)
    spills = [line for line in capfd.readouterr().out.splitlines() if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_layers_share_a_lowering_and_weights_stay_packed(stacked):
    from deviceless import compile_for, kernel_names, large_buffers

    layers, k = 3, 1024
    one = jax.eval_shape(lambda: WeightFormat("int4", 128, layout="bricks").empty((k, k)))
    weights = [one] * layers
    if stacked:
        weights = jax.tree.map(lambda a: _spec(layers, *a.shape, dtype=a.dtype), one)
    plan = Plan.for_kind("a GPU", (9, 0))

    def step(weights, x, count):
        def body(_, x):
            for layer in range(layers):
                w, at = (weights, layer) if stacked else (weights[layer], None)
                x = matmul(x, w, layer=at, plan=plan)
            return x

        return jax.lax.fori_loop(0, count, body, x)

    arguments = weights, _spec(8, k), _spec(dtype="int32")
    compiled = compile_for("h100", step, *arguments)
    assert kernel_names(compiled).count("packed_gemm_kernel") == layers
    assert large_buffers(compiled, k * k // 2) == []
    assert str(jax.make_jaxpr(step)(*arguments)).count("_launch = {") == 1


def test_a_model_on_hopper_has_its_weights_in_bricks():
    config = parse_config(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 160,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 96,
            "max_position_embeddings": 512,
        }
    )
    names = config.blocks[0].linears
    paths = [("blocks", 0, *linear.path, "weight") for linear in names.values()]
    config = config.with_formats(dict.fromkeys(paths, WeightFormat("int4", 32)))
    plan = Plan.for_kind("a GPU", (9, 0))

    def layouts(**choice):
        formats = describe(config, **choice).config.blocks[0].formats
        return {name: weight.layout for name, weight in formats}

    bricks = {"qkv": "bricks", "out": "bricks"}  # 64 divides neither 160 rows nor columns
    assert layouts(plan=plan, dtype="bfloat16") == dict.fromkeys(names, "plain") | bricks
    assert set(layouts(plan=plan, dtype="float32").values()) == {"plain"}
    assert set(layouts(plan=Plan.for_kind("cpu", None)).values()) == {"plain"}
