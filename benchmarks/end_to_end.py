"""First token and decode step of a model beside its peers: `python -m benchmarks.end_to_end`.

Random weights of the real shapes through `LM.generate`, greedy, at every batch and prompt length of
a grid, with every plan: as loaded, XLA alone, XLA and cuDNN, and as loaded but for one kind of
kernel. transformers, eager and with a static cache and torch.compile, in the same process. What
does not fit is left out and said, what is wrong gets no time.
"""

import argparse
import dataclasses
import gc
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import peers
from fdjax.bench.record import Record, Row, emit, environment, write

# Implementations named beyond the measured choice, by op.
PLANS: dict[str, dict[str, str]] = {
    "fdjax": {},
    "xla": dict.fromkeys(("matmul", "decode_attention", "prefill_attention"), "xla"),
    "cudnn": {"matmul": "xla", "decode_attention": "cudnn", "prefill_attention": "cudnn"},
    "without flat GEMM": {"matmul": "xla"},
    "without unified maximum": {"decode_attention": "cudnn", "prefill_attention": "cudnn"},
}
GRID = tuple((b, p) for b in (1, 2, 4, 8, 16, 32, 64) for p in (128, 1024, 4096, 16384))

Point = tuple[int, int]


def fdjax_rows(
    model, params, plan_names: Sequence[str], points: Sequence[Point], new_tokens: int, runs: int
) -> Iterator[tuple[list[Row], dict[str, float]]]:
    """Rows and costs of each plan and point."""
    from fdjax.bench.model import model_rows
    from fdjax.lm import LM
    from fdjax.memory import free_memory_bytes, plan_memory, weight_bytes
    from fdjax.models import describe
    from fdjax.pallas_kernels.plan import Plan

    memory_bytes = free_memory_bytes()
    if memory_bytes is not None:
        memory_bytes += weight_bytes(model)
    for name in plan_names:
        plan = dataclasses.replace(Plan.for_device(), named=tuple(PLANS[name].items()))
        planned = describe(model.config, dtype=model.dtype, plan=plan)
        for batch, prompt in points:
            need = plan_memory(
                planned, batch=batch, max_len=prompt + new_tokens, prompt_tokens=prompt
            )
            try:
                need.check(f"{name} B{batch} P{prompt}", memory_bytes)
            except MemoryError as error:
                say(str(error))
                continue
            beyond = prompt + new_tokens > model.config.max_position_embeddings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # quality is no matter of random weights
                lm = LM(
                    planned,
                    params,
                    max_len=prompt + new_tokens if beyond else None,
                    memory_bytes=memory_bytes,
                )
            say(f"{name} B{batch} P{prompt}")
            try:
                yield model_rows(
                    lm,
                    batch=batch,
                    prompt_tokens=prompt,
                    new_tokens=new_tokens,
                    runs=runs,
                    implementation=name,
                )
            except Exception as error:  # one broken plan must not cost the run its record
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                row = _failed("decode step", name, batch, prompt, reason)
                if isinstance(error, NotImplementedError):
                    row.ok = None
                yield [row], {}
            # The cache goes before the next one comes.
            del lm
            gc.collect()


def peer_rows(
    config: Path, names: Sequence[str], points: Sequence[Point], **options
) -> Iterator[tuple[list[Row], dict[str, float]]]:
    """Rows and costs of each peer and point."""
    from fdjax.bench.timing import Timing

    for name, batch, prompt, samples in peers.measure(config, points, names, **options):
        say(f"{name} B{batch} P{prompt}")
        if samples.problem:
            yield [_failed("decode step", name, batch, prompt, samples.problem)], {}
            continue
        rows = []
        for case, us in (("first token", samples.first_us), ("decode step", samples.step_us)):
            timing = dataclasses.asdict(Timing.from_samples([us], "host"))
            rows.append(Row(f"{case} B{batch} P{prompt}", name, True, timing=timing))
        cost = f"seconds of the first call, B{batch} P{prompt} {name}"
        yield rows, {cost: samples.first_call_seconds}


def _failed(case: str, name: str, batch: int, prompt: int, reason: str) -> Row:
    return Row(f"{case} B{batch} P{prompt}", name, False, reason=reason)


def fill_traffic(rows: Sequence[Row]) -> None:
    """Peers have the bytes and FLOPs of our rows: what each case cannot avoid."""
    known = {row.case: row for row in rows if row.bytes or row.flops}
    for row in rows:
        if row.case in known:
            row.bytes, row.flops = known[row.case].bytes, known[row.case].flops


def summary(rows: Sequence[Row]) -> str:
    """Milliseconds, a line for each case and a column for each implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    width = max(map(len, names), default=0) + 2
    lines = [f"{'ms':28}" + "".join(f"{name:>{width}}" for name in names)]
    for case in dict.fromkeys(row.case for row in rows):
        ms = {
            r.implementation: r.timing["median_us"] / 1e3 for r in rows if r.case == case and r.ok
        }
        cells = (f"{ms[name]:.2f}" if name in ms else "-" for name in names)
        lines.append(f"{case:28}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)


def parse_point(text: str) -> Point:
    """A batch and a prompt length, from "8x1024"."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be BATCHxPROMPT such as 8x1024, got {text!r}")
    return int(found[1]), int(found[2])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--points", nargs="+", type=parse_point, default=GRID, metavar="BxP")
    parser.add_argument("--plans", nargs="*", choices=PLANS, default=("fdjax", "xla", "cudnn"))
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=())
    parser.add_argument(
        "--peer-points", nargs="+", type=parse_point, metavar="BxP", help="default: --points"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", help="write the record to this file as well")
    parser.add_argument("--commit", help="commit to record where git cannot be asked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.peers:
        # torch and JAX share the card.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from fdjax.bench.ceiling import measure_ceiling
    from fdjax.memory import plan_memory
    from fdjax.models import describe, parse_config, random_params

    model = describe(parse_config(json.loads(args.config.read_text())), dtype=args.dtype)
    ceiling_bytes = 2**24 if model.plan.compute_capability is None else 2**30
    before = measure_ceiling(ceiling_bytes, matmul_size=0)
    say(f"ceiling {before['read_gb_per_s']:.0f} GB/s")
    config = {
        "model": args.config.name,
        "family": model.config.family,
        "parameters": model.parameter_count,
        "dtype": args.dtype,
        "new_tokens": args.new_tokens,
        "plan": dataclasses.asdict(model.plan) | {"table": len(model.plan.table)},
    }
    record = Record(environment(args.commit), config, {"before": before})
    options = {"new_tokens": args.new_tokens, "runs": args.runs}

    def take(measured) -> None:
        for rows, costs in measured:
            record.rows += rows
            record.costs |= costs
            if args.output:  # a run that is cut off keeps what it has
                write(record, args.output)

    if args.peers:
        problem = peers.missing()
        if problem:
            say(f"no peers: {problem}")
        else:
            points = args.peer_points or args.points
            take(peer_rows(args.config, args.peers, points, dtype=args.dtype, **options))
    # Growing, so that what one point leaves is less than what the next one takes.
    points = sorted(
        args.points, key=lambda p: plan_memory(model, batch=p[0], max_len=p[1]).total_bytes
    )
    if args.plans:
        take(fdjax_rows(model, random_params(model), args.plans, points, **options))
    fill_traffic(record.rows)
    record.finish(measure_ceiling(ceiling_bytes, matmul_size=0, kernels=[before["read_kernel"]]))
    print(summary(record.rows))
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
