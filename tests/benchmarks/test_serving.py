"""The benchmark of many requests."""

import json

import pytest

from benchmarks import serving
from benchmarks.dispatch import CONFIG


def test_requests_are_the_same_every_time_and_within_their_limits():
    prompts, new = serving.requests(500, 100)
    assert (prompts, new) == serving.requests(500, 100)
    lengths = sorted(map(len, prompts))
    assert 330 < lengths[250] < 440 and lengths[-1] <= 2048 and lengths[0] > 0
    assert 140 < sorted(new)[250] < 180 and max(new) <= 768
    assert max(map(max, prompts)) < 100


@pytest.mark.slow
def test_a_small_run(tmp_path):
    config, output = tmp_path / "config.json", tmp_path / "record.json"
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    arguments = [str(config), "--requests", "6", "--scale", "0.03", "--max-batch", "2"]
    assert serving.main([*arguments, "--runs", "1", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["state"]["rows"] == 2
    assert record["timed_calls"][0]["compile_seconds"] == 0
    assert record["requests"]["count"] == 6
