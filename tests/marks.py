"""Marks of test cases."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_unless_fast(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Parameters of a test whose other cases than `fast` are for slow tests."""
    return [pytest.param(c, marks=() if c in fast else pytest.mark.slow) for c in cases]
