"""Reads the messages of `fdjax chat`, typed in a terminal or piped in."""

import contextlib
import sys
from collections.abc import Callable, Iterator

QUOTES = '"""'

# Function of the text that asks for a line → the next line without its line break, or None at the
# end of the input.
ReadLine = Callable[[str], str | None]


def typed() -> ReadLine:
    """A reader of lines that the user types and edits. Ctrl-C raises KeyboardInterrupt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines with it

    def read(prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    return read


def piped() -> ReadLine:
    """A reader of standard input. A line that is not UTF-8 raises ValueError with its number."""

    def lines() -> Iterator[str]:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError:
                raise ValueError(f"chat: line {number} must be UTF-8") from None

    rest = lines()
    return lambda prompt: next(rest, None)


def read_message(read: ReadLine) -> tuple[str, bool] | None:
    """Read a message: one line, or several lines between triple quotes.

    Returns:
      (message, whether it was quoted), or None at the end of the input. A quoted message is never a
      command.

    Raises:
      ValueError: the input ends between the quotes.
    """
    line = read("> ")
    if line is None:
        return None
    if not line.lstrip().startswith(QUOTES):
        return line, False
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = read("... ")
        if line is None:
            raise ValueError(f"chat: the message that begins with {QUOTES} has no end")
        lines.append(line)
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n"), True
