"""Reads the project's documents: code blocks, commands, links."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
# Beginnings of commands in backquotes.
_COMMAND = re.compile(
    r"(fdjax \w|pytest( |$)|pip install -e|python -m \w|python \w+/|\.ci/run( |$))"
)


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(path), re.DOTALL | re.MULTILINE)
    return [Block(*block) for block in found]


def python_of(path: Path) -> str:
    """All Python code of a document, except of several processes.

    Later blocks may use names of earlier ones.
    """
    found = [block.text for block in blocks(path) if block.language == "python"]
    return "\n".join(text for text in found if "jax.distributed" not in text)


def prose(path: Path) -> str:
    """A document without its code blocks and generated parts."""
    text = re.sub(r"^<!-- (.+?) -->\n.*?^<!-- /\1 -->$", "", text_of(path), flags=re.S | re.M)
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def commands(path: Path) -> list[str]:
    """The single commands of a document's shell blocks."""
    lines = [line for b in blocks(path) if b.language == "bash" for line in b.text.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


def inline_commands(path: Path) -> list[str]:
    """The commands in backquotes in the text."""
    found = re.findall(r"`([^`]+)`", prose(path))
    return [" ".join(text.split()) for text in found if _COMMAND.match(text)]


def every(find) -> list[str]:
    """The items that a function finds in all documents, without duplicates."""
    return list(dict.fromkeys(item for path in DOCUMENTS for item in find(path)))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
