"""`fdjax calibrate`: measures attention scores on a text and chooses the softmax constants."""

import argparse
import warnings
from pathlib import Path

import fdjax
from fdjax.cli.arguments import Parser, integer, model_name, some_path
from fdjax.cli.shared import (
    EMBEDDED,
    MODEL,
    add_devices,
    add_dtype,
    add_kv_dtype,
    read_text,
    say,
)
from fdjax.system.files import check_writable

HELP = "measure attention scores on a text, for faster attention"
DESCRIPTION = (
    "Run a text through a model and choose, for each attention head, a constant near its scores. "
    "Attention then subtracts this constant before the exponential. That is faster than finding "
    "the largest score of each row (the unified maximum of FlashDecoding++, section 3). It changes "
    "the speed, never a result; see docs/performance.md."
)
# Fewer tokens are not enough to measure a share of 1 %.
_CALIBRATION_TOKENS = 1000


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", default=EMBEDDED, type=model_name, help=MODEL)
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        type=some_path,
        metavar="FILE",
        help="UTF-8 text, similar to what the model will see; may be given several times",
    )
    parser.add_argument(
        "--context",
        type=integer(2),
        metavar="N",
        help="longest piece of a text in tokens; default: the model's context, up to 4096",
    )
    add_dtype(parser)
    add_kv_dtype(parser)
    add_devices(parser)
    parser.add_argument(
        "--output",
        type=some_path,
        metavar="FILE",
        help="default: beside the checkpoint, where `load` looks for it; for the embedded model, "
        "in the current folder",
    )
    parser.add_argument(
        "--plot", type=some_path, metavar="FILE", help="also draw the distribution here"
    )
    parser.add_argument("--commit", help="commit to record if git cannot be asked")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.bench.record import environment
    from fdjax.tools import calibrate
    from fdjax.weights.calibration import FILE, write_calibration
    from fdjax.weights.checkpoint import fingerprint, locate

    # Everything is checked first, because a large model takes minutes.
    texts = [read_text(path) for path in args.text]
    folder = locate(args.model)
    # The embedded model is in the package, whose files must not change.
    beside = Path() if folder.samefile(EMBEDDED) else folder
    output = args.output or beside / FILE
    check_writable(output)
    if args.plot:
        calibrate.check_plot(args.plot)
        check_writable(args.plot)
    lm = fdjax.load(
        str(folder),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        calibration=False,
        tensor_parallel=args.tensor_parallel,
    )
    last = 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if 10 * done // total > last:
            last = 10 * done // total
            say(f"{done} of {total} tokens")

    statistics = calibrate.gather(
        lm.engine, lm.tokenizer, texts, context=args.context, progress=progress
    )
    rows = int(statistics.maxima[0, 0].sum())
    if rows < _CALIBRATION_TOKENS:
        warnings.warn(
            f"{rows} tokens are few for a reliable choice; give at least {_CALIBRATION_TOKENS}, "
            "better many times as many",
            stacklevel=2,
        )
    provenance = environment(args.commit) | {
        "texts": [path.name for path in args.text],
        "rows": rows,
        "dtype": lm.model.dtype,
    }
    calibration = calibrate.calibration_of(statistics, fingerprint(folder), provenance)
    write_calibration(calibration, output)
    print(calibration)
    say(f"written to {output}")
    if output.resolve().parent != folder.resolve():
        say(f"`load` uses it only as {FILE} in the folder of the checkpoint")
    if args.plot:
        calibrate.plot(statistics, folder.name, args.plot)
    return 0
