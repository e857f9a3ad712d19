"""Writes files as a whole or not at all."""

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, text: str) -> None:
    """Write a UTF-8 text and create the folders above it. A failure leaves an old file unchanged.

    Raises:
      OSError: the file cannot be written.
    """
    path = Path(path)
    file = path.resolve()  # a symbolic link remains a link
    if path.exists() and not (path.is_file() and os.access(file.parent, os.W_OK)):
        # This is a device, a pipe, or a file in a folder where no other file may be created.
        path.write_text(text, encoding="utf-8")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Create the folders above a file and check that it can be written.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def output_file(text: str) -> Path:
    """Parse the name of a file to write, for argparse.

    A file that cannot be written is refused before anything is measured. Nothing is created.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if (there != path and not there.is_dir()) or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def json_by_line(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> str:
    """JSON of the object `head` with one more key: `name`, a list with one item per line.

    `head` must not be empty.
    """
    lines = ",\n".join("  " + json.dumps(item) for item in items)
    return f'{json.dumps(head, indent=1)[:-2]},\n "{name}": [\n{lines}\n ]\n}}\n'
