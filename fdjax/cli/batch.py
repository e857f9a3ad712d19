"""`fdjax generate --input`: reads prompts from a file and writes the answers to another.

A run that was interrupted goes on when it is started again.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fdjax
from fdjax.cli.arguments import UsageError
from fdjax.cli.shared import plan_of, sampling_of
from fdjax.engine.results import Answer
from fdjax.system.files import write_whole
from fdjax.text.conversation import chat_ids, split_options
from fdjax.weights.checkpoint import locate


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the input.

    Attributes:
      id: name of the answer: the line's own "id", or else its number, counted from 0.
      prompt: a text, token ids, or the messages of a chat.
      is_chat: whether the prompt consists of messages.
    """

    id: Any
    prompt: Any
    is_chat: bool


def run_batch(args: argparse.Namespace) -> int:
    """Answer the prompts that have no answer yet, and return the exit code."""
    data = _read(args.input)
    lines = list(_lines(data, args.input))
    options = sampling_of(args) | {"num_return_sequences": args.num_return_sequences}
    with Answers(args.output, _run_of(args, data, options)) as answers:
        left = [i for i in range(len(lines)) if i not in answers.done]
        _say(f"{len(lines)} prompts, {len(left)} without an answer")
        if not left:
            return 0
        lm = fdjax.load(args.model, dtype=args.dtype, plan=plan_of(args))
        prompts = [_prompt(lm, lines[i], args.system) for i in left]
        if args.system is not None or any(line.is_chat for line in lines):
            # The answer of a chat also ends at the tokenizer's end token.
            _, options = split_options(lm.tokenizer, lm.defaults, None, options)
        began, tokens, count = time.monotonic(), 0, 0
        with _progress(len(left)) as update:
            found: dict[int, list[Answer]] = {}
            for answer in lm.generate_iter(prompts, return_logprobs=args.logprobs, **options):
                samples = found.setdefault(answer.index, [])
                samples.append(answer)
                tokens += len(answer.tokens)
                if len(samples) == args.num_return_sequences or answer.error is not None:
                    i = left[answer.index]
                    answers.add(i, lines[i], found.pop(answer.index))
                    count += 1
                    update(f"{tokens / (time.monotonic() - began):.0f} tok/s")
    _say(f"{count} answers, {tokens} tokens in {time.monotonic() - began:.1f} s: {args.output}")
    return 0


class Answers:
    """The output file, with one line for each prompt that has an answer, in order of completion.

    A file beside it records the model, options and input that the answers belong to.

    Attributes:
      done: indices of the prompts that have an answer.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self._path = path
        self._run = run
        self._file: BinaryIO | None = None
        self.done: set[int] = set()

    def __enter__(self) -> "Answers":
        beside = self._path.with_name(self._path.name + ".run.json")
        try:
            self._file = self._path.open("ab")
        except OSError as error:
            raise UsageError(f"generate: --output {self._path}: {error.strerror}") from None
        try:
            _lock(self._file, self._path)
            self._resume(beside)
        except BaseException:
            self._file.close()
            raise
        return self

    def _resume(self, beside: Path) -> None:
        """Read which prompts have an answer, and remove a last line that is incomplete."""
        if self._path.stat().st_size:
            self._check(beside)
        else:
            write_whole(beside, json.dumps(self._run, indent=1))
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.done.add(json.loads(line)["index"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{self._path}: line {number} is not an answer") from None
        # The prompt of an incomplete line is answered again.
        self._file.truncate(len(whole))

    def __exit__(self, *error) -> None:
        self._file.close()

    def add(self, index: int, line: Line, answers: list[Answer]) -> None:
        """Write the answers to the prompt with this index, one for each of its samples."""
        first = answers[0]
        record: dict[str, Any] = {"index": index, "id": line.id}
        if len(answers) == 1:
            record |= _answer(first)
        else:
            record["samples"] = [_answer(a) for a in sorted(answers, key=lambda a: a.sample)]
        # One write for the whole line: if the process is killed, only the last line can be cut.
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def _check(self, beside: Path) -> None:
        try:
            run = json.loads(beside.read_text())
        except (OSError, ValueError):
            raise UsageError(
                f"{self._path} exists, but {beside.name} beside it is missing or damaged: "
                "name another --output"
            ) from None
        for name, value in self._run.items():
            if run.get(name) != value:
                raise UsageError(
                    f"{self._path} holds answers of another {name}: name another --output, "
                    "or delete it"
                )


def _answer(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        return {"error": f"{type(answer.error).__name__}: {answer.error}"}
    fields = {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        fields["logprobs"] = answer.logprobs
    if answer.top_logprobs is not None:
        fields["top_logprobs"] = answer.top_logprobs
    return fields


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"generate: --input {path}: {error.strerror}") from None


def _lines(data: bytes, path: Path) -> Iterator[Line]:
    """The lines of the input: each a JSON string, or an object with "prompt" or "messages"."""
    for number, text in enumerate(data.decode("utf-8-sig", "replace").split("\n"), 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}: line {number} is not JSON: {error}") from None
        fields = value if isinstance(value, dict) else {"prompt": value}
        names = fields.keys() & {"prompt", "messages"}
        if len(names) != 1:
            raise UsageError(f'{path}: line {number} must have either "prompt" or "messages"')
        if unknown := fields.keys() - {"prompt", "messages", "id"}:
            raise UsageError(f"{path}: line {number} has an unknown field {min(unknown)!r}")
        (name,) = names
        yield Line(fields.get("id", number - 1), fields[name], is_chat=name == "messages")


def _prompt(lm: "fdjax.LM", line: Line, system: str | None) -> Any:
    """The prompt of a line in the form that `generate_iter` takes."""
    messages = line.prompt if line.is_chat else [{"role": "user", "content": line.prompt}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    elif not line.is_chat:
        return line.prompt
    return chat_ids(lm.tokenizer, messages)


def _run_of(args: argparse.Namespace, data: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that the answers depend on. They are stored beside the output."""
    asked = options | {"system": args.system, "dtype": args.dtype, "logprobs": args.logprobs}
    folder = locate(args.model, weights=False)
    config = (folder / "config.json").read_bytes()
    return {
        "model": [str(args.model), hashlib.sha256(config).hexdigest()],
        "options": {name: value for name, value in sorted(asked.items()) if value is not None},
        "input": hashlib.sha256(data).hexdigest(),
    }


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"{path}: another process is writing it") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _progress:
    """A progress bar if standard error is a terminal, else nothing."""

    def __init__(self, total: int):
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="prompt", leave=False)

    def __enter__(self):
        return self._update

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update(self, rate: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(rate)
            self._bar.update()
