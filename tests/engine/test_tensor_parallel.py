"""Models that several fake CPU devices share give the answers of one device."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fdjax.cli.main import main
from fdjax.engine.engine import compiler_options
from fdjax.engine.step import decode_steps, prompt_logits
from fdjax.models import describe, parse_config

from ..models.test_gpt_oss import in_mxfp4, written

pytestmark = pytest.mark.usefixtures("quick_compiles")

TESTS = Path(__file__).parents[1]
FIXTURES = TESTS / "fixtures"
# Each runs in a process of its own, see there.
SCRIPT = TESTS / "sharing_devices.py"
LOGPROBS_BAR = 1e-5
MXFP4 = "experts in MXFP4, which stay so"


def report(function, *arguments, **options):
    return _report(function, json.dumps([*arguments, options]))


@functools.cache
def _report(function, arguments):
    command = [sys.executable, str(SCRIPT), function, arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_same(several, one, rtol=0):
    assert several["tokens"] == one["tokens"]
    for found, expected in zip(several["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=LOGPROBS_BAR)


@pytest.mark.slow
def test_steps_in_one_launch():
    """Weights are stacked on each device, and the sums of each layer are over all devices."""
    found = report("in_one_launch", "hf/llama3_gqa_tied", 2)
    assert found["stacks"]
    assert found["launches"] and {ranks for _, ranks in found["launches"]} == {2}
    assert_same(found["several"], found["one"])
    assert found["compared"] and not found["differing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "config"),
    [
        ([2], {"model_type": "mistral", "sliding_window": 100}),
        pytest.param(
            *([4], {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_prompts_in_tiles_have_the_same_bits(counts, config):
    found = report("in_tiles", 2, *counts, **config)
    assert found["1"].pop("ran") == []
    for count in map(str, counts):
        assert set(found[count].pop("ran")) == {int(count)}
        assert found[count] == found["1"]


@pytest.mark.slow
def test_layers_are_tuned_on_all_devices():
    found = report("tuned", 2)
    (entry,), (line,) = found["entries"], found["reports"]
    assert {"m": 2, "s": 128, "hkv": 2, "ranks": 2}.items() <= entry["shape"].items()
    assert all(us > 0 for us in entry["microseconds"].values())
    assert line.startswith("decode_layers M=2 S=128: ")


def fixtures(folder):
    """The checkpoints in a folder of fixtures; there are some."""
    paths = sorted(
        f"{folder}/{path.parent.name}" for path in FIXTURES.glob(f"{folder}/*/config.json")
    )
    assert paths
    return paths


@pytest.mark.parametrize(
    ("paths", "ranks"),
    [
        # The embedding is the head too, and four devices share two KV heads.
        pytest.param(["hf/llama3_gqa_tied"], [4], marks=pytest.mark.soak, id="tied"),
        pytest.param(*(["hf/phi3_longrope", MXFP4], [2]), marks=pytest.mark.slow, id="few"),
        *(
            pytest.param([path], [2, 4, 8], marks=pytest.mark.soak, id=path)
            for path in [*fixtures("hf"), *fixtures("quantised")]
        ),
    ],
)
def test_several_devices_give_the_tokens_of_one(paths, ranks, tmp_path):
    if MXFP4 in paths:
        written(tmp_path, in_mxfp4()[0])
        paths = [str(tmp_path) if path is MXFP4 else path for path in paths]
    found = report("same_tokens", paths, *ranks)
    divided = []
    for path in paths:
        for count in map(str, ranks):
            several = found[path][count]
            if "error" in several:
                assert re.search(f"must divide|would divide.*{count}", several["error"]), path
            else:
                assert_same(several, found[path]["1"])
                divided.append((path, count))
    assert {path for path, _ in divided} == set(paths)
    # Tokens and log-probabilities of all calls, on every device the same bits.
    assert found["compared"] > 4 * len(divided)
    assert found["differing"] == 0
    # NCCL would add events to the graph of the decode loop.
    assert found["mixing"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "paths",
    [
        ["hf/bloom", "hf/qwen2_moe"],
        pytest.param(["hf/olmo3", "hf/olmoe", "hf/granitemoe"], marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_logits_of_several_devices(paths):
    """ALiBi, norms over all heads, experts, an MLP beside them; `forward` inside of a trace.

    Also `forward` outside of a trace, and `generate`, which draws tokens.
    """
    found = report("pure", paths, 4, generates=paths[:1])
    for path in paths:
        one, several = found[path]["1"]["logits"], found[path]["4"]["logits"]
        np.testing.assert_allclose(several, one, rtol=1e-5, atol=LOGPROBS_BAR)
    one, several = found[paths[0]]["1"], found[paths[0]]["4"]
    for own in (one, several):
        np.testing.assert_allclose(own["untraced"], one["logits"], rtol=1e-5, atol=LOGPROBS_BAR)
    assert several["tokens"] == one["tokens"]


@pytest.mark.soak
def test_experts_stay_quantised(tmp_path):
    """A group of 8 inputs is a word, and a device has one or two of each expert."""
    int4, one, mxfp4 = (str(tmp_path / name) for name in ("int4", "one", "mxfp4"))
    for case, output in (("olmoe", int4), ("granitemoe", one)):
        given = str(TESTS / "fixtures" / "hf" / case)
        command = ["quantize", given, "--weights-only", "--group", "8", "--output", output]
        assert main(command) == 0
    written(mxfp4, in_mxfp4()[0])
    found = report("same_tokens", [int4, one, mxfp4], 2, 4)
    for path in (int4, one):
        assert_same(found[path]["2"], found[path]["1"])
    for count in ("2", "4"):
        assert_same(found[mxfp4][count], found[mxfp4]["1"])
    assert found["compared"] > 4 and found["differing"] == 0
    assert "would divide the words" in found[int4]["4"]["error"]


@pytest.mark.slow
def test_an_int8_cache_is_divided_by_heads():
    path = "hf/llama3_gqa_tied"
    found = report("same_tokens", [path], 2, kv_dtype="int8")
    one, two = found[path]["1"], found[path]["2"]
    assert two["tokens"] == one["tokens"]
    for ours, expected in zip(two["logprobs"], one["logprobs"], strict=True):
        # A key may round to another code.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=0.02)
    assert found["compared"] > 4 and found["differing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"kv_heads": 1}),
        pytest.param(4, {"beams": 3}, marks=pytest.mark.soak),
        pytest.param(8, {"beams": 3}, marks=pytest.mark.soak),
        pytest.param(4, {"kv_heads": 1}, marks=pytest.mark.soak),
        pytest.param(4, {"kv_dtype": "int8", "beams": 2}, marks=pytest.mark.soak),
    ],
)
def test_devices_with_the_same_kv_head_divide_its_tokens(ranks, options):
    found = report("divided_tokens", ranks, **options)
    one, several = found["1"], found[str(ranks)]
    kv_heads = options.get("kv_heads", 2)
    count = ranks // kv_heads
    assert (one["ranks"], several["ranks"]) == (1, count)
    # An int8 key may round to another code.
    for name in ("all", "alone", "few"):
        assert_same(several[name], one[name], rtol=1e-3 if "kv_dtype" in options else 0)
    # What else runs changes no bit.
    assert several["alone"]["logprobs"][0] == several["all"]["logprobs"][-1]
    assert several["cached"] == one["cached"] == 2 * count * 128
    assert several["samples"] == one["samples"]
    if "beams" in options:
        assert several["beams"][0] == one["beams"][0]
        np.testing.assert_allclose(several["beams"][1], one["beams"][1], atol=LOGPROBS_BAR)
    # With one KV head on a device, it takes 1/count of the bytes of that head.
    of_head = one["bytes"] / one["capacity"] / kv_heads
    assert several["bytes"] / several["capacity"] == of_head / count
    # A row has given up its pages, and went on.
    assert several["few pages"] == 8 and several["preempted"]
    assert several["compared"] > 10 and not several["differing"]


@pytest.mark.slow
def test_calibration():
    found = report("calibrated", "hf/bloom", 4)
    one, several = found["1"], found["4"]
    assert several["scores"] == one["scores"]  # how many, of every head
    for name in ("phi", "lowest", "highest"):
        # A value at the edge of two bins may move φ by half a bin.
        np.testing.assert_allclose(several[name], one[name], atol=0.1 if name == "phi" else 1e-4)


@pytest.mark.parametrize(
    "path",
    [
        *(
            pytest.param(f"hf/{name}", marks=pytest.mark.soak)
            for name in ("llama3_gqa_tied", "bloom", "olmo2", "qwen2_moe", "gemma3")
        ),
        *(
            pytest.param(f"quantised/{name}", marks=pytest.mark.soak)
            for name in ("ct_int4_group", "fp8_block")
        ),
    ],
)
def test_everything_that_one_device_does(path):
    """Many prompts with options of their own, a common beginning, scores, submitted prompts."""
    found = report("serving", path, 4, vocab_size=32 if "quantised" in path else 90)
    one, several = found["1"], found["4"]
    # Penalties and temperatures multiply logits, and with them their rounding.
    assert_same(several["mixed"], one["mixed"], rtol=1e-5)
    for name in ("iter", "submit", "samples"):
        assert several[name] == one[name], name
    # Devices that divide tokens share whole pages of all of them.
    assert several["cached"] == one["cached"] > 0 or several["page"] > one["page"]
    for ours, expected in zip(several["score"], one["score"], strict=True):
        # Tokens as unlikely as exp(-20) are among these, whose rounding is coarser.
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=LOGPROBS_BAR)
    np.testing.assert_allclose(several["reruns"], one["reruns"])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(f"hf/{name}", marks=pytest.mark.soak)
        for name in ("llama3_gqa_tied", "bloom", "olmoe")
    ],
)
def test_beams(path):
    found = report("beams", path, 4)
    for (tokens, scores), (expected, own) in zip(found["4"], found["1"], strict=True):
        assert tokens == expected
        np.testing.assert_allclose(scores, own, rtol=0, atol=LOGPROBS_BAR)


@pytest.mark.slow
def test_weights_of_ones_own():
    """With a vocabulary that 8 does not divide, and half as many KV heads."""
    found = report("own_weights", 8)
    assert_same(found["8"], found["1"])
    assert found["again"] == found["8"]
    of_a_device, planned, whole = found["bytes"]
    assert of_a_device == planned
    assert planned < whole / 4  # the embedding is whole everywhere


@pytest.mark.soak
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "olmo2"},
        {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "bloom", "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5},
    ],
    ids=lambda config: config["model_type"],
)
def test_eight_devices(config):
    found = report("own_weights", 8, **config)
    assert_same(found["8"], found["1"])
    assert found["again"] == found["8"]


@pytest.mark.soak
def test_random_weights_are_those_of_one_device():
    found = report("own_weights", 4, vocab_size=96)
    assert found["random"]["tokens"] == found["1"]["tokens"]


@pytest.mark.slow
def test_programs_on_disk_are_found_again():
    found = report("disk_cache", "hf/llama_bias", 2)
    assert found["second"] == found["first"]
    assert found["second programs"] == found["first programs"] > 0


@pytest.mark.slow
def test_a_device_that_stalls_is_named():
    found = report("stalled", "hf/llama_bias", 4, 2)
    (stalled,) = found["reports"]
    assert re.fullmatch(
        r"no tokens of decode steps for 1 s: "
        r"device 2 of 4 has not reached collective operation \d+ \(queries\)",
        stalled,
    )
    assert found["same"]  # it went on after the stall
    assert found["calls"] == 4 * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("0", "ValueError: load: tensor_parallel must be positive, got 0"),
        ("-1", "ValueError: load: tensor_parallel must be positive, got -1"),
        ("2.5", "ValueError: load: tensor_parallel must be an integer, got 2.5"),
        ("True", "ValueError: load: tensor_parallel must be an integer, got True"),
        ("'2'", "ValueError: load: tensor_parallel must be an integer, got '2'"),
        ("3", "ValueError: tensor_parallel: must divide the query heads 4, got 3"),
        ("16", "ValueError: load: tensor_parallel needs 16 devices, found 8"),
        ("device", "ValueError: load: device must be None with tensor_parallel"),
        ("kv heads", "ValueError: tensor_parallel: must divide the KV heads 6 or be a multiple"),
        ("heads", "ValueError: tensor_parallel: must divide the query heads 4, got 8"),
        ("F", "ValueError: tensor_parallel: must divide the MLP width 90, got 4"),
        ("expert", "ValueError: tensor_parallel: must divide the width of an expert 90, got 4"),
        ("forward", "ValueError: forward: params must be on the 2 devices that share the model"),
        ("shape", "ValueError: params: blocks.0.attention.out.bias must be [64], got [2]"),
        ("nothing", "ValueError: params: blocks.0.attention.out.bias must be float32["),
        ("module", "NotImplementedError: tensor_parallel: each device runs `Model.local`"),
        ("params", "ValueError: params: embed must be float32[256, 64], got float32[3, 3]"),
    ],
)
def test_what_cannot_be_divided_is_refused(what, error):
    assert report("refusals")[what].startswith(error)


def test_collective_operations_are_captured_with_the_decode_loop():
    name = "xla_gpu_enable_command_buffer"
    data = json.loads((TESTS / "fixtures/hf/llama_bias/config.json").read_text())
    model = describe(parse_config(data), tensor_parallel=2)
    one, two = (compiler_options(decode_steps, m)[name].split(",") for m in (None, model))
    assert two[: len(one)] == one
    assert two[len(one)] == "COLLECTIVES"
    assert compiler_options(prompt_logits, model) == compiler_options(prompt_logits)
