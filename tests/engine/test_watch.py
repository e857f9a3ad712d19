"""A watch names the device that stalls. `test_tensor_parallel.py` has a device that does."""

import logging
import time

import pytest

from fdjax.engine.watch import Watch, waiting


def reported(caplog, watch, ranks=3):
    with watch.waiting("tokens", ranks):
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    return record.getMessage()


@pytest.mark.parametrize(
    ("reached", "state"),
    [
        ([], "no device has reached a collective operation"),
        ([0, 1, 2, 0, 2], "device 1 of 3 has not reached collective operation 2 (sum)"),
        ([0], "device 1, 2 of 3 has not reached collective operation 1 (sum)"),
        # Two of them form a group, and are ahead.
        ([0, 1, 2, 0, 1, 1, 0, 0], "device 2 of 3 has not reached collective operation 2 (sum)"),
        ([2, 1, 0], "all 3 devices have reached collective operation 1 (sum), and none the next"),
    ],
)
def test_the_device_that_is_behind(caplog, reached, state):
    watch = Watch(seconds=0.02)
    for rank in reached:
        watch.arrive(rank, "sum")
    assert reported(caplog, watch) == f"no tokens for 0.02 s: {state}"


def test_what_ends_in_time_is_not_reported(caplog):
    with Watch(seconds=0.3).waiting("tokens", 2), waiting(None, "tokens", 2):
        pass
    time.sleep(0.5)
    assert not caplog.records


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_that_is_not_positive(seconds):
    with pytest.raises(ValueError, match="watch: seconds must be positive"):
        Watch(seconds)
