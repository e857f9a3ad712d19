"""The dataflow table of `fdjax tune` as a file: makes its entries, writes it and explains it.

`plan.read_table` reads the file.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from fdjax.bench.record import environment
from fdjax.models import LinearShape
from fdjax.pallas_kernels.plan import (
    KERNEL_REVISIONS,
    TABLE_SCHEMA,
    read_table,
    shipped_table_path,
)
from fdjax.system.files import json_by_line, write_whole

# A kernel must beat XLA by this factor, because smaller gains are within the measurement error.
# `decode_layers` also saves host time that is not measured, so for it a tie is enough. So it is for
# `matmul`: the layers of a prompt run in a loop only if kernels run all of their products.
_LEAST_GAIN = {"matmul": 1.0, "linear_chain": 1.01, "moe": 1.01, "decode_layers": 1.0}


def table_entry(op: str, key: dict[str, int], times: Mapping[Any, float]) -> dict[str, Any]:
    """Make an entry of the table, with XLA or the fastest configuration of the kernel.

    Args:
      op: name of the operation.
      key: its sizes.
      times: microseconds by configuration of the kernel; the key None is XLA.
    """
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


def table_of(entries: Iterable[Mapping[str, Any]], commit: str | None = None) -> dict[str, Any]:
    """Make a dataflow table of measured entries, with versions and origin.

    Args:
      entries: entries from `table_entry`.
      commit: commit to record if git cannot be asked.
    """
    return {
        "schema": TABLE_SCHEMA,
        "revisions": KERNEL_REVISIONS,
        "provenance": environment(commit),
        "entries": list(entries),
    }


def write_table(table: Mapping[str, Any], path: str | Path) -> None:
    """Write a table as JSON, with one entry per line."""
    head = {key: value for key, value in table.items() if key != "entries"}
    write_whole(path, json_by_line(head, "entries", table["entries"]))


def table_in_use(device_kind: str, path: str | Path | None = None) -> dict[str, Any]:
    """Read the table of a file, or the one shipped for a kind of device.

    Raises:
      ValueError: the file is not a usable table.
      FileNotFoundError: no table is shipped for this device.
    """
    if path is None and not (path := shipped_table_path(device_kind)).exists():
        raise FileNotFoundError(f"tune: no table is shipped for {device_kind!r}")
    read_table(path, log_level=logging.INFO)  # the explanation shows other versions anyway
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    for entry in table["entries"]:
        times = entry.get("microseconds", {})
        if not (isinstance(times, dict) and all(map(_is_time, times.values()))):
            raise ValueError(
                f"dataflow table {path}: microseconds must be numbers from 0 to 1e12, got {times!r}"
            )
    return table


def _is_time(us: Any) -> bool:
    return us is None or (type(us) in (int, float) and 0 <= us <= 1e12)


def explain(table: Mapping[str, Any], shapes: Mapping[str, LinearShape], dtype: str) -> str:
    """Explain the `matmul` entries of a table for some linear layers, like Fig. 9(c) of the paper.

    Args:
      table: a table from `table_of` or from a file.
      shapes: the layers by name.
      dtype: dtype of the operands.

    Returns:
      A text with a section for each layer: its inflection points M1 and M2, between which the
      kernel runs, and the microseconds for each M. A star marks the choice.
    """
    itemsize = jnp.dtype(dtype).itemsize
    where = table.get("provenance", {})
    device, versions = where.get("device_kind", "unknown device"), where.get("versions", {})
    lines = [
        f"{device}, JAX {versions.get('jax', 'unknown')}, {where.get('date', 'undated')!s:.10}",
        f"{dtype}, microseconds on the device, * is what runs",
    ]
    for name, shape in shapes.items():
        entries = {}
        for entry in table["entries"]:
            m = entry["shape"].get("m")
            if entry["op"] == "matmul" and entry["shape"] == shape.key(m, itemsize):
                entries[m] = entry
        lines += ["", f"{name} {shape}: {_inflection(entries)}"]
        if entries:
            rows = sorted(entries)
            lines.append(f"{'M':>12}" + "".join(f"{m:>8}" for m in rows))
            for implementation in ("xla", "mosaic_gpu"):
                cells = (_cell(entries[m], implementation) for m in rows)
                line = f"{implementation:>12}" + "".join(f"{cell:>8}" for cell in cells)
                lines.append(line.rstrip())
    return "\n".join(lines)


def _inflection(entries: Mapping[int, Mapping[str, Any]]) -> str:
    if not entries:
        return "not measured, xla"
    kernel = sorted(m for m, entry in entries.items() if entry["implementation"] == "mosaic_gpu")
    if not kernel:
        return "xla at every M"
    first, last = kernel[0], kernel[-1]
    others = sorted(m for m in entries if first < m < last and m not in kernel)
    but = f" but at M = {', '.join(map(str, others))}" if others else ""
    return f"mosaic_gpu from M1 = {first} to M2 = {last}{but}, else xla"


def _cell(entry: Mapping[str, Any], implementation: str) -> str:
    us = entry.get("microseconds", {}).get(implementation)
    return ("-" if us is None else f"{us:.1f}") + " *"[entry["implementation"] == implementation]
