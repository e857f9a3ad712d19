"""`fdjax info`: reports the size of a model, what fits, and which kernels run."""

import argparse
import json

from fdjax.cli.arguments import Parser, UsageError, byte_count, integer, model_name
from fdjax.cli.shared import (
    EMBEDDED,
    MODEL_OR_CONFIG,
    add_devices,
    add_dtype,
    add_kv_dtype,
    add_table,
    model_of,
)
from fdjax.system.memory_share import DEFAULT_SHARE
from fdjax.tools.devices import DEVICES

HELP = "size of a model, what fits, which kernels run"
DESCRIPTION = "Report how large a model is, what fits on the device and which kernels run."


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", default=EMBEDDED, type=model_name, help=MODEL_OR_CONFIG)
    parser.add_argument(
        "--batch",
        type=integer(1, 2**31 - 1),
        metavar="B",
        default=1,
        help="rows at once; default: 1",
    )
    parser.add_argument(
        "--context",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="tokens of each row; default: the model's context",
    )
    parser.add_argument(
        "--beams",
        type=integer(1),
        metavar="W",
        default=1,
        help="beams of each prompt, with --new-tokens; default: 1",
    )
    parser.add_argument(
        "--new-tokens",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="of the tokens of each row, those of the answer; default: 128",
    )
    parser.add_argument(
        "--memory",
        type=byte_count,
        metavar="SIZE",
        help="memory to plan for, such as 80GB; default: the memory JAX may use",
    )
    parser.add_argument(
        "--device",
        choices=tuple(DEVICES),
        help="plan for this GPU, even without one; default: the device of this machine",
    )
    add_dtype(parser)
    add_kv_dtype(parser)
    add_table(parser)
    add_devices(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.sampling.beams import MOST_BEAMS
    from fdjax.tools.info import model_info

    model, _ = model_of(args)
    if args.beams > (most := min(MOST_BEAMS, model.config.vocab_size)):
        raise UsageError(f"info: --beams must be at most {most}, got {args.beams}")
    memory_bytes = args.memory
    if memory_bytes is None and args.device is not None:
        share = args.gpu_memory_utilization or DEFAULT_SHARE
        memory_bytes = int(share * DEVICES[args.device].memory_bytes)
    context = args.context or model.config.max_position_embeddings
    new_tokens = args.new_tokens or 128
    if args.beams > 1 and new_tokens >= context:
        raise UsageError(
            f"info: --new-tokens must be less than the {context} tokens of a row, got {new_tokens}"
        )
    info = model_info(
        model,
        batch=args.batch,
        slots=args.context,
        memory_bytes=memory_bytes,
        beams=args.beams,
        new_tokens=new_tokens,
    )
    print(json.dumps(info.asdict()) if args.json else info)
    return 0
