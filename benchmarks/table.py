"""The README's table of measurements, generated from the records: `python -m benchmarks.table`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from fdjax.bench import record as records

ROOT = Path(__file__).parent.parent
_BEGIN, _END = "<!-- measurements -->", "<!-- /measurements -->"


def measurements() -> str:
    """Markdown of the end-to-end records under `results/`: of each batch and prompt the latest."""
    head = (
        "Device",
        "Model",
        "Plan",
        "Batch, prompt",
        "First token",
        "Decode step",
        "Bandwidth",
        "",
    )
    latest: dict[tuple[str, ...], tuple[str, str]] = {}
    for path in sorted((ROOT / "benchmarks/results").glob("*/*.json")):
        try:
            record = records.read(path)
        except ValueError:  # a record of something else
            continue
        # Else it is of kernels, or of so many points that a figure shows them.
        if "family" in record.config and not path.stem.startswith(("grid", "breakdown")):
            link = f"[record](benchmarks/results/{path.parent.name}/{path.name})"
            date = record.environment["date"]
            for cells in _lines(record):
                what = cells[:4]
                if what not in latest or date > latest[what][0]:
                    latest[what] = date, f"| {' | '.join((*cells, link))} |"
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(line for _, line in latest.values())])


def _lines(record: records.Record) -> Iterator[tuple[str, ...]]:
    config = record.config
    model = f"{config['family']}, {config['parameters'] / 1e9:.2f}e9 weights, {config['dtype']}"
    rows = {
        (row.implementation, *row.case.rsplit(maxsplit=2)): row for row in record.rows if row.timing
    }
    for (plan, what, batch, prompt), step in rows.items():
        first = rows.get((plan, "first token", batch, prompt))
        if what != "decode step" or first is None:
            continue
        if plan == "fdjax":
            plan = dict(config["plan"]["named"]).get("decode_attention", "default")
        yield (
            record.environment["device_kind"],
            model,
            plan,
            f"{batch[1:]} × {prompt[1:]}",
            f"{first.timing['median_us'] / 1e3:.1f} ms",
            f"{step.timing['median_us'] / 1e3:.2f} ms",
            f"{step.gb_per_s:.0f} GB/s, {step.fraction_of_ceiling:.0%} of the ceiling",
        )


def updated(readme: str) -> str:
    """The README with the table put between its marks."""
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
