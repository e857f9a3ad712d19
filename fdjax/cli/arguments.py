"""Types of the command line's options, and the one line in which its misuse is told."""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any


class UsageError(ValueError):
    """The command line asks for what cannot be meant."""


class Parser(argparse.ArgumentParser):
    """Errors take one line, and options are written out: an abbreviation may become ambiguous."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        """As of the base class; what no command takes is told by the command itself."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(parsed, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.hint(unknown)}")
        return parsed

    def hint(self, unknown: Sequence[str]) -> str:
        """The option that the first unknown one may stand for, as `did_you_mean` says it."""
        options = [name for action in self._actions for name in action.option_strings]
        given = next((word for word in unknown if word.startswith("-")), "")
        return did_you_mean(given.partition("=")[0], options)

    def error(self, message):
        """Exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """ ", did you mean ...?" with the known word that is most like this one, "" if none is."""
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def model_name(text: str) -> str:
    """A folder, file or hub id."""
    if not text:
        raise argparse.ArgumentTypeError("must name a model, got nothing")
    return text


def some_text(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("must be a text, got nothing")
    return text


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer in least..most."""
    within = f"at least {least}" if most is None else f"from {least} to {most}"
    return _number(int, lambda n: n >= least and (most is None or n <= most), f"integer, {within}")


def said(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose ValueError is what the command line says."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def byte_count(text: str) -> int:
    """Bytes, such as 80GB."""
    units = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d*)?) ?([KMGTiB]*)", text.strip(), re.IGNORECASE)
    nbytes = int(float(found[1]) * units.get(found[2].upper(), 0)) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB or 512MiB, got {text!r}")
    return nbytes


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
