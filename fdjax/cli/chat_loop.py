"""`fdjax chat`: a conversation in a terminal, or with lines that are piped in."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

from fdjax.lm import LM
from fdjax.text.conversation import chat_ids

logger = logging.getLogger("fdjax")

_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


class Conversation:
    """Messages so far, and what answers the next one.

    Where the context has no room for all of them, the oldest questions are forgotten together with
    their answers; a system message never is.

    Attributes:
      messages: questions and answers in turn.
      forgotten: how many messages the last question pushed out.
      cut: the last answer ended only for want of room.

    Raises:
      ValueError: the model has no chat template, or none of this name.
      MissingTokenizerError: the model has no tokenizer.
    """

    def __init__(
        self,
        lm: LM,
        *,
        system: str | None = None,
        chat_template: str | None = None,
        max_new_tokens: int,
        **options: Any,
    ):
        lm.tokenizer.decode([])
        lm.tokenizer.chat_template.choose(chat_template)
        self.messages: list[dict[str, str]] = []
        self.forgotten = 0
        self.cut = False
        self._lm = lm
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._template = {} if chat_template is None else {"chat_template": chat_template}
        self._max_new_tokens = max_new_tokens
        self._options = options

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer as it comes. What came of it is remembered, however it ended.

        Raises:
          ValueError: the question alone does not fit, or the template refuses it.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        answer = ""
        self.cut = False
        try:
            self._make_room()
            stream = self._lm.stream_chat(
                self._system + self.messages,
                max_new_tokens=self._max_new_tokens,
                **self._template,
                **self._options,
            )
            with contextlib.closing(stream):
                for piece in stream:
                    answer += piece
                    yield piece
            self.cut = stream.result.finish_reasons == ["length"]
            logger.info("%s", stream.stats)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer.strip()})
            else:
                self.messages = before

    def _make_room(self) -> None:
        limit = self._lm.config.max_position_embeddings
        wanted = min(self._max_new_tokens, limit // 4)
        count = len(self.messages)
        while len(self.messages) > 1:
            prompt = chat_ids(self._lm.tokenizer, self._system + self.messages, **self._template)
            if len(prompt) + wanted <= limit:
                break
            del self.messages[:2]
        self.forgotten = count - len(self.messages)


def talk(conversation: Conversation) -> None:
    """Answer line after line of standard input until it ends or says /quit.

    In a terminal, Ctrl-C stops an answer and an error is told; elsewhere both end the program.

    Raises:
      ValueError: a line that is piped in is not UTF-8, or cannot be answered.
    """
    if sys.stdin is None:
        return
    in_terminal = sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        print(_HELP, file=sys.stderr)
    for line in _typed() if in_terminal else _piped():
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation.messages.clear()
        elif re.fullmatch(r"/(help|\?)", command):
            print(_HELP, file=sys.stderr)
        elif command:
            try:
                _show(conversation.ask(line))
                _remark(conversation)
            except KeyboardInterrupt:
                if not in_terminal:
                    raise
                print()
            except ValueError as error:
                if not in_terminal:
                    raise
                print(f"fdjax: error: {error}", file=sys.stderr)


def _show(answer: Iterator[str]) -> None:
    """Print pieces as they come, without the space that many models begin with."""
    begun = False
    with contextlib.closing(answer):
        for piece in answer:
            piece = piece if begun else piece.lstrip()
            begun = begun or bool(piece)
            print(piece, end="", flush=True)
    print(flush=True)


def _remark(conversation: Conversation) -> None:
    """Tell of what would otherwise go unseen."""
    if conversation.forgotten:
        print("fdjax: the oldest messages no longer fit and are forgotten", file=sys.stderr)
    if conversation.cut:
        print("fdjax: cut short; --max-new-tokens and the context end an answer", file=sys.stderr)


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines with it
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"chat: line {number} must be UTF-8") from None
