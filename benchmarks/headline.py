"""Measures the headline table on the default path: `python -m benchmarks.headline`.

A part measures one model at one batch and prompt length, in one process of `benchmarks.end_to_end`:
the plan that `load` chooses, XLA's products with cuDNN's attention, and the peers in PyTorch. Each
part writes a record. A part is skipped if its record is complete and from the same commit. So
repeating an interrupted call resumes it. At the end, tables and figures are updated.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.arguments import read_config
from benchmarks.end_to_end import PLANS, Point, parse_point
from benchmarks.peers import PEERS
from benchmarks.table import HEADLINE, RESULTS, folder_of
from fdjax.bench import record as records

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "fixtures" / "hf" / "configs"


class Part(NamedTuple):
    """One model at one point, measured by one process."""

    name: str
    config: Path
    point: Point

    def __str__(self) -> str:
        return f"{self.name}_{self.point[0]}x{self.point[1]}"


LLAMA2_7B, LLAMA3_8B = CONFIGS / "llama-2-7b.old.json", CONFIGS / "llama-3-8b.old.json"
PARTS = (
    *(Part("llama2_7b", LLAMA2_7B, point) for point in ((1, 1024), (8, 1024))),
    *(Part("llama3_8b", LLAMA3_8B, point) for point in ((1, 1024), (8, 1024))),
)
PLAN_NAMES = ("fdjax", "cudnn")
PEER_NAMES = ("hf static, compiled", "gpt-fast", "gpt-fast, by block")
# Expected seconds of the first part; later ones are expected to take as long as the longest.
_SECONDS_OF_A_PART = 150.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="a config.json in place of the two models")
    parser.add_argument("--models", nargs="+", choices=sorted({part.name for part in PARTS}))
    parser.add_argument("--points", nargs="+", type=parse_point, metavar="BxP", help="only these")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLAN_NAMES)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEER_NAMES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="for this call; a part begins only if the longest one so far would fit",
    )
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=Path, help="folder; default: that of the device's records")
    parser.add_argument("--list", action="store_true", help="only say what is measured already")
    parser.add_argument("--no-draw", action="store_true", help="leave tables and figures alone")
    return parser.parse_args(argv)


def parts_of(args: argparse.Namespace) -> list[Part]:
    """The requested parts, in the order in which they are measured."""
    if args.config:
        read_config(args.config)
        points = args.points or [part.point for part in PARTS[:2]]
        return [Part(args.config.stem, args.config, point) for point in points]
    wanted = [part for part in PARTS if not args.models or part.name in args.models]
    return [part for part in wanted if not args.points or part.point in args.points]


def command(part: Part, args: argparse.Namespace, output: Path) -> list[str]:
    """Module and arguments that measure a part."""
    options = {
        "--points": ["{}x{}".format(*part.point)],
        "--plans": args.plans,
        "--peers": args.peers,
        "--dtype": [args.dtype],
        "--new-tokens": [str(args.new_tokens)],
        "--runs": [str(args.runs)],
        "--check": ["tokens"],
        "--output": [str(output)],
    }
    if args.commit:
        options["--commit"] = [args.commit]
    words = [word for name, values in options.items() for word in (name, *values)]
    return ["benchmarks.end_to_end", str(part.config), *words]


def unmeasured(part: Part, args: argparse.Namespace, output: Path, commit: str) -> str | None:
    """Why a part must be measured, or None if its record can be used."""
    if not output.exists():
        return "no record"
    record = records.read(output)
    found, after = record.environment["commit"], record.ceiling["after"]
    if found != commit:
        return f"record of commit {found}"
    if after is None:
        return "record of a run that was cut off"
    if after["trusted"] is False:
        return f"ceiling not trusted: {after['reason']}"
    if not any(row.timing for row in record.rows if row.implementation == "fdjax"):
        return "no time of fdjax"
    # A peer that failed has a row with the reason.
    missing = {*args.plans, *args.peers} - {row.implementation for row in record.rows}
    return f"no row of {', '.join(sorted(missing))}" if missing else None


def measure(part: Part, args: argparse.Namespace, output: Path, seconds: float) -> None:
    """Measure a part in its own process, which is stopped after `seconds`."""
    words = command(part, args, output)
    say(f"python -m {shlex.join(words)}")
    try:
        subprocess.run([sys.executable, "-m", *words], cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        say(f"{part}: ended after {seconds:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all parts are measured, 1 if one failed, 3 if time ran out: call again."""
    began = time.monotonic()
    args = parse_args(argv)
    commit = args.commit or _asked("git", "rev-parse", "HEAD")
    # This process must not start JAX on the GPU: it would take the memory that parts need.
    folder = args.output or RESULTS / folder_of(_asked(sys.executable, "-c", _DEVICE))
    longest, failed, waiting = _SECONDS_OF_A_PART, [], []
    for part in parts_of(args):
        output = folder / f"{HEADLINE}_{part}.json"
        why = unmeasured(part, args, output, commit)
        print(f"{part}: {why or 'measured'}", flush=True)
        if args.list or why is None:
            continue
        start = time.monotonic()
        left = began + args.seconds - start
        if left < longest:
            waiting.append(part)
            continue
        measure(part, args, output, left)
        longest = max(longest, time.monotonic() - start)
        if why := unmeasured(part, args, output, commit):
            failed.append(f"{part} ({why})")
    if args.list:
        return 0
    if not args.no_draw:
        draw(folder)
    for what, parts in (("failed", failed), ("time is up, call again for", waiting)):
        if parts:
            print(f"{what}: {', '.join(map(str, parts))}")
    return 1 if failed else 3 if waiting else 0


_DEVICE = "import jax; print(jax.devices()[0].device_kind)"


def _asked(*command: str) -> str:
    """The last line that a command prints.

    Raises:
      SystemExit: it fails.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"headline: {shlex.join(command)} failed: name --commit and --output")
    return done.stdout.strip().splitlines()[-1]


def draw(folder: Path) -> None:
    """Update all tables, and the figures of the records in a folder."""
    figures = ["--results", str(folder), "--output", str(folder / "figures")]
    for module, *options in (("benchmarks.table", "--write"), ("benchmarks.plots", *figures)):
        if subprocess.run([sys.executable, "-m", module, *options], cwd=ROOT).returncode:
            say(f"{module} failed: run it where its libraries are")


if __name__ == "__main__":
    sys.exit(main())
