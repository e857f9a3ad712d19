"""The conversation of `fdjax chat`: its state, its commands and its loop."""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fdjax.cli.chat_input import QUOTES, piped, read_message, typed
from fdjax.cli.shared import say
from fdjax.lm import LM
from fdjax.system import interrupts
from fdjax.system.files import check_writable, write_whole
from fdjax.text.conversation import chat_ids
from fdjax.weights.checkpoint import user_path

logger = logging.getLogger("fdjax")

_HINT = "/help lists the commands, /quit or Ctrl-D leaves, Ctrl-C stops an answer"
_HELP = f"""/system TEXT   set the system message; without TEXT, remove it
/reset         forget the conversation, but not the system message
/save FILE     write the conversation to a JSON file
/quit, /exit   leave, as quit, exit and Ctrl-D do
/help          list the commands
{QUOTES}            begins and ends a message of several lines
Ctrl-C         stop an answer"""


class Conversation:
    """The messages so far, and the model that answers the next one.

    If the messages do not fit into the context, the oldest questions and their answers are
    forgotten. The system message is kept.

    Attributes:
      system: the system message, or None.
      messages: questions and answers in turn.
      forgotten: number of messages that were forgotten for the last question.
      cut: whether the last answer ended only because of the context or `max_new_tokens`.

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
        self.system = system
        self._template = {} if chat_template is None else {"chat_template": chat_template}
        self._max_new_tokens = max_new_tokens
        self._options = options

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer in pieces. An interrupted answer becomes part of the messages, too.

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
                self.whole,
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

    @property
    def whole(self) -> list[dict[str, str]]:
        """The messages, with the system message as the first one."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.messages

    def _make_room(self) -> None:
        limit = self._lm.config.max_position_embeddings
        wanted = min(self._max_new_tokens, limit // 4)
        count = len(self.messages)
        while len(self.messages) > 1:
            prompt = chat_ids(self._lm.tokenizer, self.whole, **self._template)
            if len(prompt) + wanted <= limit:
                break
            del self.messages[:2]
        self.forgotten = count - len(self.messages)


def talk(conversation: Conversation) -> None:
    """Answer the messages of standard input until the input ends or a command leaves.

    In a terminal, Ctrl-C stops an answer, and errors are printed. If the input is piped, both end
    the program.

    Raises:
      ValueError: a piped line is not UTF-8, is an unknown command, or cannot be answered.
      OSError: the file of a piped /save cannot be written.
    """
    if sys.stdin is None:
        return
    in_terminal = sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        print(_HINT, file=sys.stderr)
    read = typed() if in_terminal else piped()
    going_on = True
    while going_on:
        message = None
        try:
            with interrupts.delivered():
                message = read_message(read)
                going_on = message is not None and _answer_or_run(conversation, *message)
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            print("" if message else f"\n{_HINT}", file=sys.stderr)
        except (ValueError, OSError) as error:
            if not in_terminal:
                raise
            print(f"fdjax: error: {error}", file=sys.stderr)


def _answer_or_run(conversation: Conversation, message: str, quoted: bool) -> bool:
    """Run a command or answer a message. Returns False if the command leaves."""
    command = re.fullmatch(r"/([a-z]+|\?)(?:\s+(.*))?", message.strip())
    if quoted or command is None:
        if not quoted and message.strip() in ("quit", "exit"):
            return False
        if message.strip():
            _show(conversation.ask(message))
            _report_limits(conversation)
        return True
    name, rest = command[1], command[2] or ""
    if name in ("quit", "exit"):
        return False
    if name not in _COMMANDS:
        raise ValueError(f"chat: there is no /{name}; /help lists the commands")
    _COMMANDS[name](conversation, rest)
    return True


def _reset(conversation: Conversation, _: str) -> None:
    conversation.messages.clear()


def _system(conversation: Conversation, text: str) -> None:
    conversation.system = text or None


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        raise ValueError("chat: /save needs the name of a file")
    path = user_path(name)
    check_writable(path)
    write_whole(path, json.dumps(conversation.whole, indent=1, ensure_ascii=False) + "\n")
    say(f"{len(conversation.whole)} messages written to {path}")


def _help(_: Conversation, __: str) -> None:
    print(_HELP, file=sys.stderr)


_COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "reset": _reset,
    "system": _system,
    "save": _save,
    "help": _help,
    "?": _help,
}


def _show(answer: Iterator[str]) -> None:
    """Print the pieces as they come, without the space that begins the answers of many models."""
    begun = False
    with contextlib.closing(answer):
        for piece in answer:
            piece = piece if begun else piece.lstrip()
            begun = begun or bool(piece)
            print(piece, end="", flush=True)
    print(flush=True)


def _report_limits(conversation: Conversation) -> None:
    """Tell the user if messages were forgotten or the answer was cut."""
    if conversation.forgotten:
        print("fdjax: the oldest messages no longer fit and are forgotten", file=sys.stderr)
    if conversation.cut:
        print("fdjax: cut short; --max-new-tokens and the context end an answer", file=sys.stderr)
