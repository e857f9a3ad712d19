"""Calls of functions that the caller of `generate` handed over."""

from collections.abc import Callable
from typing import Any


def called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a caller's function.

    Args:
      what: it is, for the error.
      function, *args: the call.

    Raises:
      RuntimeError: it raised StopIteration or GeneratorExit, which would end a generator of ours in
        silence.
    """
    try:
        return function(*args)
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(
            f"generate: {what} {function} raised {type(error).__name__}; raise another error, "
            "or end a row by a stopping criterion that returns True"
        ) from error
