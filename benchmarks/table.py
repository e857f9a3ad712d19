"""The README's table of measurements, generated from the records: `python -m benchmarks.table`."""

import argparse
import sys
from pathlib import Path

from fdjax.bench import record as records

ROOT = Path(__file__).parent.parent
_BEGIN, _END = "<!-- measurements -->", "<!-- /measurements -->"


def measurements() -> str:
    """Markdown of every end-to-end record under `results/`."""
    head = (
        "Device",
        "Model",
        "Plan",
        "Case",
        "Median",
        "p10 to p90",
        "Bandwidth",
        "Of ceiling",
        "",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for path in sorted((ROOT / "benchmarks/results").glob("*/*.json")):
        try:
            record = records.read(path)
        except ValueError:  # a record of something else
            continue
        config = record.config
        if "family" not in config:  # of kernels
            continue
        named = dict(config["plan"]["named"])
        model = f"{config['family']}, {config['parameters'] / 1e9:.2f}e9 weights, {config['dtype']}"
        for row in record.rows:
            t = row.timing
            if not t:
                continue
            plan = row.implementation
            if plan == "fdjax":
                plan = named.get("decode_attention", "default")
            cells = (
                record.environment["device_kind"],
                model,
                plan,
                row.case,
                f"{t['median_us'] / 1e3:.2f} ms",
                f"{t['p10_us'] / 1e3:.2f} to {t['p90_us'] / 1e3:.2f}",
                f"{row.gb_per_s:.0f} GB/s" if row.gb_per_s else "",
                f"{row.fraction_of_ceiling:.0%}" if row.gb_per_s else "",
                f"[record](benchmarks/results/{path.parent.name}/{path.name})",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
