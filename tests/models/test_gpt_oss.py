"""gpt-oss: experts in MXFP4, sinks under beams and in scores, sizes, damaged checkpoints."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fdjax
from fdjax.engine.memory import plan_memory
from fdjax.models import (
    CheckpointError,
    describe,
    export_tensors,
    parse_config,
    random_params,
    weight_map,
)
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BRICKS, PLAIN, QTensor, WeightFormat, dequantise
from fdjax.system.device_memory import gigabytes
from fdjax.tools.info import model_info
from fdjax.weights.checkpoint import load_params, quantised_config, unnamed_dtype
from fdjax.weights.formats.mxfp4 import MXFP4
from fdjax.weights.stored import StoredTensor

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASE = FIXTURES / "hf" / "gpt_oss"
MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu")
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"

pytestmark = pytest.mark.usefixtures("quick_compiles")


def unpacked(blocks, scales):
    """Blocks [X,N,G,16] and scales [X,N,G] → weights [X,K,N] fp32."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    weights = VALUES[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return weights.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def tensors_of():
    return safetensors.numpy.load_file(CASE / "model.safetensors")


def in_mxfp4(seed=0):
    """Tensors of the fixture with random experts, as in the published files, and dequantised."""
    rng = np.random.default_rng(seed)
    packed, plain = {}, {}
    for name, tensor in tensors_of().items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = tensor
            continue
        x, k, n = tensor.shape
        blocks = rng.integers(0, 256, (x, n, k // 32, 16), np.uint8)
        scales = rng.integers(122, 125, (x, n, k // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(unpacked(blocks, scales))
    return packed, plain


def written(folder, tensors, quantised=True, **changes):
    folder = Path(shutil.copytree(CASE, folder, dirs_exist_ok=True))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    data = json.loads((CASE / "config.json").read_text()) | changes
    if quantised:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        data["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def loaded(folder, **options):
    return fdjax.load(str(folder), compilation_cache=False, progress=False, **options)


forward = jax.jit(fdjax.forward, static_argnums=0)
IDS = np.arange(2, 62, dtype=np.int32).reshape(2, 30)


def test_weights_are_those_of_transformers():
    with np.load(FIXTURES / "mxfp4.npz") as arrays:
        blocks, scales, bits = (arrays[name] for name in ("blocks", "scales", "weights"))
    want = bits.view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(unpacked(blocks, scales).astype(want.dtype), want)
    words = jnp.asarray(blocks.view("<i4").reshape(3, 20, 8).swapaxes(1, 2))
    exponents = jnp.asarray(scales.swapaxes(1, 2).view(ml_dtypes.float8_e8m0fnu))
    q = QTensor(words, exponents, None, "fp4", 32, (64, 20))
    got = jax.vmap(lambda q: dequantise(q, "bfloat16"))(q)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), bits)


@pytest.mark.slow
def test_experts_stay_in_four_bits_and_compute_what_dequantised_ones_do(tmp_path):
    packed, plain = in_mxfp4()
    lm, dense = (
        loaded(written(tmp_path / "a", packed)),
        loaded(written(tmp_path / "b", plain, False)),
    )
    assert lm.config.weight_formats == (MX,)
    experts = lm.params["blocks"][1]["mlp"]["experts"]
    gate_up = experts["gate_up"]
    assert gate_up.words.dtype == jnp.int32 and gate_up.words.shape == (4, 4, 2, 32)
    for i, part in enumerate(("gate", "up")):
        got = jax.vmap(lambda q: dequantise(q, "float32"))(gate_up)[:, :, i]
        np.testing.assert_array_equal(got, plain[GATE_UP][:, :, i::2], part)
    # 4 bits a weight, and 8 for each 32.
    numbers = 2 * 4 * 3 * 32 * 32
    assert dense.model.weight_bytes - lm.model.weight_bytes == numbers * 4 - numbers * 17 // 32
    assert lm.model.parameter_count == dense.model.parameter_count
    want = forward(dense.model, dense.params, IDS)
    np.testing.assert_array_equal(forward(lm.model, lm.params, IDS), want)
    assert np.isfinite(np.asarray(want)).all()


@pytest.mark.slow
def test_an_expert_of_nan_that_nobody_chooses(tmp_path):
    """Also NaN in its scales; and all rows on the same two experts."""
    packed, _ = in_mxfp4()
    lm = loaded(written(tmp_path, packed))
    params = jax.tree.map(lambda leaf: leaf, lm.params)
    for block in params["blocks"].values():
        block["mlp"]["router"]["weight"] = jnp.zeros((32, 4))
        block["mlp"]["router"]["bias"] = jnp.array([1.0, 2.0, 0.0, -3.0])
    want = np.asarray(forward(lm.model, params, IDS))
    for block in params["blocks"].values():
        experts = block["mlp"]["experts"]
        for name in ("gate_up", "down"):
            q = experts[name]
            nan = jnp.full_like(q.scales[2:], jnp.nan)
            experts[name] = QTensor(
                *(q.words.at[2:].set(-1), q.scales.at[2:].set(nan), None),
                *(q.kind, q.group, q.shape),
            )
            experts[f"{name}_bias"] = experts[f"{name}_bias"].at[2:].set(jnp.nan)
    np.testing.assert_array_equal(forward(lm.model, params, IDS), want)
    assert np.isfinite(want).all()


def test_parameters_become_the_tensors_that_they_were():
    config = parse_config(json.loads((CASE / "config.json").read_text()))
    tensors = tensors_of()
    params = load_params(CASE, describe(config, dtype="float32"))
    exported = export_tensors(params, weight_map(config))
    assert set(exported) == set(tensors)
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor, tensors[name], name)


DAMAGE = {
    "no scales": (lambda t: t.pop(f"{GATE_UP}_scales"), "gate_up_proj_scales' is missing"),
    "no blocks": (lambda t: t.pop(f"{GATE_UP}_blocks"), "gate_up_proj_blocks' is missing"),
    "no experts": (
        lambda t: (t.pop(f"{GATE_UP}_blocks"), t.pop(f"{GATE_UP}_scales")),
        "gate_up_proj' is missing",
    ),
    "too many blocks": (
        lambda t: t.update({f"{GATE_UP}_blocks": np.repeat(t[f"{GATE_UP}_blocks"], 2, axis=2)}),
        r"gate_up_proj_blocks' must have shape \[4, 64, 1, 16\], got \[4, 64, 2, 16\]",
    ),
    "fewer experts": (
        lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:3].copy()}),
        r"gate_up_proj_scales' must have shape \[4, 64, 1\], got \[3, 64, 1\]",
    ),
    "dtype": (
        lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].astype(np.int32)}),
        "gate_up_proj_blocks' has dtype I32, supported here: U8",
    ),
    "NaN": (
        lambda t: t[f"{GATE_UP}_scales"].__setitem__((1, 2, 0), 255),
        "gate_up_proj_scales' has values that are not finite",
    ),
    "plain experts too": (
        lambda t: t.update({GATE_UP: np.zeros((4, 32, 64), np.float32)}),
        "gate_up_proj' is unexpected",
    ),
    "no sinks": (lambda t: t.pop("model.layers.0.self_attn.sinks"), "self_attn.sinks' is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_file_and_tensor(tmp_path, name):
    spoil, says = DAMAGE[name]
    tensors, _ = in_mxfp4()
    spoil(tensors)
    folder = written(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: tensor 'model\..*{says}"):
        loaded(folder)


def test_blocks_that_config_does_not_describe(tmp_path):
    folder = written(tmp_path, in_mxfp4()[0], quantised=False)
    with pytest.raises(CheckpointError, match=r"belongs to quantised weights, which config\.json"):
        loaded(folder)
    folder = written(tmp_path, tensors_of())
    with pytest.raises(CheckpointError, match="no weight is quantised"):
        loaded(folder)


def test_inputs_that_are_no_multiple_of_a_block():
    tensor = StoredTensor("m_blocks", Path("model.safetensors"), 0, "U8", (2, 4, 1, 16))
    with pytest.raises(CheckpointError, match=r"config\.json: .*multiple of 32, but 'm' has 40"):
        MXFP4("config.json").linear("m", (2, 4, 40), {"m_blocks": tensor})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"swiglu_limit": 5.0}, "'swiglu_limit' must be 7.0.*got 5.0"),
        ({"swiglu_alpha": 1.0}, "'swiglu_alpha' must be 1.702"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_local_experts": 1}, "at most 'num_local_experts', got 2 and 1"),
        ({"layer_types": ["chunked_attention"] * 2}, "'layer_types'.*not supported"),
    ],
    ids=str,
)
def test_configs_that_are_refused(changes, says):
    with pytest.raises(CheckpointError, match=says):
        parse_config(json.loads((CASE / "config.json").read_text()) | changes)


# Of the model card: total, active without the embedding, size of the checkpoint in GiB.
PUBLISHED = {
    "gpt-oss-20b": (20_914_757_184, 3.61e9, 12.8),
    "gpt-oss-120b": (116_829_156_672, 5.13e9, 60.8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name, arrays_made):
    total, active, size = PUBLISHED[name]
    data = json.loads((FIXTURES / f"hf/configs/{name}.old.json").read_text())
    config = parse_config(data)
    assert [spec.window for spec in config.attention[:4]] == [128, None, 128, None]
    paths = [("mlp", "experts", part) for part in ("gate_up", "down")]
    formats = {("blocks", i, *path): MX for i in range(config.layers) for path in paths}
    model = describe(config.with_formats(formats))
    assert model.parameter_count == total
    table = config.vocab_size * config.width
    assert round(model.active_parameter_count - table, -7) == active
    assert round(model.weight_bytes / 2**30, 1) == size
    facts = model_info(model, batch=2, slots=1024)
    assert facts.quantised == ("fp4 by 32",)
    # A token's experts take 17/4 bits a weight, and all else 16.
    experts = config.layers * 4 * 3 * config.width**2
    biases = 2 * config.layers * 4 * 3 * config.width
    rest = 2 * (model.active_parameter_count - experts) - biases
    assert facts.active_bytes == experts * 17 // 32 + biases + rest
    assert f"of which a token uses {gigabytes(facts.active_bytes)}" in str(facts)
    (row,) = [row for row in facts.choices if row[0] == "moe"]
    assert row[1:3] == (f"M=2 4 of {config.experts.experts} [2880,2,2880] fp4 by 32", "xla")
    assert arrays_made() == 0


def test_experts_lie_in_bricks_where_their_kernel_runs(arrays_made):
    data = json.loads((FIXTURES / "hf/configs/gpt-oss-20b.old.json").read_text())
    parts = [(i, part) for i in range(2) for part in ("gate_up", "down")]
    paths = [("blocks", i, "mlp", "experts", part) for i, part in parts]
    data |= {"num_hidden_layers": 2, "layer_types": data["layer_types"][:2]}
    config = parse_config(data).with_formats(dict.fromkeys(paths, MX))
    hopper = Plan(device_kind="some Hopper", compute_capability=(9, 0))
    plain = hopper.with_xla("moe")
    for plan, layout in ((plain, PLAIN), (hopper, BRICKS)):
        model = describe(config, dtype="bfloat16", plan=plan)
        experts = model.abstract_params["blocks"][0]["mlp"]["experts"]
        assert {experts[name].layout for name in ("gate_up", "down")} == {layout}
        assert model.weight_bytes == describe(config, dtype="bfloat16", plan=plain).weight_bytes
        runs = {row[2] for row in model_info(model, batch=1, slots=64).choices if row[0] == "moe"}
        assert runs == {"xla" if layout == PLAIN else "mosaic_gpu"}
    assert arrays_made() == 0


@pytest.mark.slow
def test_beams_and_scores_know_the_sinks():
    """Their log-probabilities are those of a forward pass over the whole text."""
    lm = loaded(CASE)
    prompt, new = list(range(40)), 30
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": new}
    found = lm.generate(prompt, **options, do_sample=False, eos_token_id=None)
    texts = [[*prompt, *tokens] for tokens in found.tokens]
    want = []
    for text in texts:
        logits = forward(lm.model, lm.params, np.array([text], np.int32))[0]
        taken = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(text) - 1), text[1:]]
        want.append(taken)
    scores = [taken[-new:].mean() for taken in want]
    np.testing.assert_allclose(found.sequences_scores, scores, atol=1e-4)
    scored = lm.score(texts)
    for got, taken in zip(scored.logprobs, want, strict=True):
        np.testing.assert_allclose(got[-len(taken) :], taken, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_plain_experts_are_quantised_while_they_are_loaded(kind):
    lm, plain = loaded(CASE, quantize=kind), loaded(CASE)
    experts, exact = (m.params["blocks"][0]["mlp"]["experts"] for m in (lm, plain))
    for name in ("gate_up", "down"):
        got = jax.vmap(functools.partial(dequantise, dtype="float32"))(experts[name])
        error = np.abs(np.asarray(got) - exact[name])
        step = np.abs(exact[name]).max(axis=1, keepdims=True) / (7 if kind == "int4" else 127)
        assert (error <= 1.2 * step).all() and error.mean() < 0.4 * step.mean()


@pytest.mark.slow
def test_the_formats_of_a_checkpoint(tmp_path):
    folder = written(tmp_path, in_mxfp4()[0])
    config = quantised_config(
        folder, parse_config(json.loads((folder / "config.json").read_text()))
    )
    assert [dict(block.formats) for block in config.blocks] == [
        {"experts.gate_up": MX, "experts.down": MX}
    ] * 2
    halves = describe(config, tensor_parallel=2).local.config
    # Of 32 inputs of an expert's last product, a device has 16.
    assert [dict(block.formats)["experts.down"].group for block in halves.blocks] == [16] * 2


def test_codes_do_not_hide_the_dtype(tmp_path):
    """The published config.json names none: all matrices but the codes are in bfloat16."""
    packed = {
        name: a if a.dtype == np.uint8 else a.astype(ml_dtypes.bfloat16)
        for name, a in in_mxfp4()[0].items()
    }
    folder = written(tmp_path, packed, dtype=None)
    assert unnamed_dtype(folder, json.loads((folder / "config.json").read_text())) == "bfloat16"


def test_memory_for_one_dequantised_expert():
    data = json.loads((FIXTURES / "hf/configs/gpt-oss-20b.old.json").read_text())
    plain = parse_config(data)
    path = "blocks", 3, "mlp", "experts"
    one = plain.with_formats({(*path, "gate_up"): MX})
    both = plain.with_formats({(*path, "gate_up"): MX, (*path, "down"): MX})
    none, *more = (
        plan_memory(describe(c), max_len=256).workspace_bytes for c in (plain, one, both)
    )
    # XLA holds both at once: see test_experts_deviceless.py.
    assert [size - none for size in more] == [2 * n * 2880 * 2880 for n in (2, 3)]


@pytest.mark.slow
def test_random_parameters_have_the_deviation_of_others():
    data = json.loads((CASE / "config.json").read_text())
    config = parse_config(data | {"hidden_size": 64, "intermediate_size": 96})
    model = describe(config.with_formats({("blocks", 0, "mlp", "experts", "gate_up"): MX}))
    experts = random_params(model)["blocks"][0]["mlp"]["experts"]
    values = jax.vmap(lambda q: dequantise(q, "float32"))(experts["gate_up"])
    # Scales are powers of 2.
    assert values.shape == (4, 64, 2, 96) and 0.01 < np.std(values) < 0.04
    assert not np.array_equal(values[0], values[1])
