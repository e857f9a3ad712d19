"""Code that several commands share: arguments, the plan and model they name, files, messages."""

import argparse
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import fdjax
from fdjax.cli.arguments import UsageError, argument_type, integer, model_name, some_path, some_text

# The path of the embedded model. Its name "tiny" could also be a folder of the user.
EMBEDDED = str(Path(fdjax.__file__).parent / "models" / "tiny")
MODEL = "folder or hub id; default: the embedded model"
_DTYPES = ("bfloat16", "float16", "float32")
MODEL_OR_CONFIG = "folder, config.json or hub id; default: the embedded model"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that loads a model, among them --verbose."""
    parser.add_argument("--model", default=EMBEDDED, type=model_name, help=MODEL)
    add_dtype(parser)
    add_kv_dtype(parser)
    add_table(parser)
    add_devices(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log to standard error")


def add_sampling(
    parser: argparse.ArgumentParser, default_tokens: str, *, streams: bool = False
) -> None:
    """Add the flags of the options of `generate`, and --stop.

    Args:
      parser: parser of the command.
      default_tokens: text for the default of --max-new-tokens in its help.
      streams: whether the command only streams and so needs no flags for beam search.
    """
    from fdjax.sampling.options import OPTIONS

    names = [n for n, o in OPTIONS.items() if o.flag and not (streams and o.role == "beams")]
    for name, option in OPTIONS.items():
        if name in names:
            metavar, text = option.flag
            parse = argument_type(option.check.parse)
            flag, text = f"--{name.replace('_', '-')}", text.format(default=default_tokens)
            parser.add_argument(flag, type=parse, metavar=metavar, help=text)
    parser.add_argument(
        "--stop",
        action="append",
        type=some_text,
        metavar="TEXT",
        dest="stop_strings",
        help="end before this text; may be given several times",
    )
    parser.set_defaults(options=[*names, "stop_strings"])


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_sampling` that were given on the command line, by name.

    Raises:
      UsageError: --min-new-tokens exceeds --max-new-tokens.
    """
    given = {n: getattr(args, n) for n in args.options if getattr(args, n) is not None}
    least, most = given.get("min_new_tokens", 0), given.get("max_new_tokens", math.inf)
    if least > most:
        raise UsageError(f"--min-new-tokens {least} is more than --max-new-tokens {most}")
    return given


def with_room(options: dict[str, Any], default: int) -> dict[str, Any]:
    """The options. A `min_new_tokens` above the default maximum raises the maximum."""
    least = options.get("min_new_tokens", 0)
    return ({"max_new_tokens": least} if least > default else {}) | options


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add --dtype."""
    parser.add_argument("--dtype", choices=_DTYPES, help="default: the checkpoint's")


def add_kv_dtype(parser: argparse.ArgumentParser) -> None:
    """Add --kv-dtype."""
    parser.add_argument(
        "--kv-dtype",
        choices=("int8", *_DTYPES),
        metavar="DTYPE",
        help="of the cache: int8, or as default that of activations",
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel N."""
    parser.add_argument(
        "--tensor-parallel",
        type=integer(1),
        default=1,
        metavar="N",
        help="number of local devices that share the model; default: 1",
    )


def add_table(parser: argparse.ArgumentParser, text: str = "what `fdjax tune` measured") -> None:
    """Add --table FILE."""
    parser.add_argument("--table", type=some_path, metavar="FILE", help=text)


def plan_of(args: argparse.Namespace):
    """The plan of --device, or the present device's plan with --implementation and --table.

    None if none of these arguments is given.
    """
    from fdjax.pallas_kernels.plan import Plan
    from fdjax.system.platform import default_backend
    from fdjax.tools.devices import DEVICES

    implementation, name = getattr(args, "implementation", None), getattr(args, "device", None)
    if name is not None:
        device = DEVICES[name]
        return Plan.for_kind(device.kind, device.compute_capability, table=args.table)
    if args.table is None and implementation is None:
        return None
    default_backend()
    return Plan.for_device(implementation=implementation, table=args.table)


def load_model(args: argparse.Namespace) -> "fdjax.LM":
    """Load the model that the arguments of `add_model` name."""
    return fdjax.load(
        args.model,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        plan=plan_of(args),
        tensor_parallel=args.tensor_parallel,
    )


def model_of(args: argparse.Namespace):
    """The model that the arguments name, by a folder, a hub id or a config.json.

    Returns:
      (model, its folder, or None for a config.json).

    Raises:
      CheckpointError: the checkpoint is damaged or not supported.
      FileNotFoundError: there is no such config.json.
      ValueError: --tensor-parallel does not divide the model.
    """
    from fdjax.models import describe, parse_config
    from fdjax.system.platform import default_backend
    from fdjax.weights.checkpoint import (
        has_weights,
        locate,
        quantised_config,
        read_json,
        unnamed_dtype,
        user_path,
    )

    path = user_path(args.model)
    folder = None
    if path.suffix != ".json" or path.is_dir():
        folder = locate(args.model, weights=False)
        path = folder / "config.json"
    elif not path.exists():
        raise FileNotFoundError(f"{args.model}: no such file")
    default_backend()
    data = read_json(path)
    config = parse_config(data, str(path))
    if folder and has_weights(folder):
        config = quantised_config(folder, config, data)
    elif data.get("quantization_config"):
        warnings.warn(
            f"{path}: the weights are quantised, but without their files they count as "
            f"{config.dtype}",
            stacklevel=2,
        )
    dtype = args.dtype or (unnamed_dtype(folder, data) if folder else None)
    options = {"tensor_parallel": getattr(args, "tensor_parallel", 1)}
    options |= {"kv_dtype": getattr(args, "kv_dtype", None)}
    return describe(config, dtype=dtype, plan=plan_of(args), **options), folder


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
      ValueError: the file is not UTF-8. The message names the first wrong byte.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None


def counted(count: int, what: str) -> str:
    """A number of things, such as "1 prompt" and "2 prompts"."""
    return f"{count:,} {what}" + "s" * (count != 1)


def say(doing: str) -> None:
    """Print a message about the progress on standard error."""
    print(f"fdjax: {doing}", file=sys.stderr, flush=True)
