"""`fdjax score`: prints the perplexity of texts."""

import argparse
import json
import math
import sys
from typing import Any

from fdjax.cli.arguments import Parser, UsageError, integer, some_path, utf8_text
from fdjax.cli.shared import add_model, load_model, read_text

HELP = "perplexity of texts, as JSON lines"
DESCRIPTION = (
    "Print a JSON object with the perplexity of each text: the exponential of the mean negative "
    "log-probability of its tokens. A lower perplexity means a likelier text."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "texts", nargs="*", type=utf8_text, metavar="TEXT", help="default: standard input's lines"
    )
    parser.add_argument(
        "--file",
        action="append",
        type=some_path,
        default=[],
        metavar="FILE",
        help="a UTF-8 file, taken as one text; may be given several times",
    )
    add_model(parser)
    parser.add_argument(
        "--stride",
        type=integer(1),
        metavar="N",
        help="score a text longer than the context in a window that moves by N tokens",
    )
    parser.add_argument(
        "--batch-size", type=integer(1), default=16, metavar="B", help="texts at once; default: 16"
    )
    parser.add_argument("--tokens", action="store_true", help="also print each token's score")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    texts = [("text", text) for text in args.texts]
    texts += [("file", str(path)) for path in args.file]
    contents = args.texts + [read_text(path) for path in args.file]
    if not texts:
        contents = _lines()
        texts = [("text", text) for text in contents]
    for text in contents:
        if not text.strip():
            raise UsageError("score: a text is empty")
    lm = load_model(args)
    context = lm.engine.context
    if args.stride is not None and args.stride >= context:
        raise UsageError(f"score: --stride must be less than {context}, the model's context")
    result = lm.score(contents, stride=args.stride, batch_size=args.batch_size)
    for i, named in enumerate(texts):
        print(json.dumps(dict([named]) | _scores(result, i, args.tokens)))
    return 0


def _lines() -> list[str]:
    """The texts of standard input, one per line. Empty lines are skipped."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("score: give texts or --file, or pipe lines in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"score: standard input is not UTF-8 at byte {error.start}") from None
    # `str.splitlines` would also end lines at a form feed, or at U+2028.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not (texts := [line for line in lines if line.strip()]):
        raise UsageError("score: there is no text")
    return texts


def _scores(result, i: int, with_tokens: bool) -> dict[str, Any]:
    """The printed fields of text `i`. The first token has no log-probability."""
    perplexity = result.perplexities[i]
    scores = {
        "tokens": len(result.tokens[i]),
        # A text of one token has the perplexity NaN, which JSON cannot express.
        "perplexity": None if math.isnan(perplexity) else perplexity,
        "logprob": math.fsum(result.logprobs[i]),
    }
    if with_tokens:
        scores |= {"ids": result.tokens[i], "logprobs": result.logprobs[i]}
    return scores
