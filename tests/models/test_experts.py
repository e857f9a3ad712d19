"""Mixtures of experts: layouts of checkpoints, sizes, bytes of a step, what refuses them."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fdjax
from fdjax.engine.memory import plan_memory
from fdjax.engine.results import step_bytes
from fdjax.engine.state import cache_bytes
from fdjax.models import (
    CheckpointError,
    decoder_block,
    describe,
    export_tensors,
    parse_config,
    weight_map,
)
from fdjax.pallas_kernels.experts import moe
from fdjax.pallas_kernels.quantised import dequantise, is_quantised
from fdjax.tools.info import model_info
from fdjax.weights.checkpoint import load_params
from fdjax.weights.quantise import quantised_formats

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASES = ["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
PUBLISHED = {
    # Of the model's page: "12.9B", "2.7B", "3.3B", "1.3B", "400M" of active parameters.
    "mixtral-8x7b": 12_879_925_248,
    "qwen1.5-moe-a2.7b": 2_689_173_504,
    "qwen3-30b-a3b": 3_353_032_704,
    "olmoe-1b-7b": 1_282_017_280,
    "granite-3.0-1b-a400m": 428_658_688,
}


def config(name: str, **changes):
    return parse_config(json.loads((FIXTURES / name / "config.json").read_text()) | changes)


def published(name: str):
    return describe(parse_config(json.loads((FIXTURES / f"configs/{name}.new.json").read_text())))


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(FIXTURES / case / "model.safetensors")


@pytest.fixture
def loaded(tmp_path):
    """A function of (case, tensors) that loads a copy of the checkpoint with other tensors."""

    def load(case, tensors):
        folder = tmp_path / case
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(FIXTURES / case, folder)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return load_params(folder, describe(config(case), dtype="float32"))

    return load


def newer(case: str) -> dict[str, np.ndarray]:
    """The tensors as transformers 5 holds them: all experts of a layer in one tensor."""
    tensors, experts = {}, {}
    for name, tensor in tensors_of(case).items():
        if case == "mixtral":
            name = name.replace(".block_sparse_moe.", ".mlp.")
        if case == "granitemoe":
            name = name.replace("input_linear.weight", "experts.gate_up_proj")
            name = name.replace("output_linear.weight", "experts.down_proj")
            name = name.replace("router.layer.weight", "router.weight")
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            tensors[name] = tensor
    gate, up, down = (
        ("w1", "w3", "w2") if case == "mixtral" else (*("gate_proj", "up_proj", "down_proj"),)
    )
    for module, parts in experts.items():
        count = len(parts) // 3
        joined = [np.concatenate([parts[i, gate], parts[i, up]]) for i in range(count)]
        tensors[f"{module}.gate_up_proj"] = np.stack(joined)
        tensors[f"{module}.down_proj"] = np.stack([parts[i, down] for i in range(count)])
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_both_layouts_load_to_the_same(case, loaded):
    want = loaded(case, tensors_of(case))
    others = newer(case)
    assert set(others) != set(tensors_of(case))
    jax.tree.map(np.testing.assert_array_equal, loaded(case, others), want)


@pytest.mark.parametrize("case", CASES)
def test_parameters_become_the_tensors_that_they_were(case, loaded):
    tensors = tensors_of(case)
    exported = export_tensors(loaded(case, tensors), weight_map(config(case)))
    assert set(exported) == set(tensors)
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor, tensors[name], name)


def test_an_expert_is_where_it_belongs(loaded):
    tensors = tensors_of("mixtral")
    experts = loaded("mixtral", tensors)["blocks"][1]["mlp"]["experts"]
    name = "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"
    for i in range(4):
        gate, down, up = (tensors[name.format(i, part)].T for part in (1, 2, 3))
        np.testing.assert_array_equal(experts["gate_up"][i, :, 0], gate)
        np.testing.assert_array_equal(experts["gate_up"][i, :, 1], up)
        np.testing.assert_array_equal(experts["down"][i], down)


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda a: {GATE_UP: a[:-1]},
            r"gate_up_proj' must have shape \[8, 32, 32\].*\[7, 32, 32\]",
        ),
        (lambda a: {GATE_UP: a.transpose(0, 2, 1)[:, :, :-1].copy()}, "must have shape"),
        (lambda a: {GATE_UP: a.astype(np.int32)}, "gate_up_proj' has dtype I32"),
        (lambda a: {}, r"experts\.0\.gate_proj\.weight' is missing"),
        (
            lambda a: {GATE_UP: a, "model.layers.0.mlp.experts.3.up_proj.weight": a[3, 16:].copy()},
            "gate_up_proj' is unexpected|is missing",
        ),
    ],
    ids=["fewer", "narrower", "integers", "missing", "both"],
)
def test_damage_of_a_tensor_of_all_experts(change, says, loaded):
    tensors = newer("olmoe")
    whole = tensors.pop(GATE_UP)
    with pytest.raises(CheckpointError, match=says):
        loaded("olmoe", tensors | change(whole))


def test_a_tensor_by_its_older_and_its_newer_name_is_unexpected(loaded):
    tensors = tensors_of("mixtral")
    name = "model.layers.0.block_sparse_moe.gate.weight"
    twice = tensors | {name.replace("block_sparse_moe", "mlp"): tensors[name] + 1}
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.gate\.weight' is unexp"):
        loaded("mixtral", twice)


def test_an_expert_of_nan_is_warned_of(loaded):
    tensors = tensors_of("olmoe")
    name = "model.layers.1.mlp.experts.6.down_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    with pytest.warns(UserWarning, match=f"'{name}' has values that are not finite"):
        loaded("olmoe", tensors)


def test_layers_without_experts():
    blocks = config("qwen2_moe").blocks
    assert [block.experts is None for block in blocks] == [False, True, False]
    assert [block.mlp_width for block in blocks] == [12, 48, 12]
    assert blocks[1].linears.keys() == {"qkv", "out", "gate_up", "down"}
    every_other = config("qwen2_moe", mlp_only_layers=[], decoder_sparse_step=2).blocks
    assert [block.experts is None for block in every_other] == [True, False, True]
    names = {"qkv", "out", "gate_up", "down", "head", "router"}
    names |= {f"shared_{part}" for part in ("gate_up", "down", "gate")}
    assert config("qwen2_moe").linear_shapes.keys() == names


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_parameters_of_published_models(name, arrays_made):
    model = published(name)
    assert model.active_parameter_count == PUBLISHED[name]
    facts = model_info(model, batch=4, slots=512)
    assert (facts.parameters, facts.active_parameters) == (
        *(model.parameter_count, PUBLISHED[name]),
    )
    assert f"{model.parameter_count:,}, of which a token uses {PUBLISHED[name]:,}" in str(facts)
    (row,) = [row for row in facts.choices if row[0] == "moe"]
    assert row[1].startswith("M=4 ") and row[2] == "xla"
    assert plan_memory(model, max_len=64).weight_bytes == 2 * model.parameter_count
    assert arrays_made() == 0


def test_a_step_reads_at_most_the_experts_that_its_rows_choose():
    model = published("mixtral-8x7b")
    total, table = model.weight_bytes, 2 * 32000 * 4096
    expert = 2 * 3 * 4096 * 14336 * 32
    read = [step_bytes(model, total, table, rows) for rows in (1, 2, 3, 4, 5, 100)]
    assert read == [total - table - idle * expert for idle in (6, 4, 2, 0, 0, 0)]
    # Each of two devices holds half of every expert.
    assert step_bytes(describe(model.config, tensor_parallel=2), 10 * expert, 0, 1) == 7 * expert
    dense = published("llama-3-8b")
    assert step_bytes(dense, 100, 10, 1) == step_bytes(dense, 100, 10, 9) == 90


@pytest.mark.slow
def test_statistics_count_the_rows_of_each_step():
    lm = fdjax.load(str(FIXTURES / "olmoe"), compilation_cache=False, progress=False)
    c = lm.config
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": [5, 3]}
    stats = lm.generate([[1, 2, 3], [4, 5]], **options).stats
    assert stats.decode_steps == 4
    whole = lm.model.weight_bytes - 4 * c.vocab_size * c.width
    idle = 4 * c.idle_expert_weights(1)
    assert idle == 4 * 2 * 4 * 3 * 32 * 16
    slots = sum(range(4, 8)) + sum(range(3, 5))
    # Two rows of 4 experts each may choose all 8.
    assert stats.decode_bytes == 4 * whole - 2 * idle + slots * cache_bytes(lm.model, 1, 1)


@pytest.mark.slow
def test_rows_that_have_ended_choose_no_experts(monkeypatch):
    seen = []

    def recorded(x, *args, live, **options):
        seen.append((len(x), live if live is None else live.shape))
        return moe(x, *args, live=live, **options)

    monkeypatch.setattr(decoder_block, "moe", recorded)
    lm = fdjax.load(str(FIXTURES / "olmoe"), compilation_cache=False, progress=False)
    traced = fdjax.LM(dataclasses.replace(lm.model), lm.params)  # without programs
    traced.generate([[1, 2, 3]] * 6, do_sample=False, max_new_tokens=3)
    assert (8, (8,)) in seen  # 8 rows have room for 6 prompts
    assert {live for rows, live in seen if rows > 8} == {None}  # prompts


def dequantised(params):
    """The same parameters with dequantised weights, in the layouts of a plain model."""

    def plain(leaf):
        if not is_quantised(leaf):
            return leaf
        one = functools.partial(dequantise, dtype="float32")
        return jax.vmap(one)(leaf) if leaf.stack else one(leaf)

    return jax.tree.map(plain, params, is_leaf=is_quantised)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param("olmoe", "int4", marks=pytest.mark.slow),
        *(
            pytest.param(case, kind, marks=pytest.mark.soak)
            for case, kind in (("qwen2_moe", "int4"), ("granitemoe", "int8"), ("mixtral", "int8"))
        ),
    ],
)
def test_quantised_experts_compute_what_dequantised_ones_do(case, kind):
    options = {"compilation_cache": False, "progress": False}
    lm = fdjax.load(str(FIXTURES / case), quantize=kind, **options)
    model, plain = lm.model, describe(config(case), dtype="float32", plan=lm.model.plan)
    experts = lm.params["blocks"][0]["mlp"]["experts"]
    assert experts["gate_up"].kind == experts["down"].kind == kind
    router = lm.params["blocks"][0]["mlp"]["router"]["weight"]
    assert router.dtype == jnp.float32
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert plan_memory(model, max_len=64).weight_bytes == held == model.weight_bytes
    assert model.parameter_count == plain.parameter_count
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    dense = jax.tree.map(
        lambda leaf, like: leaf.reshape(like.shape), dequantised(lm.params), plain.abstract_params
    )
    forward = jax.jit(fdjax.forward, static_argnums=0)
    np.testing.assert_array_equal(forward(model, lm.params, ids), forward(plain, dense, ids))


def test_a_step_reads_the_codes_and_scales_of_its_experts():
    model = describe(quantised_formats(config("mixtral"), "int4", "bfloat16"), dtype="bfloat16")
    expert = sum(k * n // 2 + k // group * n * 2 for k, n, group in ((32, 48, 32), (24, 32, 24)))
    assert model.idle_expert_bytes(1) == 2 * 2 * expert  # of 2 layers, 2 of 4 experts
    total = model.weight_bytes
    assert step_bytes(model, total, 0, 1) == total - 4 * expert
    facts = model_info(model, batch=1, slots=128)
    assert facts.active_bytes == total - 4 * expert
    (row,) = [row for row in facts.choices if row[0] == "moe"]
    assert row[1] == "M=1 2 of 4 [32,2,24] int4 by 32"


def fp8_experts(folder):
    """A checkpoint of blocks of 16 in FP8, as published ones of Qwen3 have them, and its values."""
    tensors, exact = {}, tensors_of("qwen3_moe")
    for name, tensor in exact.items():
        if not re.search(r"experts\.\d+\.\w+\.weight$", name):
            tensors[name] = tensor
            continue
        blocks = np.ones([-(-n // 16) for n in tensor.shape], np.float32) / 64
        codes = jnp.asarray(64 * tensor).astype(jnp.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = np.asarray(codes), blocks
        exact[name] = np.asarray(codes.astype(jnp.float32)) / 64
    shutil.copytree(FIXTURES / "qwen3_moe", folder)
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(data))
    return tensors, exact


@pytest.mark.slow
def test_experts_of_a_quantised_checkpoint_stay_quantised(tmp_path):
    tensors, exact = fp8_experts(tmp_path / "fp8")
    safetensors.numpy.save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    lm = fdjax.load(str(tmp_path / "fp8"), compilation_cache=False, progress=False)
    assert lm.params["blocks"][1]["mlp"]["experts"]["down"].kind == "fp8"
    exported = export_tensors(dequantised(lm.params), weight_map(lm.config))
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor, exact[name], name)


@pytest.mark.slow
def test_an_expert_that_is_not_quantised_makes_all_of_its_layer_plain(tmp_path):
    tensors, exact = fp8_experts(tmp_path / "fp8")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = exact[name]
    safetensors.numpy.save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.warns(UserWarning, match="7 of 23 quantised weights are dequantised"):
        lm = fdjax.load(str(tmp_path / "fp8"), compilation_cache=False, progress=False)
    experts = lm.params["blocks"][1]["mlp"]["experts"]
    assert is_quantised(experts["gate_up"]) and not is_quantised(experts["down"])
    exported = export_tensors(dequantised(lm.params), weight_map(lm.config))
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor, exact[name], name)


def test_damage_of_a_quantised_expert(tmp_path):
    tensors, _ = fp8_experts(tmp_path / "fp8")
    name = "model.layers.1.mlp.experts.5.down_proj.weight_scale_inv"
    scales = tensors.pop(name)
    for change, says in (({}, "is missing"), ({name: scales[:1].copy()}, "must have shape")):
        safetensors.numpy.save_file(tensors | change, tmp_path / "fp8" / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"^model\.safetensors: tensor '{name}' {says}"):
            fdjax.load(str(tmp_path / "fp8"), compilation_cache=False)


@pytest.mark.slow
def test_rows_are_bitwise_the_same_in_any_batch():
    """128 rows are a single tile, in which the gate of the shared expert was once rounded alone."""
    lm = fdjax.load(str(FIXTURES / "qwen2_moe"), compilation_cache=False, progress=False)
    plan = lm.model.plan
    if not plan.batch_invariant:
        pytest.skip("rows of a batch are bitwise those alone only on CPU")
    mlp = lm.model.module(lm.params).blocks[0].mlp
    output = jax.jit(lambda x: mlp.output(mlp.hidden(x, None, plan), plan=plan, residual=x))
    for few, many in (([1, 3], 20), ([128, 150], 300)):
        x = jax.random.normal(jax.random.key(0), (1, many, 32))
        want = np.asarray(output(x))
        for rows in few:
            np.testing.assert_array_equal(output(x[:, -rows:]), want[:, -rows:])


@pytest.mark.slow
def test_an_expert_that_nobody_chooses_may_be_nan():
    lm = fdjax.load(str(FIXTURES / "olmoe"), compilation_cache=False, progress=False)
    model, params = lm.model, jax.tree.map(lambda leaf: leaf, lm.params)
    for block in params["blocks"].values():
        # All logits are equal, so that the first four experts are chosen.
        block["mlp"]["router"]["weight"] = jnp.zeros((32, 8))
    ids = np.arange(12, dtype=np.int32)[None]
    want = fdjax.forward(model, params, ids)
    for block in params["blocks"].values():
        experts = block["mlp"]["experts"]
        block["mlp"]["experts"] = {name: a.at[4:].set(jnp.nan) for name, a in experts.items()}
    np.testing.assert_array_equal(fdjax.forward(model, params, ids), want)
    assert np.isfinite(np.asarray(want)).all()
