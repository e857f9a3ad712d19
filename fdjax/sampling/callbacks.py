"""Calls functions that the caller of `generate` has given."""

from collections.abc import Callable
from typing import Any


def called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a caller's function and return its result.

    Args:
      what: kind of the function, for the error.
      function, *args: the function and its arguments.

    Raises:
      RuntimeError: the function raised StopIteration or GeneratorExit. They would end our own
        generators without an error.
    """
    try:
        return function(*args)
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(
            f"generate: {what} {function} raised {type(error).__name__}; raise another error, "
            "or end a row by a stopping criterion that returns True"
        ) from error
