"""First token and decode step compared with peers: `python -m benchmarks.end_to_end`.

A model with random weights in the real shapes runs `LM.generate`, greedy, at every batch and prompt
length of a grid. It runs with several plans: the default, XLA alone, XLA and cuDNN, and the default
without one kind of kernel or without fusion. Peers in PyTorch run first. A point that does not fit
into memory is skipped with a message. A wrong result gets no time.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.arguments import read_config, rows_of
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.system.files import output_file

# Ops that multiply by weights.
_LINEAR = ("matmul", "linear_chain", "decode_layers")

# For each plan: op → the implementation that is forced by name. Plans without a kind of kernel run
# XLA instead. "without unified maximum" and "without fusion" keep the kernels but change how they
# run. One launch has a running maximum in any case, so "without unified maximum" runs layer by
# layer and is to be compared with "without launch". Plans with "int8 cache" have another cache.
PLANS: dict[str, dict[str, str]] = {
    "fdjax": {},
    "xla": dict.fromkeys((*_LINEAR, "decode_attention", "prefill_attention"), "xla"),
    "cudnn": dict.fromkeys(_LINEAR, "xla")
    | {"decode_attention": "cudnn", "prefill_attention": "cudnn"},
    "without flat GEMM": dict.fromkeys(_LINEAR, "xla"),
    "without launch": {"decode_layers": "xla"},
    "without chain": dict.fromkeys(("linear_chain", "decode_layers"), "xla"),
    "without unified maximum": {"decode_layers": "xla"},
    "without attention": dict.fromkeys(
        ("decode_layers", "decode_attention", "prefill_attention"), "xla"
    ),
    "without fusion": dict.fromkeys(("linear_chain", "decode_layers"), "xla"),
    "int8 cache": {},
    "int8 cache without launch": {"decode_layers": "xla"},
}
BREAKDOWN = ("fdjax", *(name for name in PLANS if name.startswith("without")))
GRID = tuple((b, p) for b in (1, 2, 4, 8, 16, 32, 64) for p in (128, 1024, 4096, 16384))
# If the ceiling moves by more than this, the times are not trusted either.
CEILING_TOLERANCE = 0.01

Point = tuple[int, int]


def fdjax_rows(
    model,
    params,
    plan_names: Sequence[str],
    points: Sequence[Point],
    *,
    memory_bytes: int | None,
    new_tokens: int,
    ahead=None,
    until: float = math.inf,
    **options,
) -> Iterator[tuple[list[Measurement], dict[str, float]]]:
    """Measure the rows and costs of each point and plan.

    Args:
      model, params: the model; all plans share its weights.
      plan_names: keys of `PLANS`.
      points: (batch, prompt tokens).
      memory_bytes: limit for weights, cache and workspace, or None.
      new_tokens: new tokens per prompt.
      ahead: a `Compiler` or `Executables` of `benchmarks.ahead`, or None.
      until: deadline on the clock `time.monotonic`; no measurement begins after it.
      **options: options of `model_rows`.
    """
    from benchmarks.ahead import Compiler
    from benchmarks.unfused import unfused
    from fdjax.bench.model import model_rows
    from fdjax.engine.engine import Engine
    from fdjax.engine.memory import plan_memory
    from fdjax.lm import LM

    models = {name: planned_model(model, name) for name in plan_names}
    for batch, prompt in points:
        for name, planned in models.items():
            where = f"{name} B{batch} P{prompt}"
            if time.monotonic() > until:
                say(f"no time left for {where}")
                continue
            if isinstance(ahead, Compiler) and not ahead.claim(where):
                continue
            need = plan_memory(
                planned, batch=batch, max_len=prompt + new_tokens, prompt_tokens=prompt
            )
            try:
                need.check(where, memory_bytes)
            except MemoryError as error:
                say(str(error))
                continue
            beyond = prompt + new_tokens > model.config.max_position_embeddings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # random weights have no quality to compare
                lm = LM(
                    planned,
                    params,
                    max_len=prompt + new_tokens if beyond else None,
                    memory_bytes=memory_bytes,
                    make_engine=Engine if ahead is None else ahead.engine(name),
                )
            if ahead is not None:
                options["logits"] = functools.partial(ahead.logits, plan=name)
            if isinstance(ahead, Compiler):
                options["experts"] = lambda lm, ids: None  # stand-ins have no texts
            say(where)
            fused = unfused() if name == "without fusion" else contextlib.nullcontext()
            try:
                with fused, _loads(ahead) as loads:
                    rows, costs = model_rows(
                        lm,
                        batch=batch,
                        prompt_tokens=prompt,
                        new_tokens=new_tokens,
                        implementation=name,
                        **options,
                    )
                yield rows, _with_loads_named(costs, len(loads))
            except Exception as error:  # one broken plan must not lose the record of the run
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                row = _failed("decode step", name, batch, prompt, reason)
                if isinstance(error, NotImplementedError):
                    row.ok = None
                yield [row], {}
            # Frees the cache before the next one is allocated.
            del lm
            gc.collect()


def planned_model(model, name: str):
    """The model with a plan of `PLANS`."""
    from fdjax.models import describe
    from fdjax.pallas_kernels.plan import Plan

    device = Plan.for_device()
    plan = dataclasses.replace(device, named=tuple(named(device, model, name).items()))
    config = model.config
    if name == "without unified maximum":
        running = (dataclasses.replace(spec, unified=False) for spec in config.attention)
        config = config.with_attention(running)
    kv_dtype = "int8" if name.startswith("int8 cache") else None
    return describe(config, dtype=model.dtype, plan=plan, kv_dtype=kv_dtype)


def named(device, model, name: str) -> dict[str, str]:
    """Implementations of a plan by op. XLA takes the place of cuDNN for features that it lacks."""
    features = model.cache_features.union(*(spec.features for spec in model.config.attention))
    found = dict(PLANS[name])
    for op, implementation in found.items():
        lacks = features.difference(
            *(i.can for i in device.implementations if (i.op, i.name) == (op, implementation))
        )
        if implementation == "cudnn" and lacks:
            say(f"{name}: XLA runs {op}, because cuDNN lacks {', '.join(sorted(lacks))}")
            found[op] = "xla"
    return found


def peer_rows(
    config: Path, names: Sequence[str], points: Sequence[Point], **options
) -> Iterator[tuple[list[Measurement], dict[str, float]]]:
    """Measure the rows and costs of each peer and point."""
    from fdjax.bench.timing import Timing

    for name, batch, prompt, samples in peers.run_apart(config, points, names, **options):
        say(f"{name} B{batch} P{prompt}")
        if samples.problem:
            yield [_failed("decode step", name, batch, prompt, samples.problem)], {}
            continue
        rows = []
        for case, us in (("first token", samples.first_us), ("decode step", samples.step_us)):
            timing = dataclasses.asdict(Timing.from_samples([us], "host"))
            rows.append(Measurement(f"{case} B{batch} P{prompt}", name, True, timing=timing))
        cost = f"seconds of the first call, B{batch} P{prompt} {name}"
        yield rows, {cost: samples.first_call_seconds}


def _failed(case: str, name: str, batch: int, prompt: int, reason: str) -> Measurement:
    return Measurement(f"{case} B{batch} P{prompt}", name, False, reason=reason)


def fill_traffic(rows: Sequence[Measurement]) -> None:
    """Copy bytes and FLOPs, the least that a case needs, from fdjax's rows to the peers' rows."""
    known = {row.case: row for row in rows if row.bytes or row.flops}
    for row in rows:
        if row.case in known:
            row.bytes, row.flops = known[row.case].bytes, known[row.case].flops


@contextlib.contextmanager
def _loads(ahead) -> Iterator[list[str]]:
    """Collect loads of programs within the context, by JAX from its cache or by `ahead`."""
    loads: list[str] = []

    def listen(event: str, **_) -> None:
        if event.endswith("/cache_hits"):
            loads.append(event)

    import jax

    jax.monitoring.register_event_listener(listen)
    before = getattr(ahead, "loaded", 0)
    try:
        yield loads
    finally:
        jax.monitoring.unregister_event_listener(listen)
        loads += ["ahead"] * (getattr(ahead, "loaded", 0) - before)


def _with_loads_named(costs: dict[str, float], loads: int) -> dict[str, float]:
    """Name the number of loaded programs in the keys of costs, if any were loaded."""
    if not loads:
        return costs
    loaded = f", {loads} programs loaded,"
    return {
        key.replace(",", loaded, 1) if key.startswith("seconds of") else key: cost
        for key, cost in costs.items()
    }


def summary(rows: Sequence[Measurement]) -> str:
    """A table of milliseconds, with a line per case, a column per implementation, and `ratios`."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    width = max([8, *map(len, names)]) + 2
    lines = [f"{'ms':28}" + "".join(f"{name:>{width}}" for name in names) + f"{'best / ours':>13}"]
    speed = ratios(rows)
    for case in dict.fromkeys(row.case for row in rows):
        ms = _milliseconds(rows, case)
        cells = (f"{ms[name]:.2f}" if name in ms else "-" for name in names)
        ratio = f"{speed[case]:13.3f}" if case in speed else ""
        lines.append(f"{case:28}" + "".join(f"{cell:>{width}}" for cell in cells) + ratio)
    for kind in ("first token", "decode step"):
        of_kind = {case: ratio for case, ratio in speed.items() if case.startswith(kind)}
        few = [ratio for case, ratio in of_kind.items() if int(case.split()[-2][1:]) <= 8]
        if few:
            mean = math.exp(sum(map(math.log, few)) / len(few))
            lines.append(f"{kind}: {mean:.3f} geometric mean of {len(few)} up to batch 8")
        if of_kind:
            least = min(of_kind, key=of_kind.__getitem__)
            lines.append(f"{kind}: {of_kind[least]:.3f} least of {len(of_kind)}, {least}")
    return "\n".join(lines)


def ratios(rows: Sequence[Measurement]) -> dict[str, float]:
    """For each case, the time of the best peer divided by fdjax's time."""
    found = {}
    for case in dict.fromkeys(row.case for row in rows):
        ms = _milliseconds(rows, case)
        others = [ms[name] for name in ms if name not in BREAKDOWN]
        if others and "fdjax" in ms:
            found[case] = min(others) / ms["fdjax"]
    return found


def _milliseconds(rows: Sequence[Measurement], case: str) -> dict[str, float]:
    return {r.implementation: r.timing["median_us"] / 1e3 for r in rows if r.case == case and r.ok}


def say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)


def parse_point(text: str) -> Point:
    """Parse a batch and a prompt length, such as "8x1024"."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be BATCHxPROMPT such as 8x1024, got {text!r}")
    return int(found[1]), int(found[2])


def weight_format(text: str) -> tuple[str, int]:
    """Parse a kind of quantised weights with its group, such as int4:128."""
    found = re.fullmatch(r"(int4|int8|fp8|w8a8|mxfp4)(?::(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"must be int4, int8 or fp8 with a group, w8a8 or mxfp4, got {text!r}"
        )
    return found[1], int(found[2] or 0)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", help="a config.json")
    parser.add_argument("--points", nargs="+", type=parse_point, default=GRID, metavar="BxP")
    parser.add_argument(
        "--plans",
        nargs="*",
        choices=[*PLANS, "breakdown"],
        default=("fdjax", "xla", "cudnn"),
        help=f"breakdown stands for {', '.join(BREAKDOWN)}",
    )
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=())
    parser.add_argument(
        "--peer-points", nargs="+", type=parse_point, metavar="BxP", help="default: --points"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--weights", type=weight_format, metavar="KIND:GROUP", help="such as int4:128 or int8"
    )
    parser.add_argument(
        "--head", type=weight_format, metavar="KIND:GROUP", help="of the head, if it is not tied"
    )
    parser.add_argument(
        "--experts", type=weight_format, metavar="KIND:GROUP", help="of experts, such as mxfp4"
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--check", choices=("logprobs", "tokens"), default="logprobs")
    parser.add_argument(
        "--point-seconds",
        type=float,
        default=math.inf,
        help="limit for warm-up and again for timed calls of a point; at least two are timed",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no measurement after this time"
    )
    parser.add_argument(
        "--compile-jobs", type=int, default=0, help="processes that compile ahead of timing"
    )
    parser.add_argument("--compile-into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help="use only the first N layers, for trials")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--of", nargs="+", metavar="RECORD", help="only summarise these records")
    args = parser.parse_args(argv)
    if args.config is None and not args.of:
        parser.error("a config.json, or --of records, must be given")
    if "breakdown" in args.plans:
        args.plans = BREAKDOWN
    return args


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = parse_args(argv)
    if args.of:
        print(summary(rows_of(args.of)))
        return 0
    if args.compile_into:
        return compile_only(args)
    with contextlib.ExitStack() as stack:
        folder, costs = None, {}
        if args.compile_jobs and args.plans:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            argv = sys.argv[1:] if argv is None else argv
            costs = compile_ahead(argv, args.points, folder, args.compile_jobs)
        return measure(args, costs, folder, until=began + args.seconds)


def compile_ahead(
    argv: Sequence[str], points: Sequence[Point], folder: Path, jobs: int
) -> dict[str, float]:
    """Compile the programs of a run into a folder, in other processes; returns the cost.

    This process must not have used the device yet, because the others need memory to autotune.
    """
    from benchmarks.ahead import run_processes

    began = time.monotonic()
    command = ("benchmarks.end_to_end", *argv, "--compile-into")
    # First, one process alone autotunes XLA's products. A few layers have the products of all, and
    # the shortest prompt of each batch is enough.
    shortest: dict[int, int] = {}
    for batch, prompt in points:
        shortest[batch] = min(prompt, shortest.get(batch, prompt))
    few = "--plans", "xla", "--layers", "3", "--points", *(f"{b}x{p}" for b, p in shortest.items())
    failed = run_processes((*command, str(folder / "few"), *few), folder, 1)
    say(f"tuned in {time.monotonic() - began:.0f} s")
    failed += run_processes((*command, str(folder)), folder, jobs)
    seconds = time.monotonic() - began
    found = len(list(folder.glob("*.executable")))
    say(f"compiled {found} programs ahead in {seconds:.0f} s, {jobs} processes")
    if failed:
        say(f"{failed} of {jobs + 1} processes failed: missing programs are compiled later")
    return {f"seconds of compiling ahead, {found} programs in {jobs} processes": seconds}


def compile_only(args: argparse.Namespace) -> int:
    """Run one process of `compile_ahead`."""
    from benchmarks.ahead import Compiler
    from fdjax.system.device_memory import free_memory_bytes

    model, compiler = read_model(args), Compiler(args.compile_into)
    options = {"new_tokens": args.new_tokens, "runs": 1, "check": args.check}
    for rows, _ in fdjax_rows(
        model,
        compiler.params(model),
        args.plans,
        sorted_points(model, args.points),
        memory_bytes=free_memory_bytes(),
        ahead=compiler,
        **options,
    ):
        for row in rows:
            if row.ok is False and row.timing is None and row.error is None:
                say(f"{row.implementation} {row.case}: not compiled ahead, {row.reason}")
    return 0


def read_model(args: argparse.Namespace):
    """Describe the model that the command line names."""
    from fdjax.models import describe, parse_config

    config = parse_config(read_config(args.config))
    config = config.with_attention(config.attention[: args.layers])
    if args.weights or args.head or args.experts:
        config = with_weights(config, args.weights, args.head, args.experts)
    return describe(config, dtype=args.dtype)


def with_weights(
    config,
    weights: tuple[str, int] | None,
    head: tuple[str, int] | None,
    experts: tuple[str, int] | None = None,
):
    """The model with quantised weights: (kind, rows of a group, or 0 for one scale a column)."""
    from fdjax.pallas_kernels.quantised import WeightFormat

    def chosen(form: tuple[str, int], k: int) -> WeightFormat:
        kind, group = form
        if kind == "mxfp4":
            return WeightFormat("fp4", 32, scales="float8_e8m0fnu")
        rounds = kind in ("fp8", "w8a8")
        kind = "int8" if kind == "w8a8" else kind
        return WeightFormat(kind, group or k, scales="bfloat16", rounded_activations=rounds)

    formats = {
        ("blocks", i, *linear.path, "weight"): chosen(weights, linear.k)
        for i, block in enumerate(config.blocks)
        for linear in block.linears.values()
        if weights
    }
    formats |= {
        ("blocks", i, *block.weights[name][0]): chosen(experts, k)
        for i, block in enumerate(config.blocks)
        if experts and block.experts
        for name, k in (("experts.gate_up", block.width), ("experts.down", block.mlp_width))
    }
    if head:
        formats["head", "weight"] = chosen(head, config.width)
    return config.with_formats(formats)


def sorted_points(model, points: Sequence[Point]) -> list[Point]:
    """Sort by memory, so that each point needs at least as much memory as the previous one."""
    from fdjax.engine.memory import plan_memory

    return sorted(points, key=lambda p: plan_memory(model, batch=p[0], max_len=p[1]).total_bytes)


def measure(
    args: argparse.Namespace, costs: dict[str, float], folder: Path | None, until: float
) -> int:
    """Measure, print the summary, and print the record as the last line.

    Args:
      args: the parsed command line.
      costs: costs so far.
      folder: folder of programs compiled ahead, or None.
      until: see `fdjax_rows`.
    """
    from fdjax.bench.ceiling import measure_ceiling
    from fdjax.system.device_memory import free_memory_bytes
    from fdjax.weights.stacked import random_stacked_params

    options = {"new_tokens": args.new_tokens, "runs": args.runs}
    points = args.peer_points or args.points
    # The peers end before JAX starts and takes the memory.
    of_peers = args.peers and list(
        peer_rows(args.config, args.peers, points, dtype=args.dtype, **options)
    )
    model = read_model(args)
    ceiling_bytes = 2**24 if model.plan.compute_capability is None else 2**30
    before = measure_ceiling(ceiling_bytes, matmul_size=0)
    say(f"ceiling {before['read_gb_per_s']:.0f} GB/s")
    config = {
        "model": args.config.name,
        "family": model.config.family,
        "parameters": model.parameter_count,
        "dtype": args.dtype,
        "new_tokens": args.new_tokens,
        "check": args.check,
        "plan": model.plan.summary(),
    }
    if args.peers:
        config["peers"] = peers.versions()
    record = Record(environment(args.commit), config, {"before": before}, costs=costs)

    def take(measured) -> None:
        for rows, costs in measured:
            record.rows += rows
            record.costs |= costs
            if args.output:  # a run that is cut off keeps its finished rows
                write(record.so_far(), args.output)

    take(of_peers)
    if args.plans:
        ahead = None
        if folder:
            from benchmarks.ahead import Executables

            ahead = Executables(folder)
        # Stacked here, as `load` does, so that all plans share it. Otherwise each would copy it.
        params, _stacks = random_stacked_params(model)
        memory_bytes = free_memory_bytes()
        if memory_bytes is not None:
            memory_bytes += model.weight_bytes
        take(
            fdjax_rows(
                model,
                params,
                args.plans,
                sorted_points(model, args.points),
                memory_bytes=memory_bytes,
                ahead=ahead,
                until=until,
                check=args.check,
                seconds=args.point_seconds,
                **options,
            )
        )
        for name, count in collections.Counter(ahead.missing if ahead else ()).items():
            say(f"not compiled ahead: {name}, {count} times")
    fill_traffic(record.rows)
    after = measure_ceiling(ceiling_bytes, matmul_size=0, kernels=[before["read_kernel"]])
    record.finish(after, tolerance=CEILING_TOLERANCE)
    print(summary(record.rows))
    emit(record, args.output)
    return int(record.failed or after["trusted"] is False)


if __name__ == "__main__":
    sys.exit(main())
