"""Many steps and requests on several GPUs: `python -m benchmarks.tensor_parallel_soak`.

Looks for what a short run does not show: a step that never ends, GPUs that disagree, results that
change. Each point repeats the same call until its share of the steps is done. All calls must give
the tokens and log-probabilities of the first, and all GPUs must hold the same tokens. Then the
scheduler runs requests of many lengths. Run it under `timeout`, because a step that hangs says
nothing.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import read_config
from benchmarks.end_to_end import parse_point
from benchmarks.request_mix import requests
from benchmarks.tensor_parallel import CONFIG, SUMS, random_lm, with_sums
from fdjax.bench.record import environment
from fdjax.lm import LM
from fdjax.models import parse_config
from fdjax.pallas_kernels.plan import Plan
from fdjax.system.files import output_file, write_whole

# Lengths of requests are this part of those in `request_mix`: about 40 tokens, 17 of the answer.
_SCALE = 0.1
_CALLS_OF_A_REPORT = 10


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json; default: Llama 2 7B")
    parser.add_argument("--devices", type=int, metavar="N", default=2, help="number of GPUs")
    parser.add_argument(
        "--points",
        nargs="+",
        type=parse_point,
        default=[(1, 1024), (8, 1024)],
        metavar="BxP",
        help="batch and prompt tokens; each gets the same share of the steps",
    )
    parser.add_argument("--steps", type=int, default=100_000, help="decode steps of all points")
    parser.add_argument("--new-tokens", type=int, default=1000, help="decode steps of a call")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--max-batch", type=int, default=64, help="rows that run at once")
    parser.add_argument("--sums", choices=SUMS, help="how to sum over GPUs; default: the plan's")
    parser.add_argument("--table", type=Path, help="a table of `fdjax tune`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def repeat(lm: LM, batch: int, prompt: int, steps: int, new_tokens: int) -> dict[str, Any]:
    """Repeat one call until its steps are done.

    Raises:
      AssertionError: a call gave another result, or GPUs disagree.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, lm.config.vocab_size, (batch, prompt)).tolist()
    options = {"max_new_tokens": new_tokens, "eos_token_id": None, "return_logprobs": True}
    calls, first, began = math.ceil(steps / new_tokens), None, time.perf_counter()
    for call in range(calls):
        result = lm.generate(prompts, do_sample=False, **options)
        first = first or result
        for ours, theirs in zip(result.logprobs, first.logprobs, strict=True):
            other = np.flatnonzero(np.not_equal(ours, theirs))
            assert not other.size, f"{batch}x{prompt}: call {call} differs from step {other[0]} on"
        assert result.tokens == first.tokens
        check_ranks(lm)
        if (call + 1) % _CALLS_OF_A_REPORT == 0 or call + 1 == calls:
            report(f"{batch}x{prompt}: {(call + 1) * new_tokens} steps", began)
    seconds = time.perf_counter() - began
    return {
        "point": f"{batch}x{prompt}",
        "one_launch": lm.engine.stacks(batch, prompt + new_tokens),
        "calls": calls,
        "steps": calls * new_tokens,
        "seconds": round(seconds, 1),
    }


def serve(lm: LM, count: int) -> dict[str, Any]:
    """Run many requests through the scheduler.

    Raises:
      AssertionError: a request failed, is missing or came twice, or GPUs disagree.
    """
    prompts, new = requests(count, lm.config.vocab_size, _SCALE)
    began, seen = time.perf_counter(), set()
    options = {"max_new_tokens": new, "eos_token_id": None, "do_sample": False}
    for answer in lm.generate_iter(prompts, **options):
        assert answer.error is None, f"request {answer.index}: {answer.error}"
        assert answer.index not in seen and len(answer.tokens) == new[answer.index]
        seen.add(answer.index)
        if len(seen) % 1000 == 0:
            report(f"{len(seen)} requests", began)
    assert len(seen) == count
    check_ranks(lm)
    return {
        "requests": count,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(new),
        "seconds": round(time.perf_counter() - began, 1),
    }


def check_ranks(lm: LM) -> None:
    """Raise AssertionError unless all GPUs hold the same tokens and lengths of rows."""
    state = lm.engine.reusable.state
    for array in (state.ids, state.progress):
        first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert others, "there is one GPU only"
        assert all(np.array_equal(first, other) for other in others), "GPUs disagree"


def report(what: str, began: float) -> None:
    print(f"{what} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    config = read_config(args.config) if args.config else CONFIG
    plan = Plan.for_device(table=args.table)
    plan = with_sums(plan, parse_config(config), args.devices, args.sums)
    # A prompt that is in the cache is computed by other kernels, and rounded elsewhere.
    options = {"max_batch": args.max_batch, "prefix_cache": False}
    lm, _stacks = random_lm(config, plan, args.devices, args.dtype, **options)
    record = {
        "environment": environment(args.commit),
        "config": {"model": config, "dtype": args.dtype, "devices": args.devices}
        | {"sums": args.sums, "new_tokens": args.new_tokens, "max_batch": args.max_batch},
        "points": [],
    }
    for batch, prompt in args.points:
        steps = math.ceil(args.steps / len(args.points))
        record["points"].append(repeat(lm, batch, prompt, steps, args.new_tokens))
        write(record, args.output)
    if args.requests:
        record["scheduler"] = serve(lm, args.requests)
        write(record, args.output)
    print(json.dumps(record["points"] + [record.get("scheduler")]))
    return 0


def write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_whole(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
