"""Generates the tables of measurements from the records: `python -m benchmarks.table --write`.

README.md shows a few points of the default path and the speed-up by the unified maximum.
docs/measurements.md shows every record of a model and of attention.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fdjax.bench import record as records
from fdjax.bench.record import Measurement, Record
from fdjax.pallas_kernels.attention.hopper.decode import default_config

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Names of records of `benchmarks.headline` begin with this.
HEADLINE = "headline"
# Names of older records of the default path end with this.
_EARLIER = "_one_launch"
README_POINTS = {(1, 1024), (8, 1024)}

# Name of each peer in records → its name in the tables.
PEERS = {
    "cudnn": "XLA + cuDNN",
    "xla": "XLA",
    "hf static, compiled": "transformers, compiled",
    "gpt-fast": "PyTorch like gpt-fast",
    "gpt-fast, by block": "PyTorch by block",
    "gpt-fast, max-autotune": "the same, max-autotune",
    "gpt-fast, int4": "the same, int4",
    "hf eager": "transformers, eager",
}
_README_PEERS = ("cudnn", "hf static, compiled", "gpt-fast", "gpt-fast, by block")
_OURS = ("Batch × prompt", "First token", "Decode step", "Of the ceiling")


class Source(NamedTuple):
    """A record and its file."""

    path: Path
    record: Record

    @property
    def is_default(self) -> bool:
        """Whether its "fdjax" rows ran the plan that `load` chooses today."""
        return self.path.stem.startswith(HEADLINE) or self.path.stem.endswith(_EARLIER)

    @property
    def model(self) -> str:
        """Family, size and dtype of the model, as text."""
        config = self.record.config
        name = f"{config['family'].title()}, {config['parameters'] / 1e9:.2f} B"
        return f"{name}, {config['dtype']}"

    def link(self, text: str, folder: Path) -> str:
        """A Markdown link to the record, for a document in `folder`."""
        return f"[{text}]({self.path.relative_to(folder, walk_up=True).as_posix()})"


def folder_of(device_kind: str) -> str:
    """Name of the folder that holds the records of a device."""
    return device_kind.lower().replace(" ", "_")


def sources() -> Iterator[Source]:
    """All records of `fdjax.bench`, without older ones in subfolders."""
    for path in sorted(RESULTS.glob("*/*.json")):
        try:
            yield Source(path, records.read(path))
        except ValueError:  # a record of another kind
            continue


def of_models() -> list[Source]:
    """All end-to-end records of a model."""
    return [source for source in sources() if "family" in source.record.config]


class PointRows(NamedTuple):
    """The rows of one point, by implementation."""

    first: dict[str, Measurement]
    step: dict[str, Measurement]


def points(record: Record) -> dict[tuple[int, int], PointRows]:
    """The points of a record, by (batch, prompt tokens)."""
    found: dict[tuple[int, int], PointRows] = {}
    for row in record.rows:
        what, batch, prompt = row.case.rsplit(maxsplit=2)
        if row.timing:
            measured = found.setdefault((int(batch[1:]), int(prompt[1:])), PointRows({}, {}))
            of_case = measured.first if what == "first token" else measured.step
            of_case[row.implementation] = row
    return {p: m for p, m in found.items() if "fdjax" in m.first.keys() & m.step.keys()}


def headline() -> dict[tuple[str, str, tuple[int, int]], tuple[Source, PointRows]]:
    """The newest record of the default path for each device, model and point."""
    found = {}
    # `benchmarks.headline` measures all of them at one commit, so its records go first.
    order = sorted(
        (source for source in of_models() if source.is_default),
        key=lambda s: (s.path.stem.startswith(HEADLINE), s.record.environment["date"]),
    )
    for source in order:
        for point, measured in points(source.record).items():
            device = source.record.environment["device_kind"]
            found[device, source.model, point] = source, measured
    return dict(sorted(found.items()))


def readme_table() -> str:
    """The table of README.md: a few points of the default path, and peers from the same run."""
    chosen = {key: value for key, value in headline().items() if key[2] in README_POINTS}
    peers = [n for n in _README_PEERS if any(n in m.step for _, m in chosen.values())]
    lines = [("Device", "Model", *_OURS, *(PEERS[name] for name in peers))]
    for (device, model, point), (source, measured) in chosen.items():
        own = _own(point, measured)
        own[2] = source.link(own[2], ROOT)
        lines.append((device, model, *own, *(_ratio(name, measured) for name in peers)))
    return markdown(lines)


def _own(point: tuple[int, int], measured: PointRows) -> list[str]:
    step = measured.step["fdjax"]
    return [
        f"{point[0]} × {point[1]}",
        f"{ms(measured.first['fdjax']):.1f} ms",
        f"{ms(step):.2f} ms",
        f"{step.fraction_of_ceiling:.0%}",
    ]


def _ratio(name: str, measured: PointRows) -> str:
    """Decode step and first token of a peer, as multiples of fdjax's."""
    if name not in measured.step.keys() & measured.first.keys():
        return ""
    pairs = ((rows[name], rows["fdjax"]) for rows in (measured.step, measured.first))
    return "; ".join(f"{ms(theirs) / ms(ours):.2f}" for theirs, ours in pairs)


def unified_maximum() -> dict[str, list[float]]:
    """Speed-up of attention kernels by the unified maximum over a running one.

    Shapes for which decode attention uses a running maximum by default are left out, because both
    columns of the record measured the same kernel.
    """
    found = {}
    for name, other in (("decode", "synchronised"), ("prefill", "online")):
        record = records.read(RESULTS / "nvidia_h100_80gb_hbm3" / f"{name}_attention.json")
        times: dict[str, dict[str, float]] = {}
        for row in record.rows:
            sizes = re.fullmatch(r"B(\d+) H\d+ Hkv(\d+) S(\d+) D(\d+)", row.case)
            if not (sizes and row.timing):
                continue
            if name == "prefill" or default_config(*map(int, sizes.groups())).unified:
                times.setdefault(row.case, {})[row.implementation] = row.timing["median_us"]
        found[name] = [us[other] / us["mosaic_gpu"] for us in times.values() if other in us]
    return found


def unified_maximum_sentence() -> str:
    """`unified_maximum` as one sentence."""
    parts = [
        f"{name} attention {min(gains):.2f} to {max(gains):.2f}"
        for name, gains in unified_maximum().items()
    ]
    return f"Speed over the same kernel with a running maximum, on an H100: {', '.join(parts)}."


def measurements(folder: Path) -> str:
    """The tables of docs/measurements.md, with links for a document in `folder`."""
    sections = ["## Models from end to end"]
    for source in sorted(of_models(), key=lambda s: (not s.is_default, s.path)):
        sections += [f"### {_title(source)}", _about(source, folder), _of_points(source)]
    sections.append("## Attention")
    for source in sources():
        if source.path.stem in ("decode_attention", "prefill_attention"):
            sections += [f"### {_title(source)}", _about(source, folder), _of_cases(source.record)]
    return "\n\n".join(sections)


def _title(source: Source) -> str:
    return f"{source.record.environment['device_kind']}: {source.path.stem.replace('_', ' ')}"


def _about(source: Source, folder: Path) -> str:
    environment, config = source.record.environment, source.record.config
    versions = environment["versions"] | config.get("peers", {})
    known = ("jax", "nvidia-cudnn-cu13", "torch", "transformers")
    libraries = ", ".join(f"{name} {versions[name]}" for name in known if name in versions)
    about = [f"{source.model}, {config['new_tokens']} new tokens"] if "family" in config else []
    if about and not source.is_default:
        about.append("not the default path of today")
    about += [environment["date"][:10], f"commit {environment['commit'][:8]}", libraries]
    return f"{source.link('Record', folder)}: {'; '.join(about)}.\n`{environment['command']}`"


def _of_points(source: Source) -> str:
    found = points(source.record)
    if not found:  # a run of peers alone
        return _of_cases(source.record)
    others = {name: PEERS.get(name, name) for m in found.values() for name in m.step}
    others.pop("fdjax", None)
    lines = [(*_OURS, "Spread of the step", *others.values())]
    for point, measured in found.items():
        spread = measured.step["fdjax"].timing["spread_us"]
        ratios = (_ratio(name, measured) for name in others)
        lines.append((*_own(point, measured), f"{spread:.0f} µs", *ratios))
    return markdown(lines)


def _of_cases(record: Record) -> str:
    names = list(dict.fromkeys(row.implementation for row in record.rows))
    cases: dict[str, dict[str, str]] = {}
    for row in record.rows:
        text = f"{row.timing['median_us']:.1f} µs" if row.timing else "-"
        cases.setdefault(row.case, {})[row.implementation] = text
    lines = [("Case", *names)]
    lines += [(case, *(cells.get(name, "") for name in names)) for case, cells in cases.items()]
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is the header."""
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def ms(row: Measurement) -> float:
    """The median in milliseconds."""
    return row.timing["median_us"] / 1e3


def put(text: str, name: str, content: str) -> str:
    """Replace the text between the two marks of a name.

    Raises:
      ValueError: the text does not have these marks once.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"table: text must have {begin.strip()} and {end} once")
    before, rest = text.split(begin)
    return f"{before}{begin}{content}\n{end}{rest.split(end)[1]}"


def updated() -> dict[Path, str]:
    """The up-to-date text of each file that contains tables."""
    readme, full = ROOT / "README.md", ROOT / "docs" / "measurements.md"
    text = put(readme.read_text(encoding="utf-8"), "headline", readme_table())
    text = put(text, "unified maximum", unified_maximum_sentence())
    tables = put(full.read_text(encoding="utf-8"), "records", measurements(full.parent))
    return {readme: text, full: tables}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring README.md and docs up to date")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.write:
        for path, text in updated().items():
            path.write_text(text, encoding="utf-8")
    else:
        print(readme_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
