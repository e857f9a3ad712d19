"""The command line: `fdjax generate | chat | score | info | doctor | bench | ...`."""

import argparse
import contextlib
import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import fdjax
from fdjax.cli.arguments import Parser, UsageError, did_you_mean, share
from fdjax.system import interrupts
from fdjax.system.memory_share import DEFAULT_SHARE, memory_share

_EXAMPLES = """examples:
  fdjax generate "What is the largest ocean?"
  fdjax generate --model meta-llama/Llama-3.2-1B --max-new-tokens 64 "The ocean is"
  echo "What is 7 + 5?" | fdjax generate
  fdjax chat
  fdjax score --file book.txt --stride 256
  fdjax info path/to/checkpoint --memory 80GB --batch 8
  fdjax doctor
  fdjax bench path/to/checkpoint --batch 8
  fdjax calibrate path/to/checkpoint --text book.txt
  fdjax tune path/to/checkpoint --output table.json
  fdjax quantize path/to/checkpoint --bits 4 --text book.txt --output folder
"""
logger = logging.getLogger("fdjax")

_COMMANDS = (
    *("generate", "chat", "score", "info", "doctor", "bench", "calibrate", "tune"),
    "quantize",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    The code is 0 for success, 1 for a failure, 2 for wrong arguments, 130 for an interrupt, 141 if
    the reader of the output has closed the pipe.

    Args:
      argv: the arguments without the name of the program; default those of this process.
    """
    if sys.stderr is None:  # `print` would write messages to standard output
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            return main(argv)
    try:
        try:
            with interrupts.delivered():
                return _run(argv)
        finally:
            try:
                _flush(sys.stderr)
            finally:
                _flush(sys.stdout)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141  # the reader has closed the pipe; shells report a SIGPIPE so
    except UsageError as error:
        return _fail(error, 2)
    except (ValueError, NotImplementedError, OSError, FloatingPointError) as error:
        return _fail(error)
    except (MemoryError, RuntimeError) as error:
        return _fail(_explained(error))


def _run(argv: Sequence[str] | None) -> int:
    # Characters that the terminal cannot show are replaced and raise no error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    argv = sys.argv[1:] if argv is None else argv
    command = next((word for word in argv if not word.startswith("-")), "")
    parser = _parser(command)
    if command not in ("", *_COMMANDS):
        parser.error(f"there is no command {command!r}{did_you_mean(command, _COMMANDS)}")
    args = parser.parse_args(argv)
    if "run" not in args:
        parser.print_help(sys.stderr)
        return 2
    logged = _logged() if getattr(args, "verbose", False) else contextlib.nullcontext()
    with warnings.catch_warnings(), logged:
        # A command may check something that it later loads, with the same warnings.
        warnings.showwarning = functools.partial(_show_warning, set())
        needed = args.needed_bytes and args.needed_bytes(args)
        with memory_share(args.gpu_memory_utilization, needed_bytes=needed):
            return args.run(args)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Write fdjax's log to standard error inside this block."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fdjax: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _fail(reason: Exception | str, code: int = 1) -> int:
    from fdjax.models.readable import readable

    print(f"fdjax: error: {readable(reason)}", file=sys.stderr)
    return code


def _explained(error: MemoryError | RuntimeError) -> str:
    """A message with advice for an error that is not a bug. Other errors are raised again."""
    from fdjax.system.platform import NoDeviceError

    if isinstance(error, NoDeviceError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in first:
        raise error
    detail = first.partition("RESOURCE_EXHAUSTED: ")[2] or first
    return (
        f"out of memory{f' ({detail})' if detail else ''}; lower the number of tokens or the "
        "batch, give --dtype bfloat16, or take a smaller model; `fdjax info MODEL` says what fits"
    )


def _flush(stream: TextIO | None) -> None:
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        # Drop the output that cannot be written. Otherwise the interpreter tries again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def _show_warning(shown, message, category, filename, lineno, file=None, line=None):
    """Print a warning whose text is not in `shown`, and add it."""
    from fdjax.models.readable import readable

    text = readable(message)
    if text not in shown:
        print(f"fdjax: warning: {text}", file=file or sys.stderr)
    shown.add(text)


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
      chosen: the command that gets its arguments, so that no other command's imports are needed;
        None gives every command its arguments.
    """
    parser = Parser(
        prog="fdjax",
        description="LLM inference on NVIDIA GPUs from JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fdjax {fdjax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in _COMMANDS:
        module = importlib.import_module(f"fdjax.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        if chosen in (None, name):
            module.add_arguments(command)
            _add_memory(command)
            # Most commands can use all the memory that JAX can take.
            needed_bytes = getattr(module, "needed_bytes", None)
            command.set_defaults(run=module.run, parser=command, needed_bytes=needed_bytes)
    return parser


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory-utilization",
        type=share,
        metavar="SHARE",
        help=f"share of each GPU's memory that JAX may take, up to 1; default: {DEFAULT_SHARE}, "
        "or what JAX's environment variables say",
    )


if __name__ == "__main__":
    sys.exit(main())
