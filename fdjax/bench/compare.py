"""Compares two records."""

import dataclasses
import math

from fdjax.bench.record import Measurement, Record

# Relative changes that are tolerated. On a CPU that is shared with other programs, the same program
# may take twice as long in another run.
_TOLERANCE, _TOLERANCE_OF_CPU = 0.05, 1.0
# Byte counts that differ by less count as the same. A mixture of experts reads other experts if
# rounding changes a generated token.
_SAME_BYTES = 0.01
_FAILURES = ("regression", "broken", "incomparable", "missing")


@dataclasses.dataclass(frozen=True)
class Change:
    """How a row changed. `ratio` is the new median time over the old one."""

    case: str
    implementation: str
    status: str
    old_us: float | None = None
    new_us: float | None = None
    ratio: float | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The changes of all rows, and notes on the records as a whole."""

    changes: list[Change]
    notes: list[str]
    allow_missing: bool = False

    @property
    def failed(self) -> bool:
        """Whether a row regressed, broke, or can no longer be compared."""
        statuses = {change.status for change in self.changes}
        return not statuses.isdisjoint(_FAILURES[:-1] if self.allow_missing else _FAILURES)

    def table(self) -> str:
        """Return the comparison as text."""
        lines = [f"note: {note}" for note in self.notes]
        for c in self.changes:
            times = f"{c.old_us:.1f} -> {c.new_us:.1f} us ({c.ratio - 1:+.1%})" if c.ratio else ""
            text = (f"{c.status:15}", c.case, c.implementation, times, c.detail)
            lines.append("  ".join(filter(None, text)))
        return "\n".join(lines)


def compare(
    old: Record,
    new: Record,
    tolerance: float | None = None,
    *,
    allow_device: bool = False,
    allow_missing: bool = False,
) -> Comparison:
    """Matches the rows of two records by case and implementation and compares the median times.

    Nothing is normalised. A time counts as changed if it moved by more than `tolerance` and by more
    than the larger of the two spreads. If it moved by more than the tolerance but not the spread,
    it is `"within spread"`. Rows with another clock, FLOP count or L2 state, or a byte count that
    differs by more than 1 %, are `"incomparable"`. A row that was right and no longer is, is
    `"broken"`. A row that is gone is `"missing"`, and counts as a failure because the new run may
    have been cut off.

    Args:
      old: the earlier record.
      new: the record to judge.
      tolerance: largest relative change of the median that counts as the same; default 0.05, and
        1 for records of a CPU, where only more than a factor of two counts.
      allow_device: compare records of different devices or device counts.
      allow_missing: rows of `old` that `new` lacks are not a failure.

    Raises:
      ValueError: the devices differ, or `tolerance` is below 0 or NaN.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"compare: tolerance must be at least 0, got {tolerance}")
    devices = [(r.environment["device_kind"], r.environment["device_count"]) for r in (old, new)]
    if devices[0] != devices[1] and not allow_device:
        raise ValueError(f"compare: devices must be the same, got {devices[0]} and {devices[1]}")
    notes = []
    if tolerance is None:
        on_cpu = new.environment.get("platform") == "cpu"
        tolerance = _TOLERANCE_OF_CPU if on_cpu else _TOLERANCE
        if on_cpu:
            notes.append("on a CPU, which other programs use too, only a factor of 2 counts")
    for name in ("device_kind", "device_count", "versions", "nvidia_smi"):
        a, b = old.environment.get(name), new.environment.get(name)
        if a != b:
            notes.append(f"{name} differs: {a} and {b}")
    if old.config != new.config:
        notes.append(f"config differs: {old.config} and {new.config}")
    for which, record in (("old", old), ("new", new)):
        for when, ceiling in record.ceiling.items():
            if ceiling and ceiling["trusted"] is False:
                notes.append(f"{which} ceiling {when} is not trusted: {ceiling['reason']}")
    rows = [{(r.case, r.implementation): r for r in record.rows} for record in (old, new)]
    changes = [
        Change(*key, *_judge(rows[0].get(key), rows[1].get(key), tolerance))
        for key in dict.fromkeys([*rows[0], *rows[1]])
    ]
    return Comparison(changes, notes, allow_missing)


def _judge(old: Measurement | None, new: Measurement | None, tolerance: float) -> tuple:
    if new is None:
        return ("missing",)
    if not new.timing:
        broken = new.ok is False or (old is not None and old.timing)
        return ("broken" if broken else "unsupported", None, None, None, new.reason or "")
    if old is None or not old.timing:
        return ("new", None, new.timing["median_us"])
    a, b = old.timing, new.timing
    before = (a["clock"], a["cold_l2"], old.flops)
    now = (b["clock"], b["cold_l2"], new.flops)
    if before != now or not math.isclose(old.bytes, new.bytes, rel_tol=_SAME_BYTES):
        before, now = (*before, old.bytes), (*now, new.bytes)
        detail = f"clock, cold L2, FLOPs, bytes were {before}, are {now}"
        return ("incomparable", None, None, None, detail)
    ratio = b["median_us"] / a["median_us"]
    status = "same"
    if max(ratio, 1 / ratio) - 1 > tolerance:
        moved = abs(b["median_us"] - a["median_us"]) > max(a["spread_us"], b["spread_us"])
        status = ("regression" if ratio > 1 else "improvement") if moved else "within spread"
    return (status, a["median_us"], b["median_us"], ratio)
