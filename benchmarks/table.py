"""The README's table of measurements, generated from the records: `python -m benchmarks.table`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fdjax.bench import record as records

ROOT = Path(__file__).parent.parent
_BEGIN, _END = "<!-- measurements -->", "<!-- /measurements -->"

# Name of each peer in records → its name in the table.
_PEERS = {
    "cudnn": "XLA + cuDNN",
    "xla": "XLA",
    "hf static, compiled": "transformers, compiled",
    "hf eager": "transformers, eager",
}


class Point(NamedTuple):
    """The point that a line of the table shows."""

    device: str
    model: str
    batch: int
    prompt: int


class PointTimes(NamedTuple):
    """A record's measurements at one point, by implementation."""

    date: str
    link: str
    first: dict[str, records.Measurement]
    step: dict[str, records.Measurement]


def measurements() -> str:
    """The end-to-end records under `results/` as a Markdown table.

    For each point it shows the latest run of fdjax, and for each peer the latest run that measured
    the peer and fdjax together.
    """
    runs: dict[Point, list[PointTimes]] = {}
    for path in sorted((ROOT / "benchmarks/results").glob("*/*.json")):
        try:
            record = records.read(path)
        except ValueError:  # a file in another format
            continue
        # A figure shows the breakdown, the plans that leave something out.
        if "family" in record.config and not path.stem.startswith("breakdown"):
            link = f"benchmarks/results/{path.parent.name}/{path.name}"
            for point, measured in _points(record, link):
                runs.setdefault(point, []).append(measured)
    head = "Device", "Model", "Batch × prompt", "First token", "Decode step", "Of the ceiling"
    lines = [(*head, *_PEERS.values()), ["---"] * (len(head) + len(_PEERS))]
    for point, measured in sorted(runs.items()):
        # Points that only a grid has measured are left to a figure.
        measured.sort(key=lambda m: ("/grid" not in m.link, m.date))
        if "/grid" not in measured[-1].link:
            lines.append([*_ours(point, measured[-1]), *(_peer(name, measured) for name in _PEERS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _points(record: records.Record, link: str) -> Iterator[tuple[Point, PointTimes]]:
    """The points of a record that were measured with the plan that `load` chooses."""
    config = record.config
    if config["plan"]["named"]:
        return
    model = f"{config['family'].title()}, {config['parameters'] / 1e9:.2f} B, {config['dtype']}"
    points: dict[tuple[int, int], PointTimes] = {}
    for row in record.rows:
        what, batch, prompt = row.case.rsplit(maxsplit=2)
        if row.timing:
            key = int(batch[1:]), int(prompt[1:])
            new = PointTimes(record.environment["date"], link, {}, {})
            measured = points.setdefault(key, new)
            rows = {"first token": measured.first, "decode step": measured.step}[what]
            rows[row.implementation] = row
    for key, measured in points.items():
        if "fdjax" in measured.first.keys() & measured.step.keys():
            yield Point(record.environment["device_kind"], model, *key), measured


def _ours(point: Point, measured: PointTimes) -> tuple[str, ...]:
    step = measured.step["fdjax"]
    return (
        point.device,
        point.model,
        f"{point.batch} × {point.prompt}",
        f"{_ms(measured.first['fdjax']):.1f} ms",
        f"[{_ms(step):.2f} ms]({measured.link})",
        f"{step.fraction_of_ceiling:.0%}",
    )


def _peer(name: str, measured: list[PointTimes]) -> str:
    """Decode step and first token as multiples of fdjax's, from a run that has both; else ""."""
    for run in reversed(measured):
        if name in run.step.keys() & run.first.keys():
            step, first = (_ms(rows[name]) / _ms(rows["fdjax"]) for rows in (run.step, run.first))
            return f"[{step:.2f}; {first:.2f}]({run.link})"
    return ""


def _ms(row: records.Measurement) -> float:
    return row.timing["median_us"] / 1e3


def updated(readme: str) -> str:
    """The README with the table between its marks replaced."""
    before, rest = readme.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{measurements()}\n{_END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    if args.write:
        readme.write_text(updated(readme.read_text()))
    else:
        print(measurements())
    return 0


if __name__ == "__main__":
    sys.exit(main())
