"""Command line: `compare` two records, or measure the `ceiling`."""

import argparse
import sys
from collections.abc import Sequence

from fdjax.bench import record as records
from fdjax.bench.compare import compare
from fdjax.system.files import output_file


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands. Each sets `run`, a function of the parsed arguments."""
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "compare", help="exit with 1 if anything got slower, broke or is missing"
    )
    command.add_argument("old")
    command.add_argument("new")
    command.add_argument("--tolerance", type=float, help="relative; default: 0.05, 1 on a CPU")
    command.add_argument("--allow-device", action="store_true", help="compare different devices")
    command.add_argument("--allow-missing", action="store_true", help="NEW may lack rows of OLD")
    command.set_defaults(run=_compare)
    command = commands.add_parser("ceiling", help="measure bandwidth and matrix-multiply rate")
    command.add_argument("--bytes", type=int, default=2**30, help="bytes that each kernel reads")
    command.add_argument("--matmul-size", type=int, default=8192, help="0 skips it")
    command.add_argument("--commit", help="commit to record if git cannot be asked")
    command.add_argument("--output", type=output_file, help="write the record to this file as well")
    command.set_defaults(run=_ceiling)


def _compare(args: argparse.Namespace) -> int:
    try:
        old, new = records.read(args.old), records.read(args.new)
        comparison = compare(
            old,
            new,
            args.tolerance,
            allow_device=args.allow_device,
            allow_missing=args.allow_missing,
        )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(comparison.table())
    return int(comparison.failed)


def _ceiling(args: argparse.Namespace) -> int:
    from fdjax.bench.ceiling import measure_ceiling

    ceiling = measure_ceiling(args.bytes, matmul_size=args.matmul_size)
    config = {"bytes": args.bytes, "matmul_size": args.matmul_size}
    environment = records.environment(args.commit)
    record = records.Record(environment, config, {"before": ceiling})
    records.emit(record.finish(), args.output)
    return int(ceiling["trusted"] is False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 if a result failed, 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m fdjax.bench")
    add_commands(parser)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
