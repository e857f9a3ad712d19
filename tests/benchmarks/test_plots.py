"""The figures of `benchmarks.plots`, from the records in the repository and from made-up ones."""

import dataclasses
import re

import pytest

from fdjax.bench import record as records
from fdjax.bench.record import Measurement, Record
from fdjax.bench.timing import Timing

plots = pytest.importorskip("benchmarks.plots")


@pytest.mark.parametrize("folder", ["nvidia_h100_80gb_hbm3", "nvidia_h200"])
def test_every_figure_of_a_folder_can_be_drawn(folder):
    path = plots.RESULTS.parent / folder
    results = plots.Results(path)
    drawn = {name for name, draw in plots.FIGURES.items() if draw(results)}
    assert {file.stem for file in path.glob("figures/*.png")} <= drawn


def test_two_devices_are_compared_with_one_of_the_same_run(tmp_path):
    def record(name, date, times):
        rows = []
        for (case, implementation), us in times.items():
            timing = dataclasses.asdict(Timing.from_samples([[us]], "host")) | {"kernels": {}}
            rows.append(Measurement(case, implementation, True, timing=timing))
        config = {"model": {"num_hidden_layers": 4, "hidden_size": 256}, "devices": [1, 2]}
        environment = {"device_kind": "fake", "device_count": 2, "date": date}
        records.write(Record(environment, config, None, rows), tmp_path / f"{name}.json")

    step, first = "decode step B1 P128", "first token B1 P128"
    assert plots.tensor_parallel(plots.Results(tmp_path, tmp_path)) is None
    # The newest comes first, so that names do not decide.
    record("a", "2026-02-01", {(step, "1 devices"): 30.0, (step, "2 devices, one launch"): 20.0})
    times = {"1 devices": 40.0, "2 devices, one launch": 40.0, "2 devices, psum": 50.0}
    record(
        "b", "2026-01-01", {(case, name): t for case in (step, first) for name, t in times.items()}
    )
    record("without one device", "2026-03-01", {(step, "2 devices, one launch"): 1.0})
    figure = plots.tensor_parallel(plots.Results(tmp_path, tmp_path))
    found = [
        {bars.get_label(): [round(bar.get_width(), 3) for bar in bars] for bars in axes.containers}
        for axes in figure.axes
    ]
    assert found == [{"one launch": [1.5], "psum": [0.8]}, {"one launch": [1.0], "psum": [0.8]}]
    (label,) = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert re.sub(r"\s+", " ", label) == "4 layers of 256 B1 P128"
