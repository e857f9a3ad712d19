"""The benchmark of what int4 loses."""

import json

import numpy as np
import pytest

from benchmarks import quantisers
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.layer import dequantised


def test_plain_rounding_has_the_smallest_step_that_clips_nothing():
    weight = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    weight[2, :32] = 0
    form = WeightFormat("int4", 32, scales="float32")
    got = np.asarray(dequantised(quantisers.plain_rounding(weight, form), form, 64))
    steps = np.abs(weight.reshape(6, 2, 32)).max(axis=2).repeat(32, axis=1) / 7
    assert (np.abs(got - weight) <= steps / 2 + 1e-6).all()
    assert not got[2, :32].any()


def test_a_summary_has_errors_over_draws():
    row = {"p99_kl_short": 0, "agreement_short": 0.5, "agreement_long": 1.0}
    rows = [
        row | {"draw": i, "group": g, "method": m, "mean_kl_short": 2.0 * i, "mean_kl_long": g}
        for i in range(2)
        for g in (32, 64)
        for m in quantisers.METHODS
    ]
    for of in quantisers.summary(rows).values():
        assert of == {
            "mean_kl_short": 1.0,
            "error_short": pytest.approx(1.0),
            "agreement_short": 0.5,
            "mean_kl_long": 48.0,
            "error_long": 0.0,
            "agreement_long": 1.0,
        }
    single = quantisers.summary([one for one in rows if one["draw"] == 0])
    assert all("error_short" not in of for of in single.values())


@pytest.mark.soak
def test_it_measures(tmp_path):
    output = tmp_path / "record.json"
    few = ["--draws", "1", "--groups", "128", "--stories", "6", "--long", "2"]
    assert quantisers.main([*few, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [row["method"] for row in record["rows"]] == list(quantisers.METHODS)
    assert all(0 < row["mean_kl_long"] < 0.1 for row in record["rows"])
