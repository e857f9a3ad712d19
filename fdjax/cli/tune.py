"""`fdjax tune`: measures which implementation is the fastest."""

import argparse

from fdjax.cli.arguments import Parser, UsageError, model_name, some_path
from fdjax.cli.shared import (
    EMBEDDED,
    MODEL_OR_CONFIG,
    add_devices,
    add_dtype,
    add_table,
    model_of,
    say,
)
from fdjax.system.files import check_writable

HELP = "measure which implementation of each linear layer is the fastest"
DESCRIPTION = (
    "Measure XLA and the kernel for each linear layer of a model over M, the number of rows of a "
    "step, and print the inflection points between them (FlashDecoding++, section 5). It takes "
    "minutes on a GPU."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("model", nargs="?", default=EMBEDDED, type=model_name, help=MODEL_OR_CONFIG)
    source.add_argument(
        "--config", type=model_name, metavar="FILE", help="a config.json instead of a model"
    )
    add_dtype(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--explain",
        action="store_true",
        help="measure nothing: print the table in use, or the one of --table",
    )
    what.add_argument(
        "--output", type=some_path, metavar="FILE", help="write the table here, for a later --table"
    )
    add_table(parser, "the table to explain")
    add_devices(parser)
    parser.add_argument("--commit", help="commit to record if git cannot be asked")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.system.platform import default_backend, enable_compilation_cache
    from fdjax.tools import tune, tune_table

    args.model = args.config or args.model
    if args.table and not args.explain:
        raise UsageError("tune: --table needs --explain")
    if args.explain:
        # The table may belong to another device, so the plan must not use it.
        explained, args.table = args.table, None
        model, _ = model_of(args)
        table = tune_table.table_in_use(model.plan.device_kind, explained)
    else:
        if default_backend() != "gpu":
            raise UsageError("tune: needs an NVIDIA GPU, JAX sees none")
        if args.output:
            check_writable(args.output)
        enable_compilation_cache()
        model, _ = model_of(args)
        table = tune.tune(model, commit=args.commit, report=say)
        if args.output:
            tune_table.write_table(table, args.output)
    print(tune_table.explain(table, model.local.config.linear_shapes, model.dtype))
    return 0
