"""The headline command measures missing parts and resumes. Both arms of an ablation are honest."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import end_to_end, headline, peers
from fdjax.bench import ceiling
from fdjax.bench import record as records
from fdjax.bench.record import Measurement, Record
from fdjax.bench.timing import Timing
from fdjax.pallas_kernels.plan import Plan

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROOT = Path(__file__).resolve().parents[2]
CEILING = {"read_gb_per_s": 1e3, "matmul_tflop_per_s": None, "trusted": True, "reason": None}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
}


def record_of(part, names, *, date="2026-01-02", commit="c", scale=1.0, **config):
    batch, prompt = part.point
    rows = []
    for i, name in enumerate(names):
        for case, us in (("first token", 20e3), ("decode step", 4e3)):
            timing = dataclasses.asdict(Timing.from_samples([[scale * us * (1 + i / 10)]], "host"))
            rows.append(
                Measurement(f"{case} B{batch} P{prompt}", name, True, timing=timing, bytes=10**9)
            )
    environment = {"device_kind": "My GPU", "commit": commit, "date": date, "versions": {}}
    environment |= {"command": "end_to_end.py", "device_count": 1}
    config = {"family": "llama", "parameters": 10**9, "dtype": "bfloat16", "new_tokens": 3} | config
    return Record(environment, config, {"before": dict(CEILING)}, rows).finish(dict(CEILING))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The parts that were measured. Each one is measured at once and gets a record."""
    found = []

    def measure(part, args, output, seconds):
        found.append((str(part), seconds))
        records.write(record_of(part, (*args.plans, *args.peers)), output)

    monkeypatch.setattr(headline, "measure", measure)
    return found


def run(tmp_path, *options):
    return headline.main(["--output", str(tmp_path), "--commit", "c", "--no-draw", *options])


def test_all_parts_are_measured_once(measured, tmp_path, capsys):
    assert run(tmp_path) == 0
    names = [name for name, _ in measured]
    assert names[:4] == [
        *("llama2_7b_1x1024", "llama2_7b_8x1024", "llama3_8b_1x1024", "llama3_8b_8x1024"),
    ]
    assert len(set(names)) == len(names) == len(headline.PARTS)
    assert all(0 < seconds <= 600 for _, seconds in measured)
    assert run(tmp_path) == 0
    assert len(measured) == len(headline.PARTS)
    (tmp_path / "headline_llama2_7b_8x1024.json").unlink()
    capsys.readouterr()
    assert run(tmp_path, "--list") == 0
    assert "llama2_7b_8x1024: no record\n" in capsys.readouterr().out
    assert run(tmp_path) == 0
    assert [name for name, _ in measured[len(headline.PARTS) :]] == ["llama2_7b_8x1024"]


def test_no_part_begins_that_does_not_fit(measured, tmp_path, capsys):
    assert run(tmp_path, "--seconds", "100") == 3
    assert measured == []
    assert "time is up, call again for: llama2_7b_1x1024, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.environment.update(commit="other"), "record of commit other"),
        (lambda r: r.ceiling.update(after=None), "cut off"),
        (lambda r: r.ceiling["after"].update(trusted=False, reason="moved"), "moved"),
        (lambda r: r.rows.__delitem__(slice(-2, None)), "no row of gpt-fast"),
        (lambda r: [setattr(row, "timing", None) for row in r.rows[:2]], "no time of fdjax"),
    ],
)
def test_a_record_that_will_not_do_is_measured_anew(measured, tmp_path, change, why, capsys):
    part = headline.PARTS[0]
    record = record_of(part, ("fdjax", "cudnn", "hf static, compiled", "gpt-fast"))
    change(record)
    output = tmp_path / f"headline_{part}.json"
    records.write(record, output)
    assert run(tmp_path, "--points", "1x1024") == 0
    assert f"{part}: " in (out := capsys.readouterr().out) and why in out
    assert [name for name, _ in measured] == ["llama2_7b_1x1024", "llama3_8b_1x1024"]


def test_a_part_that_leaves_no_record_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(headline, "measure", lambda *a: None)
    assert run(tmp_path, "--points", "8x1024") == 1
    assert "failed: llama2_7b_8x1024 (no record)" in capsys.readouterr().out


def test_a_part_is_a_call_of_end_to_end(tmp_path):
    for part in headline.PARTS:
        args = headline.parse_args(["--commit", "c"])
        module, *argv = headline.command(part, args, tmp_path / "r.json")
        parsed = end_to_end.parse_args(argv)
        assert module == "benchmarks.end_to_end"
        assert (parsed.config, parsed.points) == (part.config, [part.point])
        assert parsed.config.exists()
        assert tuple(parsed.plans) == headline.PLAN_NAMES
        assert tuple(parsed.peers) == headline.PEER_NAMES


def test_a_part_ends_when_the_time_is_up(monkeypatch, tmp_path, capsys):
    def run(command, *, cwd, timeout):
        assert cwd == ROOT
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(headline.subprocess, "run", run)
    headline.measure(headline.PARTS[0], headline.parse_args([]), tmp_path / "r.json", 5)
    assert "llama2_7b_1x1024: ended after 5 s" in capsys.readouterr().err


@pytest.mark.slow
def test_it_measures(tmp_path, monkeypatch, capsys):
    """A small model on a CPU. Of the processes, the one that measures is a call here."""
    config = tmp_path / "small.json"
    config.write_text(json.dumps(CONFIG))
    options = "--points 1x8 --plans fdjax xla --peers --new-tokens 3 --runs 2 --dtype float32"
    where = ["--output", str(tmp_path), "--no-draw", "--commit", "c"]
    words = ["--config", str(config), *options.split(), *where]

    def run(command, *, cwd, timeout):
        python, m, module, *argv = command
        assert (python, m, cwd) == (sys.executable, "-m", ROOT) and timeout > 0
        monkeypatch.setattr(sys, "argv", [module, *argv])
        return SimpleNamespace(returncode=importlib.import_module(module).main(argv))

    with monkeypatch.context() as patch:
        patch.setattr(headline.subprocess, "run", run)
        patch.setattr(
            ceiling,
            "measure_ceiling",
            lambda *a, **k: CEILING | {"read_kernel": "", "clock": "host"},
        )
        assert headline.main(words) == 0
    assert "small_1x8: no record" in capsys.readouterr().out
    # A process of its own finds the record.
    command = [sys.executable, "-m", "benchmarks.headline", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert "small_1x8: measured" in done.stdout.decode()
    record = records.read(tmp_path / "headline_small_1x8.json")
    assert {row.implementation for row in record.rows} == {"fdjax", "xla"}
    assert all(row.ok and row.timing["spread_us"] >= 0 for row in record.rows)
    environment = record.environment
    assert environment["commit"] == "c" and environment["versions"]["jax"]
    assert "--points 1x8" in environment["command"]


# Peers


def test_peers_need_their_libraries(monkeypatch):
    def find_spec(name):
        return None if name == "transformers" else "found"

    class Torch:
        class cuda:
            is_available = staticmethod(lambda: True)

    monkeypatch.setattr(peers.importlib.util, "find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert peers.missing(["gpt-fast"]) is None
    assert peers.missing(["gpt-fast", "hf eager"]) == "transformers is not installed"


# Ablation of the unified maximum


def test_both_arms_of_the_unified_maximum_run_the_kernel_that_has_one(monkeypatch, tmp_path):
    """No launch for all layers, because it has a running maximum. Only the maximum differs."""
    from fdjax.bench import ceiling, model

    arms = {}

    def model_rows(lm, *, implementation, **options):
        arms[implementation] = lm.model
        return [], {}

    monkeypatch.setattr(model, "model_rows", model_rows)
    monkeypatch.setattr(
        ceiling, "measure_ceiling", lambda *a, **k: CEILING | {"read_kernel": "", "clock": "host"}
    )
    config = tmp_path / "small.json"
    config.write_text(json.dumps(CONFIG))
    plans = ["without launch", "without unified maximum"]
    end_to_end.main([str(config), "--points", "1x8", "--plans", *plans, "--dtype", "float32"])
    unified, running = (arms[name] for name in plans)
    assert {spec.unified for spec in unified.config.attention} == {True}
    assert {spec.unified for spec in running.config.attention} == {False}
    assert unified.plan == running.plan
    hopper = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    hopper = dataclasses.replace(hopper, named=running.plan.named)
    shape = dict(m=1, k=4096, width=4096, hidden=11008, n=12288, itemsize=2)
    layers = hopper.choose("decode_layers", **shape, hkv=32, d=128, s=1024)
    assert layers.implementation == "xla"


def test_recomputed_cases_have_the_unified_maximum(monkeypatch):
    """Their peers use the running maximum at every shape."""
    from benchmarks import decode_attention

    ran = []
    monkeypatch.setattr(
        decode_attention, "decode_mosaic", lambda *a, config, **k: ran.append(config) or [None]
    )
    cases = [case for case in decode_attention.CASES if case.name.startswith("recompute")]
    assert any(" B1 " in case.name for case in cases)
    for case in cases:
        b, h, kv_heads, s, d = map(int, re.findall(r"[A-z](\d+)", case.name))
        q = jax.ShapeDtypeStruct((b, 1, h, d), "bfloat16")
        k = jax.ShapeDtypeStruct((b, kv_heads, s, d), "bfloat16")
        for name in ("mosaic_gpu", "synchronised"):
            case.implementations[name](q, k, k, None)
    assert [config.unified for config in ran] == [True, False] * len(cases)
