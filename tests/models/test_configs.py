"""Both generations of config.json give the same object, and no field is overlooked."""

import json
import math
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from fdjax.models import FAMILIES, CheckpointError, describe, parse_config, weight_map
from fdjax.pallas_kernels.rope import Dynamic, LinearScaling, Llama3, LongRope, Rope, Yarn
from marks import slow_unless_fast

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
PUBLISHED = sorted(p.name.removesuffix(".old.json") for p in FIXTURES.glob("configs/*.old.json"))
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/config.alternate.json"))

MODEL_TYPES = sorted(name for family in FAMILIES.values() for name in family.MODEL_TYPES)

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Rope(16, 500000.0, Llama3(8.0, 1.0, 4.0, 8192))
SHORT, LONG = [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2], [1.0, 1.3, 2.1, 4.0, 7.5, 16, 20, 30]
LONGROPE = {
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def config(**changes) -> dict:
    """A small valid config.json with changes; `...` as a value removes the field."""
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "float32",
    } | changes
    return {key: value for key, value in fields.items() if value is not ...}


def rope(**changes) -> Rope:
    (spec,) = set(parse_config(config(**changes)).attention)
    return spec.rope


def family(model_type: str, **changes):
    return parse_config(config(model_type=model_type, **changes))


def refusal(fields: dict) -> str:
    """The one-line error for a config that cannot be loaded."""
    with pytest.raises(CheckpointError) as caught:
        parse_config(fields, "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert "\n" not in message
    return message


def test_the_fixtures_are_all_there():
    assert len(PUBLISHED) >= 37
    assert len(CASES) >= 32
    # Every family has one.
    assert {read(FIXTURES / case / "config.json")["model_type"] for case in CASES} == {*MODEL_TYPES}


def assert_generations(old: dict, new: dict) -> None:
    """Check that the fields are those of the two generations. Not every model has a RoPE."""
    ropes = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_pct", "rope_parameters")
    assert "dtype" in new and "torch_dtype" in old
    assert "rope_parameters" not in old
    assert ("rope_parameters" in new) == any(key in old for key in ropes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_generations_of_a_published_config_are_one(name):
    old, new = (read(FIXTURES / "configs" / f"{name}.{g}.json") for g in ("old", "new"))
    assert_generations(old, new)
    parsed = parse_config(old)
    assert parsed == parse_config(new)
    assert hash(parsed) == hash(parse_config(new))


@pytest.mark.parametrize("name", CASES)
def test_both_generations_of_a_fixture_are_one(name):
    one, other = (read(FIXTURES / name / f) for f in ("config.json", "config.alternate.json"))
    assert_generations(*sorted((one, other), key=lambda data: "dtype" in data))
    assert parse_config(one) == parse_config(other)


@pytest.mark.parametrize("name", slow_unless_fast(PUBLISHED, PUBLISHED[::3]))
def test_a_published_model_has_its_published_size_and_is_never_allocated(name, arrays_made):
    model = describe(parse_config(read(FIXTURES / "configs" / f"{name}.new.json")))
    counts = read(FIXTURES / "configs/parameter_counts.json")
    assert model.parameter_count == counts[name]
    leaves = jax.tree.leaves(model.abstract_params)
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert arrays_made() == 0
    # Every parameter has source tensors, and these hold exactly the model's weights.
    assert len(weight_map(model.config)) == len(leaves)


def test_llama_3_1_8b_field_by_field():
    parsed = parse_config(read(FIXTURES / "configs/llama-3.1-8b.old.json"))
    assert (parsed.family, parsed.layers, parsed.vocab_size) == ("llama", 32, 128256)
    assert (parsed.width, parsed.mlp_width, parsed.norm_eps) == (4096, 14336, 1e-5)
    assert (parsed.heads, parsed.kv_heads, parsed.head_dim, parsed.group) == (32, 8, 128, 4)
    assert (parsed.activation, parsed.dtype) == ("silu", "bfloat16")
    assert parsed.max_position_embeddings == 131072
    assert not (parsed.tie_embeddings or parsed.qkv_bias or parsed.out_bias or parsed.mlp_bias)
    (spec,) = set(parsed.attention)
    assert spec.scale == 128**-0.5
    assert spec.window is spec.soft_cap is spec.alibi is None
    assert spec.rope == Rope(128, 500000.0, Llama3(8.0, 1.0, 4.0, 8192))


def windows(name: str) -> list[int | None]:
    parsed = parse_config(read(FIXTURES / "configs" / f"{name}.old.json"))
    return [spec.window for spec in parsed.attention]


def only_spec(name: str):
    (spec,) = set(parse_config(read(FIXTURES / "configs" / f"{name}.old.json")).attention)
    return spec


def test_what_is_special_in_published_configs():
    assert only_spec("codellama-7b").rope == Rope(128, 1000000.0)
    assert only_spec("vicuna-7b-v1.5-16k").rope == Rope(128, 10000.0, LinearScaling(4.0))
    assert only_spec("mistral-7b-v0.1").window == 4096
    assert only_spec("phi-3-mini-4k").window == 2047
    # These files have windows that are switched off.
    for name in ("qwen1.5-7b", "qwen1.5-72b", "qwen2-7b", "qwen3-8b"):
        assert set(windows(name)) == {None}
    for name in ("qwen1.5-7b", "qwen2-7b"):
        parsed = parse_config(read(FIXTURES / "configs" / f"{name}.new.json"))
        assert (parsed.qkv_bias, parsed.out_bias, parsed.qk_norm) == (True, False, False)
    parsed = parse_config(read(FIXTURES / "configs/qwen3-8b.new.json"))
    assert (parsed.qkv_bias, parsed.out_bias, parsed.qk_norm) == (False, False, True)


def test_phi_4_mini_has_longrope_on_three_quarters_of_a_head():
    rope = only_spec("phi-4-mini").rope
    assert (rope.dim, rope.theta) == (96, 10000.0)
    assert rope.scaling.short_factors == (1.0,) * 48
    assert rope.scaling.long_factors[-1] == 47.77
    assert rope.scaling.original_max_position == 4096
    # sqrt(1 + log(32) / log(4096))
    assert rope.attention_factor == pytest.approx(1.1902380714238083, rel=1e-12)


def test_gemma_field_by_field():
    parsed = parse_config(read(FIXTURES / "configs/gemma-2-27b.old.json"))
    assert (parsed.family, parsed.activation) == ("gemma2", "gelu_tanh")
    assert (parsed.norm_offset, parsed.post_norms, parsed.qk_norm) == (1.0, True, False)
    assert parsed.tie_embeddings and parsed.embedding_scale == 4608**0.5
    assert parsed.logit_soft_cap == 30.0
    assert {(s.scale, s.soft_cap, s.rope) for s in parsed.attention} == {
        (144**-0.5, 50.0, Rope(128, 10000.0))
    }
    assert [s.window for s in parsed.attention] == [4096, None] * 23

    parsed = parse_config(read(FIXTURES / "configs/gemma-3-1b.old.json"))
    assert (parsed.logit_soft_cap, parsed.qk_norm) == (None, True)
    assert [s.window for s in parsed.attention] == ([512] * 5 + [None]) * 4 + [512] * 2
    for spec in parsed.attention:
        assert spec.rope == Rope(256, 1e6 if spec.window is None else 1e4)
        assert (spec.scale, spec.soft_cap) == (256**-0.5, None)


def test_what_a_config_leaves_out_has_the_defaults_of_transformers():
    parsed = parse_config(
        config(num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., torch_dtype=...)
    )
    assert (parsed.kv_heads, parsed.head_dim) == (4, 16)
    assert (parsed.norm_eps, parsed.max_position_embeddings) == (1e-6, 2048)
    assert (parsed.activation, parsed.tie_embeddings, parsed.dtype) == ("silu", False, "float32")
    assert parsed.attention[0].rope == Rope(16, 10000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_parameters": None},
        {"rope_parameters": {}},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500000},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500000.0}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_plain_rope_however_it_is_written(fields):
    assert rope(**fields) == Rope(16, 500000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": None, "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": ..., "rope_parameters": {"type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_theta": ...,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
    ],
    ids=str,
)
def test_llama3_rope_however_it_is_written(fields):
    assert rope(**fields) == LLAMA3_ROPE


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "section", "scaling"),
    [
        ("linear", {"factor": 4}, LinearScaling(4.0)),
        # The default comes from the model's context, as in transformers.
        ("dynamic", {"factor": 2.0}, Dynamic(2.0, 2048)),
        ("yarn", YARN, Yarn(4.0, 512, 0.1 * math.log(4) + 1)),
        ("yarn", {"factor": 4.0}, Yarn(4.0, 2048, 0.1 * math.log(4) + 1)),
        ("yarn", YARN | {"factor": 0.5}, Yarn(0.5, 512, 1.0)),
        (
            "yarn",
            YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": False},
            Yarn(4.0, 512, 1.5, 16.0, 2.0, False),
        ),
        (
            "yarn",
            YARN | {"mscale": 2.0, "mscale_all_dim": 1.0},
            Yarn(4.0, 512, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ),
        (
            "longrope",
            LONGROPE,
            LongRope(tuple(SHORT), tuple(LONG), 1024, math.sqrt(1 + 1 / 10)),
        ),
        (
            "longrope",
            LONGROPE | {"factor": 1024.0},
            LongRope(tuple(SHORT), tuple(LONG), 1024, math.sqrt(2)),
        ),
        (
            "longrope",
            LONGROPE | {"attention_factor": 1.25},
            LongRope(tuple(SHORT), tuple(LONG), 1024, 1.25),
        ),
    ],
    ids=str,
)
def test_scaled_rope_in_either_place_under_either_name(place, key, kind, section, scaling):
    assert rope(**{place: {key: kind, **section}}) == Rope(16, 500000.0, scaling)


TABLES = sorted(read(FIXTURES / "rope_configs.json"))


@pytest.mark.parametrize("key", TABLES)
def test_tables_are_those_of_transformers(key):
    """Frequencies agree to fp32 accuracy, cos and sin to the resulting error of an angle."""
    with np.load(FIXTURES / "rope_tables.npz") as arrays:
        table = {
            n: arrays[f"{key}.{n}"] for n in ("positions", "inverse_frequencies", "cos", "sin")
        }
    fields = read(FIXTURES / "rope_configs.json")[key]
    if "partial_rotary_factor" in fields:
        fields |= {"model_type": "phi3", "pad_token_id": 0}
    (spec,) = parse_config(fields).attention
    length = np.full(1, int(key.rpartition(".")[2]), np.int32)
    frequencies = table["inverse_frequencies"]
    if spec.rope.depends_on_length:
        ours = np.asarray(spec.rope.inverse_frequencies(length))[0]
    else:
        ours = spec.rope.inverse_frequencies()
    np.testing.assert_allclose(ours, frequencies, rtol=4e-6 if "llama3" in key else 1e-6)
    positions = table["positions"].astype(np.float32)[:, None]
    bar = 2e-6 * (1 + positions * frequencies)
    for name, wave in (("cos", np.cos), ("sin", np.sin)):
        got = wave(positions * ours) * np.float32(spec.rope.attention_factor)
        assert (np.abs(got - table[name]) <= bar).all(), np.abs(got - table[name]).max()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        # If both are present, transformers uses rope_scaling and other readers rope_parameters.
        (
            {
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "default"},
            },
            ["rope_scaling", "rope_parameters", "disagree"],
        ),
        (
            {
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "llama3", **LLAMA3, "factor": 32.0},
            },
            ["rope_scaling", "rope_parameters", "disagree"],
        ),
        ({"rope_parameters": {"rope_theta": 10000.0}}, ["rope_theta", "10000.0", "500000.0"]),
        (
            {"rope_scaling": {"type": "default", "rope_type": "llama3", **LLAMA3}},
            ["rope_scaling", "rope_type", "'type'", "disagree"],
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
            ["partial_rotary_factor", "0.5", "1.0"],
        ),
    ],
    ids=str,
)
def test_two_places_that_disagree_are_refused(fields, says):
    message = refusal(config(**fields))
    assert all(word in message for word in says)


def test_a_partial_rotation_is_read_and_not_dropped():
    named = {"model_type": "phi3", "pad_token_id": 0}
    assert rope(**named, partial_rotary_factor=0.5).dim == 8
    assert rope(**named, rope_parameters={"partial_rotary_factor": 0.5}).dim == 8


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2", "cohere"])
@pytest.mark.parametrize("place", ["outside", "rope_parameters"])
def test_models_that_rotate_whole_heads_refuse_a_part(kind, place):
    """transformers ignores it in these models."""
    part = {"partial_rotary_factor": 0.5}
    message = refusal(config(model_type=kind, **(part if place == "outside" else {place: part})))
    assert "'partial_rotary_factor' must be 1" in message


def test_the_original_length_of_llama3_outside_its_section():
    """transformers lets it win, so it must agree."""
    outside = {"original_max_position_embeddings": 2 * LLAMA3["original_max_position_embeddings"]}
    within = {"rope_type": "llama3", **LLAMA3}
    assert "original_max_position_embeddings" in refusal(config(rope_scaling=within, **outside))
    del within["original_max_position_embeddings"]
    found = rope(rope_scaling=within, **outside).scaling.original_max_position
    assert found == outside["original_max_position_embeddings"]


def test_what_transformers_adds_to_a_file_that_lacks_it():
    spec = family("gpt_oss", head_dim=16, num_local_experts=4, rope_theta=...).attention[0]
    assert spec.rope.scaling == Yarn(32.0, 4096, spec.rope.attention_factor, truncate=False)
    assert (
        family(
            "gpt2", rope_theta=..., rms_norm_eps=..., num_key_value_heads=...
        ).max_position_embeddings
        == 1024
    )


def test_windows_that_smollm3_does_not_use():
    kinds = ["sliding_attention", "full_attention"]
    fields = {"model_type": "smollm3", "layer_types": kinds, "sliding_window": 5}
    assert "use_sliding_window" in refusal(config(**fields, pad_token_id=0))
    windows = [s.window for s in parse_config(config(**fields, use_sliding_window=True)).attention]
    assert windows == [5, None]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "dtype": None}, "float16"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ...}, "float32"),
    ],
    ids=str,
)
def test_dtype_under_either_name(fields, dtype):
    assert parse_config(config(**fields)).dtype == dtype


@pytest.mark.parametrize(
    ("written", "meant"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
def test_activations(written, meant):
    assert parse_config(config(hidden_act=written)).activation == meant


INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
)
NOT_FINITE = (float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("value", ["64", True, 0, -4, 4.0, float("nan"), [4], {}, 2**31], ids=repr)
@pytest.mark.parametrize("field", INTEGERS)
def test_integers_must_be_positive_integers(field, value):
    message = refusal(config(**{field: value}))
    assert repr(field) in message
    assert repr(value) in message


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "gemma3_text"])
def test_layers_beyond_every_model_are_refused_at_once(model_type):
    message = refusal(config(model_type=model_type, num_hidden_layers=10**9))
    assert "'num_hidden_layers' must be at most" in message


@pytest.mark.parametrize(
    "value", ["1e-5", True, 0, -1.0, *NOT_FINITE, [1]], ids=lambda v: str(v)[:9]
)
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_numbers_must_be_positive_and_finite(field, value):
    assert repr(field) in refusal(config(**{field: value}))


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["8", True, 0, -8, float("nan")], ids=repr)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_numbers_must_be_positive_and_finite(place, field, value):
    message = refusal(config(**{place: {"rope_type": "llama3", **LLAMA3, field: value}}))
    assert place in message and repr(field) in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", 1),
        ("mlp_bias", "false"),
        ("tie_word_embeddings", 0),
        ("hidden_act", 3),
        ("torch_dtype", 16),
        ("dtype", ["float32"]),
        ("model_type", 1),
        ("rope_scaling", "llama3"),
        ("rope_parameters", [1]),
        ("rope_parameters", 1.0),
    ],
)
def test_other_fields_must_have_their_type(field, value):
    message = refusal(config(**{field: value}))
    assert repr(field) in message and repr(value) in message


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"],
)
@pytest.mark.parametrize("absent", [..., None], ids=["absent", "null"])
def test_a_missing_field_is_named(field, absent):
    message = refusal(config(**{field: absent}))
    assert repr(field) in message and "missing" in message


@pytest.mark.parametrize("field", sorted(LLAMA3))
def test_a_missing_llama3_rope_field_is_named(field):
    section = {"rope_type": "llama3", **LLAMA3}
    del section[field]
    message = refusal(config(rope_scaling=section))
    assert "rope_scaling" in message and repr(field) in message and "missing" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"model_type": "mamba"},
            ["model_type", "'mamba'", "state space", ", ".join(MODEL_TYPES)],
        ),
        ({"model_type": ...}, ["model_type", "missing", "supported: " + ", ".join(MODEL_TYPES)]),
        (
            {"model_type": "phimoe", "auto_map": {"AutoConfig": "configuration.PhiMoEConfig"}},
            ["model_type", "'phimoe'", "the checkpoint's own code is never run"],
        ),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "gelu_pytorch_tanh", "silu"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "'int8'", "bfloat16, float16, float32"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "bfloat16, float16, float32"]),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            ["rope_scaling", "'su'", "default, dynamic, linear, llama3, longrope, yarn"],
        ),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            ["rope_parameters", "'proportional'", "default, dynamic, linear, llama3"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
            ["rope_scaling", "unknown keys finetuned", "'linear'", "factor"],
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}},
            ["rope_scaling", "mrope_section"],
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1.0}},
            ["rope_scaling", "beta_slow must be below beta_fast"],
        ),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling", "'factor'", "missing"]),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "short_factor": SHORT[1:]}},
            ["rope_scaling", "must have 8 values each, got 7 and 8"],
        ),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [*LONG[1:], 10**400]}},
            ["rope_scaling", "'long_factor'", "positive"],
        ),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [*LONG[1:], -1]}},
            ["rope_scaling", "'long_factor'", "positive"],
        ),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [*LONG[1:], "1"]}},
            ["rope_scaling", "'long_factor'", "positive"],
        ),
        (
            {
                "original_max_position_embeddings": 512,
                "rope_scaling": {"type": "longrope", **LONGROPE},
            },
            ["original_max_position_embeddings", "1024 and 512"],
        ),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    **LONGROPE,
                    "original_max_position_embeddings": 1,
                }
            },
            ["original_max_position_embeddings", "exceed 1"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "attention_factor": 2.0}},
            ["rope_scaling", "attention_factor", "low_freq_factor"],
        ),
        # One set of parameters per kind of layer, as in Gemma 3.
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            ["rope_parameters", "full_attention", "known: "],
        ),
        (
            {"num_key_value_heads": 3},
            ["num_attention_heads", "num_key_value_heads", "multiple", "4 and 3"],
        ),
        (
            {"num_key_value_heads": 8},
            ["num_attention_heads", "num_key_value_heads", "multiple", "4 and 8"],
        ),
        ({"hidden_size": 66}, ["head_dim", "hidden_size", "num_attention_heads", "66 and 4"]),
        ({"hidden_size": 2}, ["head_dim", "hidden_size", "num_attention_heads", "2 and 4"]),
        ({"head_dim": 15}, ["head_dim", "even", "15"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "head_dim", "1.5"]),
        ({"partial_rotary_factor": 1e308}, ["partial_rotary_factor", "head_dim", "1e+308"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["rope_scaling", "low_freq_factor", "high_freq_factor"],
        ),
        ({"rope_interleaved": True}, ["rope_interleaved"]),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_cannot_be_done_is_refused_with_what_can(fields, says):
    message = refusal(config(**fields))
    assert all(word in message for word in says), message


FOREIGN = [
    ("sliding_window", 4096),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("query_pre_attn_scalar", 256),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("attention_multiplier", 0.0078125),
    ("logits_scaling", 16.0),
    ("num_local_experts", 8),
    ("use_qk_norm", True),
    ("alibi", True),
]


@pytest.mark.parametrize(("field", "value"), FOREIGN)
def test_a_field_of_another_family_that_changes_the_forward_pass_is_refused(field, value):
    message = refusal(config(**{field: value}))
    assert repr(field) in message and "supported: null" in message


@pytest.mark.parametrize(
    "fields",
    [
        *({field: None} for field, _ in FOREIGN),
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"use_qk_norm": False, "alibi": False, "rope_interleaved": False},
        {"quantization_config": None, "partial_rotary_factor": 1.0},
        {"a_field_of_the_future": None},
    ],
    ids=str,
)
def test_the_same_field_saying_nothing_is_no_matter(fields):
    # Warnings are errors here, so this also checks that there are none.
    assert parse_config(config(**fields)) == parse_config(config())


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 24}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 24}, [24] * 4),
        ("phi3", {}, [None] * 4),
        ("phi3", {"sliding_window": 24}, [24] * 4),
        ("gemma2", {}, [4096, None, 4096, None]),
        ("gemma2", {"layer_types": ["full_attention"] * 4}, [None] * 4),
        ("gemma3_text", {}, [4096] * 4),
        ("gemma3_text", {"sliding_window_pattern": 3}, [4096, 4096, None, 4096]),
        ("qwen3_moe", {"num_experts": 8}, [None] * 4),
        ("qwen3_moe", {"num_experts": 8, "sliding_window": 24}, [None] * 4),
        ("qwen3_moe", {"num_experts": 8} | QWEN_WINDOW, [24] * 4),
        *(
            case
            for kind in ("qwen2", "qwen3")
            for case in (
                (kind, {}, [None] * 4),
                (kind, {"sliding_window": 24}, [None] * 4),
                (kind, QWEN_WINDOW, [None] * 4),
                (kind, QWEN_WINDOW | {"max_window_layers": 0}, [24] * 4),
                (kind, QWEN_WINDOW | {"max_window_layers": 3}, [None, None, None, 24]),
                (kind, QWEN_WINDOW | {"sliding_window": None}, [None] * 4),
                (
                    kind,
                    QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
                    [24, None, 24, None],
                ),
            )
        ),
    ],
    ids=str,
)
def test_windows(model_type, fields, expected):
    # Widths that do not conflict with any family's defaults.
    fields = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16} | fields
    assert [s.window for s in family(model_type, **fields).attention] == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "says"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "(2)", "got 1"]),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 2},
            ["layer_types", "chunked", "sliding"],
        ),
        ("qwen2", {"layer_types": [[], {}]}, ["layer_types", "[]", "sliding_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["use_sliding_window", "false"]),
        ("qwen2", {"attention_bias": True}, ["attention_bias", "supported: null, False"]),
        (
            "qwen2",
            QWEN_WINDOW | {"sliding_window": 0, "max_window_layers": 0},
            ["sliding_window", "positive"],
        ),
        ("mistral", {"sliding_window": -1}, ["sliding_window", "positive"]),
        ("mistral", {"num_key_value_heads": ...}, ["num_key_value_heads", "4 and 8"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("gemma2", {"sliding_window": None}, ["sliding_window", "missing"]),
        ("gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping", "positive"]),
        ("gemma2", {"final_logit_softcapping": "30"}, ["final_logit_softcapping", "float"]),
        ("gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "positive"]),
        ("gemma2", {"hidden_activation": "relu"}, ["hidden_activation", "'relu'", "silu"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma3_text", {"sliding_window_pattern": 0}, ["sliding_window_pattern", "positive"]),
        (
            "gemma3_text",
            {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            ["rope_parameters", "unknown keys factor, rope_type", "full_attention"],
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "cubic"}}},
            ["rope_parameters: full_attention", "'cubic'", "linear"],
        ),
        (
            "gemma3_text",
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}},
            },
            ["disagree"],
        ),
        ("phi3", {"lm_head_bias": True}, ["lm_head_bias"]),
        ("phi", {"tie_word_embeddings": True}, ["tie_word_embeddings", "the head has a bias"]),
        ("gptj", {"tie_word_embeddings": True}, ["tie_word_embeddings", "the head has a bias"]),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, ["'short_factor'", "missing"]),
    ],
    ids=str,
)
def test_what_a_family_cannot_do_is_refused(model_type, fields, says):
    message = refusal(config(**{"model_type": model_type, "head_dim": 16} | fields))
    assert all(word in message for word in says), message


def test_a_null_is_not_the_default_of_an_absent_field():
    absent, null = {}, {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    caps = [
        (parsed.attention[0].soft_cap, parsed.logit_soft_cap)
        for parsed in (family("gemma2", head_dim=16, **fields) for fields in (absent, null))
    ]
    assert caps == [(50.0, 30.0), (None, None)]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_local_base_freq": 10000.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {
            "rope_theta": ...,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": None,
            }
        },
    ],
    ids=str,
)
def test_gemma_3_has_two_ropes_however_they_are_written(fields):
    parsed = family("gemma3_text", head_dim=16, sliding_window_pattern=2, **fields)
    assert [s.rope for s in parsed.attention] == [
        Rope(16, 10000.0),
        Rope(16, 500000.0, LinearScaling(8.0)),
    ]


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_has_longrope_under_its_early_names(name):
    fields = {
        "rope_scaling": {"type": name, "short_factor": SHORT, "long_factor": LONG},
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    }
    (spec,) = set(family("phi3", **fields).attention)
    assert isinstance(spec.rope.scaling, LongRope)
    assert spec.rope.attention_factor == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-12)


def test_code_of_the_checkpoints_own_is_warned_of_where_it_is_another_model():
    ours = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM", "AutoConfig": "c.Phi3Config"}
    assert family("phi3", auto_map=ours) == family("phi3", auto_map=None) == family("phi3")
    with pytest.warns(UserWarning, match=r"auto_map.*other\.Better, which is not run.*LlamaForC"):
        parse_config(config(auto_map={"AutoModelForCausalLM": "other.Better"}))


def test_unknown_fields_are_warned_of_and_known_ones_are_not():
    with pytest.warns(UserWarning, match=r"folder/config.json: .*fields another, new_trick$"):
        parse_config(config(new_trick=1, another={}), "folder/config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in [*FIXTURES.glob("configs/*.*.json"), *FIXTURES.glob("*/config*.json")]:
            parse_config(read(path))
