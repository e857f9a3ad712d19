"""The record of a benchmark: what ran where, how fast, and whether its results were right."""

import copy
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from fdjax.system.files import write_whole

SCHEMA = 1
_PACKAGES = (
    *("fdjax", "jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cuda-cupti", "nvidia-cudnn-cu13", "nvidia-cublas"),
)


@dataclasses.dataclass
class Measurement:
    """The measurement of one implementation in one case, a row of a record.

    Attributes:
      ok: True if the result was right, False if it was wrong or failed (then `timing` is None),
        None if the implementation does not support the case.
      error: relative error against the reference, see `verify`.
      reason: why `ok` is not True.
      timing: fields of a `Timing`.
      bytes, flops: smallest number of bytes to move and of FLOPs to compute in a call.
      gb_per_s, tflop_per_s: 1e9 bytes and 1e12 FLOP per second at the median time.
      fraction_of_ceiling: time at the ceiling (the longer of bytes and FLOPs) over the median
        time.
      notes: reasons to doubt the number.
    """

    case: str
    implementation: str
    ok: bool | None
    error: float | None = None
    reason: str | None = None
    timing: dict[str, Any] | None = None
    bytes: int = 0
    flops: int = 0
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    fraction_of_ceiling: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Record:
    """A run: environment, configuration, ceilings, rows.

    `ceiling` holds the results of `measure_ceiling` under `before` and `after`. `costs` holds
    numbers that are reported but not compared, such as seconds of compiling.
    """

    environment: dict[str, Any]
    config: dict[str, Any]
    ceiling: dict[str, Any]
    rows: list[Measurement] = dataclasses.field(default_factory=list)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def failed(self) -> bool:
        """Whether any row is wrong, or nothing was measured."""
        return any(row.ok is False for row in self.rows) or not any(row.ok for row in self.rows)

    def so_far(self) -> "Record":
        """A finished copy without a closing ceiling, to be saved in case the run is cut off."""
        return copy.deepcopy(self).finish()

    def finish(self, after: dict[str, Any] | None = None, *, tolerance: float = 0.03) -> "Record":
        """Stores the closing ceiling and fills in the rates, fractions and notes of all rows.

        Fractions refer to the better of the two read ceilings. If the read bandwidth moved by more
        than `tolerance` (relative), the closing ceiling is marked as not trusted.
        """
        before = self.ceiling.get("before")
        self.ceiling["after"] = after
        reads = [c["read_gb_per_s"] for c in (before, after) if c]
        peak_flops = before and before["matmul_tflop_per_s"]
        moved = len(reads) == 2 and min(reads) < (1 - tolerance) * max(reads)
        if moved and after["trusted"] is not None:
            after |= {"trusted": False, "reason": f"moved: {reads[0]:.0f} to {reads[1]:.0f} GB/s"}
        for row in self.rows:
            if not row.timing:
                continue
            timing, median_us = row.timing, row.timing["median_us"]
            row.gb_per_s = row.bytes / median_us / 1e3 if row.bytes else None
            row.tflop_per_s = row.flops / median_us / 1e6 if row.flops else None
            fractions = [row.gb_per_s / max(reads)] if row.gb_per_s and reads else []
            fractions += [row.tflop_per_s / peak_flops] if row.tflop_per_s and peak_flops else []
            row.fraction_of_ceiling = max(fractions, default=None)
            if timing["cold_l2"] is False:
                row.notes.append("warm L2")
            if timing["uncounted_copy_bytes"] > 0.01 * row.bytes:
                row.notes.append(f"uncounted copies of {timing['uncounted_copy_bytes']} bytes")
            if (row.fraction_of_ceiling or 0) > 1.03:
                row.notes.append("above the ceiling")
        return self

    def table(self) -> str:
        """Return the record as text, the ceiling first."""
        lines = [f"device  {self.environment['device_kind']} x{self.environment['device_count']}"]
        for when, c in self.ceiling.items():
            if c:
                matmul = c["matmul_tflop_per_s"]
                lines.append(
                    f"ceiling {when}: {c['read_gb_per_s']:.0f} GB/s ({c['read_kernel']}, "
                    f"{c['clock']})"
                    + (f", {matmul:.3g} TFLOP/s" if matmul else "")
                    + (f", NOT TRUSTED: {c['reason']}" if c["trusted"] is False else "")
                )
        head = ("case", "implementation", "median us", "p10-p90", "clock", "wall us")
        cells = [(*head, "GB/s", "TFLOP/s", "ceiling", "error", "")]
        for r in self.rows:
            t = r.timing
            status = "; ".join(r.notes) if r.ok else "unsupported" if r.ok is None else "FAILED"
            cells.append(
                (
                    r.case,
                    r.implementation,
                    f"{t['median_us']:.1f}" if t else "-",
                    f"{t['p10_us']:.1f}-{t['p90_us']:.1f}" if t else "-",
                    t["clock"] if t else "-",
                    _text(t and t["wall_us"], ".1f"),
                    _text(r.gb_per_s, ".0f"),
                    _text(r.tflop_per_s, ".3g"),
                    _text(r.fraction_of_ceiling, ".1%"),
                    _text(r.error, ".1e"),
                    status + (f": {r.reason}" if r.reason else ""),
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = [c.rjust(w) for c, w in zip(row, widths, strict=True)]
            padded[:2] = [c.ljust(w) for c, w in zip(row[:2], widths[:2], strict=True)]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _output(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(commit: str | None = None) -> dict[str, Any]:
    """Describes the machine, the software and the command.

    Args:
      commit: commit to record. None asks git, and gives None outside a checkout.
    """
    import jax

    here = Path(__file__).resolve()
    dirty = None
    # A package installed inside another repository must not report that repository's commit.
    if commit is None and _output("git", "ls-files", "--error-unmatch", here.name, cwd=here.parent):
        commit = _output("git", "rev-parse", "HEAD", cwd=here.parent)
        status = _output("git", "status", "--porcelain", cwd=here.parent)
        dirty = None if status is None else bool(status)
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    fields = ("driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
    smi = device.platform == "gpu" and _output(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"
    )
    return {
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "allocator_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "nvidia_smi": dict(zip(fields, smi.splitlines()[0].split(", "), strict=True))
        if smi
        else None,
        "versions": versions,
        "commit": commit,
        "dirty": dirty,
        # An absolute path is cut to its last name, because the folders exist on one machine only.
        "command": shlex.join(
            [Path(sys.argv[0]).name, *(re.sub("(^|=)/(.*/)?(?=.)", r"\1", a) for a in sys.argv[1:])]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def emit(record: Record, path: str | Path | None = None) -> None:
    """Print the table, then the JSON as the last line, and write the JSON to `path` if given."""
    print(record.table())
    print(record.json(), flush=True)
    if path:
        write(record, path)


def write(record: Record, path: str | Path) -> None:
    """Write the record as JSON, and create missing folders."""
    write_whole(path, record.json() + "\n")


def read(path: str | Path) -> Record:
    """Read a record from its file, or from the saved output of a run (its last line).

    Raises:
      ValueError: the file is not a record, or has another schema.
    """
    lines = Path(path).read_text().strip().splitlines() or [""]
    try:
        fields = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        raise ValueError(f"record: last line of {path} must be JSON, got {error}") from None
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"record: schema of {path} must be {SCHEMA}, got {schema!r}")
    try:
        return Record(**fields | {"rows": [Measurement(**row) for row in fields["rows"]]})
    except (KeyError, TypeError) as error:
        raise ValueError(f"record: {path} is not a record of schema {SCHEMA}, {error!r}") from None
