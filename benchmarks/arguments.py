"""Arguments that several benchmarks share: files that may be missing or wrong."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    If it is missing or describes no supported model, print one line and exit with code 2.
    """
    from fdjax.models import parse_config
    from fdjax.weights.checkpoint import read_json

    with _problems_in_one_line():
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        parse_config(data := read_json(path), str(path))
    return data


def rows_of(paths: Sequence[str]) -> list[Any]:
    """The measurements of records. If one cannot be read, print one line and exit with code 2."""
    from fdjax.bench.record import read

    with _problems_in_one_line():
        return [row for path in paths for row in read(path).rows]


@contextlib.contextmanager
def _problems_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
