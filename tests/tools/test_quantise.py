"""`fdjax quantize` and `load(quantize=...)`: what is lost, and what is written."""

import contextlib
import dataclasses
import functools
import json
import random
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fdjax
from fdjax.cli.main import main
from fdjax.engine.engine import Engine
from fdjax.models import Model, Params, describe, parse_config, weight_map
from fdjax.models.tiny.stories import story
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BITS, WeightFormat, dequantise, is_quantised
from fdjax.tools import quantise as tool
from fdjax.tools import smoothing
from fdjax.tools.own_texts import own_texts
from fdjax.weights.checkpoint import (
    load_params,
    locate,
    quantised_config,
    read_json,
    unnamed_dtype,
)
from fdjax.weights.formats.layer import Codes, dequantised, pack_rows, unpack_rows
from fdjax.weights.quantise import quantise
from fdjax.weights.stored import stored_tensors
from fdjax.weights.written import Planned, write_tensors

from ..models.test_gpt_oss import in_mxfp4 as mxfp4_tensors
from ..models.test_gpt_oss import written as in_mxfp4

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
INT4 = WeightFormat("int4", 32, scales="bfloat16")
INT8 = WeightFormat("int8", 96, scales="float32")
FP8 = WeightFormat("fp8", 96, scales="bfloat16")


@pytest.fixture(scope="module")
def small(two_layers):
    return fdjax.load(two_layers, plan=Plan())


@pytest.fixture(scope="module")
def pieces(small):
    """Token ids of stories: (to observe, to compare)."""
    drawn = random.Random(1)
    ids = [small.tokenizer.encode(" ".join(story(drawn)))[:200] for _ in range(48)]
    return ids[:24], ids[24:]


def to_nearest(weight, form, importance=None, columns=None, rows=None) -> Codes:
    """Plain round to nearest: the largest weight of a group is the largest code."""
    assert columns is None is rows
    n, k = weight.shape
    top = {"int4": 7, "int8": 127, "fp8": 448}[form.kind]
    groups = np.asarray(weight).astype(np.float32).reshape(n, -1, form.group)
    scales = (np.abs(groups).max(axis=2) / top).astype(np.dtype(form.scales))
    steps = scales.astype(np.float32)[..., None]
    codes = groups / np.where(steps == 0, 1, steps)
    if form.kind == "fp8":
        codes = np.clip(codes, -top, top).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return Codes(pack_rows(codes.reshape(n, k), 8), scales)
    codes = np.clip(np.round(codes), -top - 1, top)
    codes = (codes + top + 1).astype(np.uint8).reshape(n, k)
    return Codes(pack_rows(codes, 4 if form.kind == "int4" else 8), scales)


def errors(weight, codes, form, importance=1.0):
    """Squared error of each group [N,G], float64."""
    lost = dequantised(codes, form, weight.shape[1]).astype(np.float64) - weight.astype(np.float64)
    return (lost**2 * importance).reshape(len(weight), -1, form.group).sum(axis=2)


@pytest.mark.parametrize("form", [INT4, INT8, FP8], ids=str)
@pytest.mark.parametrize("heavy", [False, True])
def test_no_group_loses_more_than_by_plain_rounding(form, heavy):
    rng = np.random.default_rng(0)
    weight = rng.standard_t(3, (40, 96)) if heavy else rng.normal(size=(40, 96))
    weight = weight.astype(ml_dtypes.bfloat16)
    ours = errors(weight, quantise(weight, form), form)
    plain = errors(weight, to_nearest(weight, form), form)
    assert (ours <= plain * (1 + 1e-5)).all()
    if form is INT4:
        assert ours.sum() < 0.9 * plain.sum()


def test_errors_count_by_their_importance():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, 96)).astype(np.float32)
    importance = np.where(np.arange(96) % 8 == 0, 100.0, 1.0)
    weighted = errors(weight, quantise(weight, INT4, importance), INT4, importance)
    alike = errors(weight, quantise(weight, INT4), INT4, importance)
    assert weighted.sum() < 0.8 * alike.sum()


def test_groups_of_zeros_and_single_weights():
    weight = np.zeros((2, 64), np.float32)
    weight[1, 40] = -3.0
    codes = quantise(weight, INT4)
    np.testing.assert_array_equal(dequantised(codes, INT4, 64), weight)
    codes = quantise(weight, FP8 := dataclasses.replace(INT4, kind="fp8"))
    np.testing.assert_allclose(dequantised(codes, FP8, 64), weight, rtol=2**-8)


@pytest.mark.slow
def test_rows_are_quantised_alike_in_parts(monkeypatch):
    """With the factors of rows and columns; a word may have room for more codes than are left."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(50, 60)).astype(np.float16)
    columns, rows = (rng.uniform(0.5, 2, n).astype(np.float32) for n in (60, 50))
    for form in (INT4, INT8):
        form = dataclasses.replace(form, group=60)
        whole = quantise(weight.astype(np.float32) * columns * rows[:, None], form)
        codes = unpack_rows(whole.words, BITS[form.kind], 60)
        np.testing.assert_array_equal(pack_rows(codes, BITS[form.kind]), whole.words)
        with monkeypatch.context() as patch:
            patch.setattr("fdjax.weights.quantise._AT_ONCE", 7 * 60)
            parts = quantise(weight, form, columns=columns, rows=rows)
        np.testing.assert_array_equal(whole.words, parts.words)
        np.testing.assert_array_equal(whole.scales, parts.scales)


@pytest.mark.slow
def test_texts_are_observed_alike_in_any_number_at_once(monkeypatch):
    config = parse_config(read_json(FIXTURES / "llama2_mha" / "config.json"))
    model = describe(config, dtype="float32", plan=Plan())
    engine = Engine(model, load_params(FIXTURES / "llama2_mha", model))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, config.vocab_size, n).tolist() for n in (5, 12, 1, 9, 12)]
    found = smoothing.observe(engine, texts)
    for at_once in (1, 2):  # the last of the second has one text and padding
        monkeypatch.setattr(smoothing, "_TOKENS", 12 * at_once)
        for one, other in zip(found, smoothing.observe(engine, texts), strict=True):
            assert one.keys() == other.keys()
            for name, inputs in one.items():
                assert inputs.sample.shape == (256, inputs.square.size)
                for field, value in vars(inputs).items():
                    theirs = getattr(other[name], field)
                    np.testing.assert_allclose(theirs, value, rtol=1e-4, atol=1e-5)
    # Alone, a text has the sums of its tokens and its own sample.
    alone = [smoothing.observe(engine, [text]) for text in texts]
    for i, block in enumerate(found):
        for name, inputs in block.items():
            parts = [
                (one[i][name].square * len(text)) for one, text in zip(alone, texts, strict=True)
            ]
            square = np.sum(parts, axis=0) / sum(map(len, texts))
            np.testing.assert_allclose(inputs.square, square, rtol=1e-4)


@pytest.mark.slow
def test_the_search_of_scales_knows_what_is_rounded():
    """With a power of 0, inputs and weights are rounded as they are."""
    rng = np.random.default_rng(0)
    exact = rng.uniform(-3, 3, (8, 64)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact[:, 0] = 448 / 2**7
    sample, magnitude = rng.normal(size=(5, 64)).astype(np.float32), np.ones(64, np.float32)
    fp8 = WeightFormat("fp8", 64, rounded_activations=True)
    assert smoothing._errors(exact, sample, magnitude, form=fp8)[0] == 0

    whole = rng.integers(-126, 127, (8, 64)).astype(np.float32)
    whole[:, 0] = 127
    step = np.abs(sample).max(axis=1, keepdims=True) / 127
    lost = (np.round(sample / step) * step - sample) @ whole.T
    for rounds, want in ((False, 0), (True, np.sum(lost**2))):
        int8 = WeightFormat("int8", 64, rounded_activations=rounds)
        found = smoothing._errors(whole, sample, magnitude, form=int8)[0]
        np.testing.assert_allclose(found, want, rtol=1e-3)


@pytest.mark.soak
def test_a_model_is_quantised_while_it_is_loaded():
    tiny = fdjax.load("tiny", plan=Plan())
    for kind, share in (("int4", 0.33), ("fp8", 0.56), ("int8", 0.56)):
        lm = fdjax.load("tiny", quantize=kind, plan=Plan())
        assert lm.model.weight_bytes < share * tiny.model.weight_bytes
        assert {weight.kind for weight in lm.config.weight_formats} == {kind}
    assert "Pacific" in lm.generate("What is the largest ocean?").text
    assert {weight.group for weight in lm.config.weight_formats} == {256, 640}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "kind", "allowed"),
    [("fp8", "fp8", True), ("fp8", "fp8", False), ("w8a8", "int8", True), ("w8a8", "int8", False)],
)
def test_a_model_rounds_activations_if_it_may(two_layers, small, quantize, kind, allowed):
    options = {"plan": Plan(), "quantize": quantize, "rounded_activations": allowed}
    lm = fdjax.load(two_layers, **options)
    formats = {(f.kind, f.rounded_activations) for f in lm.config.weight_formats}
    assert formats == {(kind, allowed)}
    ids = small.tokenizer.encode("Once upon a time")
    ours, theirs = (m.score([ids]).logprobs[0] for m in (lm, small))
    assert 0 < np.abs(np.subtract(ours, theirs)).max() < 1


def test_what_cannot_be_quantised_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quantize must be int4, int8, fp8 or w8a8, got 'int3'"):
        fdjax.load("tiny", quantize="int3")
    quantised = FIXTURES.parent / "quantised" / "ct_int4_group"
    with pytest.raises(ValueError, match="is quantised already"):
        fdjax.load(str(quantised), quantize="int4")
    with pytest.raises(fdjax.CheckpointError, match="only plain checkpoints can be quantised"):
        config = parse_config(read_json(quantised / "config.json"))
        tool.quantise_checkpoint(quantised, tmp_path, config, bits=4, scales="bfloat16")


def written(of: fdjax.LM, source, folder, *, bits=4, group=128, inputs=None, **options) -> fdjax.LM:
    options = {"bits": bits, "group": group, "scales": "bfloat16", "inputs": inputs} | options
    tool.quantise_checkpoint(Path(source), folder, of.config, **options)
    return fdjax.load(str(folder), plan=Plan())


@pytest.mark.slow
def test_a_written_checkpoint_is_what_load_makes(small, two_layers, tmp_path):
    lm = written(small, two_layers, tmp_path)
    direct = fdjax.load(two_layers, quantize="int4", plan=Plan())
    assert lm.config == direct.config
    for ours, theirs in zip(
        jax.tree.leaves(lm.params), jax.tree.leaves(direct.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = described["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 128, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "quantize", "name"),
    [("fp8", "fp8", "float"), ("int8", "w8a8", "int")],
)
def test_a_written_checkpoint_with_activations_is_what_load_makes(
    small, two_layers, tmp_path, activations, quantize, name
):
    lm = written(small, two_layers, tmp_path, bits=8, group=None, activations=activations)
    direct = fdjax.load(two_layers, quantize=quantize, plan=Plan())
    assert lm.config == direct.config
    for ours, theirs in zip(
        jax.tree.leaves(lm.params), jax.tree.leaves(direct.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["format"] == f"{name}-quantized"
    group = described["config_groups"]["group_0"]
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    assert group["input_activations"]["dynamic"] is True
    assert group["input_activations"]["type"] == group["weights"]["type"] == name


@pytest.mark.slow
@pytest.mark.parametrize(("option", "kind"), [("--fp8", "fp8"), ("--w8a8", "int8")])
def test_the_command_writes_activations(tmp_path, capsys, option, kind):
    source, output = str(FIXTURES / "gpt2"), tmp_path / "out"
    command = ["quantize", source, "--bits", "8", option, "--output", str(output)]
    assert main(command) == 0
    assert ("the model writes" in capsys.readouterr().err) == (option == "--w8a8")
    formats = fdjax.load(str(output), plan=Plan()).config.weight_formats
    assert {(weight.kind, weight.rounded_activations) for weight in formats} == {(kind, True)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fp8"], "--fp8 needs --bits 8"),
        (["--fp8", "--bits", "8", "--group", "32"], "and no --group"),
        (["--w8a8"], "--w8a8 needs --bits 8"),
        (["--w8a8", "--fp8", "--bits", "8"], "--fp8 and --w8a8 exclude each other"),
    ],
)
def test_activations_go_with_8_bits_and_no_groups(options, says, tmp_path, capsys):
    assert main(["quantize", *options, "--output", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_experts_in_one_tensor_keep_their_activations():
    config = parse_config(read_json(FIXTURES / "granitemoe" / "config.json"))
    with pytest.raises(ValueError, match="have 8 bits, and one scale for each output"):
        tool.with_formats(config, 4, None, "bfloat16", activations="int8")
    with pytest.raises(ValueError, match="activations must be int8 or fp8, got 'int4'"):
        tool.with_formats(config, 8, None, "bfloat16", activations="int4")
    with pytest.raises(
        ValueError, match="holds all experts of a layer, whose activations cannot be in fp8"
    ):
        tool.with_formats(config, 8, None, "bfloat16", activations="fp8")


@pytest.mark.slow
def test_a_checkpoint_may_have_several_files(small, two_layers, tmp_path):
    write = functools.partial(written, small, two_layers)
    one, many = write(tmp_path / "one"), write(tmp_path / "many", shard_bytes=5 * 10**5)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files[0] == "model-00001-of-00003.safetensors" and len(files) == 3
    for ours, theirs in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_failure_leaves_no_file_that_looks_complete(tmp_path):
    def fail():
        raise OSError("disk is full")

    group = ((Planned("w", "F32", (2,)),), fail)
    with pytest.raises(OSError, match="disk is full"):
        write_tensors(tmp_path, [group])
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ("opt_350m", {"model.decoder.project_in", "model.decoder.project_out"}),
        ("gpt_neox", {"embed_out"}),
        ("llama3_gqa_tied", set()),
    ],
)
def test_transformers_learns_what_is_not_quantised(case, kept, tmp_path, capsys):
    source, output = str(FIXTURES / case), tmp_path / "out"
    assert (
        main(["quantize", source, "--weights-only", "--group", "16", "--output", str(output)]) == 0
    )
    described = read_json(output / "config.json")["quantization_config"]
    assert set(described["ignore"]) == {"lm_head", *kept}
    assert "transformers cannot" not in capsys.readouterr().err


def spoilt(folder, change):
    """A copy of a checkpoint whose tensors are changed."""
    shutil.copytree(FIXTURES / "llama2_mha", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(dict(tensors)), folder / "model.safetensors")
    return folder


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {name: a for name, a in t.items() if name != DOWN}, "is missing"),
        (lambda t: t | {"model.layers.0.foo.weight": t[DOWN]}, "is unexpected"),
        (lambda t: t | {DOWN: t[DOWN][:16].copy()}, "must have shape"),
        (lambda t: t | {DOWN: np.where(t[DOWN] == t[DOWN].max(), np.nan, t[DOWN])}, "not finite"),
        (lambda t: t | {DOWN: np.where(t[DOWN] == t[DOWN].max(), -np.inf, t[DOWN])}, "not finite"),
    ],
)
def test_a_damaged_checkpoint_is_not_quantised(change, says, tmp_path):
    folder = spoilt(tmp_path / "spoilt", change)
    config = parse_config(read_json(folder / "config.json"))
    with pytest.raises(fdjax.CheckpointError, match=says):
        tool.quantise_checkpoint(folder, tmp_path / "out", config, bits=8, scales="float32")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(("value", "says"), [(np.nan, "not finite"), (0, "only zeros")])
def test_damage_is_found_while_a_model_is_quantised(quantize, value, says, tmp_path):
    folder = spoilt(tmp_path / "spoilt", lambda t: t | {DOWN: np.full_like(t[DOWN], value)})
    with pytest.warns(UserWarning, match=f"{DOWN}' has .*{says}"):
        fdjax.load(str(folder), quantize=quantize, plan=Plan(), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "can"), [("--w8a8", False), ("--fp8", True)])
def test_transformers_drops_experts_in_int8(option, can, tmp_path, capsys):
    source, output = str(FIXTURES / "mixtral"), str(tmp_path / "out")
    command = ["quantize", source, "--bits", "8", option, "--weights-only", "--output", output]
    assert main(command) == 0
    assert ("transformers cannot" not in capsys.readouterr().err) == can


@pytest.mark.slow
def test_what_transformers_cannot_load_is_said(tmp_path, capsys):
    source, output = str(FIXTURES / "gpt2"), str(tmp_path / "out")
    assert main(["quantize", source, "--weights-only", "--group", "16", "--output", output]) == 0
    assert "transformers cannot load this model: it only quantises" in capsys.readouterr().err


@pytest.mark.slow
def test_chat_templates_are_copied(tmp_path):
    source, output = tmp_path / "source", tmp_path / "out"
    shutil.copytree(FIXTURES / "llama3_gqa_tied", source)
    (source / "chat_template.jinja").write_text("default")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    options = ["--weights-only", "--group", "16", "--output", str(output)]
    assert main(["quantize", str(source), *options]) == 0
    assert (output / "chat_template.jinja").read_text() == "default"
    assert (output / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"


def test_an_interrupted_run_can_be_repeated(tmp_path, monkeypatch):
    output = tmp_path / "out"
    options = ["--weights-only", "--group", "16", "--output", str(output)]
    command = ["quantize", str(FIXTURES / "llama3_gqa_tied"), *options]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tool, "quantise", interrupted)
        assert main(command) == 130
    assert not any(output.iterdir())
    assert main(command) == 0


def test_a_folder_that_cannot_be_made_is_refused_before_the_model_runs(tmp_path, capsys):
    (tmp_path / "file").touch()
    output = str(tmp_path / "file" / "folder")
    command = ["quantize", str(FIXTURES / "llama3_gqa_tied"), "--group", "16", "--output", output]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "quantize: --output cannot be created" in said and "tokens" not in said


def test_one_tensor_is_made_at_a_time(tmp_path):
    """Each tensor is in the file before the next one is made."""
    seen = []

    def make(i):
        def run():
            (part,) = tmp_path.iterdir()
            seen.append(part.stat().st_size)
            return (np.full(10**6, i, np.float32),)

        return run

    groups = [((Planned(f"w{i}", "F32", (10**6,)),), make(i)) for i in range(3)]
    assert write_tensors(tmp_path, groups) == 12 * 10**6
    assert seen[2] - seen[1] >= 4 * 10**6 - 2**16
    tensors = stored_tensors(tmp_path)
    assert [float(tensors[f"w{i}"].view()[-1]) for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("phi3_longrope", marks=pytest.mark.soak),
        *(
            pytest.param(case, marks=marks)
            for case, marks in (
                ("gemma2", pytest.mark.slow),
                ("llama_bias", pytest.mark.soak),
                ("qwen2_mixed", pytest.mark.soak),
                ("qwen3", pytest.mark.soak),
            )
        ),
    ],
)
def test_smoothing_changes_no_answer(tmp_path, case):
    """The same logits before anything is rounded, also with biases, fused tensors and offsets."""
    folder = FIXTURES / case
    config = parse_config(read_json(folder / "config.json"))
    model = describe(config, dtype="float32", plan=Plan())
    params = load_params(folder, model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12)).tolist()
    seen = smoothing.observe(Engine(model, params), ids)
    stored = stored_tensors(folder)
    formats = tool.with_formats(config, 4, None, "float32")
    changes = smoothing.smoothed(formats, weight_map(config), stored, seen)
    assert any(np.ptp(scale) > 0.1 for scale in changes.columns.values())
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    groups = []
    for name, tensor in stored.items():
        new = changes.apply(name, np.array(tensor.view())).astype(np.float32)
        groups.append(((Planned(name, "F32", new.shape),), lambda new=new: (new,)))
    write_tensors(tmp_path, groups)
    with_s = load_params(tmp_path, model)
    want = np.asarray(fdjax.forward(model, params, np.array(ids)))
    got = np.asarray(fdjax.forward(model, with_s, np.array(ids)))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_text_makes_predictions_closer(own, pieces, tmp_path, monkeypatch, group=32):
    """Closer than those of plain rounding with as many bits, and of a search without a text.

    So do texts that the model writes itself; `benchmarks.quantisers` measures more groups.
    """
    tiny = fdjax.load("tiny", plan=Plan())
    write = functools.partial(written, tiny, locate("tiny"), group=group)
    start, vocab_size = tiny.tokenizer.bos_token_id, tiny.config.vocab_size
    texts = own_texts(tiny.generate, start, vocab_size=vocab_size) if own else pieces[0]
    models = {
        "text": write(tmp_path / "text", inputs=smoothing.observe(tiny.engine, texts)),
        "searched": write(tmp_path / "searched"),
    }
    monkeypatch.setattr(tool, "quantise", to_nearest)
    models["plain"] = write(tmp_path / "plain")
    assert len({lm.model.weight_bytes for lm in models.values()}) == 1
    found = {
        name: tool.compare_models(tiny.engine, lm.engine, pieces[1]) for name, lm in models.items()
    }
    for other in ("plain", "searched"):
        assert found["text"].mean_kl < 0.95 * found[other].mean_kl, found
        assert found["text"].agreement > found[other].agreement, found


@pytest.mark.parametrize(("start", "firsts"), [(7, [7, 7, 7]), (None, [0, 33, 66])])
def test_own_texts_begin_where_texts_begin(start, firsts):
    calls = []

    def generate(prompts, **options):
        calls.append(options)
        return SimpleNamespace(tokens=[[1, 2], [3], [4, 5]])

    texts = own_texts(generate, start, vocab_size=100, texts=3, tokens=40)
    assert texts == [[firsts[0], 1, 2], [firsts[1], 3], [firsts[2], 4, 5]]
    (options,) = calls
    assert (options["max_new_tokens"], options["min_new_tokens"]) == (40, 10)
    assert options["seed"] == [0, 1, 2]  # the same texts in each call


@pytest.mark.slow
def test_the_command_quantises_with_own_texts(two_layers, tmp_path, capsys, monkeypatch):
    """Unless it is told not to, or the model does not fit into memory."""
    command = ["quantize", two_layers, "--group", "64", "--output"]
    ways = {"own": [], "weights": ["--weights-only"], "too large": [], "int8": ["--bits", "8"]}
    seen = {}
    monkeypatch.setattr("fdjax.tools.own_texts.TOKENS", 20)
    for name, options in ways.items():
        if name == "too large":
            monkeypatch.setattr(fdjax, "load", _raise(MemoryError("load: no room for weights")))
        assert main([*command, str(tmp_path / name), *options]) == 0
        said = capsys.readouterr().err
        assert ("the model writes 1,280 tokens and runs on them" in said) == (name == "own")
        assert ("only the weights are considered" in said) == (name == "too large")
        seen[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert seen["too large"] == seen["weights"] != seen["own"]


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ([], 13.48e9 * 5 / 4 + 10e9),
        (["--text", "README.md"], 13.48e9 * 7 / 4 + 10e9),
        (["--weights-only"], 10e9),
        (["--bits", "8"], 10e9),
    ],
)
def test_the_command_takes_no_more_of_a_gpu_than_it_needs(tmp_path, monkeypatch, options, needed):
    """JAX's allocator takes host memory for all that it may hand out."""
    seen = []

    @contextlib.contextmanager
    def memory_share(share, *, needed_bytes):
        seen.append((share, needed_bytes))
        yield

    monkeypatch.setattr("fdjax.cli.main.memory_share", memory_share)
    shutil.copy(FIXTURES / "configs" / "llama-2-7b.old.json", tmp_path / "config.json")
    assert main(["quantize", str(tmp_path), *options, "--output", str(tmp_path / "new")]) == 1
    assert seen == [(None, pytest.approx(needed, rel=1e-3))]


def _raise(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.slow
def test_a_comparison_with_itself_and_with_noise(small, pieces):
    same = tool.compare_models(small.engine, small.engine, pieces[1][:9])
    assert (same.mean_kl, same.p99_kl, same.agreement) == (0, 0, 1)
    assert same.perplexity == same.reference_perplexity
    scored = small.score(pieces[1][:9]).perplexity
    assert same.perplexity == pytest.approx(scored, rel=1e-3)
    params = small.params
    params["embed"] = jnp.roll(params["embed"], 1, axis=0)
    other = fdjax.LM(small.model, params)
    assert tool.compare_models(small.engine, other.engine, pieces[1][:9]).mean_kl > 1
    with pytest.raises(ValueError, match="too short to compare"):
        tool.compare_models(small.engine, small.engine, [[3]])


@pytest.fixture
def text(tmp_path):
    drawn = random.Random(2)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(story(drawn)) for _ in range(40)), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_command_writes_and_reports(two_layers, tmp_path, text, capsys):
    output = tmp_path / "int4"
    command = ["quantize", two_layers, "--group", "64", "--text", str(text)]
    assert main([*command, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    for word in ("size ", "seconds ", "perplexity ", "KL ", "99th percentile", "agreement "):
        assert word in said
    assert "2.61 times less" in said
    assert main(["info", str(output)]) == 0
    assert "int4 by 64" in capsys.readouterr().out
    again = ["quantize", str(output), "--output", str(tmp_path / "again")]
    assert main(again) == 1 and "is quantised already" in capsys.readouterr().err
    assert main(["quantize", "--output", str(output)]) == 1
    assert "must be a new or empty folder" in capsys.readouterr().err


def test_info_of_a_description_alone_warns(capsys):
    quantised = FIXTURES.parent / "quantised" / "ct_int4_group"
    assert main(["info", str(quantised)]) == 0
    assert "int4 by 32" in capsys.readouterr().out
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main(["info", str(quantised / "config.json")]) == 0
    shown = capsys.readouterr()
    assert "int4" not in shown.out
    assert "without their files they count as bfloat16" in f"{warned}{shown.err}"


def test_the_command_refuses_what_it_cannot_do(tmp_path, capsys):
    output = str(tmp_path / "out")
    assert main(["quantize", "--group", "100", "--output", output]) == 1
    assert "group must divide the 256 inputs of qkv, got 100" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("Once.", encoding="utf-8")
    assert main(["quantize", "--text", str(short), "--output", output]) == 1
    assert "the text must have more than" in capsys.readouterr().err
    assert main(["quantize", "--text", str(short), "--weights-only", "--output", output]) == 2
    assert "--weights-only does not use --text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quantize", "--bits", "3", "--output", output])
    assert "invalid choice" in capsys.readouterr().err
    assert not Path(output).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "bits", "group"),
    [("mixtral", 4, 8), pytest.param("qwen2_moe", 8, None, marks=pytest.mark.soak)],
)
def test_experts_are_written_and_routers_stay(case, bits, group, tmp_path):
    folder, output = FIXTURES / case, tmp_path / "out"
    config = parse_config(read_json(folder / "config.json"))
    written = tool.quantise_checkpoint(
        folder, output, config, bits=bits, group=group, scales="float32"
    )
    assert written < 0.6 * sum(tensor.nbytes for tensor in stored_tensors(folder).values())
    names = set(stored_tensors(output))
    module = "block_sparse_moe.experts.3.w2" if case == "mixtral" else "mlp.experts.3.down_proj"
    assert f"model.layers.0.{module}.weight_packed" in names
    lm = fdjax.load(str(output), compilation_cache=False, progress=False)
    formats = dict(lm.config.blocks[0].formats)
    assert "router" not in formats and "shared_gate" not in formats
    assert formats["experts.down"].group == (group or config.mlp_width)
    ignored = read_json(output / "config.json")["quantization_config"]["ignore"]
    router = "block_sparse_moe.gate" if case == "mixtral" else "mlp.gate"
    assert {"lm_head", f"model.layers.0.{router}"} <= set(ignored)
    plain = fdjax.load(str(folder), compilation_cache=False, progress=False)
    ours, theirs = (m.params["blocks"][0]["mlp"] for m in (lm, plain))
    np.testing.assert_array_equal(ours["router"]["weight"], theirs["router"]["weight"])
    got = jax.vmap(lambda q: dequantise(q, "float32"))(ours["experts"]["down"])
    error = np.abs(np.asarray(got - theirs["experts"]["down"]))
    assert 0 < error.mean() < (0.06 if bits == 4 else 0.006)


@pytest.mark.slow
def test_experts_in_one_tensor_are_written_one_by_one(tmp_path):
    """Newer checkpoints of a Mixtral hold all experts of a layer in one tensor."""
    one, many = tmp_path / "one", tmp_path / "many"
    config = parse_config(read_json(FIXTURES / "mixtral" / "config.json"))
    shutil.copytree(FIXTURES / "mixtral", one)
    tensors = {name: t.view() for name, t in stored_tensors(one).items()}
    for i in range(2):
        old = f"model.layers.{i}.block_sparse_moe."
        new = f"model.layers.{i}.mlp."
        parts = [
            {w: tensors.pop(f"{old}experts.{j}.{w}.weight") for w in ("w1", "w2", "w3")}
            for j in range(4)
        ]
        gate_up = [np.concatenate([part["w1"], part["w3"]]) for part in parts]
        tensors[f"{new}experts.gate_up_proj"] = np.stack(gate_up)
        tensors[f"{new}experts.down_proj"] = np.stack([part["w2"] for part in parts])
        tensors[f"{new}gate.weight"] = tensors.pop(f"{old}gate.weight")
    groups = [
        ((Planned(n, "F32", a.shape),), lambda a=np.array(a): (a,)) for n, a in tensors.items()
    ]
    (one / "model.safetensors").unlink()
    write_tensors(one, groups)
    options = {"bits": 4, "group": 8, "scales": "float32"}
    for folder, output in ((one, many), (FIXTURES / "mixtral", tmp_path / "other")):
        tool.quantise_checkpoint(folder, output, config, **options)
    ours, theirs = stored_tensors(many), stored_tensors(tmp_path / "other")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.view(), theirs[name].view(), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tensors"),
    [
        ("olmoe", [f"mlp.experts.7.{part}_proj.weight" for part in ("gate", "up")]),
        pytest.param(
            *("granitemoe", ["block_sparse_moe.input_linear.weight"]), marks=pytest.mark.soak
        ),
        ("gpt_oss", ["mlp.experts.gate_up_proj"]),
    ],
)
def test_experts_count_errors_by_what_the_router_reads(case, tensors, tmp_path):
    folder = FIXTURES / case
    config = parse_config(read_json(folder / "config.json"))
    model = describe(config, dtype="float32", plan=Plan())
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12)).tolist()
    seen = smoothing.observe(Engine(model, load_params(folder, model)), ids)
    stored, weights = stored_tensors(folder), weight_map(config)
    formats = tool.with_formats(config, 4, 16, "float32")
    importance = smoothing.smoothed(formats, weights, stored, seen).importance
    for name in tensors:
        square = importance[f"model.layers.1.{name}"]
        np.testing.assert_array_equal(square, seen[1]["router"].square)
    written = tool.quantise_checkpoint(
        folder, tmp_path / "out", config, bits=4, group=16, scales="float32", inputs=seen
    )
    assert written
    assert fdjax.load(str(tmp_path / "out"), compilation_cache=False).config.weight_formats


forward = jax.jit(fdjax.forward, static_argnums=0)


def in_one_tensor(case, folder) -> Path:
    """A model whose layers hold all experts in one tensor."""
    return in_mxfp4(folder, mxfp4_tensors()[0]) if case == "mxfp4" else FIXTURES / case


def dense_of(lm: fdjax.LM) -> tuple[Model, Params]:
    """The same model with dequantised weights."""
    model = describe(lm.config.with_formats({}), dtype="float32", plan=lm.model.plan)
    one = functools.partial(dequantise, dtype="float32")

    @jax.jit
    def dequantised(q):
        return jax.vmap(one)(q) if q.stack else one(q)

    def dense(leaf, like):
        leaf = dequantised(leaf) if is_quantised(leaf) else leaf
        return np.asarray(leaf).reshape(like.shape)

    return model, jax.tree.map(dense, lm.params, model.abstract_params, is_leaf=is_quantised)


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        ("mxfp4", 4),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("granitemoe", 4), ("gpt_oss", 8))),
        *(
            pytest.param(*of, marks=pytest.mark.soak)
            for of in (("granitemoe", 8), ("gpt_oss", 4), ("mxfp4", 8))
        ),
    ],
)
def test_experts_in_one_tensor_are_written(case, bits, tmp_path, capsys, monkeypatch):
    """What is written is what `load` makes."""
    monkeypatch.setattr("fdjax.weights.quantise.GROUPS", (16,))
    folder, output = in_one_tensor(case, tmp_path / "in"), tmp_path / "out"
    group = ["--group", "16"] if bits == 4 else []
    command = ["quantize", str(folder), "--bits", str(bits), *group, "--output", str(output)]
    assert main([*command, "--weights-only"]) == 0
    assert (
        "transformers cannot load this model: a tensor holds all experts" in capsys.readouterr().err
    )
    lm = fdjax.load(str(output), compilation_cache=False, progress=False)
    direct = fdjax.load(str(folder), quantize=f"int{bits}", compilation_cache=False, progress=False)
    assert lm.config == direct.config
    for ours, theirs in zip(
        jax.tree.leaves(lm.params), jax.tree.leaves(direct.params), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    kinds = {name: form.kind for name, form in lm.config.blocks[1].formats}
    experts = "fp4" if case == "mxfp4" else f"int{bits}"
    assert kinds == dict.fromkeys(("qkv", "out"), f"int{bits}") | {
        "experts.gate_up": experts,
        "experts.down": experts,
    }
    again = ["quantize", str(output), "--output", str(tmp_path / "again")]
    assert main(again) == 1 and "is quantised already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("mxfp4", 4), ("gpt_oss", 4))),
        *(
            pytest.param(*of, marks=pytest.mark.soak)
            for of in (("granitemoe", 4), ("granitemoe", 8), ("gpt_oss", 8))
        ),
    ],
)
def test_experts_in_one_tensor_compute_what_dequantised_ones_do(case, bits, tmp_path):
    folder = in_one_tensor(case, tmp_path)
    lm = fdjax.load(str(folder), quantize=f"int{bits}", compilation_cache=False, progress=False)
    ids = np.arange(2, 62, dtype=np.int32).reshape(2, 30)
    plain, dense = dense_of(lm)
    got = forward(lm.model, lm.params, ids)
    np.testing.assert_array_equal(got, forward(plain, dense, ids))
    assert np.ptp(got) > 0.1
    if case != "mxfp4":
        exact = load_params(folder, plain)
        for ours, theirs in zip(jax.tree.leaves(dense), jax.tree.leaves(exact), strict=True):
            bar = (0.12 if bits == 4 else 0.012) * np.abs(theirs).mean()
            assert np.abs(ours - theirs).mean() < bar


def test_experts_in_mxfp4_keep_their_codes(tmp_path):
    """They are described as compressed-tensors does, and a model of them alone is written alike."""
    folder, output = in_one_tensor("mxfp4", tmp_path / "in"), tmp_path / "out"
    data = read_json(folder / "config.json")
    config = quantised_config(folder, parse_config(data), data)
    tool.quantise_checkpoint(folder, output, config, bits=8, scales="float32")
    old, new = stored_tensors(folder), stored_tensors(output)
    for name in ("gate_up_proj", "down_proj"):
        module = f"model.layers.1.mlp.experts.{name}"
        for ours, theirs in (("weight_packed", "blocks"), ("weight_scale", "scales")):
            codes = old[f"{module}_{theirs}"].view()
            packed = new[f"{module}.{ours}"].view()
            np.testing.assert_array_equal(packed.reshape(codes.shape), codes)
        bias = f"{module}_bias"
        np.testing.assert_array_equal(new[bias].view(), old[bias].view())
    described = read_json(output / "config.json")["quantization_config"]
    group = described["config_groups"]["group_1"]
    assert described["format"] == "mixed-precision"
    assert group["format"] == "mxfp4-pack-quantized" and group["weights"]["group_size"] == 32
    assert len(group["targets"]) == 4 and module in group["targets"]
    assert "model.layers.1.mlp.router" in described["ignore"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"symmetric": False},
            "input_linear' holds all experts of a layer, which must be symmetric",
        ),
        ({"strategy": "tensor"}, "must be symmetric, and quantised by group or channel"),
        (
            {"num_bits": 4},
            r"weight_packed' must have shape \[6, 32, 4\] for 4 bits, got \[6, 32, 8\]",
        ),
        ({"strategy": "group", "group_size": 8}, r"must have shape \[6, 32, 4\], got \[6, 32, 1\]"),
    ],
)
def test_a_description_that_does_not_fit_experts_in_one_tensor(change, says, tmp_path):
    folder = FIXTURES / "granitemoe"
    config = parse_config(read_json(folder / "config.json"))
    tool.quantise_checkpoint(folder, tmp_path, config, bits=8, scales="float32")
    data = read_json(tmp_path / "config.json")
    own = data["quantization_config"]["config_groups"]["group_0"]
    experts = own | {"targets": ["re:.*_linear$"], "weights": own["weights"] | change}
    data["quantization_config"]["config_groups"] = {"group_0": experts, "group_1": own}
    own["targets"] = ["Linear"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(fdjax.CheckpointError, match=says):
        fdjax.load(str(tmp_path), progress=False)


@pytest.mark.parametrize(("name", "group"), [("gpt-oss-20b", 64), ("granite-3.0-1b-a400m", 128)])
def test_the_default_group_divides_all_inputs(name, group):
    config = parse_config(read_json(FIXTURES / "configs" / f"{name}.old.json"))
    assert tool.default_group(config) == group
    tool.with_formats(config, 4, group, "bfloat16")


def test_inputs_that_no_usual_group_divides_are_named():
    config = parse_config(read_json(FIXTURES / "gemma2" / "config.json"))
    with pytest.raises(
        ValueError, match="none of 128, 64 and 32 divides the 48 inputs of qkv; --group must"
    ):
        tool.with_formats(config, 4, tool.default_group(config), "bfloat16")
    config = parse_config(read_json(FIXTURES / "cohere" / "config.json"))
    bad = {k for _, _, k in tool.to_quantise(config) if k % 32}
    with pytest.raises(
        ValueError, match=f"none of 128, 64 and 32 divides the {min(bad)} inputs of"
    ):
        tool.with_formats(config, 4, tool.default_group(config), "bfloat16")


def test_no_other_quantised_weights_are_quantised_again():
    for case in ("bnb_nf4", "gptq_order", "ct_mixed", "ct_mxfp4"):
        with pytest.raises(ValueError, match="is quantised already"):
            fdjax.load(str(FIXTURES.parent / "quantised" / case), quantize="int8")


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_weights_that_are_stored_transposed(bits, tmp_path):
    """Those of GPT-2 are [K,N]."""
    folder, output = FIXTURES / "gpt2", tmp_path / "out"
    config = parse_config(read_json(folder / "config.json"))
    tool.quantise_checkpoint(folder, output, config, bits=bits, group=32, scales="float32")
    options = {"compilation_cache": False, "progress": False}
    exact = fdjax.load(str(folder), **options).params["blocks"][1]
    for lm in (
        fdjax.load(str(output), **options),
        fdjax.load(str(folder), quantize=f"int{bits}", **options),
    ):
        for path in (("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")):
            ours, theirs = (
                tree[path[0]][path[1]]["weight"] for tree in (lm.params["blocks"][1], exact)
            )
            got = np.asarray(dequantise(ours, "float32"))
            error = np.abs(got - np.asarray(theirs).reshape(got.shape))
            bar = (0.12 if bits == 4 else 0.012) * np.abs(theirs).mean()
            assert error.mean() < bar, path


@pytest.mark.parametrize("case", ["gptj", pytest.param("gpt_neox", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_masks_of_old_checkpoints_are_left_out(case, tmp_path):
    """Published checkpoints of these families have a mask of booleans in each layer."""
    folder, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(FIXTURES / case, folder)
    tensors = {name: t.view() for name, t in stored_tensors(folder).items()}
    layer = "transformer.h.0.attn." if case == "gptj" else "gpt_neox.layers.0.attention."
    masks = {f"{layer}bias": np.tril(np.ones((1, 1, 8, 8), bool))}
    masks |= {f"{layer}masked_bias": np.array(-1e9, np.float32)}
    save_file(tensors | masks, folder / "model.safetensors")
    command = ["quantize", str(folder), "--weights-only", "--group", "8", "--output", str(output)]
    assert main(command) == 0
    assert f"{layer}bias" not in stored_tensors(output)
    assert fdjax.load(str(output), compilation_cache=False, progress=False).config.weight_formats


@pytest.mark.parametrize("dtype", [bool, np.int32, ml_dtypes.float8_e4m3fn])
def test_masks_and_codes_do_not_count_for_the_dtype(dtype, tmp_path):
    config = {"model_type": "gptj"}
    save_file(
        {"w": np.ones((2, 2), np.float16), "h.0.attn.bias": np.ones((1, 1, 2, 2), dtype)},
        tmp_path / "model.safetensors",
    )
    assert unnamed_dtype(tmp_path, config) == "float16"
