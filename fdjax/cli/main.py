"""The command line: `fdjax generate | chat | info | doctor | bench | calibrate | tune`."""

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fdjax
from fdjax.cli.arguments import (
    Parser,
    UsageError,
    byte_count,
    integer,
    model_name,
    said,
    some_text,
)
from fdjax.system import interrupts

_EXAMPLES = """examples:
  fdjax generate "What is the largest ocean?"
  fdjax generate --model meta-llama/Llama-3.2-1B --max-new-tokens 64 "The ocean is"
  echo "What is 7 + 5?" | fdjax generate
  fdjax chat
  fdjax info path/to/checkpoint --memory 80GB --batch 8
  fdjax doctor
  fdjax bench path/to/checkpoint --batch 8
  fdjax calibrate path/to/checkpoint --text book.txt
  fdjax tune path/to/checkpoint --output table.json
"""
_MODEL = "folder or hub id; default: the embedded model"
_MODEL_OR_CONFIG = "folder, config.json or hub id; default: the embedded model"
logger = logging.getLogger("fdjax")

# Answers of a conversation end by themselves; this is for those that do not.
_CHAT_TOKENS = 1024
# With fewer, a share of 1 % is a guess.
_CALIBRATION_TOKENS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0 done, 1 failed, 2 misused, 130 interrupted."""
    try:
        try:
            with interrupts.delivered():
                return _run(argv)
        finally:
            _flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # The reader has seen enough.
    except UsageError as error:
        return _fail(error, 2)
    except (ValueError, NotImplementedError, OSError, FloatingPointError) as error:
        return _fail(error)
    except (MemoryError, RuntimeError) as error:
        return _fail(_explained(error))


def _run(argv: Sequence[str] | None) -> int:
    # A character that the terminal does not have is no reason to stop half-way.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    args = parser.parse_args(argv)
    if "run" not in args:
        parser.print_help(sys.stderr)
        return 2
    with warnings.catch_warnings(), _told(getattr(args, "verbose", False)):
        warnings.showwarning = _show_warning
        return args.run(args)


@contextlib.contextmanager
def _told(verbose: bool) -> Iterator[None]:
    """With `verbose`, what fdjax logs goes to standard error; else a terminal sees compilations."""
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fdjax: %(message)s"))
    elif sys.stderr is not None and sys.stderr.isatty():
        handler = _CompileNotice()
    else:
        yield
        return
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _CompileNotice(logging.Handler):
    """Says on a terminal, wherever the cursor is, what is compiled, for as long as it takes."""

    def emit(self, record):
        compiling = getattr(record, "compiling", None)
        if compiling is None:
            return
        if compiling:
            # The first token of an answer may be on this line; what wraps cannot be taken back.
            room = max(0, shutil.get_terminal_size().columns - 24)
            self._notice = f" [{record.getMessage()}]"[:room]
            print(self._notice, end="", file=sys.stderr, flush=True)
        else:
            back = "\b" * len(self._notice)
            print(back + " " * len(back) + back, end="", file=sys.stderr, flush=True)


def _fail(reason: Exception | str, code: int = 1) -> int:
    print(f"fdjax: error: {reason}", file=sys.stderr)
    return code


def _explained(error: MemoryError | RuntimeError) -> str:
    """What a user can do about an error that is not a bug; others are raised again."""
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


def _flush() -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        # What cannot be written is dropped, or the interpreter tries again as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _show_warning(message, category, filename, lineno, file=None, line=None):
    print(f"fdjax: warning: {message}", file=file or sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fdjax",
        description="LLM inference on NVIDIA GPUs from JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fdjax {fdjax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="continue a prompt, printing as it comes",
        description="Continue a prompt, printing the text as it comes.",
    )
    generate.add_argument("prompt", nargs="?", help="default: standard input")
    _add_model(generate)
    _add_sampling(generate, "default: the checkpoint's, else 128")
    generate.add_argument(
        "--num-return-sequences",
        type=integer(1),
        default=1,
        metavar="N",
        help="samples to print; several need a temperature",
    )
    generate.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for each sample at the end; its stats are those of the call",
    )
    generate.add_argument(
        "--logprobs",
        type=integer(0, 20),
        metavar="N",
        help="with --json: the log-probabilities of the tokens, and of the N likeliest",
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model: each line is answered in view of those before it, which "
        "need a chat template. Lines may be piped in. /reset forgets the conversation, /quit or "
        "the end of the input ends it, Ctrl-C stops an answer.",
    )
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    chat.add_argument(
        "--chat-template", metavar="T", help="a Jinja file, or the name of a template of the model"
    )
    _add_sampling(chat, f"default: {_CHAT_TOKENS}")
    chat.set_defaults(run=_chat)

    info = commands.add_parser(
        "info",
        help="size of a model, what fits, which kernels run",
        description="Say how large a model is, what fits on the device and which kernels run.",
    )
    info.add_argument("model", nargs="?", default="tiny", type=model_name, help=_MODEL_OR_CONFIG)
    info.add_argument(
        "--batch", type=integer(1), metavar="B", default=1, help="rows at once; default: 1"
    )
    info.add_argument(
        "--context",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="tokens of each row; default: the model's context",
    )
    info.add_argument(
        "--memory",
        type=byte_count,
        metavar="SIZE",
        help="what would fit into this, such as 80GB; default: the memory JAX may use here",
    )
    _add_dtype(info)
    _add_table(info)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and what is missing for a GPU",
        description="Say what fdjax runs on and what is missing for a GPU to be used well. Exit "
        "code 1 if there is something to mend.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench",
        help="time the first token and the decode step",
        description="Time the first token and the decode step of random prompts. A config.json "
        "alone gives random weights. The last line printed is the JSON record; "
        "`python -m fdjax.bench compare OLD NEW` holds two against each other.",
    )
    bench.add_argument("model", nargs="?", default="tiny", type=model_name, help=_MODEL_OR_CONFIG)
    default = "default: %(default)s"
    for option, least, value, text in (
        ("--batch", 1, 1, "prompts at once"),
        ("--prompt-tokens", 1, 128, "length of each prompt"),
        ("--new-tokens", 2, 128, "tokens generated for each"),
        ("--runs", 1, 5, "timed calls"),
    ):
        bench.add_argument(
            option, type=integer(least), metavar="N", default=value, help=f"{text}; {default}"
        )
    _add_dtype(bench)
    bench.add_argument(
        "--implementation",
        choices=("xla", "cudnn", "mosaic_gpu"),
        help="force this one for every op that has it",
    )
    _add_table(bench)
    bench.add_argument("--output", metavar="FILE", help="also write the JSON record here")
    bench.add_argument("--commit", help="commit to record where git cannot be asked")
    bench.set_defaults(run=_bench)

    calibrate = commands.add_parser(
        "calibrate",
        help="choose the unified maximum of decode attention by a text",
        description="Run a text through a model and choose, head by head, the constant that decode "
        "attention subtracts in place of a maximum (FlashDecoding++, section 3). It changes the "
        "speed, never a result.",
    )
    calibrate.add_argument("model", nargs="?", default="tiny", type=model_name, help=_MODEL)
    calibrate.add_argument(
        "--text",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="UTF-8 text like what the model will see; may be given several times",
    )
    calibrate.add_argument(
        "--context",
        type=integer(2),
        metavar="N",
        help="longest piece of a text in tokens; default: the model's context, up to 4096",
    )
    _add_dtype(calibrate)
    calibrate.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: beside the checkpoint, the only place where a model's loading looks for it",
    )
    calibrate.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the distribution here"
    )
    calibrate.add_argument("--commit", help="commit to record where git cannot be asked")
    calibrate.set_defaults(run=_calibrate)

    tune = commands.add_parser(
        "tune",
        help="measure which implementation of each linear layer is the fastest",
        description="Measure XLA and the kernel for each linear layer of a model over M, the rows "
        "of a step, and print the inflection points between them (FlashDecoding++, section 5). "
        "Takes a GPU for minutes.",
    )
    source = tune.add_mutually_exclusive_group()
    source.add_argument("model", nargs="?", default="tiny", type=model_name, help=_MODEL_OR_CONFIG)
    source.add_argument(
        "--config", type=model_name, metavar="FILE", help="the same by a config.json"
    )
    _add_dtype(tune)
    what = tune.add_mutually_exclusive_group()
    what.add_argument(
        "--explain",
        action="store_true",
        help="measure nothing: print the table that is in use, or that of --table",
    )
    what.add_argument(
        "--output", type=Path, metavar="FILE", help="write the table here, for --table"
    )
    _add_table(tune, "the table to explain")
    tune.add_argument("--commit", help="commit to record where git cannot be asked")
    tune.set_defaults(run=_tune)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", type=model_name, help=_MODEL)
    _add_dtype(parser)
    _add_table(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log to standard error")


def _add_sampling(parser: argparse.ArgumentParser, default_tokens: str) -> None:
    from fdjax.sampling.options import OPTIONS

    for name, option in OPTIONS.items():
        if option.flag:
            metavar, text = option.flag
            parse = said(option.check.parse)
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
    names = [name for name, option in OPTIONS.items() if option.flag]
    parser.set_defaults(options=[*names, "stop_strings"])


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `_add_sampling` that were given."""
    given = {n: getattr(args, n) for n in args.options if getattr(args, n) is not None}
    least, most = given.get("min_new_tokens", 0), given.get("max_new_tokens", math.inf)
    if least > most:
        raise UsageError(f"--min-new-tokens {least} is more than --max-new-tokens {most}")
    return given


def _with_room(options: dict[str, Any], default: int) -> dict[str, Any]:
    """The options: a minimum above the default maximum asks for more, not for an error."""
    least = options.get("min_new_tokens", 0)
    return ({"max_new_tokens": least} if least > default else {}) | options


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's"
    )


def _add_table(parser: argparse.ArgumentParser, text: str = "what `fdjax tune` measured") -> None:
    parser.add_argument("--table", type=Path, metavar="FILE", help=text)


def _prompt(given: str | None) -> str:
    """The prompt: the argument, or what is piped in without its last line break."""
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("generate: give a prompt, or pipe one in")
        data = sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")
    try:
        if given is not None:  # Surrogates stand for bytes that Python could not decode.
            data = given.encode("utf-8", "surrogateescape")
        text = data.decode("utf-8-sig")
    except UnicodeError as error:
        raise UsageError(f"generate: prompt must be UTF-8, not so at {error.start}") from None
    if not text.strip():
        raise UsageError("generate: the prompt is empty")
    return text


def _generate(args: argparse.Namespace) -> int:
    if args.logprobs is not None and not args.json:
        raise UsageError("generate: --logprobs needs --json")
    prompt, options = _prompt(args.prompt), _sampling(args)
    lm = fdjax.load(args.model, dtype=args.dtype, plan=_plan(args))
    options = _with_room(options, lm.defaults.max_new_tokens)
    if args.json or args.num_return_sequences > 1:
        several = {"num_return_sequences": args.num_return_sequences}
        result = lm.generate(prompt, return_logprobs=args.logprobs, **several, **options)
        if args.json:
            for sample in _samples(prompt, result):
                print(json.dumps(sample))
        else:
            print("\n---\n".join(text.removeprefix(" ") for text in result.texts))
        if args.verbose:
            logger.info("%s", result.stats)
        return 0
    held: str | None = ""
    stream = lm.stream(prompt, **options)
    for piece in stream:
        if held is not None:
            held += piece
            if not held.strip():
                continue
            # The space that joins a continuation to its prompt; indentation is more than one.
            piece, held = held if held.startswith("  ") else held.removeprefix(" "), None
        print(piece, end="", flush=True)
    print()
    if args.verbose:
        logger.info("%s", stream.stats)
    return 0


def _samples(prompt: str, result: "fdjax.GenerateResult") -> Iterator[dict[str, Any]]:
    """What `fdjax generate --json` prints: one object for each sample."""
    stats = result.stats
    for i, tokens in enumerate(result.tokens):
        yield {
            "prompt": prompt,
            "text": result.texts[i] if result.texts else None,
            "tokens": tokens,
            "finish_reason": result.finish_reasons[i],
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


def _chat(args: argparse.Namespace) -> int:
    from fdjax.cli.chat_loop import Conversation, talk

    template = args.chat_template
    if template is not None and Path(template).is_file():
        template = _read_text(Path(template))
    options = {"max_new_tokens": _CHAT_TOKENS} | _with_room(_sampling(args), _CHAT_TOKENS)
    lm = fdjax.load(args.model, dtype=args.dtype, plan=_plan(args))
    talk(Conversation(lm, system=args.system, chat_template=template, **options))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from fdjax.tools.doctor import diagnose

    diagnosis = diagnose()
    print(json.dumps(diagnosis.asdict()) if args.json else diagnosis)
    return int(not diagnosis.sound)


def _plan(args: argparse.Namespace):
    """The device's plan as --implementation and --table change it; None if neither does."""
    from fdjax.pallas_kernels.plan import Plan
    from fdjax.system.platform import default_backend

    implementation = getattr(args, "implementation", None)
    if args.table is None and implementation is None:
        return None
    default_backend()
    return Plan.for_device(implementation=implementation, table=args.table)


def _describe(args: argparse.Namespace):
    """(model, folder or None) from a folder, a hub id, or a config.json alone."""
    from fdjax.models import describe, parse_config
    from fdjax.system.platform import default_backend
    from fdjax.weights.checkpoint import locate, read_json, unnamed_dtype, user_path

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
    dtype = args.dtype or (unnamed_dtype(folder, data) if folder else None)
    return describe(config, dtype=dtype, plan=_plan(args)), folder


def _info(args: argparse.Namespace) -> int:
    from fdjax.tools.info import model_info

    model, _ = _describe(args)
    info = model_info(model, batch=args.batch, slots=args.context, memory_bytes=args.memory)
    print(json.dumps(info.asdict()) if args.json else info)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from fdjax.bench.model import bench_model
    from fdjax.bench.record import emit
    from fdjax.engine.memory import check_load, plan_memory
    from fdjax.lm import LM
    from fdjax.models import random_params
    from fdjax.system.platform import default_backend, enable_compilation_cache

    # Whatever is wrong is found before the minutes that measuring takes.
    if args.implementation not in (None, "xla") and default_backend() != "gpu":
        raise UsageError(
            f"bench: --implementation {args.implementation} needs an NVIDIA GPU, JAX sees none"
        )
    if args.output:
        _check_writable(Path(args.output))
    enable_compilation_cache()
    model, folder = _describe(args)
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
    _say(f"{'making' if folder is None else 'loading'} {size} on {model.plan.device_kind}")
    if folder is None:
        lm = LM(model, random_params(model), memory_bytes=memory_bytes)
    else:
        lm = fdjax.load(args.model, dtype=args.dtype, plan=model.plan)
    record = bench_model(
        lm,
        batch=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        runs=args.runs,
        commit=args.commit,
        progress=_say,
    )
    emit(record, args.output)
    return int(record.failed)


def _calibrate(args: argparse.Namespace) -> int:
    from fdjax.bench.record import environment
    from fdjax.tools import calibrate
    from fdjax.weights.calibration import FILE, write_calibration
    from fdjax.weights.checkpoint import fingerprint, locate

    # Whatever is wrong is found before the minutes that a large model takes.
    texts = [_read_text(path) for path in args.text]
    folder = locate(args.model)
    output = folder / FILE if args.output is None else args.output
    _check_writable(output)
    if args.plot:
        calibrate.check_plot(args.plot)
        _check_writable(args.plot)
    lm = fdjax.load(str(folder), dtype=args.dtype, calibration=False)
    last = 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if 10 * done // total > last:
            last = 10 * done // total
            _say(f"{done} of {total} tokens")

    statistics = calibrate.gather(
        lm.engine, lm.tokenizer, texts, context=args.context, progress=progress
    )
    rows = int(statistics.maxima[0, 0].sum())
    if rows < _CALIBRATION_TOKENS:
        warnings.warn(
            f"{rows} tokens are few to choose by; give at least {_CALIBRATION_TOKENS}, better many "
            "times that",
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
    _say(f"written to {output}")
    if args.plot:
        calibrate.plot(statistics, folder.name, args.plot)
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8, not so at {error.start}") from None


def _tune(args: argparse.Namespace) -> int:
    from fdjax.system.platform import default_backend, enable_compilation_cache
    from fdjax.tools import tune

    args.model = args.config or args.model
    if args.table and not args.explain:
        raise UsageError("tune: --table is what --explain explains")
    if args.explain:
        # What is explained may be of another device, and runs nothing here.
        explained, args.table = args.table, None
        model, _ = _describe(args)
        table = tune.table_in_use(model.plan.device_kind, explained)
    else:
        if default_backend() != "gpu":
            raise UsageError("tune: needs an NVIDIA GPU, JAX sees none")
        if args.output:
            _check_writable(args.output)
        enable_compilation_cache()
        model, _ = _describe(args)
        table = tune.tune(model, commit=args.commit, report=_say)
        if args.output:
            tune.write_table(table, args.output)
    print(tune.explain(table, model.config.linear_shapes, model.dtype))
    return 0


def _check_writable(path: Path) -> None:
    """Make the folders above a file that is to be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def _say(doing: str) -> None:
    print(f"fdjax: {doing}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
