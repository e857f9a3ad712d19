"""Decode steps without prompts."""

import json
import re

import numpy as np
import pytest

from benchmarks import steps
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import read
from fdjax.models import describe, parse_config
from fdjax.weights.stacked import random_stacked_params

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.slow
def test_a_small_run(config, tmp_path, monkeypatch):
    quick = lambda size, **options: measure_ceiling(2**16, runs=1, **options)  # noqa: E731
    monkeypatch.setattr(steps, "measure_ceiling", quick)
    output = tmp_path / "record.json"
    options = ["--points", "1x20", "3x300", "--plans", "fdjax", "int8 cache", "--dtype", "float32"]
    options += ["--layers", "1", "--steps", "5", "--runs", "2", "--output", str(output)]
    assert steps.main([config, *options]) == 0
    record = read(output)
    assert record.config["model"] == CONFIG and record.config["layers"] == 1
    assert [(row.case, row.implementation) for row in record.rows] == [
        (f"decode step {point}", plan)
        for plan in ("fdjax", "int8 cache")
        for point in ("B1 P20", "B3 P300")
    ]
    # A busy machine leads to notes of its own.
    assert not any("ran again" in note for row in record.rows for note in row.notes)
    plain, int8 = np.split(np.array([row.bytes for row in record.rows]), 2)
    # Keys and values of a token: 2 heads of 16 values in fp32, then of 16 codes and a scale.
    tokens = np.array([20 - 2.5, 3 * (300 - 2.5)])
    assert (plain - int8 == tokens * 2 * 2 * (16 * 4 - (16 + 4))).all()


@pytest.mark.slow
def test_a_call_reads_its_context(monkeypatch):
    """Every row ends at its context, and has its own pages if there are pages."""
    seen = []

    def program(engine, function, **static):
        assert static["max_steps"] == 7

        def run(params, leaves, host):
            seen.append((leaves, host.unpack()))
            return leaves, None

        return run

    monkeypatch.setattr(steps.Engine, "program", program)
    model = describe(parse_config(CONFIG), dtype="float32")
    engine = steps.Engine(model, random_stacked_params(model)[0])
    call = steps.caller(engine, 2, 300, 7)
    assert call(7)[0] >= 0 and call(1)[0] >= 0
    for (leaves, (_, n, pages, _)), count in zip(seen, (7, 1), strict=True):
        progress = np.asarray(leaves[-1])
        assert n == count and (progress[0] + count == 300).all() and not progress[3].any()
        assert pages.shape == (2, 512 // 128)
        assert sorted(np.ravel(pages[:, :3])) == [1, 2, 3, 4, 5, 6] and not pages[:, 3:].any()


@pytest.mark.parametrize(
    ("shares", "notes"),
    [([0.0, 0.0005], []), ([0.5, 1.0], ["75% of the blocks of attention ran again"])],
)
def test_attention_that_ran_twice_is_noted_once_for_a_plan(config, monkeypatch, shares, notes):
    def caller(engine, rows, context, count, **static):
        assert static == ({"return_reruns": True} if count == 1 else {})
        return lambda n: (n, (None, None, np.array(shares)))

    written = []
    monkeypatch.setattr(steps, "caller", caller)
    monkeypatch.setattr(steps, "measure_ceiling", lambda *args, **options: {})
    monkeypatch.setattr(steps, "emit", lambda record, output: written.append(record))
    options = ["--points", "2x100", "2x300", "--plans", "fdjax", "xla", "--dtype", "float32"]
    assert steps.main([config, *options]) == 0
    (record,) = written
    assert [row.notes for row in record.rows] == [notes, [], notes, []]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--points", "1x33"], "a context must be longer than the 33 steps"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--one-launch", "rings=2"], "must be one of .*clusters.* got 'rings=2'"),
        (["--one-launch", "ahead=x"], "got 'ahead=x'"),
    ],
)
def test_wrong_arguments_are_refused(config, capsys, options, error):
    with pytest.raises(SystemExit, match="2"):
        steps.parse_args([config, *options])
    assert re.search(error, capsys.readouterr().err.replace("\n", " "))
