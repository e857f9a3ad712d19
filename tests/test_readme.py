"""README.md is short, has its two commands, and its numbers come from the records."""

import re
import tomllib

import fdjax
from benchmarks import table
from documents import README, ROOT, prose, text_of
from fdjax.pallas_kernels.plan import Plan

# A measured number has a unit, or is a range of multiples.
MEASURED = re.compile(
    r"\d[\d.,]*\s?(%|×|[mµun]?s\b|[GMTk]?B(/s)?\b|times\b|tokens/s|percent|TFLOP)"
    r"|(?<![\d.])\d+\.\d+ to \d"
)
CAPABILITIES = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0)}
# Number of entries in a device's table when one launch was added to it.
ENTRIES = {"NVIDIA H100 80GB HBM3": 279, "NVIDIA H200": 196}
# Dimensions of the models in the table, by billions of parameters.
SHAPES = {
    "6.74": dict(k=4096, width=4096, hidden=11008, n=12288, hkv=32, d=128, itemsize=2),
    "8.03": dict(k=4096, width=4096, hidden=14336, n=6144, hkv=8, d=128, itemsize=2),
}


def test_it_is_short():
    assert len(text_of(README).splitlines()) <= 150


def test_the_two_commands_are_lines_of_their_own():
    lines = text_of(README).splitlines()
    assert lines.count('pip install -e . && fdjax generate "What is the largest ocean?"') == 1
    assert lines.count("pip install -e '.[test]' && pytest") == 1
    assert lines.count("pip install -e '.[cuda13]'") == 1


def test_numbers_are_only_where_they_are_made_from_records():
    assert [found[0] for found in MEASURED.finditer(prose(README))] == []


def test_the_search_for_numbers_finds():
    for text in ("4.73 ms", "91%", "1.14 times", "1.01 to 1.38", "3 TB/s", "25 s with", "12×"):
        assert MEASURED.search(text), text
    for text in (
        "Llama 2 and 3.x",
        "Phi 3 and 4",
        "Qwen 1.5, 2, 2.5",
        "JAX 0.11.2 to 0.12",
        "CUDA 13",
    ):
        assert not MEASURED.search(text), text


def test_its_measurements_are_of_the_default_path():
    """One launch ran then, still runs today, and no implementation is forced."""
    shown = {key: value for key, value in table.headline().items() if key[2] in table.README_POINTS}
    assert len(shown) >= 5
    for (device, model, (batch, prompt)), (source, measured) in shown.items():
        planned = source.record.config["plan"]
        assert planned["named"] == []
        assert planned["table"] >= ENTRIES[device]
        assert measured.step["fdjax"].ok and measured.first["fdjax"].ok
        plan = Plan.for_kind(device, CAPABILITIES[device])
        shape = SHAPES[re.search(r"[\d.]+(?= B)", model)[0]]
        chosen = plan.choose("decode_layers", m=batch, s=prompt, **shape)
        assert chosen.implementation == "mosaic_gpu", (device, model, batch)


def test_records_of_the_headline_command_replace_earlier_ones(monkeypatch, tmp_path):
    from fdjax.bench import record as records

    source = next(s for s in table.of_models() if s.path.stem.endswith("7b_one_launch"))
    newer = records.read(source.path)
    newer.environment["date"] = "2026-01-01"  # an older date, but the commit of others
    newer.environment["commit"] = "of the headline"
    folder = tmp_path / "device"
    records.write(newer, folder / f"{table.HEADLINE}_llama2_7b_1x1024.json")
    records.write(records.read(source.path), folder / source.path.name)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    commits = {s.record.environment["commit"] for s, _ in table.headline().values()}
    assert commits == {"of the headline"}


def test_the_unified_maximum_is_compared_where_there_is_one():
    """With few steps, the kernel has a running maximum in both columns of the record."""
    found = table.unified_maximum()
    assert 0 < len(found["decode"]) < 11 and len(found["prefill"]) == 8
    assert f"{max(found['prefill']):.2f}" in text_of(README)


def test_the_changelog_knows_this_version():
    assert fdjax.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fdjax.__version__
