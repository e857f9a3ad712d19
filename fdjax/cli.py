"""The command line: `fdjax generate | info | bench`."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import fdjax

_EXAMPLES = """examples:
  fdjax generate "What is the largest ocean?"
  fdjax generate --model meta-llama/Llama-3.2-1B --max-new-tokens 64 "The ocean is"
  echo "What is 7 + 5?" | fdjax generate
  fdjax info path/to/checkpoint
  fdjax bench path/to/checkpoint --batch 8
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0 done, 1 failed, 2 misused, 130 interrupted."""
    parser = _parser()
    args = parser.parse_args(argv)
    warnings.showwarning = _show_warning
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone; what is still buffered has nowhere to go.
        sys.stderr.close()
        return 0
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"fdjax: error: {error}", file=sys.stderr)
        return 1


def _show_warning(message, category, filename, lineno, file=None, line=None):
    print(f"fdjax: warning: {message}", file=file or sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fdjax",
        description="LLM inference on NVIDIA GPUs from JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fdjax {fdjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt, printing as it comes")
    generate.add_argument("prompt", nargs="?", help="default: standard input")
    generate.add_argument(
        "--model", default="tiny", help="folder or hub id; default: the embedded model"
    )
    generate.add_argument("--max-new-tokens", type=int, help="tokens to generate at most")
    generate.add_argument("--temperature", type=float, help="above 0 samples; 0 is greedy")
    generate.add_argument("--top-k", type=int, help="sample from the k likeliest tokens")
    generate.add_argument("--top-p", type=float, help="sample from the likeliest mass p")
    generate.add_argument("--seed", type=int, help="makes samples reproducible")
    _add_dtype(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    generate.set_defaults(run=_generate)

    info = commands.add_parser("info", help="size of a model, what fits, which kernels run")
    info.add_argument("model", nargs="?", default="tiny", help="folder, config.json or hub id")
    info.add_argument("--batch", type=int, default=1, help="rows of the decode step")
    _add_dtype(info)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    bench = commands.add_parser(
        "bench", help="time first token and decode step; a config.json gives random weights"
    )
    bench.add_argument("model", nargs="?", default="tiny", help="folder, config.json or hub id")
    bench.add_argument("--batch", type=int, default=1)
    bench.add_argument("--prompt-tokens", type=int, default=128)
    bench.add_argument("--new-tokens", type=int, default=128)
    bench.add_argument("--runs", type=int, default=5)
    _add_dtype(bench)
    bench.add_argument("--implementation", help="force one for every op that has it")
    bench.add_argument("--output", help="also write the JSON record to this file")
    bench.add_argument("--commit", help="commit to record where git cannot be asked")
    bench.set_defaults(run=_bench)
    return parser


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's"
    )


def _generate(args: argparse.Namespace) -> int:
    prompt = args.prompt
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            print("fdjax generate: give a prompt, or pipe one in", file=sys.stderr)
            return 2
        prompt = sys.stdin.read().strip()
    lm = fdjax.load(args.model, dtype=args.dtype)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    options = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if args.json:
        result = lm.generate(prompt, **options)
        stats = result.stats
        print(
            json.dumps(
                {
                    "prompt": prompt,
                    "text": result.texts[0] if result.texts else None,
                    "tokens": result.tokens[0],
                    "finish_reason": result.finish_reasons[0],
                    "stats": {
                        "prompt_tokens": stats.prompt_tokens,
                        "decode_tokens": stats.decode_tokens,
                        "prefill_seconds": stats.prefill_seconds,
                        "decode_seconds": stats.decode_seconds,
                        "tokens_per_s": stats.tokens_per_s,
                        "gb_per_s": stats.gb_per_s,
                        "share_of_peak": stats.share_of_peak,
                    },
                }
            )
        )
        return 0
    started = False
    for piece in lm.stream(prompt, **options):
        # A continuation begins with the space between words; an answer on a line of its own does
        # not want it.
        piece = piece if started else piece.lstrip()
        started = started or bool(piece)
        print(piece, end="", flush=True)
    print()
    return 0


def _describe(name: str, dtype: str | None, implementation: str | None = None):
    """(model, folder or None) from a folder, a hub id, or a config.json alone."""
    from fdjax.checkpoint import locate, read_json
    from fdjax.models import describe, parse_config
    from fdjax.pallas_kernels.plan import Plan

    folder = None if name.endswith(".json") else locate(name)
    path = Path(name) if folder is None else folder / "config.json"
    plan = Plan.for_device(implementation=implementation)
    return describe(parse_config(read_json(path), str(path)), dtype=dtype, plan=plan), folder


def _info(args: argparse.Namespace) -> int:
    from fdjax.info import model_info

    model, _ = _describe(args.model, args.dtype)
    info = model_info(model, batch=args.batch)
    print(json.dumps(info.asdict()) if args.json else info)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from fdjax.bench.model import bench_model
    from fdjax.bench.record import emit
    from fdjax.lm import LM
    from fdjax.models import random_params
    from fdjax.platform import enable_compilation_cache

    enable_compilation_cache()
    model, folder = _describe(args.model, args.dtype, args.implementation)
    if folder is None:
        lm = LM(model, random_params(model))
    else:
        lm = fdjax.load(args.model, dtype=args.dtype, plan=model.plan)
    record = bench_model(
        lm,
        batch=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        runs=args.runs,
        commit=args.commit,
    )
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
