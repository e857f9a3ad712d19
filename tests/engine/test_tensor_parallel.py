"""Models that several fake CPU devices share give the answers of one device."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fdjax.engine.engine import compiler_options
from fdjax.engine.step import decode_steps, prefill
from fdjax.models import describe, parse_config

TESTS = Path(__file__).parents[1]
# Each runs in a process of its own, see there.
SCRIPT = TESTS / "sharing_devices.py"
LOGPROBS_BAR = 1e-5


@functools.cache
def report(function, *arguments, **options):
    command = [sys.executable, str(SCRIPT), function, json.dumps([*arguments, options])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_same(several, one, rtol=0):
    assert several["tokens"] == one["tokens"]
    for found, expected in zip(several["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=LOGPROBS_BAR)


def cases(mark, *checked):
    for path, *ranks in checked:
        yield pytest.param(path, ranks, id=f"{path.partition('/')[2]}-{ranks}", marks=mark)


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        # The embedding is the head too, and four devices share two KV heads.
        pytest.param("hf/llama3_gqa_tied", [4], id="llama3_gqa_tied"),
        *cases(
            pytest.mark.slow,
            ("hf/phi3_longrope", 2, 4),
            ("quantised/gptq", 2),
        ),
        *cases(
            pytest.mark.soak,
            ("hf/llama3_gqa_tied", 2, 8),
            ("hf/llama_bias", 2, 4),
            ("hf/llama2_mha", 2, 4),
            ("hf/mistral_window", 2, 4),
            ("hf/qwen2_mixed", 2, 4),
            ("hf/qwen3", 4),
            ("hf/gemma2", 2, 4),
            ("hf/gemma3", 4),
            *(
                (f"hf/{name}", 2, 4)
                for name in """
                chatglm cohere cohere2 glm4 gpt2 gpt_neox gptj granite opt opt_350m phi smollm3
                starcoder2
                """.split()
            ),
            ("quantised/gptq", 4),
            ("quantised/awq_64", 2),
            ("quantised/ct_fp8_channel", 2),
            ("quantised/ct_int8_group", 4),
            ("quantised/ct_mixed", 2),
            ("quantised/bnb_nf4", 2),
        ),
    ],
)
def test_several_devices_give_the_tokens_of_one(path, ranks):
    found = report("same_tokens", path, *ranks)
    for count in ranks:
        assert_same(found[str(count)], found["1"])
    # Tokens and log-probabilities of all calls, on every device the same bits.
    assert found["compared"] > 4 * len(ranks)
    assert found["differing"] == 0


@pytest.mark.slow
def test_an_int8_cache_is_divided_by_heads():
    found = report("same_tokens", "hf/llama3_gqa_tied", 2, kv_dtype="int8")
    assert found["2"]["tokens"] == found["1"]["tokens"]
    for ours, expected in zip(found["2"]["logprobs"], found["1"]["logprobs"], strict=True):
        # A key may round to another code.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=0.02)
    assert found["compared"] > 4 and found["differing"] == 0


@pytest.mark.slow
def test_everything_that_one_device_does():
    """Many prompts with options of their own, a common beginning, scores, submitted prompts."""
    found = report("serving", "hf/llama3_gqa_tied", 4)
    one, several = found["1"], found["4"]
    # Penalties and temperatures multiply logits, and with them their rounding.
    assert_same(several["mixed"], one["mixed"], rtol=1e-5)
    for name in ("iter", "submit", "cached"):
        assert several[name] == one[name], name
    assert one["cached"] > 0
    for ours, expected in zip(several["score"], one["score"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=LOGPROBS_BAR)
    np.testing.assert_allclose(several["reruns"], one["reruns"])


@pytest.mark.slow
def test_weights_of_ones_own():
    """With a vocabulary that 8 does not divide, and half as many KV heads."""
    found = report("own_weights", 8)
    assert_same(found["8"], found["1"])
    assert found["again"] == found["8"]
    of_a_device, planned, whole = found["bytes"]
    assert of_a_device == planned
    assert planned < whole / 4  # the embedding is whole everywhere


@pytest.mark.slow
def test_random_weights_are_those_of_one_device():
    found = report("own_weights", 4, vocab_size=96)
    assert found["random"]["tokens"] == found["1"]["tokens"]


@pytest.mark.slow
def test_programs_on_disk_are_found_again():
    found = report("disk_cache", "hf/llama_bias", 2)
    assert found["second"] == found["first"]
    assert found["second programs"] == found["first programs"] > 0


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
        ("forward", "NotImplementedError: tensor_parallel: only `LM` runs a model that devices"),
        ("calibrate", "NotImplementedError: calibrate: load the model without tensor_parallel"),
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
    assert compiler_options(prefill, model) == compiler_options(prefill)
