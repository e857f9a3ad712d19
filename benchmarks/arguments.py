"""Arguments that several benchmarks share."""

import sys
from pathlib import Path
from typing import Any


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    If it is missing or describes no supported model, print one line and exit with code 2.
    """
    from fdjax.models import parse_config
    from fdjax.weights.checkpoint import read_json

    try:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        parse_config(data := read_json(path), str(path))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    return data
