"""An entry of a dataflow table from what was measured."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# A kernel that gains less than the measurement can tell has not earned its place, but for that
# which spares the host most of what a dispatch costs.
_LEAST_GAIN = {"matmul": 1.01, "linear_chain": 1.01, "decode_layers": 1.0}


def table_entry(op: str, key: dict[str, int], times: Mapping[Any, float]) -> dict[str, Any]:
    """An entry of the table from microseconds of configurations: None is XLA's."""
    xla_us = times[None]
    config = min((c for c in times if c is not None), key=times.get, default=None)
    best_us = None if config is None else times[config]
    wins = best_us is not None and xla_us >= _LEAST_GAIN[op] * best_us
    return {
        "op": op,
        "shape": key,
        "implementation": "mosaic_gpu" if wins else "xla",
        "config": dataclasses.asdict(config) if wins else None,
        "microseconds": {
            "xla": round(xla_us, 2),
            "mosaic_gpu": None if best_us is None else round(best_us, 2),
        },
    }
