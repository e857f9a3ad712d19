"""Runs cases: measures the ceiling, checks and times every implementation, measures it again."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.check import verify
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.bench.timing import Timing, cold_sets, compile_for, measure
from fdjax.system.files import output_file


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one operation.

    Attributes:
      make_args: seed → argument tuple of random arrays.
      implementations: name → function of those arguments, for fdjax and its peers. A function
        that raises `NotImplementedError` is recorded as not supporting the case.
      reference: function of the arguments, more precise than the implementations; never timed.
      bytes, flops: smallest number of bytes to move and of FLOPs to compute in a call.
      tolerance: largest error that passes, see `verify`.
      prepare: name → function that converts the arguments to the layout of this implementation;
        never timed.
    """

    name: str
    make_args: Callable[[int], tuple]
    implementations: Mapping[str, Callable]
    reference: Callable
    bytes: int
    tolerance: float
    flops: int = 0
    prepare: Mapping[str, Callable[..., tuple]] = dataclasses.field(default_factory=dict)


def _run_case(case: Case, runs: int, passes: int) -> list[Measurement]:
    sets = cold_sets(case.make_args, case.bytes)
    want = jax.block_until_ready(case.reference(*sets[0]))
    rows, compiled, timings = {}, {}, {}

    def check(name: str) -> None:
        row, args = rows[name], case.prepare.get(name, lambda *a: a)(*sets[0])
        if name not in compiled:
            compiled[name] = compile_for(case.implementations[name], args)
        row.error, row.reason = verify(compiled[name](*args), want, case.tolerance)
        row.ok = row.reason is None

    def time(name: str) -> None:
        prepare = case.prepare.get(name)
        prepared = [prepare(*args) for args in sets] if prepare else sets
        timing = measure(compiled[name], prepared, runs=runs, bytes_per_set=case.bytes)
        timings.setdefault(name, []).append(timing)

    for name in case.implementations:
        rows[name] = Measurement(case.name, name, None, bytes=case.bytes, flops=case.flops)
    # The check is repeated after timing: a race or a clobbered argument may show only then.
    for step in (check, *[time] * passes, check):
        for name, row in rows.items():
            if (step is not check and not row.ok) or row.reason:
                continue
            try:
                step(name)
            except NotImplementedError as error:
                row.ok, row.reason = None, str(error) or "not implemented"
            except Exception as error:  # a broken peer must not lose the record of the run
                row.ok, row.reason = False, f"{type(error).__name__}: {error}".splitlines()[0]
    for name, row in rows.items():
        if row.ok:
            row.timing = dataclasses.asdict(Timing.merge(timings[name]))
    return list(rows.values())


def run_cases(
    cases: Sequence[Case],
    *,
    runs: int = 20,
    passes: int = 2,
    config: Mapping[str, Any] | None = None,
    ceiling_bytes: int = 2**30,
    matmul_size: int = 8192,
    commit: str | None = None,
    output: str | Path | None = None,
) -> Record:
    """Measure every implementation of every case, and the ceiling, in one process.

    Implementations are checked, then timed in interleaved passes (A B A B), then checked again. A
    wrong one gets no timing, and the record's `failed` is true.

    Args:
      cases: what to measure.
      runs: timed calls per pass.
      passes: passes over the implementations of a case.
      config: configuration to record, beside `runs` and `passes`.
      ceiling_bytes: bytes that each kernel of the ceiling reads.
      matmul_size: see `measure_ceiling`.
      commit: see `environment`.
      output: file for the record, written after every case, so that a run that is cut off keeps
        its finished cases.
    """
    before = measure_ceiling(ceiling_bytes, matmul_size=matmul_size)
    config = {"runs": runs, "passes": passes, **(config or {})}
    record = Record(environment(commit), config, {"before": before})
    for case in cases:
        print(f"measuring {case.name}", file=sys.stderr, flush=True)
        record.rows += _run_case(case, runs, passes)
        if output:
            write(record.so_far(), output)
    after = measure_ceiling(ceiling_bytes, matmul_size=0, kernels=[before["read_kernel"]])
    return record.finish(after)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a script of cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--runs", type=int, default=20, help="timed calls per pass")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    return parser.parse_args(argv)


def main(cases: Sequence[Case], argv: Sequence[str] | None = None, **options: Any) -> int:
    """Run cases as a script: parse the command line, print the record, return the exit code.

    Args:
      cases: what to measure.
      argv: command line without the program's name; None takes the process's.
      options: arguments of `run_cases`.

    Returns:
      0, or 1 if a result was wrong or nothing was measured.
    """
    args = parse_args(argv)
    chosen = [case for case in cases if args.only in case.name]
    record = run_cases(chosen, runs=args.runs, commit=args.commit, output=args.output, **options)
    emit(record, args.output)
    return int(record.failed)
