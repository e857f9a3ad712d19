"""The benchmarks of beams that share prompts: sizes, attention, searches and their figures."""

import dataclasses
import json

import jax
import pytest

from benchmarks import beams, segment_attention, segment_cache
from fdjax.bench import record as records
from fdjax.bench.check import verify
from fdjax.bench.record import Measurement, Record
from fdjax.bench.timing import Timing


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    return plots


def measured(case, name, us, *, bytes=0, kernels=None):
    timing = dataclasses.asdict(Timing.from_samples([[us]], "host"))
    timing["kernels"] = kernels or {}
    return Measurement(case, name, True, timing=timing, bytes=bytes)


def write(path, rows, **config):
    ceiling = {"before": {"read_gb_per_s": 3000.0, "matmul_tflop_per_s": None}}
    records.write(Record({"device_kind": "fake", "device_count": 1}, config, ceiling, rows), path)


def searches(cases, name, call, first, step):
    rows = []
    for case in cases:
        times = {"call": [call], "first token": [first], "decode step": [step]}
        rows += beams.rows_of(beams.Search.parse(case), name, times, None)
    return rows


def test_sizes_are_those_that_the_paper_tells():
    """GPT-J-6B, 32 prompts: 86 GB, 63 % of 137 GB."""
    found = segment_cache.sizes("GPT-J-6B", 32, prompt=1024, new=1024, beams=4)
    assert round(found["standard_bytes"] / 1e9) == 137
    assert round(found["segment_bytes"] / 1e9) == round(found["fdjax_bytes"] / 1e9) == 86
    # Pages are larger than the paper's steps.
    found = segment_cache.sizes("OPT-30B", 2, prompt=100, new=17, beams=3)
    of_token = 2 * 48 * 56 * 128 * 2
    sizes = [found[f"{name}_bytes"] / of_token / 2 for name in ("standard", "segment", "fdjax")]
    assert sizes == [3 * 117, 100 + 3 * 32, 100 + 3 * 128]


def test_cache_over_prompts(plots, tmp_path, capsys):
    output = tmp_path / "cpu" / "segment_cache.json"
    output.parent.mkdir()
    assert segment_cache.main(["--new", "64", "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(output.read_text())
    figure = plots.segment_cache(plots.Results(tmp_path / "gpu", tmp_path))
    assert [axes.get_title() for axes in figure.axes] == list(segment_cache.MODELS)
    standard, paper, ours = figure.axes[0].containers
    assert standard[5].get_height() > ours[5].get_height() >= paper[5].get_height() > 0
    assert plots.segment_cache(plots.Results(tmp_path, tmp_path / "none")) is None


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_attention_of_beams_is_that_of_their_own_slots():
    shape = segment_attention.Shape(2, beams=3, heads=2, d=16, prompt=128, response=128)
    case = segment_attention.case(shape, {"xla": "xla"})
    q, k, v, pages, sources = case.make_args(0)
    assert case.bytes == k.nbytes + v.nbytes
    want, attend = case.reference(q, k, v, pages, sources), jax.jit(case.implementations["xla"])
    assert verify(attend(q, k, v, pages, sources), want, case.tolerance)[1] is None
    others = sources[::-1] % 3 + sources // 3 * 3
    assert verify(attend(q, k, v, pages, others), want, case.tolerance)[1] is not None
    assert {case.name.split()[0] for case in segment_attention.CASES} >= {"BS1", "BS64"}


def test_bandwidth_over_prompts(plots, tmp_path):
    kernels = {"decode_attention_1": 5.0, "fusion": 3.0}
    rows = [
        measured("BS2 W4 H40", "mosaic_gpu", 8.0, bytes=16_000, kernels=kernels),
        measured("BS1 W4 H40", "mosaic_gpu", 10.0, bytes=10_000, kernels=kernels),
        measured("BS1 W4 H40", "xla", 20.0, bytes=10_000, kernels=kernels),
        Measurement("BS2 W4 H40", "xla", False, reason="none"),
    ]
    write(tmp_path / "segment_attention.json", rows)
    (axes,) = plots.segment_attention(plots.Results(tmp_path, tmp_path)).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines[:3]}
    assert lines == {
        "mosaic_gpu": [[1, 1.0], [2, 2.0]],
        "its kernel alone": [[1, 2.0], [2, 3.2]],
        "xla": [[1, 0.5]],
    }
    assert axes.lines[3].get_ydata()[0] == 3000


def test_searches_over_prompts_models_and_batches(plots, tmp_path):
    """Transformers runs in a record of its own, with the same configuration."""
    long = ["1x32+32x4", "1x64+32x4"]
    batches = ["1x1024+128x1", "1x1024+128x4", "8x1024+128x4"]
    rows = searches(long, "fdjax", 9e3, 2e3, 1e3) + searches(batches, "fdjax", 64e3, 4e3, 1e3)
    write(tmp_path / "beams_13b.json", rows, name="llama-2-13b.old.json")
    rows = searches(long + batches[:2], "transformers", 128e3, 8e3, 3e3)
    rows += beams.rows_of(beams.Search.parse(batches[2]), "transformers", {}, "out of memory")
    assert rows[-1].ok is None
    write(tmp_path / "beams_13b_peer.json", rows, name="llama-2-13b.old.json")
    results = plots.Results(tmp_path, tmp_path)
    first, step = plots.beams_over_prompt(results).axes
    assert [line.get_xydata().tolist() for line in first.lines] == [
        [[32, 2], [64, 2]],
        [[32, 8], [64, 8]],
    ]
    assert [line.get_ydata().tolist() for line in step.lines] == [[1, 1], [3, 3]]
    first, step = plots.beams_by_model(results).axes
    ours, theirs = ([bar.get_width() for bar in bars] for bars in step.containers)
    assert (ours, theirs) == ([1, 1], [3, 3])
    (axes,) = plots.beams_throughput(results).axes
    assert axes.get_title() == "llama-2-13b, 4 beams"
    assert axes.lines[0].get_xydata().tolist() == [[1, 2000], [8, 16000]]
    assert axes.lines[1].get_xydata().tolist() == [[1, 1000]]
    empty = plots.Results(tmp_path / "none", tmp_path)
    names = ("segment_attention", "beams_over_prompt", "beams_by_model", "beams_throughput")
    assert [plots.FIGURES[name](empty) for name in names] == [None] * 4
