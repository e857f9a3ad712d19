"""Which test cases run when."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow_unless_fast(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Parameters of a test whose other cases than `fast` are for slow tests."""
    return [pytest.param(c, marks=() if c in fast else pytest.mark.slow) for c in cases]


def in_part(names: Sequence[str], part: int, parts: int) -> list[bool]:
    """Whether each test, of which these are the names, is in the part 1 <= `part` <= `parts`.

    Functions take turns. All cases of a function are in one part, because they share programs.
    """
    functions = {function: i for i, function in enumerate(dict.fromkeys(map(_function, names)))}
    return [functions[_function(name)] % parts == part - 1 for name in names]


def _function(name):
    return name.split("[")[0]
