"""`fdjax generate`: continues a prompt."""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import fdjax
from fdjax.cli.arguments import Parser, UsageError, integer, some_path, some_text, utf8_text
from fdjax.cli.batch import run_batch
from fdjax.cli.shared import (
    add_model,
    add_sampling,
    load_model,
    sampling_of,
    with_room,
)

HELP = "continue a prompt, printing as it comes"
DESCRIPTION = "Continue a prompt, printing the text as it comes."
logger = logging.getLogger("fdjax")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("prompt", nargs="?", type=utf8_text, help="default: standard input")
    parser.add_argument(
        "--input",
        type=some_path,
        metavar="FILE",
        help="answer each line of a file, in JSON: a text, token ids, or an object with "
        '"prompt" or "messages" and optionally an "id"',
    )
    parser.add_argument(
        "--output",
        type=some_path,
        metavar="FILE",
        help="with --input: file for the answers, one JSON object per line; a second run continues "
        "an interrupted one",
    )
    add_model(parser)
    parser.add_argument(
        "--system",
        type=some_text,
        metavar="TEXT",
        help="answer the prompt as one question of a chat, after this system message",
    )
    add_sampling(parser, "default: the checkpoint's, else 128")
    parser.add_argument(
        "--num-return-sequences",
        type=integer(1),
        default=1,
        metavar="N",
        help="answers to print; more than one needs a temperature or --num-beams",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for each answer at the end; its stats cover the whole call",
    )
    parser.add_argument(
        "--logprobs",
        type=integer(0, 20),
        metavar="N",
        help="with --json: the log-probability of each token, and of the N likeliest in its place",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.input is not None or args.output is not None:
        if args.input is None or args.output is None:
            raise UsageError("generate: --input and --output belong together")
        if args.prompt is not None:
            raise UsageError("generate: give a prompt or --input, not both")
        check_options(args)
        return run_batch(args)
    if args.logprobs is not None and not args.json:
        raise UsageError("generate: --logprobs needs --json")
    prompt, options = _prompt(args.prompt), sampling_of(args)
    several = {"num_return_sequences": args.num_return_sequences}
    if args.num_return_sequences > 1 or "num_beams" in options:
        check_options(args)
    lm = load_model(args)
    options = with_room(options, lm.defaults.max_new_tokens)
    generate, stream, given = lm.generate, lm.stream, prompt
    if args.system is not None:
        generate, stream = lm.chat, lm.stream_chat
        given = [{"role": "system", "content": args.system}, {"role": "user", "content": prompt}]
    # The text of a beam search is known only at its end.
    has_beams = options.get("num_beams", lm.defaults.num_beams) > 1
    if args.json or args.num_return_sequences > 1 or has_beams:
        result = generate(given, return_logprobs=args.logprobs, **several, **options)
        if args.json:
            for sample in _samples(prompt, result):
                print(json.dumps(sample))
        else:
            print("\n---\n".join(text.removeprefix(" ") for text in result.texts))
        if args.verbose:
            logger.info("%s", result.stats)
        return 0
    held: str | None = ""
    answer = stream(given, **options)
    for piece in answer:
        if held is not None:
            held += piece
            if not held.strip():
                continue
            # One space joins the answer to the prompt and is dropped. More spaces are indentation.
            piece, held = held if held.startswith("  ") else held.removeprefix(" "), None
        print(piece, end="", flush=True)
    print(flush=True)
    if args.verbose:
        logger.info("%s", answer.stats)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Check that options fit together and to those of the checkpoint, before the weights are read.

    Raises:
      UsageError: they do not fit together.
    """
    from fdjax.sampling.options import GenerationConfig
    from fdjax.sampling.per_prompt import per_prompt
    from fdjax.weights.checkpoint import locate, read_json

    options = sampling_of(args) | {"num_return_sequences": args.num_return_sequences}
    options |= {"return_logprobs": args.logprobs}
    folder = locate(args.model, weights=False)
    path = folder / "generation_config.json"
    defaults = GenerationConfig.from_files(
        read_json(path, required=False), read_json(folder / "config.json"), str(path)
    )
    ((config, _),) = per_prompt(defaults, None, options, 1)
    if config.num_return_sequences > 1 and config.num_beams == 1 and not config.sampled:
        raise UsageError(
            "generate: --num-return-sequences needs a --temperature above 0 or --num-beams, "
            "because without them all answers are the same"
        )
    if conflict := config.conflict:
        raise UsageError(f"generate: {conflict}")


def _prompt(given: str | None) -> str:
    """The prompt: the argument, or standard input without its last line break."""
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("generate: give a prompt, or pipe one in")
        data = sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")
        try:
            given = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"generate: prompt is not UTF-8 at byte {error.start}") from None
    if not given.strip():
        raise UsageError("generate: the prompt is empty")
    return given


def _samples(prompt: str, result: "fdjax.GenerateResult") -> Iterator[dict[str, Any]]:
    """The objects that `fdjax generate --json` prints, one for each sample."""
    stats = result.stats
    for i, tokens in enumerate(result.tokens):
        yield {
            "prompt": prompt,
            "text": result.texts[i] if result.texts else None,
            "tokens": tokens,
            "finish_reason": result.finish_reasons[i],
            **({"sequences_score": result.sequences_scores[i]} if result.sequences_scores else {}),
            **({"logprobs": result.logprobs[i]} if result.logprobs else {}),
            **({"top_logprobs": result.top_logprobs[i]} if result.top_logprobs else {}),
            "stats": {
                "prompt_tokens": stats.prompt_tokens,
                "decode_tokens": stats.decode_tokens,
                "prefill_seconds": stats.prefill_seconds,
                "decode_seconds": stats.decode_seconds,
                "compile_seconds": stats.compile_seconds,
                "tokens_per_s": stats.tokens_per_s,
                "gb_per_s": stats.gb_per_s,
                "share_of_peak": stats.share_of_peak,
            },
        }
