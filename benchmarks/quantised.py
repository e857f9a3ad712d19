"""Products with quantised weights compared with bf16: `python -m benchmarks.quantised`.

Runs linear layers of Llama 2 7B and Llama 3 8B for several M: in bf16, and with weights of each
format, both as the plan runs them. The ratio is bf16's time over that with quantised weights. XLA
also runs, where it is asked for by name, with the same quantised weights.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from benchmarks.matmul import PLAIN, row_of
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.models import LinearShape
from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BRICKS, WeightFormat
from fdjax.system.files import output_file
from fdjax.tools.tune import time_linear

LAYERS = ("7B qkv", "7B gate and up", "7B down", "7B head", "8B gate and up", "8B down")
ROWS = (1, 8, 16, 32, 64, 128, 129, 256, 512, 1024, 4096)


def formats(k: int) -> dict[str, WeightFormat]:
    """The formats of a weight with K rows, by name."""
    found = {"int4 by 128": ("int4", 128), "int8": ("int8", k), "fp8": ("fp8", k)}
    forms = {
        name: WeightFormat(kind, group, scales="bfloat16", layout=BRICKS)
        for name, (kind, group) in found.items()
    }
    rounded = {
        f"{kind} x {kind}": dataclasses.replace(forms[kind], rounded_activations=True)
        for kind in ("int8", "fp8")
    }
    return forms | rounded


def measure_layer(
    name: str, shape: LinearShape, args: argparse.Namespace, plan: Plan
) -> Iterator[Measurement]:
    """Measure a layer in bf16, then with weights of each format."""

    def planned(operands):
        return matmul(**operands, plan=plan)

    def xla(operands):
        return matmul(**operands, implementation="xla")

    forms = {kind: form for kind, form in formats(shape.k).items() if args.only in kind}
    for kind, form in {"bf16": None, **forms}.items():
        variants = {kind: planned} | ({f"{kind}, XLA": xla} if form and args.xla else {})
        layer = dataclasses.replace(shape, weight=form)
        bits = 16 if form is None else 4 if form.kind == "int4" else 8
        timed = time_linear(
            layer, args.rows, variants, reference=xla, runs=args.runs, passes=args.passes
        )
        for m, measured in timed:
            for implementation, one in measured.items():
                nbytes = shape.k * shape.n * bits // 8 + 2 * m * (shape.k + shape.n)
                yield row_of(name, implementation, one, shape, m, nbytes)


def summary(rows: Sequence[Measurement]) -> str:
    """bf16's time over that of each format, one line per layer and implementation."""
    us: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        name, m = row.case.split(" M=")
        if row.timing:
            times = us.setdefault(name, {}).setdefault(int(m), {})
            times[row.implementation] = row.timing["median_us"]
    every = sorted({m for over_m in us.values() for m in over_m})
    lines = [f"{'bf16 / quantised, M =':36}" + "".join(f"{m:>7}" for m in every)]
    for name, over_m in us.items():
        for kind in dict.fromkeys(kind for times in over_m.values() for kind in times):
            cells = (
                f"{times[kind]:.0f}"
                if kind == "bf16"
                else f"{times['bf16'] / times[kind]:.2f}"
                if kind in times
                else ""
                for times in (over_m.get(m, {}) for m in every)
            )
            title = f"{name}, {kind}" + (", us" if kind == "bf16" else "")
            lines.append(f"{title:36}" + "".join(f"{cell:>7}" for cell in cells).rstrip())
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=PLAIN, metavar="LAYER")
    parser.add_argument("--only", default="", help="run only formats whose name contains this")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="values of M")
    parser.add_argument("--xla", action="store_true", help="measure XLA as well")
    parser.add_argument("--runs", type=int, default=10, help="timed calls per pass")
    parser.add_argument("--passes", type=int, default=2, help="passes over the implementations")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the summary, and print the record as the last line."""
    args = parse_args(argv)
    plan = Plan.for_device()
    before = measure_ceiling(matmul_size=0)
    config = {"runs": args.runs, "passes": args.passes}
    record = Record(environment(args.commit), config, {"before": before})
    for name in args.layers:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        record.rows += measure_layer(name, PLAIN[name], args, plan)
        if args.output:  # a run that is cut off keeps its finished rows
            write(record.so_far(), args.output)
    record.finish(measure_ceiling(matmul_size=0, kernels=[before["read_kernel"]]))
    print(summary(record.rows))
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
