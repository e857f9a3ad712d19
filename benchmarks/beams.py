"""Beam search compared with one beam and with transformers: `python -m benchmarks.beams [CONFIG]`.

A model with random weights searches. A case is written BxP+NxW: B prompts of P tokens, N new
tokens, W beams; one beam decodes greedily. Each plan that attends to beams runs each case. The
peer is `generate` of transformers with the same number of beams, in a process of its own. With
`--shared`, prompts begin with the same tokens, which then are in the prefix cache.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import read_config
from benchmarks.peers import random_transformer, versions
from benchmarks.serving import CONFIG
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.bench.timing import Timing
from fdjax.system.files import output_file

# Plan → implementation that is named for `decode_attention` of beams.
PLANS = {"fdjax": None, "xla": "xla", "segments": "mosaic_gpu"}
# A long prompt with one beam and with several; and several prompts beside rows that read the same
# bytes, and beside rows of the same length that share nothing.
DEFAULT_CASES = ("1x4096+256x1", "1x4096+256x4", "8x1024+512x4", "32x384+256x1", "32x960+640x1")
_NO_MEMORY = "out of memory"


class Search(NamedTuple):
    """Prompts, tokens of a prompt, new tokens of an answer, and beams."""

    prompts: int
    tokens: int
    new: int
    beams: int

    @classmethod
    def parse(cls, text: str) -> "Search":
        """Read BxP+NxW."""
        if not (match := re.fullmatch(r"(\d+)x(\d+)\+(\d+)x(\d+)", text)):
            raise argparse.ArgumentTypeError(f"a case is BxP+NxW, got {text!r}")
        return cls(*map(int, match.groups()))

    def __str__(self):
        return f"B{self.prompts} P{self.tokens} N{self.new} W{self.beams}"

    def draw(self, vocabulary: int, seed: int, shared: int = 0) -> list[list[int]]:
        """Random prompts, of which the first `shared` tokens are equal."""
        shape = (self.prompts, self.tokens)
        prompts = np.random.default_rng((seed, *self)).integers(3, vocabulary, shape)
        prompts[:, :shared] = prompts[0, :shared]
        return prompts.tolist()


def measure(
    config: dict[str, Any], args: argparse.Namespace
) -> Iterator[tuple[Search, str, dict[str, list[float]], str | None]]:
    """Measure each case with each plan.

    Yields:
      (case, plan, times in us of a `call`, and of its `first token` and `decode step`, problem).
    """
    import jax

    from fdjax.lm import LM
    from fdjax.models import describe, parse_config
    from fdjax.pallas_kernels.plan import Plan
    from fdjax.system.device_memory import free_memory_bytes
    from fdjax.weights.stacked import random_stacked_params

    longest = max(case.tokens + case.new for case in args.cases)
    context = max(config["max_position_embeddings"], longest)
    described = parse_config(config | {"max_position_embeddings": context})
    device = Plan.for_device()
    model = describe(described, dtype=args.dtype, plan=device)
    # By default, a cache takes as much memory as the weights: too little for 32 long rows.
    memory_bytes = free_memory_bytes()
    params, _stacks = random_stacked_params(model)
    for plan in args.plans:
        named = () if PLANS[plan] is None else (("decode_attention", PLANS[plan]),)
        model = describe(described, dtype=args.dtype, plan=dataclasses.replace(device, named=named))
        for case in args.cases:
            if case.beams == 1 and plan != args.plans[0]:
                continue
            rows = case.prompts * case.beams
            lm = LM(model, params, max_batch=rows, memory_bytes=memory_bytes)
            options = {"max_new_tokens": case.new, "eos_token_id": None, "do_sample": False}
            times: dict[str, list[float]] = {"call": [], "first token": [], "decode step": []}
            problem = None
            try:
                for run in range(args.runs + 2):  # the first call compiles, the second warms up
                    prompts = case.draw(described.vocab_size, run, args.shared)
                    if args.shared:
                        beginning = prompts[0][: args.shared]
                        lm.generate(beginning, **options | {"max_new_tokens": 1})
                    began = time.perf_counter()
                    result = lm.generate(prompts, num_beams=case.beams, **options)
                    seconds = time.perf_counter() - began
                    if any(len(tokens) != case.new for tokens in result.tokens):
                        raise RuntimeError("a search ended early")
                    if run > 1:
                        times["call"].append(1e6 * seconds)
                        times["first token"].append(1e6 * result.stats.prefill_seconds)
                        times["decode step"].append(1e3 * ms_with_all_rows(result.stats, case.new))
            except Exception as error:  # one broken plan must not lose the record of the run
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            yield case, plan, times, problem
            lm.release()
            del lm
            jax.clear_caches()


def ms_with_all_rows(stats: Any, new: int) -> float:
    """Milliseconds of a decode step while all rows run.

    Where the last rows wait for memory or for their prompts, the first ones begin and end some
    steps earlier.

    Args:
      stats: the statistics of a call.
      new: new tokens of each row.

    Raises:
      RuntimeError: there is no such step.
    """
    alone = stats.decode_steps - (new - 1)
    begin, end = alone, stats.decode_steps - alone
    if begin >= end:
        raise RuntimeError(
            f"the rows never run together: they need more than {new} new tokens, or memory"
        )
    at, ms = 0, 0.0
    for steps, each in zip(stats.chunk_steps, stats.chunk_ms_per_token, strict=True):
        ms += each * max(0, min(at + steps, end) - max(at, begin))
        at += steps
    return ms / (end - begin)


def search_by_transformers(config: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    """Time `generate` of transformers.

    Yields:
      For each case a JSON line (case, times as in `measure`, problem). A call for one token gives
      the time of the first, and its difference to the whole call that of the others.
    """
    import torch

    model = random_transformer(config, args.dtype, "cuda")

    def seconds(case: Search, run: int, new: int) -> float:
        ids = torch.tensor(case.draw(config["vocab_size"], run, args.shared), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=case.beams,
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for case in args.peer_cases:
        times: dict[str, list[float]] = {"call": [], "first token": [], "decode step": []}
        problem = None
        try:
            for run in range(args.runs + 1):
                call, first = seconds(case, run, case.new), seconds(case, run, 1)
                if run:
                    times["call"].append(1e6 * call)
                    times["first token"].append(1e6 * first)
                    times["decode step"].append(1e6 * (call - first) / (case.new - 1))
        except torch.cuda.OutOfMemoryError:
            problem = _NO_MEMORY
            torch.cuda.empty_cache()
        yield json.dumps([case, times, problem])


def peer(
    args: argparse.Namespace, argv: Sequence[str]
) -> Iterator[tuple[Search, dict[str, list[float]], str | None]]:
    """Run transformers in a process of its own, because it needs the GPU's memory."""
    command = [sys.executable, "-m", "benchmarks.beams", *argv, "--as-peer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            case, times, problem = json.loads(line)
            yield Search(*case), times, problem
    if process.returncode:
        raise RuntimeError(f"the process of the peer ended with {process.returncode}")


def rows_of(
    case: Search, name: str, times: dict[str, list[float]], problem: str | None
) -> list[Measurement]:
    """The rows of a record."""
    if problem is not None:
        ok = None if problem == _NO_MEMORY else False
        return [Measurement(f"call {case}", name, ok=ok, reason=problem)]
    return [
        Measurement(
            f"{what} {case}",
            name,
            ok=True,
            timing=dataclasses.asdict(Timing.from_samples([samples], "host")),
        )
        for what, samples in times.items()
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json; default: Llama 2 7B")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=Search.parse,
        metavar="BxP+NxW",
        default=[Search.parse(text) for text in DEFAULT_CASES],
    )
    parser.add_argument("--plans", nargs="*", choices=PLANS, default=("fdjax", "segments"))
    parser.add_argument(
        "--peer-cases",
        nargs="+",
        type=Search.parse,
        metavar="BxP+NxW",
        default=(),
        help="cases that transformers runs",
    )
    parser.add_argument(
        "--shared", type=int, default=0, metavar="TOKENS", help="that all prompts begin with"
    )
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=3, help="timed calls")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and print the record as the last line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(argv)
    config = CONFIG if args.config is None else read_config(args.config)
    if args.as_peer:
        for line in search_by_transformers(config, args):
            print(line, flush=True)
        return 0
    rows = []
    if args.peer_cases:
        for case, times, problem in peer(args, argv):
            rows += rows_of(case, "transformers", times, problem)
    ceiling = {"before": measure_ceiling(matmul_size=0)} if args.plans else {}
    name = "llama-2-7b" if args.config is None else args.config.name
    described = {"name": name, "config": config, "dtype": args.dtype, "peers": versions()}
    record = Record(environment(args.commit), described, ceiling)
    record.rows += rows
    for found in measure(config, args):
        record.rows += rows_of(*found)
        case, plan, times, problem = found
        step = problem or f"{np.median(times['decode step']) / 1e3:.3f} ms a step"
        print(f"{case} {plan}: {step}", file=sys.stderr, flush=True)
        if args.output:  # a run that is cut off keeps its finished rows
            write(record.so_far(), args.output)
    if ceiling:
        record.finish(measure_ceiling(matmul_size=0, kernels=[ceiling["before"]["read_kernel"]]))
    print(record.table())
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
