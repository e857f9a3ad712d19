"""Argument types of the command line, and a parser that reports errors in one line."""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class UsageError(ValueError):
    """The arguments of a command are wrong; `fdjax` exits with code 2."""


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line and accepts no abbreviated options.

    An abbreviation may become ambiguous when options are added.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        """Parse as the base class does, but let the chosen command report unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(parsed, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.hint(unknown)}")
        return parsed

    def hint(self, unknown: Sequence[str]) -> str:
        """Say what may be meant by unknown arguments, in the words of `did_you_mean`."""
        options = [name for action in self._actions for name in action.option_strings]
        places = [action.dest for action in self._actions if not action.option_strings]
        given = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
        # Commands about a model take it first, the others as an option.
        if given == "--model" and "model" in places:
            return ", the model comes without --model"
        if not given and not places and "--model" in options:
            return f", did you mean --model {unknown[0]}?"
        if not given and places == ["prompt"]:
            return ", put the whole prompt in quotes"
        return did_you_mean(given, options)

    def error(self, message):
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The text ", did you mean ...?" with the most similar known word, or "" if there is none."""
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def model_name(text: str) -> str:
    """Parse the name of a model: a folder, a file or a hub id."""
    if not text:
        raise argparse.ArgumentTypeError("must name a model, got nothing")
    return text


def some_path(text: str) -> Path:
    """Parse the path of a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got nothing")
    return Path(text)


def utf8_text(text: str) -> str:
    """Parse a text, which is UTF-8 in every locale. Python decodes arguments by the locale."""
    try:
        return os.fsencode(text).decode("utf-8-sig")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"is not UTF-8 at byte {error.start}") from None


def some_text(text: str) -> str:
    """Parse a text that must not be empty, as `utf8_text` does."""
    if not (text := utf8_text(text)):
        raise argparse.ArgumentTypeError("must be a text, got nothing")
    return text


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of integers from `least` to `most`; None means no limit."""
    within = f"at least {least}" if most is None else f"from {least} to {most}"
    return _number(int, lambda n: n >= least and (most is None or n <= most), f"integer, {within}")


def share(text: str) -> float:
    """Parse a share, above 0 and at most 1."""
    return _number(float, lambda x: 0 < x <= 1, "number above 0 and at most 1")(text)


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type: argparse shows the message of its ValueError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def byte_count(text: str) -> int:
    """Parse a number of bytes, such as 80GB or 512MiB."""
    units = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d*)?) ?([KMGTiB]*)", text.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * units.get(found[2].upper(), 0) if found else 0
    if not 1 <= nbytes < 2**63:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB or 512MiB, got {text!r}")
    return int(nbytes)


def _number(kind: type, accepts: Callable[..., bool], what: str) -> Callable[[str], float]:
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            article = "an" if what[0] in "aeiou" else "a"
            raise argparse.ArgumentTypeError(f"must be {article} {what}, got {text!r}")
        return value

    return parse
