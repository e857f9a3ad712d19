"""`fdjax generate --input`: reads prompts from a file and writes the answers to another.

An interrupted run continues when it is started again.
"""

import argparse
import codecs
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fdjax
from fdjax.cli.arguments import UsageError
from fdjax.cli.shared import counted, load_model, model_of, sampling_of, with_room
from fdjax.engine.mesh import Place
from fdjax.engine.results import IndexedGeneration
from fdjax.models import CheckpointError
from fdjax.system import progress
from fdjax.system.files import write_whole
from fdjax.text.conversation import chat_ids, split_options
from fdjax.weights.checkpoint import fingerprint, locate, read_json

# Files of a checkpoint that change its answers, beside the weights.
_SETTINGS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt")


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
    # Everything is checked before a file is made.
    data = _read(args.input)
    lines = list(_lines(data, args.input))
    model_of(args)
    Place.for_ranks(args.tensor_parallel)
    options = sampling_of(args) | {"num_return_sequences": args.num_return_sequences}
    with AnswerFile(args.output, _run_of(args, data, options)) as answers:
        left = [i for i in range(len(lines)) if i not in answers.done]
        _say(f"{counted(len(lines), 'prompt')}, {len(left)} without an answer")
        if not left:
            return 0
        lm = load_model(args)
        if args.system is not None or any(line.is_chat for line in lines):
            # The answer of a chat also ends at the tokenizer's end token.
            _, options = split_options(lm.tokenizer, lm.defaults, None, options)
        options = with_room(options, lm.defaults.max_new_tokens)
        options |= {"return_logprobs": args.logprobs}
        try:
            _answer_all(lm, {i: lines[i] for i in left}, answers, args.system, options)
        except KeyboardInterrupt:
            done = len(answers.done)
            _say(f"\n{done} of {len(lines)} prompts have an answer; the same command goes on")
            raise
    return 0


def _answer_all(
    lm: "fdjax.LM",
    lines: dict[int, Line],
    answers: "AnswerFile",
    system: str | None,
    options: dict[str, Any],
) -> None:
    """Answer the given lines of the input."""
    began, tokens = time.monotonic(), 0
    prompts, failed = {}, 0
    for i, line in lines.items():
        try:
            prompts[i] = _prompt(lm, line, system)
        except CheckpointError:
            raise
        except ValueError as error:
            answers.add(i, line, [_error(error)])
            failed += 1
    numbers = list(prompts)
    found: dict[int, list[IndexedGeneration]] = {}
    complete = 0
    with progress.answers(len(prompts)) as update:
        for answer in lm.generate_iter(list(prompts.values()), **options):
            if (i := numbers[answer.index]) in answers.done:  # another sample of this prompt failed
                continue
            samples = found.setdefault(answer.index, [])
            samples.append(answer)
            tokens += len(answer.tokens)
            if len(samples) == options["num_return_sequences"] or answer.error is not None:
                samples = sorted(found.pop(answer.index), key=lambda a: a.sample)
                answers.add(i, lines[i], [_answer(sample, i) for sample in samples])
                failed += answer.error is not None
                complete += 1
                if update is not None:
                    update(complete, tokens)
    errors = f", of which {counted(failed, 'error')}" if failed else ""
    seconds, count = time.monotonic() - began, counted(len(lines), "answer")
    _say(f"{count}{errors}, {counted(tokens, 'token')} in {seconds:.1f} s: {answers.path}")


class AnswerFile:
    """The output file, with one line for each prompt that has an answer, in order of completion.

    A file beside it records the model, options and input that the answers belong to.

    Attributes:
      path: path of the output.
      done: numbers of the prompts that have an answer.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self._run = run
        self._beside = Path(f"{path}.run.json")
        self._is_new = False
        self._file: BinaryIO | None = None
        self.done: set[int] = set()

    def __enter__(self) -> "AnswerFile":
        try:
            for path in (self.path, self._beside):
                if path.exists() and not path.is_file():
                    raise UsageError(f"generate: --output {path}: not a file")
            self._is_new = not self.path.exists()
            self._file = self.path.open("ab")
        except OSError as error:
            raise UsageError(f"generate: --output {error.filename}: {error.strerror}") from None
        try:
            _lock(self._file, self.path)
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def _resume(self) -> None:
        """Read which prompts have an answer."""
        if self.path.stat().st_size:
            self._check()
        else:
            write_whole(self._beside, json.dumps(self._run, indent=1))
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.done.add(json.loads(line)["index"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{self.path}: line {number} is not an answer") from None
        # A line that was cut off is written again.
        self._file.truncate(len(whole))

    def __exit__(self, error: type[BaseException] | None, *_rest: object) -> None:
        self._file.close()
        if error is not None and self._is_new and not self.done:
            for path in (self.path, self._beside):
                path.unlink(missing_ok=True)

    def add(self, index: int, line: Line, answers: list[dict[str, Any]]) -> None:
        """Write the answers to a prompt."""
        record: dict[str, Any] = {"index": index, "id": line.id}
        record |= answers[0] if len(answers) == 1 else {"samples": answers}
        # A lone surrogate in an id has no UTF-8 form, so it is written as a JSON escape.
        text = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")
        # One write call, so that if the process is killed, only the last line can be cut off.
        self._file.write(text + b"\n")
        self._file.flush()
        self.done.add(index)

    def _check(self) -> None:
        try:
            run = json.loads(self._beside.read_text())
        except (OSError, ValueError):
            run = None
        if not isinstance(run, dict):
            raise UsageError(
                f"{self.path} exists without {self._beside.name}, its settings: "
                "name another --output"
            )
        for name, value in self._run.items():
            if run.get(name) != value:
                raise UsageError(
                    f"{self.path} holds answers of another {name}: name another --output, "
                    "or delete it"
                )


def _error(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def _answer(answer: IndexedGeneration, index: int) -> dict[str, Any]:
    if answer.error is not None:
        # `generate_iter` counts the prompts of this run.
        called, name = rf"\bprompt {answer.index}\b", f"prompt {index}"
        return {"error": re.sub(called, name, _error(answer.error)["error"], count=1)}
    fields = {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}
    if answer.sequences_score is not None:
        fields["sequences_score"] = answer.sequences_score
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
    """The lines of the input: texts, token ids, or objects with "prompt" or "messages"."""
    for number, text in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text.decode(), parse_constant=_refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(value, str | list | dict):
            raise UsageError(f"{path}: line {number} must be a text, token ids or an object")
        fields = value if isinstance(value, dict) else {"prompt": value}
        names = fields.keys() & {"prompt", "messages"}
        if len(names) != 1:
            raise UsageError(f'{path}: line {number} must have either "prompt" or "messages"')
        if unknown := fields.keys() - {"prompt", "messages", "id"}:
            raise UsageError(f"{path}: line {number} has an unknown field {min(unknown)!r}")
        (name,) = names
        if not isinstance(fields[name], list if name == "messages" else str | list):
            what = "a list of messages" if name == "messages" else "a text or token ids"
            raise UsageError(f'{path}: "{name}" of line {number} must be {what}')
        yield Line(fields.get("id", number - 1), fields[name], is_chat=name == "messages")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is none of its values")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


def _prompt(lm: "fdjax.LM", line: Line, system: str | None) -> Any:
    """The prompt of a line in the form that `generate_iter` takes."""
    messages = line.prompt if line.is_chat else [{"role": "user", "content": line.prompt}]
    if system is not None:
        if not line.is_chat and not isinstance(line.prompt, str):
            raise ValueError("generate: a prompt after --system must be a text, got token ids")
        messages = [{"role": "system", "content": system}, *messages]
    elif not line.is_chat:
        return line.prompt
    return chat_ids(lm.tokenizer, messages)


def _run_of(args: argparse.Namespace, data: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that the answers depend on. They are stored beside the output."""
    names = "system", "dtype", "kv_dtype", "logprobs"
    asked = options | {name: getattr(args, name) for name in names}
    folder = locate(args.model)
    read_json(folder / "config.json")  # raises if the folder is no checkpoint
    return {
        "model": [args.model, _digest_of_settings(folder), fingerprint(folder)],
        "options": {name: value for name, value in sorted(asked.items()) if value is not None},
        "input": hashlib.sha256(data).hexdigest(),
    }


def _digest_of_settings(folder: Path) -> str:
    """Digest of the files of a checkpoint that are no weights, such as its default options."""
    found = itertools.chain.from_iterable(folder.glob(pattern) for pattern in _SETTINGS)
    digest = hashlib.sha256()
    for path in sorted(path for path in found if path.is_file()):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no `fcntl`
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"{path}: another process is writing it") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
