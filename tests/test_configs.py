"""config.json of both generations: the same object from either, and no field that goes unseen."""

import json
import warnings
from pathlib import Path

import jax
import pytest

from fdjax.models import CheckpointError, describe, parse_config, weight_map
from fdjax.pallas_kernels.rope import Rope

FIXTURES = Path(__file__).parent / "hf_fixtures"
PUBLISHED = sorted(p.name.removesuffix(".old.json") for p in FIXTURES.glob("configs/*.old.json"))
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/config.alternate.json"))

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Rope(
    dim=16,
    theta=500000.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def config(**changes) -> dict:
    """A small valid config.json; a change to ... takes the field out."""
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


def refusal(fields: dict) -> str:
    """The one-line error of a config that cannot be loaded."""
    with pytest.raises(CheckpointError) as caught:
        parse_config(fields, "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert "\n" not in message
    return message


def test_the_fixtures_are_all_there():
    assert len(PUBLISHED) == 7
    assert len(CASES) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_generations_of_a_published_config_are_one(name):
    old, new = (read(FIXTURES / "configs" / f"{name}.{g}.json") for g in ("old", "new"))
    assert "rope_parameters" in new and "rope_parameters" not in old
    assert "dtype" in new and "torch_dtype" in old
    parsed = parse_config(old)
    assert parsed == parse_config(new)
    assert hash(parsed) == hash(parse_config(new))


@pytest.mark.parametrize("name", CASES)
def test_both_generations_of_a_fixture_are_one(name):
    one, other = (read(FIXTURES / name / f) for f in ("config.json", "config.alternate.json"))
    assert ("rope_parameters" in one) != ("rope_parameters" in other)
    assert parse_config(one) == parse_config(other)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size_and_is_never_allocated(name):
    live = len(jax.live_arrays())
    model = describe(parse_config(read(FIXTURES / "configs" / f"{name}.new.json")))
    counts = read(FIXTURES / "configs/parameter_counts.json")
    assert model.parameter_count == counts[name]
    leaves = jax.tree.leaves(model.abstract_params)
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert len(jax.live_arrays()) == live
    # Every parameter has an origin, and the origins hold exactly those weights.
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
    assert spec.rope == Rope(128, 500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        # transformers takes rope_scaling when both are there, other readers rope_parameters.
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
    assert rope(partial_rotary_factor=0.5).dim == 8
    assert rope(rope_parameters={"partial_rotary_factor": 0.5}).dim == 8


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


@pytest.mark.parametrize("value", ["64", True, 0, -4, 4.0, float("nan"), [4], {}], ids=repr)
@pytest.mark.parametrize("field", INTEGERS)
def test_integers_must_be_positive_integers(field, value):
    message = refusal(config(**{field: value}))
    assert repr(field) in message
    assert repr(value) in message


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
        ({"model_type": "mamba"}, ["model_type", "'mamba'", "supported: llama"]),
        ({"model_type": ...}, ["model_type", "missing", "supported: llama"]),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "gelu_pytorch_tanh", "silu"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "'int8'", "bfloat16, float16, float32"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "bfloat16, float16, float32"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling", "'linear'", "default, llama3"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            ["rope_parameters", "'yarn'", "default, llama3"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "attention_factor": 2.0}},
            ["rope_scaling", "attention_factor", "low_freq_factor"],
        ),
        # One set of parameters per kind of layer, as Gemma 3 has it.
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
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["rope_scaling", "low_freq_factor", "high_freq_factor"],
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "unquantised"]),
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
    # Warnings are errors here, so these say nothing either.
    assert parse_config(config(**fields)) == parse_config(config())


def test_unknown_fields_are_warned_of_and_known_ones_are_not():
    with pytest.warns(UserWarning, match=r"folder/config.json: .*fields another, new_trick$"):
        parse_config(config(new_trick=1, another={}), "folder/config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in [*FIXTURES.glob("configs/*.*.json"), *FIXTURES.glob("*/config*.json")]:
            parse_config(read(path))
