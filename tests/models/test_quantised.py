"""Models with quantised weights: they compute what the dequantised weights compute."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.engine.engine import compiler_options
from fdjax.engine.memory import plan_memory
from fdjax.engine.state import SLOT_MULTIPLE, init_cache, start
from fdjax.engine.step import decode_steps
from fdjax.models import chain_features, describe, layers_features, parse_config, random_params
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, is_quantised
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors
from fdjax.tools.info import model_info

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "torch_dtype": "float32",
}
INT4 = WeightFormat("int4", 32, zeros=True)
FORMATS = {
    "int4": INT4,
    "int8": WeightFormat("int8", 32, scales="bfloat16"),
    "fp8": WeightFormat("fp8", 16),
}


def with_formats(config, weight, *, head=True, layers=None):
    paths = [
        ("blocks", i, *linear.path, "weight")
        for i, block in enumerate(config.blocks)
        if layers is None or i in layers
        for linear in block.linears.values()
    ]
    return config.with_formats(dict.fromkeys([*paths, *[("head", "weight")] * head], weight))


@functools.cache
def model(kind, dtype="float32", **choice):
    config = parse_config(LLAMA)
    if kind is not None:
        config = with_formats(config, FORMATS[kind], **choice)
    return describe(config, dtype=dtype, plan=Plan(batch_invariant=True))


def dequantised(params, dtype):
    """Parameters of the model without quantised weights, in the shapes of its own layers."""
    plain = jax.tree.map(
        lambda leaf: dequantise(leaf, dtype) if is_quantised(leaf) else leaf,
        params,
        is_leaf=is_quantised,
    )
    return jax.tree.map(
        lambda leaf, like: leaf.reshape(like.shape), plain, model(None, dtype).abstract_params
    )


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "dtype"), [("int4", "float32"), ("int8", "bfloat16"), ("fp8", "bfloat16")]
)
def test_logits_are_those_of_the_dequantised_weights(kind, dtype):
    m = model(kind, dtype)
    params = random_params(m, seed=1)
    ids = np.random.default_rng(0).integers(0, 96, (2, 7))
    got = np.asarray(fdjax.forward(m, params, ids, np.array([7, 4])))
    plain = model(None, dtype)
    want = fdjax.forward(plain, dequantised(params, dtype), ids, np.array([7, 4]))
    np.testing.assert_array_equal(got, np.asarray(want))
    assert np.ptp(got) > 0.01  # the logits say something


@pytest.mark.slow
def test_answers_are_those_of_the_dequantised_weights():
    m = model("int4")
    params = random_params(m, seed=2)
    config = GenerationConfig(max_new_tokens=9)
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    generate = jax.jit(fdjax.generate, static_argnums=(0, 3))
    want = generate(model(None), dequantised(params, "float32"), ids, config)
    got = generate(m, params, ids, config)
    np.testing.assert_array_equal(got, want)
    lm = fdjax.LM(m, params)
    answers = lm.generate(ids.tolist(), max_new_tokens=9).tokens
    np.testing.assert_array_equal(answers, want)
    again = pickle.loads(pickle.dumps(jax.device_get(params)))
    lm.params = again
    assert lm.generate(ids.tolist(), max_new_tokens=9).tokens == answers
    assert lm.score([[5, 6, 7, 8]]).perplexity > 1


@pytest.mark.slow
def test_layers_may_differ():
    m = model("int8", layers=(1,), head=False)
    params = random_params(m)
    kinds = [is_quantised(params["blocks"][i]["mlp"]["down"]["weight"]) for i in range(2)]
    assert kinds == [False, True]
    ids = np.array([[1, 2, 3]])
    want = fdjax.forward(model(None), dequantised(params, "float32"), ids)
    np.testing.assert_array_equal(fdjax.forward(m, params, ids), want)


@pytest.mark.slow
def test_other_weights_may_be_assigned_if_they_have_the_same_format():
    lm = fdjax.LM(model("int4"), random_params(model("int4")))
    with pytest.raises(ValueError, match=r"params: blocks\.0\.attention\.out\.weight"):
        lm.params = random_params(model("int8"))
    with pytest.raises(ValueError, match=r"params: blocks\.0\.attention\.out\.weight"):
        lm.params = random_params(model(None))


def test_kernels_for_several_products_refuse_the_model():
    config = model("int4").config
    plain = parse_config(LLAMA)
    for features in (chain_features, layers_features):
        assert {"weight.int4", "weight.zeros"} <= features(config)
        assert not any(name.startswith("weight") for name in features(plain))
    assert hash(plain) == hash(dataclasses.replace(config, head_format=None).with_formats({}))
    assert config != plain


def test_bytes_are_counted_exactly():
    m, plain = model("int4", "bfloat16"), model(None, "bfloat16")
    params = random_params(m)
    assert m.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert m.parameter_count == plain.parameter_count
    plan = plan_memory(m, max_len=128)
    assert plan.weight_bytes == m.weight_bytes < plain.weight_bytes
    # XLA dequantises one weight at a time, here gate and up.
    more = plan.workspace_bytes - plan_memory(plain, max_len=128).workspace_bytes
    assert more == 2 * 64 * 2 * 96


def test_info_tells_the_formats():
    info = model_info(model("int4", "bfloat16"), memory_bytes=10**9)
    assert info.quantised == ("int4 by 32",)
    assert "in int4 by 32, bfloat16" in str(info)
    labels = [label for op, label, *_ in info.choices if op == "matmul"]
    assert all("int4 by 32" in label for label in labels) and len(labels) == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", pytest.param("fp8", marks=pytest.mark.soak)])
def test_a_decode_loop_does_not_hold_dequantised_weights(kind):
    """XLA would otherwise move the dequantisation of all layers out of the loop."""
    config = parse_config(LLAMA | {"hidden_size": 256, "intermediate_size": 1024})
    sizes = {}
    for name, c in ((kind, with_formats(config, FORMATS[kind], head=False)), ("plain", config)):
        m = describe(c, dtype="float32", plan=Plan(batch_invariant=True))
        params = jax.eval_shape(functools.partial(random_params, m))
        run = functools.partial(fdjax.generate, m, config=GenerationConfig(max_new_tokens=9))
        ids = jax.ShapeDtypeStruct((1, SLOT_MULTIPLE // 2), jnp.int32)
        compiled = jax.jit(run).lower(params, ids).compile()
        sizes[name] = compiled.memory_analysis().temp_size_in_bytes
    one = 4 * 2 * 256 * 1024
    assert sizes[kind] - sizes["plain"] < 2.5 * one


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", FORMATS)
def test_one_weight_is_dequantised_at_a_time_on_a_gpu(kind):
    from deviceless import compile_for, temp_bytes

    config = parse_config(LLAMA | {"hidden_size": 1024, "intermediate_size": 4096})
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    config = with_formats(config, WeightFormat(kind, 64, scales="bfloat16"), head=False)
    m = describe(config, dtype="bfloat16", plan=plan)
    state = jax.eval_shape(lambda: start(init_cache(m, 1, SLOT_MULTIPLE)))
    sampling = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), per_row([GenerationConfig()], 1)
    )

    def run(params, state, sampling, steps):
        return decode_steps(m, params, state, sampling, steps, max_steps=4, processors=Processors())

    compiled = compile_for(
        *("h100", run, jax.eval_shape(functools.partial(random_params, m)), state, sampling),
        jax.ShapeDtypeStruct((), jnp.int32),
        donate_argnums=1,
        compiler_options=compiler_options(decode_steps, m),
    )
    assert temp_bytes(compiled) < 1.2 * 2 * 2 * 1024 * 4096
