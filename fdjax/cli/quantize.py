"""`fdjax quantize`: writes a checkpoint with weights of 4 or 8 bits."""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import fdjax
from fdjax.cli.arguments import Parser, UsageError, integer, model_name, some_path
from fdjax.cli.shared import EMBEDDED, MODEL, read_text, say

HELP = "write a checkpoint with weights of 4 or 8 bits"
DESCRIPTION = (
    "Quantise the weights of a model's linear layers and write a checkpoint in a format of "
    "compressed-tensors, which transformers also loads, except Granite MoE, "
    "gpt-oss and GPT-2. The model first runs on texts, so that the weights that matter lose less. "
    "Without --text, it writes them itself. With --text, a part shows how much the answers change. "
    "See docs/quantised.md."
)
# Tokens of a piece of the text. A short text is cut into shorter pieces, so that there are enough.
_PIECE_TOKENS, _LEAST_TOKENS, _LEAST_PIECES = 512, 32, 8
# The largest number of pieces for the search of scales, and for the comparison.
_PIECES, _COMPARED = 128, 64
# Bytes of a GPU beside weights: the cache of the texts, and what the search of scales computes.
_BESIDE_WEIGHTS = 10 * 10**9


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", default=EMBEDDED, type=model_name, help=MODEL)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="default: 4")
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="with 8 bits: floating point (e4m3) with a scale for each output; prompts then round "
        "activations to fp8, too",
    )
    parser.add_argument(
        "--w8a8",
        action="store_true",
        help="with 8 bits: prompts also round activations to int8, which is the fastest on Hopper; "
        "weights have a scale for each output",
    )
    parser.add_argument(
        "--group",
        type=integer(1),
        metavar="N",
        help="weights that share a scale; default: all of an output with 8 bits; with 4 bits 128, "
        "or 64 or 32 if 128 does not divide the inputs of all layers",
    )
    parser.add_argument(
        "--text",
        action="append",
        type=some_path,
        metavar="FILE",
        help="UTF-8 text, similar to what the model will see; may be given several times",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="do not run the model, which takes less time and memory, and is less exact; always so "
        "with 8 bits if there is no text and no --w8a8",
    )
    parser.add_argument(
        "--output", type=some_path, required=True, metavar="DIR", help="an empty or new folder"
    )


def needed_bytes(args: argparse.Namespace) -> int:
    """Bytes of a GPU's memory that are enough, in order to take less host memory for JAX's tables.

    Raises:
      CheckpointError: the checkpoint is damaged or not supported.
    """
    import jax.numpy as jnp

    from fdjax.models import parse_config, weight_map
    from fdjax.weights.checkpoint import locate, read_json, unnamed_dtype

    if not args.text and not _runs_on_own_texts(args):
        return _BESIDE_WEIGHTS
    folder = locate(args.model)
    data = read_json(folder / "config.json")
    config = parse_config(data, str(folder / "config.json"))
    itemsize = jnp.dtype(unnamed_dtype(folder, data) or config.dtype).itemsize
    shapes = [shape for weight in weight_map(config).values() for _, shape in weight.sources]
    dense = itemsize * sum(map(math.prod, shapes))
    # The comparison holds the quantised model as well.
    return (7 if args.text else 5) * dense // 4 + _BESIDE_WEIGHTS


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.models import parse_config
    from fdjax.system.device_memory import gigabytes
    from fdjax.tools import quantise, smoothing
    from fdjax.weights.checkpoint import (
        is_quantised_already,
        locate,
        quantised_config,
        read_json,
        unnamed_dtype,
    )
    from fdjax.weights.stored import DTYPES, stored_tensors

    if args.weights_only and args.text:
        raise UsageError("quantize: --weights-only does not use --text")
    if args.fp8 and args.w8a8:
        raise UsageError("quantize: --fp8 and --w8a8 exclude each other")
    for name, given in (("--fp8", args.fp8), ("--w8a8", args.w8a8)):
        if given and (args.bits != 8 or args.group):
            raise UsageError(f"quantize: {name} needs --bits 8, and no --group")
    # Everything is checked first, because a large model takes minutes.
    texts = [read_text(path) for path in args.text or ()]
    folder = locate(args.model)
    data = read_json(folder / "config.json")
    config = parse_config(data, str(folder / "config.json"))
    config = quantised_config(folder, config, data)
    if is_quantised_already(folder, config):
        raise ValueError(f"quantize: {folder} is quantised already")
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise ValueError(f"quantize: {args.output} must be a new or empty folder")
    group = args.group or (quantise.default_group(config) if args.bits == 4 else None)
    scales = unnamed_dtype(folder, data) or config.dtype
    activations = "fp8" if args.fp8 else "int8" if args.w8a8 else None
    # Raises an error if the group does not divide.
    planned = quantise.with_formats(config, args.bits, group, scales, activations=activations)
    inputs, reference = None, None
    if texts:
        reference = fdjax.load(str(folder), calibration=False)
        if not reference.tokenizer:
            raise ValueError(f"quantize: {folder} has no tokenizer.json, so --text cannot be used")
        observed, compared = _split(reference, texts)
        _make(args.output)
        say(f"running {sum(map(len, observed)):,} tokens")
        inputs = smoothing.observe(reference.engine, observed)
    elif _runs_on_own_texts(args):
        _make(args.output)
        inputs = _inputs_of_own_texts(str(folder), config.max_position_embeddings)
    began, last = time.perf_counter(), 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if total and 10 * done // total > last:
            last = 10 * done // total
            say(f"{gigabytes(done)} of {gigabytes(total)} written")

    written = quantise.quantise_checkpoint(
        folder,
        args.output,
        config,
        bits=args.bits,
        group=group,
        scales=scales,
        activations=activations,
        inputs=inputs,
        progress=progress,
    )
    seconds = time.perf_counter() - began
    tensors = stored_tensors(folder).values()
    before = sum(tensor.nbytes for tensor in tensors if tensor.dtype in DTYPES)
    less = written <= before
    change = f"{before / written:.2f} times less" if less else f"{written / before:.2f} times more"
    print(f"size          {gigabytes(written)}, {change} than before")
    print(f"seconds       {seconds:.1f}")
    if reference is not None:
        other = fdjax.load(str(args.output), calibration=False)
        print(quantise.compare_models(reference.engine, other.engine, compared))
    say(f"written to {args.output}")
    if why := quantise.why_transformers_cannot(planned):
        say(f"transformers cannot load this model: {why}")
    return 0


def _runs_on_own_texts(args: argparse.Namespace) -> bool:
    """Whether the model runs on texts that it writes, if none is given."""
    return not args.weights_only and (args.bits == 4 or args.w8a8)


def _make(folder: Path) -> None:
    """Create the folder before the model runs, which takes minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"quantize: --output cannot be created: {error}") from None


def _inputs_of_own_texts(folder: str, context: int) -> list[dict[str, Any]] | None:
    """Inputs of the layers for texts that the model writes; None if it is too large to run."""
    from fdjax.tools import own_texts, smoothing

    try:
        # A cache for more rows or tokens would only take memory.
        length = min(1 + own_texts.TOKENS, context)
        lm = fdjax.load(folder, calibration=False, max_batch=own_texts.TEXTS, max_len=length)
        tokens = length - 1
        say(f"the model writes {own_texts.TEXTS * tokens:,} tokens and runs on them")
        start = lm.tokenizer.bos_token_id if lm.tokenizer else None
        if start is None and lm.tokenizer:
            start = lm.tokenizer.eos_token_id
        vocab_size = lm.config.vocab_size
        texts = own_texts.own_texts(lm.generate, start, vocab_size=vocab_size, tokens=tokens)
        lm.release()
        return smoothing.observe(lm.engine, texts)
    except MemoryError as error:
        say(f"only the weights are considered, as with --weights-only: {error}")
        return None


def _split(lm: fdjax.LM, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Split pieces into (those for finding scales, a quarter for comparing predictions)."""
    from fdjax.tools.calibrate import pieces_of

    def cut(context: int) -> list[list[int]]:
        return [
            piece
            for i, text in enumerate(texts)
            for piece in pieces_of(lm.engine, lm.tokenizer, text, i, context)
            if len(piece) > 1
        ]

    context = min(_PIECE_TOKENS, lm.engine.context)
    while len(pieces := cut(context)) < _LEAST_PIECES and context > _LEAST_TOKENS:
        context //= 2
    if len(pieces) < 4:
        raise ValueError(
            f"quantize: the text must have more than {3 * _LEAST_TOKENS} tokens, of which a "
            "quarter is for the comparison"
        )
    observed = [piece for i, piece in enumerate(pieces) if i % 4 != 3]
    return observed[:_PIECES], pieces[3::4][:_COMPARED]
