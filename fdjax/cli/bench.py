"""`fdjax bench`: times a model end to end."""

import argparse

import fdjax
from fdjax.cli.arguments import Parser, UsageError, integer, model_name, some_path
from fdjax.cli.shared import (
    EMBEDDED,
    MODEL_OR_CONFIG,
    add_dtype,
    add_kv_dtype,
    add_table,
    model_of,
    say,
)
from fdjax.system.files import check_writable

HELP = "time the first token and the decode step"
DESCRIPTION = (
    "Time the first token and the decode step of random prompts. With a config.json alone, the "
    "weights are random. The last line printed is the JSON record, unless --output names a file "
    "for it. `python -m fdjax.bench compare OLD NEW` compares two records."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", default=EMBEDDED, type=model_name, help=MODEL_OR_CONFIG)
    default = "default: %(default)s"
    for option, least, value, text in (
        ("--batch", 1, 1, "prompts at once"),
        ("--prompt-tokens", 1, 128, "length of each prompt"),
        ("--new-tokens", 2, 128, "tokens generated for each"),
    ):
        parser.add_argument(
            option, type=integer(least), metavar="N", default=value, help=f"{text}; {default}"
        )
    parser.add_argument(
        "--runs", type=integer(1), metavar="N", help="timed calls; default: 5, 15 on a CPU"
    )
    add_dtype(parser)
    add_kv_dtype(parser)
    parser.add_argument(
        "--implementation",
        choices=("xla", "cudnn", "mosaic_gpu"),
        help="use this one for every op that has it",
    )
    add_table(parser)
    parser.add_argument(
        "--output", type=some_path, metavar="FILE", help="write the JSON record here"
    )
    parser.add_argument("--commit", help="commit to record if git cannot be asked")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.bench.model import bench_model, summary
    from fdjax.bench.record import write
    from fdjax.engine.memory import check_load, plan_memory
    from fdjax.lm import LM
    from fdjax.system.platform import default_backend, enable_compilation_cache
    from fdjax.weights.stacked import random_stacked_params

    # Everything is checked first, because measuring takes minutes.
    if args.implementation not in (None, "xla") and default_backend() != "gpu":
        raise UsageError(
            f"bench: --implementation {args.implementation} needs an NVIDIA GPU, JAX sees none"
        )
    if args.output:
        check_writable(args.output)
    enable_compilation_cache()
    model, folder = model_of(args)
    tokens = args.prompt_tokens + args.new_tokens
    if tokens > model.config.max_position_embeddings:
        raise UsageError(
            f"bench: --prompt-tokens and --new-tokens make {tokens}, "
            f"the model's context is {model.config.max_position_embeddings}"
        )
    _, memory_bytes = check_load(model)
    need = plan_memory(model, batch=args.batch, max_len=tokens, prompt_tokens=args.prompt_tokens)
    need.check("bench", memory_bytes)
    size = f"{model.parameter_count:,} parameters in {model.dtype}"
    say(f"{'making' if folder is None else 'loading'} {size} on {model.plan.device_kind}")
    if folder is None:
        params, _stacks = random_stacked_params(model)
        lm = LM(model, params, memory_bytes=memory_bytes)
    else:
        lm = fdjax.load(args.model, dtype=args.dtype, kv_dtype=args.kv_dtype, plan=model.plan)
    record = bench_model(
        lm,
        batch=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        runs=args.runs or (15 if default_backend() == "cpu" else 5),
        commit=args.commit,
        progress=say,
    )
    print(record.table())
    if line := summary(record):
        print(line)
    if args.output:
        write(record, args.output)
        say(f"the record is in {args.output}")
    else:
        print(record.json())
    return int(record.failed)
