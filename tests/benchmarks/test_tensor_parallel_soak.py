"""What the soak of several GPUs calls a failure; `pytest -m soak` runs the whole on a CPU."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import tensor_parallel_soak as soak
from benchmarks.tensor_parallel import CONFIG

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 99}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def on_devices(*values):
    return SimpleNamespace(addressable_shards=[SimpleNamespace(data=np.array(v)) for v in values])


def answers(*logprobs):
    """A model that gives these log-probabilities, one call after another."""
    calls = iter(logprobs)
    state = SimpleNamespace(ids=on_devices([1], [1]), progress=on_devices([2], [2]))
    return SimpleNamespace(
        config=SimpleNamespace(vocab_size=9),
        generate=lambda *_, **__: SimpleNamespace(tokens=[[1, 2]], logprobs=[next(calls)]),
        engine=SimpleNamespace(
            reusable=SimpleNamespace(state=state), stacks=lambda rows, slots: True
        ),
    )


def test_another_result_is_a_failure():
    found = soak.repeat(answers([-1.0, -2.0], [-1.0, -2.0]), 1, 3, steps=4, new_tokens=2)
    assert (found["calls"], found["steps"], found["one_launch"]) == (2, 4, True)
    with pytest.raises(AssertionError, match="1x3: call 1 differs from step 1 on"):
        soak.repeat(answers([-1.0, -2.0], [-1.0, -2.5]), 1, 3, steps=4, new_tokens=2)


@pytest.mark.parametrize(
    ("ids", "problem"), [([[1], [1]], None), ([[1], [2]], "disagree"), ([[1]], "one GPU only")]
)
def test_devices_must_agree(ids, problem):
    lm = answers()
    lm.engine.reusable.state.ids = on_devices(*ids)
    if problem is None:
        soak.check_ranks(lm)
        return
    with pytest.raises(AssertionError, match=problem):
        soak.check_ranks(lm)


@pytest.mark.soak
def test_a_small_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SMALL))
    command = [sys.executable, "-m", "benchmarks.tensor_parallel_soak"]
    command += [str(tmp_path / "config.json"), "--dtype", "float32", "--points", "1x20", "3x16"]
    command += ["--steps", "60", "--new-tokens", "15", "--requests", "20", "--max-batch", "8"]
    output = tmp_path / "soak.json"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([*command, "--output", str(output)], check=True, env=environment)
    record = json.loads(output.read_text())
    assert [point["steps"] for point in record["points"]] == [30, 30]
    assert record["scheduler"]["requests"] == 20
