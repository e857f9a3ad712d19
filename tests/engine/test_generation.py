"""The pure functions: `fdjax.generate` under jit, `fdjax.forward`, and their configuration."""

import copy
import dataclasses
import functools
import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from any_size import ANY_SIZE
from fdjax import CheckpointError, GenerationConfig
from fdjax.engine.state import init_cache, start
from fdjax.models import Decoder, chain_features, chain_shape, describe, parse_config
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.sampling.options import OPTIONS, UNSET

pytestmark = pytest.mark.usefixtures("quick_compiles")

CASE = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3_gqa_tied"
PROMPTS = (1, 2, 3)  # of 7, 23 and 60 tokens, with their greedy runs by transformers

generate = jax.jit(fdjax.generate, static_argnums=(0, 3))
forward = jax.jit(fdjax.forward, static_argnums=0, static_argnames="last")


@pytest.fixture(scope="module")
def lm():
    options = {"compilation_cache": False, "progress": False, "max_batch": 4}
    return fdjax.load(str(CASE), dtype="float32", **options)


@functools.cache
def expected():
    with np.load(CASE / "expected.npz") as arrays:
        return dict(arrays)


def padded(fill=0):
    """(ids [B,P], lengths [B]) of the ragged prompts."""
    prompts = [expected()[f"prompt_{i}"] for i in PROMPTS]
    lengths = np.array([len(p) for p in prompts], np.int32)
    ids = np.full((len(prompts), lengths.max()), fill, np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, lengths


def until(tokens, stops):
    """`tokens` up to the first of `stops`, then -1."""
    ends = np.flatnonzero(np.isin(tokens, stops))
    return np.where(np.arange(len(tokens)) <= (ends[0] if len(ends) else len(tokens)), tokens, -1)


@pytest.mark.slow
def test_ragged_prompts_continue_as_each_alone_and_stop(lm):
    """The runs of transformers with which test_lm.py compares `lm.generate`."""
    ids, lengths = padded()
    truth = np.stack([expected()[f"tokens_{i}"][:20] for i in PROMPTS])
    stops = (int(truth[0, 0]), int(truth[1, 9]))
    config = GenerationConfig(max_new_tokens=20, eos_token_ids=stops)
    tokens = np.asarray(generate(lm.model, lm.params, ids, config, lengths))
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, [until(row, stops) for row in truth])
    counts = (tokens >= 0).sum(axis=1)
    assert counts[0] == 1 and 1 < counts[1] <= 10
    # The content of padding does not matter, and another value needs no other program.
    other, _ = padded(fill=7)
    np.testing.assert_array_equal(generate(lm.model, lm.params, other, config, lengths), tokens)


@pytest.mark.slow
def test_samples_are_those_of_lm_generate(lm):
    ids, lengths = padded()
    options = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 30, "top_p": 0.9}
    config = GenerationConfig(do_sample=True, seed=2**32 - 2, **options)
    tokens = np.asarray(generate(lm.model, lm.params, ids, config, lengths))
    ours = lm.generate(
        [expected()[f"prompt_{i}"] for i in PROMPTS],
        seed=[2**32 - 2, 2**32 - 1, 0],
        eos_token_id=None,
        **options,
    )
    assert tokens.tolist() == ours.tokens


def test_no_new_tokens(lm):
    ids, lengths = padded()
    config = GenerationConfig(max_new_tokens=0)
    assert generate(lm.model, lm.params, ids, config, lengths).shape == (3, 0)


@pytest.mark.slow
def test_one_new_token_of_whole_rows(lm):
    ids = expected()["prompt_2"][None]
    tokens = generate(lm.model, lm.params, ids, GenerationConfig(max_new_tokens=1))
    assert tokens.tolist() == [[expected()["tokens_2"][0]]]


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((7,), None, r"ids must be \[B,T\] and not empty, got \[7\]"),
        ((0, 7), None, r"got \[0, 7\]"),
        ((2, 0), None, r"got \[2, 0\]"),
        ((2, 7), (3,), r"lengths must be \[2\], got \[3\]"),
    ],
)
def test_shapes_that_are_refused(lm, shape, lengths, message):
    lengths = None if lengths is None else np.ones(lengths, np.int32)
    ids = np.ones(shape, np.int32)
    with pytest.raises(ValueError, match=message):
        fdjax.generate(lm.model, lm.params, ids, GenerationConfig(), lengths)
    with pytest.raises(ValueError, match=message.replace("generate", "forward")):
        fdjax.forward(lm.model, lm.params, ids, lengths)


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([[5, -1]], None, r"ids must be in 0\.\.319, the vocabulary, got -1"),
        ([[5, 320]], None, "got 320"),
        (np.array([[5, 2**32 + 5]]), None, f"got {2**32 + 5}"),
        (jnp.asarray([[5, 400]]), None, "got 400"),
        ([[5.0, 6.0]], None, "ids must be integers, got float64"),
        ([[True, False]], None, "ids must be integers, got bool"),
        ([[5, 6]], [3], r"lengths must be in 1\.\.2, what ids has room for, got 3"),
        ([[5, 6]], [0], "got 0"),
        ([[5, 6], [5, 6]], [1, -3], "got -3"),
        ([[5, 6]], [1.0], "lengths must be integers, got float64"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(lm, ids, lengths, message):
    with pytest.raises(ValueError, match=f"^forward: .*{message}$"):
        fdjax.forward(lm.model, lm.params, ids, lengths)
    with pytest.raises(ValueError, match=f"^generate: .*{message}$"):
        fdjax.generate(lm.model, lm.params, ids, GenerationConfig(), lengths)
    # If they are closed over, they are concrete inside a traced function as well.
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda params: fdjax.forward(lm.model, params, ids, lengths))(lm.params)


def test_weights_of_another_model_are_refused(lm):
    ids, config = np.ones((1, 3), np.int32), GenerationConfig(max_new_tokens=2)
    params = lm.params
    embed = params.pop("embed")
    want = re.escape("params: embed must be [320, 64], got ")
    for wrong, message in (
        (params, f"{want}nothing"),
        (params | {"embed": embed[:5]}, want + re.escape("[5, 64]")),
        (params | {"embed": embed, "head": embed}, r"params: head must be absent, got \[320, 64\]"),
        (params | {"embed": embed, "blocks": [*params["blocks"].values()]}, "nested dicts"),
        ({}, r"params: .* must be \[.*\], got nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            fdjax.forward(lm.model, wrong, ids)
        with pytest.raises(ValueError, match=message):
            fdjax.generate(lm.model, wrong, ids, config)
        with pytest.raises(ValueError, match=message):
            forward(lm.model, wrong, ids)


def test_options_that_a_pure_function_refuses(lm):
    generate = functools.partial(fdjax.generate, lm.model, lm.params, [[5, 6]])
    with pytest.raises(TypeError, match=r"generate: config must be a GenerationConfig, got {'max"):
        generate({"max_new_tokens": 3})
    with pytest.raises(ValueError, match="generate: suppress_tokens has id 320, the vocabulary"):
        generate(GenerationConfig(suppress_tokens=320))


@pytest.mark.slow
def test_transfers_are_allowed_whatever_the_guard_says(lm):
    ids = np.ones((1, 3), np.int32)
    config = GenerationConfig(max_new_tokens=2, do_sample=True)
    with jax.transfer_guard("disallow"):
        assert fdjax.forward(lm.model, lm.params, ids).shape == (1, 3, 320)
        assert fdjax.generate(lm.model, lm.params, ids, config).shape == (1, 2)


@pytest.mark.slow
def test_lists_are_arrays(lm):
    ids = [[5, 6, 7], [8, 9, 10]]
    logits = fdjax.forward(lm.model, lm.params, ids, [3, 2])
    want = fdjax.forward(lm.model, lm.params, np.array(ids, np.int32), np.array([3, 2], np.int32))
    np.testing.assert_array_equal(logits, want)


def test_forward_takes_no_notice_of_padding(lm):
    ids, lengths = padded()
    logits = np.asarray(forward(lm.model, lm.params, ids, lengths))
    assert (logits.shape, logits.dtype) == ((3, 60, 320), np.float32)
    other = np.asarray(forward(lm.model, lm.params, padded(fill=9)[0], lengths))
    for i, row, other_row, length in zip(PROMPTS, logits, other, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], other_row[:length])
        want = expected()[f"logits_{i}"]
        np.testing.assert_allclose(row[:length], want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.slow
def test_only_last_tokens_go_through_the_end_of_the_last_block():
    def flops(layers):
        config = dict(num_hidden_layers=layers, hidden_size=64, intermediate_size=1024)
        config |= dict(model_type="llama", num_attention_heads=4, vocab_size=16)
        model = describe(parse_config(config), dtype="float32")
        ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
        generate = functools.partial(
            fdjax.generate, model, config=GenerationConfig(max_new_tokens=1)
        )
        return jax.jit(generate).lower(model.abstract_params, ids).cost_analysis()["flops"]

    one, two, three = map(flops, (1, 2, 3))
    # A block's MLP is nine tenths of it.
    assert one < 0.4 * (three - two)


@pytest.mark.slow
def test_the_last_logits_of_forward(lm):
    ids = jnp.asarray(padded()[0][2:])
    whole = forward(lm.model, lm.params, ids)
    last = forward(lm.model, lm.params, ids, last=4)
    np.testing.assert_allclose(last, whole[:, -4:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [0, -1, 8, 1.5, "a", True])
def test_a_number_of_last_logits_that_there_cannot_be(lm, last):
    message = rf"forward: last must be an integer in 1\.\.7, got {last!r}"
    with pytest.raises(ValueError, match=message):
        fdjax.forward(lm.model, lm.params, np.ones((2, 7), np.int32), last=last)


# --- configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", 2e30),
        ("repetition_penalty", 1e-38),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_values_that_are_refused(field, value):
    with pytest.raises(ValueError, match=f"generate: {field} must be"):
        GenerationConfig(**{field: value})


@pytest.mark.parametrize("values", [{"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}, {"seed": None}])
def test_values_at_the_edge_are_taken(values):
    (name,) = values
    assert getattr(GenerationConfig(**values), name) == values[name]


def test_scalars_of_numpy_are_numbers():
    given = GenerationConfig(
        do_sample=np.True_,
        temperature=np.float32(0.5),
        max_new_tokens=np.int64(3),
        logit_bias={np.int64(5): np.float32(2)},
    )
    plain = GenerationConfig(do_sample=True, temperature=0.5, max_new_tokens=3, logit_bias={5: 2.0})
    assert given == plain and type(given.max_new_tokens) is int


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_arrays_without_dimensions_are_numbers(array):
    given = GenerationConfig(
        do_sample=array(True),
        temperature=array(0.5),
        max_new_tokens=array(3),
        logit_bias={5: array(2.0)},
    )
    plain = GenerationConfig(do_sample=True, temperature=0.5, max_new_tokens=3, logit_bias={5: 2.0})
    assert given == plain and type(given.max_new_tokens) is int
    with pytest.raises(ValueError, match="temperature must be a number"):
        GenerationConfig(temperature=array([0.5]))
    with pytest.raises(ValueError, match="temperature must be a number"):
        jax.jit(lambda t: GenerationConfig(temperature=t).temperature)(array(0.5))


def test_values_at_the_edges():
    GenerationConfig(max_new_tokens=0)
    GenerationConfig(max_new_tokens=5, min_new_tokens=5, temperature=0, top_p=1, seed=2**32 - 1)


def test_a_configuration_is_a_static_argument():
    one, other = (GenerationConfig(eos_token_ids=(1, 2)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_a_configuration_knows_what_was_given():
    config = GenerationConfig(max_new_tokens=5, top_k=None, do_sample=False)
    assert config.given == {"max_new_tokens", "top_k", "do_sample"}
    assert (config.temperature, config.top_k) == (UNSET, 0)
    assert repr(config) == "GenerationConfig(max_new_tokens=5, do_sample=False, top_k=0)"
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), eval(repr(config))):
        assert other == config and other.given == config.given and other.temperature is UNSET
    other = dataclasses.replace(config, num_return_sequences=1)
    assert other.given == config.given | {"num_return_sequences"} and other != config
    defaults = GenerationConfig(max_new_tokens=9, top_k=7, do_sample=True, eos_token_ids=3)
    filled = config.filled(defaults)
    assert (filled.max_new_tokens, filled.top_k, filled.do_sample) == (5, 0, False)
    assert (filled.eos_token_ids, filled.temperature) == ((3,), 1.0)
    assert filled.filled(GenerationConfig(temperature=2.0)) is filled
    assert GenerationConfig().filled().given == set(OPTIONS)


@pytest.mark.parametrize(
    ("given", "defaults", "least", "most"),
    [
        ({"min_new_tokens": 129}, {}, 129, 129),
        ({"min_new_tokens": 9}, {"max_new_tokens": 5}, 9, 9),
        ({"max_new_tokens": 5}, {"min_new_tokens": 9}, 5, 5),
        ({"max_new_tokens": 5}, {"min_new_tokens": 9, "max_new_tokens": 20}, 5, 5),
        ({}, {"min_new_tokens": 200}, 200, 200),
    ],
)
def test_of_a_minimum_and_a_maximum_the_given_one_wins(given, defaults, least, most):
    filled = GenerationConfig(**given).filled(GenerationConfig(**defaults))
    assert (filled.min_new_tokens, filled.max_new_tokens) == (least, most)
    with pytest.raises(ValueError, match="min_new_tokens must be between 0 and max_new_tokens"):
        GenerationConfig(min_new_tokens=6, max_new_tokens=5)


def test_temperature_0_is_greedy():
    assert not GenerationConfig(do_sample=True, temperature=0).sampled
    assert not GenerationConfig(do_sample=False, temperature=0.7).sampled
    assert GenerationConfig(temperature=0.7).sampled
    assert GenerationConfig(do_sample=True, temperature=0.7).sampled


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({}, {}, ()),
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 2}, (3, 4)),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": [2]}, (2,)),
    ],
)
def test_ends_of_sequence_of_a_checkpoint(generation, config, eos):
    found = GenerationConfig.from_files(generation, config, "generation_config.json")
    assert found.filled().eos_token_ids == eos


def test_defaults_of_a_checkpoint():
    files = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_length": 4096}
    found = GenerationConfig.from_files(files, {}, "generation_config.json")
    assert found == GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=50)
    found = GenerationConfig.from_files({"min_new_tokens": 200}, {}, "generation_config.json")
    assert (found.min_new_tokens, found.filled().max_new_tokens) == (200, 200)


@pytest.mark.parametrize(
    "generation", [{"eos_token_id": "</s>"}, {"eos_token_id": [-1]}, {"top_p": 7.0}]
)
def test_a_damaged_generation_config_is_named(generation):
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: "):
        GenerationConfig.from_files(generation, {}, "generation_config.json")


class TestChains:
    """The same blocks, cut at attention and not between layers."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "case", [pytest.param("llama3_gqa_tied", marks=pytest.mark.soak), "qwen3"]
    )
    def test_decode_as_layer_after_layer(self, case, monkeypatch):
        lm = fdjax.load(str(CASE.parent / case), dtype="float32", compilation_cache=False)
        ids, lengths = padded()
        ids %= lm.config.vocab_size
        config = GenerationConfig(max_new_tokens=8)
        decode = functools.partial(fdjax.generate, lm.model, lm.params, ids, config, lengths)
        tokens = jax.jit(decode)()
        made = []

        def chains(decoder, x, plan):
            made.append(x.shape)
            return True

        monkeypatch.setattr(Decoder, "_chains", chains)
        np.testing.assert_array_equal(jax.jit(lambda: decode())(), tokens)
        assert {shape[:2] for shape in made} == {(3, 1)}

    def test_run_where_the_plan_has_a_kernel(self):
        config = parse_config(SMALL)
        shape = chain_shape(config, 4, 2)
        assert shape == dict(m=4, k=64, width=64, hidden=192, n=128, itemsize=2)
        entry = Entry(
            "linear_chain", tuple(sorted(shape.items())), Choice("mosaic_gpu", source="table")
        )
        tokens = jax.ShapeDtypeStruct((4, 1), jnp.int32)
        for table, kernel in (((), False), ((entry,), True)):
            model = describe(config, dtype="bfloat16", plan=Plan(table=table))
            state = jax.eval_shape(lambda m=model: start(init_cache(m, 4, 128)))

            def step(params, state, tokens, model=model):
                attend = lambda spec, kv, qkv: (qkv[:, :, :, :-2].reshape(4, 1, -1), kv)  # noqa: E731
                return model.module(params)(tokens, state.kv, attend, model.plan, starts=None)[0]

            traced = jax.jit(step).trace(model.abstract_params, state, tokens)
            assert ("chain_kernel" in str(traced.jaxpr)) == kernel

    @pytest.mark.parametrize(
        "change",
        [
            {"attention_bias": True},
            {"mlp_bias": True},
            {"model_type": "qwen2"},
            {"model_type": "gemma2", "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
        ],
        ids=str,
    )
    def test_are_not_for_blocks_with_more_in_between(self, change):
        config = parse_config(SMALL | change)
        shape = chain_shape(config, 1, 2)
        plan = Plan(implementations=ANY_SIZE)
        assert plan.has_kernel("linear_chain", chain_features(parse_config(SMALL)), **shape)
        assert not plan.has_kernel("linear_chain", chain_features(config), **shape)


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 320,
    "num_hidden_layers": 3,
}
