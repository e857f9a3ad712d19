"""Attention with sinks and mixtures of experts, compiled for an H100 without having one.

Run: `pytest -m deviceless tests/pallas_kernels/test_experts_deviceless.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from deviceless import compile_for, kernel_names, large_copies
from fdjax.pallas_kernels.attention import AttentionSpec, decode_attention, prefill_attention
from fdjax.pallas_kernels.experts import Routing, moe
from fdjax.pallas_kernels.experts.hopper.chosen import (
    CANDIDATES,
    PACKED_CANDIDATES,
    MoeConfig,
    moe_chosen,
)
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat

pytestmark = pytest.mark.deviceless

H100 = Plan(device_kind="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))
Array = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("op", "t"), [(decode_attention, 1), (prefill_attention, 128)])
def test_kernels_run_attention_with_sinks(op, t, window):
    """The sizes of gpt-oss."""
    spec = AttentionSpec(0.125, window=window, sinks=True)
    cache = Array((2, 8, 1024, 64), BF16)
    operands = Array((2, t, 64, 64), BF16), cache, cache, Array((2,), jnp.int32)

    def run(q, k, v, lengths, sinks):
        return op(q, k, v, lengths, spec=spec, sinks=sinks, plan=H100, implementation="mosaic_gpu")

    compiled = compile_for("h100", run, *operands, Array((64,), BF16))
    assert op.__name__ in compiled.as_text()


@pytest.mark.parametrize(
    ("m", "layout"),
    [(1, "plain"), pytest.param(16, "plain", marks=pytest.mark.soak), (16, "bricks")],
)
def test_one_expert_is_dequantised_at_a_time(m, layout):
    """The experts of gpt-oss-20b: 50 MB of 1.6 GB."""
    e, x = 2880, 32
    form = WeightFormat("fp4", 32, scales="float8_e8m0fnu", layout=layout)
    weights = [
        jax.eval_shape(functools.partial(form.empty, shape, (x,))) for shape in ((e, 2, e), (e, e))
    ]

    def run(rows, logits, gate_up, down, gate_up_bias, down_bias):
        return moe(
            *(rows, logits, gate_up, down),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            routing=Routing(x, 4, normalised=True),
            gate="clamped_swiglu",
            plan=H100.with_xla("moe"),
        )

    biases = Array((x, 2, e), BF16), Array((x, e), BF16)
    rows = Array((m, e), BF16), Array((m, x), jnp.float32)
    memory = compile_for("h100", run, *rows, *weights, *biases).memory_analysis()
    expert = 2 * 3 * e * e
    assert memory.temp_size_in_bytes < 1.05 * expert
    assert memory.argument_size_in_bytes < x * (expert * 17 / 64 + 2 * 4 * e) + 10 * m * e


# E, F, X, k.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}


def chosen_operands(name, m, biased=False, form=None):
    """Operands of `moe_chosen`, in the order of its arguments."""
    width, hidden, count, chosen = MODELS[name]
    shapes = (width, 2, hidden), (hidden, width)
    if form is None:
        weights = [Array((count, *shape), BF16) for shape in shapes]
    else:
        weights = [
            jax.eval_shape(functools.partial(form.empty, shape, (count,))) for shape in shapes
        ]
    biases = [Array((count, 2, hidden), BF16), Array((count, width), BF16)] if biased else []
    return (
        Array((m, width), BF16),
        Array((m, chosen), jnp.int32),
        Array((m, chosen), jnp.float32),
        *weights,
        *biases,
    )


def check_no_spills(capfd):
    said = capfd.readouterr().out.splitlines()
    spills = [line for line in said if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


@pytest.mark.parametrize(
    ("name", "m", "gate", "config"),
    [
        *(("Qwen3-30B-A3B", m, "silu", None) for m in (1, 16)),
        pytest.param("Qwen3-30B-A3B", 8, "silu", None, marks=pytest.mark.soak),
        # Every other candidate; the rest is a grid.
        *(("Qwen3-30B-A3B", 32, "silu", config) for config in CANDIDATES[::2]),
        *(
            pytest.param("Qwen3-30B-A3B", 32, "silu", config, marks=pytest.mark.soak)
            for config in CANDIDATES[1::2]
        ),
        ("Mixtral 8x7B", 20, "gelu", MoeConfig(128, 128, 2, 128, 128, 3)),
        ("gpt-oss-20b", 3, "clamped_swiglu", None),
    ],
    ids=str,
)
def test_chosen_experts_compile_without_spills_and_copies(
    name, m, gate, config, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    run = functools.partial(moe_chosen, gate=gate, config=config)
    operands = chosen_operands(name, m, biased=gate == "clamped_swiglu")
    compiled = compile_for("h100", run, *operands)
    check_no_spills(capfd)
    kernels = [name for name in kernel_names(compiled) if name.startswith("moe_")]
    assert kernels == ["moe_up_kernel", "moe_down_kernel"]
    assert large_copies(compiled, 2**20) == []


MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu", layout="bricks")


@pytest.mark.parametrize(
    ("m", "form", "config"),
    [
        *((m, MX, None) for m in (1, 32)),
        *((16, MX, config) for config in PACKED_CANDIDATES[::2]),
        *(pytest.param(16, MX, c, marks=pytest.mark.soak) for c in PACKED_CANDIDATES[1::2]),
        (32, WeightFormat("int4", 32, zeros=True, scales="bfloat16", layout="bricks"), None),
        (32, WeightFormat("int8", 2880, layout="bricks"), None),
        (8, WeightFormat("fp8", 64, scales="bfloat16", layout="bricks"), None),
    ],
    ids=str,
)
def test_quantised_experts_compile_without_spills_and_copies(m, form, config, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    run = functools.partial(moe_chosen, gate="clamped_swiglu", config=config)
    operands = chosen_operands("gpt-oss-20b", m, biased=True, form=form)
    compiled = compile_for("h100", run, *operands)
    check_no_spills(capfd)
    assert large_copies(compiled, 2**20) == []
    # Hidden values of 32 rows and every expert, results, and nothing dequantised.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23


def test_layers_share_a_lowering_and_experts_are_not_copied():
    layers, (x, experts, weights, *one) = 3, chosen_operands("gpt-oss-20b", 8)

    def step(x, experts, weights, layers, count):
        def body(_, x):
            for gate_up, down in layers:
                x = moe_chosen(x, experts, weights, gate_up, down, gate="silu")
            return x

        return jax.lax.fori_loop(0, count, body, x)

    operands = x, experts, weights, [one] * layers, Array((), jnp.int32)
    compiled = compile_for("h100", step, *operands)
    names = kernel_names(compiled)
    assert names.count("moe_up_kernel") == names.count("moe_down_kernel") == layers
    assert large_copies(compiled, 2**20) == []
    assert len(re.findall(r"_launch\d* = {", str(jax.make_jaxpr(step)(*operands)))) == 2
