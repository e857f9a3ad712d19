"""Linear layers as the plan runs them, compared with XLA: `python -m benchmarks.matmul`.

It runs the linear layers of Llama 2 7B, Llama 2 13B and Llama 3 8B for several M, as plain
products, and for M up to 16 also fused as in a decoder. XLA compiles its own sequence of norm,
product, activation and residual, with weights [K,N], the layout it is fastest with. Where the plan
chooses XLA, the ratio is 1 by definition.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

from benchmarks.arguments import rows_of
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.models import LinearShape
from fdjax.pallas_kernels.gemm import matmul, matmul_reference
from fdjax.pallas_kernels.plan import Plan
from fdjax.system.files import output_file
from fdjax.tools.tune import ROWS, VariantMeasurement, time_linear

PLAIN = {
    "7B qkv": LinearShape(4096, 12288),
    "7B out": LinearShape(4096, 4096),
    "7B gate and up": LinearShape(4096, 22016),
    "7B down": LinearShape(11008, 4096),
    "7B head": LinearShape(4096, 32000),
    "8B qkv": LinearShape(4096, 6144),
    "8B gate and up": LinearShape(4096, 28672),
    "8B down": LinearShape(14336, 4096),
    "13B qkv": LinearShape(5120, 15360),
    "13B out": LinearShape(5120, 5120),
    "13B gate and up": LinearShape(5120, 27648),
    "13B down": LinearShape(13824, 5120),
    "13B head": LinearShape(5120, 32000),
}
FUSED = {
    "7B norm, qkv": LinearShape(4096, 12288, norm=True),
    "7B out, residual": LinearShape(4096, 4096, residual=True),
    "7B norm, gate and up": LinearShape(4096, 22016, gate=True, norm=True),
    "7B down, residual": LinearShape(11008, 4096, residual=True),
    "8B norm, qkv": LinearShape(4096, 6144, norm=True),
    "8B norm, gate and up": LinearShape(4096, 28672, gate=True, norm=True),
    "8B down, residual": LinearShape(14336, 4096, residual=True),
    "13B norm, qkv": LinearShape(5120, 15360, norm=True),
    "13B out, residual": LinearShape(5120, 5120, residual=True),
    "13B norm, gate and up": LinearShape(5120, 27648, gate=True, norm=True),
    "13B down, residual": LinearShape(13824, 5120, residual=True),
}
FUSED_ROWS = tuple(m for m in ROWS if m <= 16)


def measure_layer(
    name: str, shape: LinearShape, rows: Sequence[int], plan: Plan, runs: int, passes: int
) -> Iterator[Measurement]:
    """Measure XLA for each M, and the kernel where the plan runs it."""
    gate = "silu" if shape.gate else None

    def reference(operands):
        return matmul_reference(**operands, gate=gate)

    def xla(operands):
        return matmul(**operands, gate=gate, implementation="xla")

    def chosen(operands):
        return matmul(**operands, gate=gate, plan=plan)

    def kernel_runs(m: int) -> bool:
        return plan.choose("matmul", **shape.key(m, 2)).implementation == "mosaic_gpu"

    for variants, some in (
        ({"xla": xla}, [m for m in rows if not kernel_runs(m)]),
        ({"xla": xla, "mosaic_gpu": chosen}, [m for m in rows if kernel_runs(m)]),
    ):
        if not some:
            continue
        timed = time_linear(shape, some, variants, reference=reference, runs=runs, passes=passes)
        for m, measured in timed:
            columns = shape.n // 2 if shape.gate else shape.n
            for implementation, measurement in measured.items():
                values = shape.k * shape.n + m * (shape.k + columns * (1 + shape.residual))
                yield row_of(name, implementation, measurement, shape, m, 2 * values)


def row_of(
    name: str, implementation: str, one: VariantMeasurement, shape: LinearShape, m: int, nbytes: int
) -> Measurement:
    """The row of a record for a product of M rows that must move `nbytes`."""
    return Measurement(
        case=f"{name} M={m}",
        implementation=implementation,
        ok=one.problem is None,
        error=one.error,
        reason=one.problem,
        timing=one.timing and dataclasses.asdict(one.timing),
        bytes=nbytes,
        flops=2 * m * shape.k * shape.n,
    )


def summary(rows: Sequence[Measurement]) -> str:
    """XLA's time over the plan's, one line per layer, and geometric means."""
    us: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        name, m = row.case.split(" M=")
        if row.timing:
            times = us.setdefault(name, {}).setdefault(int(m), {})
            times[row.implementation] = row.timing["median_us"]
    ratios = {
        name: {m: t["xla"] / t.get("mosaic_gpu", t["xla"]) for m, t in sorted(over_m.items())}
        for name, over_m in us.items()
    }
    lines = [f"{'xla / plan, M =':24}" + "".join(f"{m:>6}" for m in ROWS)]
    for name, over_m in ratios.items():
        cells = (f"{over_m[m]:.3f}" if m in over_m else "" for m in ROWS)
        lines.append(f"{name:24}" + "".join(f"{cell:>6}" for cell in cells).rstrip())
    for title, group, some in (
        ("plain, M = 1 to 12", PLAIN, range(1, 13)),
        ("plain, M = 16 to 64", PLAIN, range(16, 65)),
        ("fused, M = 1 to 16", FUSED, range(1, 17)),
    ):
        found = [r for n in group for m, r in ratios.get(n, {}).items() if m in some]
        kept = sum(r == 1 for r in found)
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            lines.append(
                f"{title}: {mean:.3f} geometric mean of {len(found)}, least {min(found):.3f}; "
                f"xla chosen at {kept}"
            )
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run only layers whose name contains this")
    parser.add_argument("--table", help="a table of `fdjax tune`, used before the shipped one")
    parser.add_argument("--runs", type=int, default=10, help="timed calls per pass")
    parser.add_argument("--passes", type=int, default=2, help="passes over the implementations")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    parser.add_argument("--of", nargs="+", metavar="RECORD", help="only summarise these records")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the summary, and print the record as the last line."""
    args = parse_args(argv)
    if args.of:
        print(summary(rows_of(args.of)))
        return 0
    plan = Plan.for_device(table=args.table)
    before = measure_ceiling(matmul_size=0)
    config = {"runs": args.runs, "passes": args.passes, "table": args.table}
    record = Record(environment(args.commit), config, {"before": before})
    for cases, rows in ((PLAIN, ROWS), (FUSED, FUSED_ROWS)):
        for name, shape in cases.items():
            if args.only in name:
                print(f"measuring {name}", file=sys.stderr, flush=True)
                record.rows += measure_layer(name, shape, rows, plan, args.runs, args.passes)
                if args.output:  # a run that is cut off keeps its finished rows
                    write(record.so_far(), args.output)
    record.finish(measure_ceiling(matmul_size=0, kernels=[before["read_kernel"]]))
    print(summary(record.rows))
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
