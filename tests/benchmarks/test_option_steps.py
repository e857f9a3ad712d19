"""`benchmarks.option_steps` on the embedded model."""

import json
from pathlib import Path

import pytest

from benchmarks import option_steps

TINY = Path(__file__).parents[2] / "models" / "tiny" / "config.json"


@pytest.mark.slow
def test_every_set_of_options_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(option_steps, "OPTIONS", dict(list(option_steps.OPTIONS.items())[:3]))
    output = tmp_path / "record.json"
    arguments = [str(TINY), "--points", "2x5", "--new-tokens", "5", "--runs", "1"]
    assert option_steps.main([*arguments, "--layers", "1", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    cases = [f"decode step B2 P5, {name}" for name in ("greedy", "temperature", "top-p")]
    assert [(row["case"], row["implementation"]) for row in rows] == [(c, "fdjax") for c in cases]
    assert all(row["timing"]["median_us"] > 0 for row in rows)
