"""What families have in their layers: who refuses it, how it is loaded, what is damaged."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fdjax
from fdjax.engine.memory import longest_context
from fdjax.models import (
    CheckpointError,
    chain_features,
    chain_shape,
    describe,
    layers_features,
    layers_shape,
    parse_config,
    weight_map,
)
from fdjax.models.block import DECODER_CAN, BlockSpec
from fdjax.models.name_map import GroupedQKV, PerGroupQKV
from fdjax.models.refused import REFUSED
from fdjax.pallas_kernels.attention import attention_reference, prefill_attention
from fdjax.pallas_kernels.attention.spec import AttentionSpec, alibi_slopes
from fdjax.pallas_kernels.experts import ROUTING_FEATURES, Routing
from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES
from fdjax.pallas_kernels.rope import Rope, apply_rope

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/config.alternate.json"))
SINGLE = "model.safetensors"

# A value that is not the default, and fields that it needs.
NEW = {
    "layer_norm": {"layer_norm": True},
    "norm_bias": {"norm_bias": True, "layer_norm": True},
    "whole_qk_norm": {"whole_qk_norm": True},
    "no_pre_norms": {"no_pre_norms": True},
    "sum_norms": {"sum_norms": True},
    "parallel": {"parallel": True},
    "shared_norm": {"shared_norm": True, "parallel": True},
    "no_gate": {"no_gate": True},
    "residual_multiplier": {"residual_multiplier": 0.5},
    "experts": {"experts": Routing(4, 2)},
    "experts.normalised": {"experts": Routing(4, 2, normalised=True)},
    "shared_width": {"experts": Routing(4, 2), "shared_width": 64},
    "shared_gate": {"experts": Routing(4, 2), "shared_width": 64, "shared_gate": True},
}


def read(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def small(**changes) -> BlockSpec:
    """A block that every kernel for several layers runs, with changes."""
    sizes = {"width": 512, "mlp_width": 512, "heads": 4, "kv_heads": 2, "head_dim": 128}
    spec = AttentionSpec(0.1, rope=Rope(128, 10000.0))
    return BlockSpec(**sizes, norm_eps=1e-5, activation="silu", attention=spec, **changes)


@pytest.mark.parametrize("name", NEW)
def test_kernels_of_several_layers_refuse_what_they_do_not_list(name):
    config = parse_config(read("llama_bias") | {"attention_bias": False, "mlp_bias": False})
    requests = {"linear_chain": (chain_shape, chain_features)}
    for changes, refused in (({}, False), (NEW[name], True)):
        of_blocks = dataclasses.replace(config, blocks=(small(**changes),) * 2)
        requests = {
            "linear_chain": (chain_shape(of_blocks, 8, 2), chain_features(of_blocks)),
            "decode_layers": (layers_shape(of_blocks, 8, 256, 2), layers_features(of_blocks)),
        }
        for i in IMPLEMENTATIONS:
            if i.op in requests and i.name != "xla":
                refusal = i.refusal(*requests[i.op])
                assert (refusal is not None and name in refusal) == refused, (i, refusal)


def test_the_decoder_runs_every_field():
    assert {name for name in NEW} <= DECODER_CAN
    used = {field.name for field in dataclasses.fields(BlockSpec)}
    assert used >= DECODER_CAN - WEIGHT_FEATURES - {f"experts.{name}" for name in ROUTING_FEATURES}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm_bias": True}, "norm_bias needs layer_norm"),
        ({"qk_norm": True, "whole_qk_norm": True}, "exclude each other"),
        ({"sum_norms": True, "parallel": True}, "exclude each other"),
        ({"shared_norm": True}, "needs parallel"),
        ({"shared_norm": True, "parallel": True, "no_pre_norms": True}, "pre-norms"),
        ({"shared_width": 8}, "shared_width needs experts"),
        ({"experts": Routing(4, 2), "shared_gate": True}, "shared_gate needs shared_width"),
        ({"experts": Routing(4, 2), "shared_width": -1}, "must not be negative"),
        ({"experts": Routing(4, 2), "no_gate": True}, "experts exclude no_gate and mlp_bias"),
        ({"experts": Routing(4, 2), "mlp_bias": True}, "experts exclude no_gate and mlp_bias"),
    ],
    ids=str,
)
def test_what_makes_no_sense_together(changes, says):
    with pytest.raises(ValueError, match=says):
        small(**changes)


# RoPE and ALiBi


def rotated(x: np.ndarray, dim: int, theta: float) -> np.ndarray:
    """x [T,H,D] in float64 with pairs (2i, 2i + 1) of the first `dim` dimensions turned."""
    x = x.astype(np.float64)
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    pairs = x[..., 0:dim:2] + 1j * x[..., 1:dim:2]
    pairs = pairs * np.exp(1j * angles)[:, None]
    turned = np.stack([pairs.real, pairs.imag], axis=-1).reshape(*x.shape[:2], dim)
    return np.concatenate([turned, x[..., dim:]], axis=-1)


def exact_attention(q, k, v, scale, slopes=None):
    """Causal attention in float64. q [T,H,D], k and v [T,Hkv,D] → [T,H,D]."""
    t, heads = q.shape[:2]
    k, v = (np.repeat(a, heads // a.shape[1], axis=1).astype(np.float64) for a in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    if slopes is not None:
        scores += np.array(slopes)[:, None, None] * np.arange(t)
    scores = np.where(np.tri(t, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shd->thd", p / p.sum(axis=-1, keepdims=True), v)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["xla", "reference"])
@pytest.mark.parametrize(("dim", "spread"), [(2, False), (8, False), (16, False), (8, True)])
def test_rope_of_interleaved_pairs_is_a_matter_of_loading(dim, spread, run):
    """The checkpoint's rows of Q and K, loaded and turned by halves, give its own attention."""
    kv_heads, group, d, t, width = 2, 3, 16, 37, 24
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(t, width))
    shapes = [(heads * d, width) for heads in (kv_heads * group, kv_heads, kv_heads)]
    parts = [rng.normal(size=shape).astype(np.float32) / 4 for shape in shapes]
    q, k, v = ((x @ part.T.astype(np.float64)).reshape(t, -1, d) for part in parts)
    want = exact_attention(rotated(q, dim, 100.0), rotated(k, dim, 100.0), v, d**-0.5)

    layout = GroupedQKV(kv_heads, group, d, interleaved=dim, spread=dim if spread else 0)
    weight = layout.join([jnp.asarray(p) for p in parts])
    qkv = np.einsum("te,ehgd->thgd", x, np.asarray(weight, np.float64)).astype(np.float32)
    q, k, v = (qkv[:, :, s] for s in (slice(None, -2), slice(-2, -1), slice(-1, None)))
    q, k, v = (jnp.asarray(a.reshape(1, t, -1, d)) for a in (q, k, v))
    rope, positions = Rope(dim, 100.0), jnp.arange(t, dtype=jnp.int32)[None]
    rope = dataclasses.replace(rope, span=d) if spread else rope
    q, k = (apply_rope(a, positions, rope) for a in (q, k))
    lengths = jnp.array([t], jnp.int32)
    caches = (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    spec = AttentionSpec(d**-0.5)
    if run == "xla":
        o = prefill_attention(q, *caches, lengths, spec=spec)
    else:
        o, _ = attention_reference(q, *caches, lengths, jnp.zeros_like(lengths), spec=spec)
    np.testing.assert_allclose(o[0], want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_against_float64(heads):
    t, d = 50, 8
    rng = np.random.default_rng(heads)
    q, k, v = rng.normal(size=(3, t, heads, d)).astype(np.float32)
    slopes = alibi_slopes(heads)
    want = exact_attention(q, k, v, d**-0.5, slopes)
    spec = AttentionSpec(d**-0.5, alibi=slopes)
    o = prefill_attention(
        *(jnp.asarray(q[None]), jnp.asarray(k[None]).transpose(0, 2, 1, 3)),
        jnp.asarray(v[None]).transpose(0, 2, 1, 3),
        jnp.array([t], jnp.int32),
        spec=spec,
    )
    np.testing.assert_allclose(o[0], want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
def test_interleaved_rows_come_back():
    layout = GroupedQKV(2, 2, 8, interleaved=6)
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(size=(n * 8, 5)).astype(np.float32)) for n in (4, 2, 2)]
    for part, back in zip(parts, layout.split(layout.join(parts)), strict=True):
        np.testing.assert_array_equal(part, back)
    halves = np.asarray(layout.join([p[:, 0] for p in parts])[0, 0])
    np.testing.assert_array_equal(halves, np.asarray(parts[0])[[0, 2, 4, 1, 3, 5, 6, 7], 0])


@pytest.mark.parametrize("d", [8, 12])
@pytest.mark.parametrize("interleaved", [0, 4])
def test_pairs_of_a_part_of_a_head_are_spread(d, interleaved):
    """Both layouts have the same order, and both give the checkpoint's tensors back."""
    kv_heads, group = 2, 2
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(kv_heads, group + 2, d, 5)).astype(np.float32)
    q, k, v = np.split(heads, [group, group + 1], axis=1)
    apart = [jnp.asarray(part.reshape(-1, 5)) for part in (q, k, v)]
    layout = GroupedQKV(kv_heads, group, d, interleaved=interleaved, spread=4)
    joined = layout.join(apart)
    for part, back in zip(apart, layout.split(joined), strict=True):
        np.testing.assert_array_equal(part, back)
    one = np.asarray(joined)[0, 0]
    middle = d // 2
    firsts, seconds = ((0, 2), (1, 3)) if interleaved else ((0, 1), (2, 3))
    for at, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        np.testing.assert_array_equal(one[:-1, at], heads[0, :-1, first, 0])
        np.testing.assert_array_equal(one[:-1, middle + at], heads[0, :-1, second, 0])
    np.testing.assert_array_equal(one[-1], heads[0, -1, :, 0])
    if not interleaved:
        together = PerGroupQKV(kv_heads, group, d, spread=4)
        whole = [jnp.asarray(heads.reshape(-1, 5))]
        np.testing.assert_array_equal(together.join(whole), joined)
        np.testing.assert_array_equal(together.split(together.join(whole))[0], whole[0])


# Families


def test_opt_has_no_unified_maximum_unless_calibrated():
    assert {spec.unified for spec in parse_config(read("opt")).attention} == {False}
    assert {spec.unified for spec in parse_config(read("gptj")).attention} == {True}


CHATGLM2 = {
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def test_chatglm2_has_its_published_size():
    model = describe(parse_config(CHATGLM2))
    assert model.parameter_count == 6_243_584_000
    assert (model.config.kv_heads, model.config.attention[0].rope) == (
        2,
        Rope(64, 10000.0, span=128),
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        (CHATGLM2, {"rope_ratio": 50}, "'rope_ratio' is not supported: ChatGLM2 divides"),
        (CHATGLM2, {"rmsnorm": False}, "'rmsnorm' False is not supported"),
        (CHATGLM2, {"quantization_bit": 4}, "quantised or prefix-tuned"),
        ("opt", {"layer_norm_elementwise_affine": False}, "norms without weights"),
        ("opt", {"activation_function": "swiglu"}, "activation_function 'swiglu'.*gelu.*relu"),
        ("opt", {"hidden_size": 30}, "'hidden_size' must be a multiple of 'num_attention_heads'"),
        ("gptj", {"rotary_dim": 3}, "dim must be positive and even, got 3"),
        ("gptj", {"n_embd": 0}, "'n_embd' must be positive"),
        ("gptj", {"n_head": 5}, "'n_embd' must be a multiple of 'n_head'"),
        ("bloom", {"n_layer": 10**6}, "'n_layer' must be at most"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "is not supported"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.4}, "must be even"),
        ("cohere", {"use_qk_norm": True}, "'use_qk_norm' True is not supported"),
        ("cohere", {"logit_scale": 0}, "'logit_scale' must be positive"),
        ("phi", {"qk_layernorm": True}, "'qk_layernorm' True is not supported"),
        ("granite", {"logits_scaling": 0}, "'logits_scaling' must be positive"),
        ("smollm3", {"no_rope_layers": [1]}, "'no_rope_layers' must be 0 or 1 for each layer"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "'no_rope_layers' must be 0 or 1"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "unknown keys rope_type"),
        ("mixtral", {"num_experts_per_tok": 5}, "'num_experts_per_tok' must be at most 'num_local"),
        ("mixtral", {"num_local_experts": 10**6}, "'num_local_experts' must be at most 4096"),
        ("mixtral", {"num_local_experts": 0}, "'num_local_experts' must be positive"),
        ("mixtral", {"num_experts": 4}, "'num_experts' 4 is not supported"),
        ("qwen2_moe", {"mlp_only_layers": ["1"]}, "'mlp_only_layers' must hold integers"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "'mlp_only_layers' must be list"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be positive"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "'moe_intermediate_size' must be positive"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' 8.0 is not supported"),
    ],
    ids=str,
)
def test_what_a_family_cannot_do(model_type, changes, says):
    fields = (read(model_type) if isinstance(model_type, str) else model_type) | changes
    with pytest.raises(CheckpointError, match=says):
        parse_config(fields)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen3_next", "gated delta nets"),
        ("qwen3_5", "gated delta nets"),
        ("gemma3n", "inputs of their own"),
        ("gemma4", "share keys and values"),
        ("deepseek_v3", "MLA"),
        ("glm4_moe", "mixture of experts"),
    ],
)
def test_other_models_are_refused_with_the_reason(model_type, why):
    with pytest.raises(CheckpointError, match=f"{model_type}.*because.*{why}.*supported: "):
        parse_config({"model_type": model_type})


def test_no_family_is_refused_and_supported():
    types = {name for family in fdjax.models.FAMILIES.values() for name in family.MODEL_TYPES}
    assert not types & set(REFUSED)


@pytest.mark.parametrize("case", ["opt", "gpt2"])
def test_no_sequence_is_longer_than_the_table_of_positions(case):
    model = describe(parse_config(read(case)))
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), model.abstract_params)
    limit = model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"max_len must be at most {limit}.*got {limit + 1}"):
        fdjax.LM(model, params, max_len=limit + 1)
    with pytest.raises(ValueError, match=f"lengths must be in 1..{limit}.*positions"):
        fdjax.forward(model, params, np.zeros((1, limit + 1), np.int32))
    assert longest_context(model, memory_bytes=10**9) == limit
    options = fdjax.GenerationConfig(max_new_tokens=9)
    with pytest.raises(ValueError, match=f"lengths must be in 1..{limit - 9}.*positions"):
        fdjax.generate(model, params, np.zeros((1, limit - 8), np.int32), options)


# Checkpoints


@pytest.fixture
def damaged(tmp_path):
    """A function of (case, function that changes its tensors) that loads the result."""

    def load(case, change):
        folder = shutil.copytree(FIXTURES / case, tmp_path / case)
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= safetensors.numpy.load_file(file)
            file.unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        safetensors.numpy.save_file(change(tensors), folder / SINGLE)
        return fdjax.load(str(folder), compilation_cache=False, progress=False)

    return load


FLOAT32 = [case for case in CASES if not case.endswith("bf16")]


@pytest.mark.parametrize("case", FLOAT32)
def test_every_damage_names_the_tensor(case, damaged, tmp_path):
    weights = weight_map(parse_config(read(case)))
    names = [name for weight in weights.values() for name, _ in weight.sources]
    name = names[len(names) // 2]

    def without(tensors):
        return {key: value for key, value in tensors.items() if key != name}

    def cut(tensors):
        return tensors | {name: tensors[name][:-1]}

    def another(tensors):
        return tensors | {name + "_too": tensors[name]}

    for change, says in ((without, "is missing"), (cut, "must have shape"), (another, "unexpect")):
        with pytest.raises(CheckpointError, match=says) as caught:
            damaged(case, change)
        assert name in str(caught.value)
        shutil.rmtree(tmp_path / case)


@pytest.mark.parametrize("case", ["gpt2", "bloom", "opt"])
@pytest.mark.slow
def test_a_checkpoint_saved_without_its_head_lacks_the_first_part_of_names(case, damaged):
    def shortened(tensors):
        return {name.partition(".")[2]: value for name, value in tensors.items()}

    want = fdjax.load(str(FIXTURES / case), compilation_cache=False, progress=False)
    got = damaged(case, shortened)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


def test_a_norm_of_zeros_is_warned_of_by_any_name(damaged):
    name = "transformer.h.1.ln_2.weight"
    with pytest.warns(UserWarning, match=f"'{name}' has only zeros"):
        damaged("gpt2", lambda tensors: tensors | {name: np.zeros_like(tensors[name])})


def test_masks_of_old_checkpoints_are_no_matter(damaged):
    def old(tensors):
        mask = np.tril(np.ones((1, 1, 8, 8), np.float32))
        masks = {
            f"transformer.h.{i}.attn.{n}": mask for i in (0, 1) for n in ("bias", "masked_bias")
        }
        return tensors | masks

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        damaged("gpt2", old)
