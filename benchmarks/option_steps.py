"""Decode steps with sampling options: `python -m benchmarks.option_steps [CONFIG]`.

A model with random weights answers random prompts with each set of options, with the kernel that
finds the limits of top-k and top-p, if the device has one, and with XLA. A step is the time of a
call less that of a call for one token, divided by the number of tokens after the first. Seeds are
the same, so both should draw the same tokens.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.arguments import read_config
from benchmarks.end_to_end import Point, parse_point
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.bench.timing import Timing
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.plan import Plan
from fdjax.system.files import output_file

CONFIG = Path(__file__).parents[1] / "tests" / "fixtures" / "hf" / "configs" / "llama-3-8b.new.json"
_DRAWN = {"do_sample": True, "temperature": 0.8, "seed": 0}
OPTIONS = {
    "greedy": {"do_sample": False},
    "temperature": _DRAWN,
    "top-p": _DRAWN | {"top_p": 0.9},
    "top-k and top-p": _DRAWN | {"top_k": 50, "top_p": 0.9},
    "repetition penalty": _DRAWN | {"top_k": 50, "repetition_penalty": 1.1},
}
PLANS = "fdjax", "limits by XLA"
_COMPARED = 4  # first tokens of each answer
_LEAST_EQUAL = 0.9  # of answers: limits are sums, which round differently


def measured(lm: LM, prompts: list[list[int]], new_tokens: int, runs: int, **options):
    """(tokens of the answers, the time of a step)."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        lm.generate(prompts, max_new_tokens=count, eos_token_id=None, **options)
        return time.perf_counter() - began

    tokens = lm.generate(prompts, max_new_tokens=new_tokens, eos_token_id=None, **options).tokens
    for _ in range(2):  # compiles, and captures CUDA graphs
        seconds(1), seconds(new_tokens)
    first = statistics.median(seconds(1) for _ in range(runs))
    steps = [1e6 * (seconds(new_tokens) - first) / (new_tokens - 1) for _ in range(runs)]
    return tokens, Timing.from_samples([steps], "host")


def rows_of(lms: dict[str, LM], prompts: list[list[int]], point: Point, args) -> list[Measurement]:
    """The measurements of a point."""
    rows = []
    for name, options in OPTIONS.items():
        found = {}
        for plan, lm in lms.items():
            found[plan], timing = measured(lm, prompts, args.new_tokens, args.runs, **options)
            starts = [
                [answer[:_COMPARED] for answer in answers]
                for answers in (found[plan], found["fdjax"])
            ]
            equal = np.mean([a == b for a, b in zip(*starts, strict=True)])
            case = "decode step B{} P{}, {}".format(*point, name)
            row = Measurement(
                case, plan, bool(equal >= _LEAST_EQUAL), timing=dataclasses.asdict(timing)
            )
            row.notes.append(f"{equal:.1%} of answers begin alike")
            print(f"{case}, {plan}: {timing.median_us:.0f} us, {row.notes[0]}", file=sys.stderr)
            rows.append(row)
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG, help="a config.json")
    parser.add_argument(
        "--points",
        nargs="+",
        type=parse_point,
        default=[(1, 1024), (16, 128), (64, 128)],
        metavar="BxP",
    )
    parser.add_argument("--layers", type=int, help="use only the first N layers")
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    data = read_config(args.config)
    if args.layers:
        data["num_hidden_layers"] = args.layers
    config, plan = parse_config(data), Plan.for_device()
    plans = dict(zip(PLANS, (plan, plan.with_xla("truncate")), strict=True))
    if plan.choose("truncate", b=1, v=config.vocab_size).implementation == "xla":
        del plans[PLANS[1]]
    models = {n: describe(config, dtype="bfloat16", plan=plan) for n, plan in plans.items()}
    params = random_params(models["fdjax"])
    record = Record(environment(args.commit), {"model": data, "new_tokens": args.new_tokens}, {})
    rng = np.random.default_rng(0)
    for batch, length in args.points:
        prompts = rng.integers(3, config.vocab_size, (batch, length)).tolist()
        lms = {name: LM(model, params) for name, model in models.items()}
        record.rows += rows_of(lms, prompts, (batch, length), args)
        del lms
        if args.output:
            write(record.so_far(), args.output)
    emit(record.finish(), args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
