"""What XLA makes for an H100 of attention with sinks and of quantised experts, without having one.

Run: `pytest -m deviceless tests/pallas_kernels/test_experts_deviceless.py`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from deviceless import compile_for
from fdjax.pallas_kernels.attention import AttentionSpec, decode_attention, prefill_attention
from fdjax.pallas_kernels.experts import Routing, moe
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


@pytest.mark.parametrize("m", [1, 16])
def test_one_expert_is_dequantised_at_a_time(m):
    """The experts of gpt-oss-20b: 50 MB of 1.6 GB."""
    e, x = 2880, 32
    form = WeightFormat("fp4", 32, scales="float8_e8m0fnu")
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
            plan=H100,
        )

    biases = Array((x, 2, e), BF16), Array((x, e), BF16)
    rows = Array((m, e), BF16), Array((m, x), jnp.float32)
    memory = compile_for("h100", run, *rows, *weights, *biases).memory_analysis()
    expert = 2 * 3 * e * e
    assert memory.temp_size_in_bytes < 1.05 * expert
    assert memory.argument_size_in_bytes < x * (expert * 17 / 64 + 2 * 4 * e) + 10 * m * e
