"""Files that are written whole or not at all."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, text: str) -> None:
    """Write a UTF-8 text, making the folders above it; what fails leaves the file as it was."""
    path = Path(path)
    file = path.resolve()  # a link stays one
    if path.exists() and not (path.is_file() and os.access(file.parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")  # into a device, a pipe, or all that may be written
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def json_by_line(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> str:
    """JSON of an object: what `head` holds, and under `name` a list, an item to a line."""
    lines = ",\n".join("  " + json.dumps(item) for item in items)
    return f'{json.dumps(head, indent=1)[:-2]},\n "{name}": [\n{lines}\n ]\n}}\n'
