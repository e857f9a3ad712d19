"""What `benchmarks.tensor_parallel` compares."""

import sys
import time

import pytest

from benchmarks.tensor_parallel import CONFIG, SUMS, parse_args, run_peer, with_sums
from fdjax.models import describe, parse_config
from fdjax.pallas_kernels.plan import Plan

H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))


@pytest.mark.parametrize("sums", SUMS)
def test_each_way_to_sum_is_the_one_named(sums):
    """For this model, the shipped table chooses one launch."""
    config = parse_config(CONFIG)
    assert describe(config, dtype="bfloat16", plan=H100, tensor_parallel=2).one_launch(1, 2048)
    plan = with_sums(H100, config, 2, sums)
    model = describe(config, dtype="bfloat16", plan=plan, tensor_parallel=2)
    assert model.one_launch(1, 2048) == (sums == "one launch")


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ('echo starting; echo \'{"devices": 2, "points": {}}\'', {"devices": 2, "points": {}}),
        ("echo '{}'; exit 3", {"devices": 2, "problem": "exit code 3"}),
        # A process that keeps the output open.
        ("setsid sleep 20 & sleep 60", {"devices": 2, "problem": "took more than 0.5 s"}),
    ],
)
def test_a_peer_that_fails_or_takes_too_long(script, result, tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    args = parse_args(["--devices", "2", "--peer-seconds", "0.5"])
    began = time.monotonic()
    assert run_peer("gpt-fast", tmp_path / "config.json", args) == [result]
    assert time.monotonic() - began < 10
