"""Calls functions that the caller of `generate` has given."""

import threading
from collections.abc import Callable
from typing import Any


def called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a caller's function and return its result.

    Args:
      what: kind of the function, for the error.
      function, *args: the function and its arguments.

    Raises:
      RuntimeError: the function raised StopIteration, which would end our own generators without
        an error, or something that is no `Exception`, which would end the requests of others.
        Ctrl-C, a KeyboardInterrupt in the main thread, stays what it is.
    """
    try:
        return function(*args)
    except BaseException as error:
        in_main_thread = threading.current_thread() is threading.main_thread()
        is_interrupt = isinstance(error, KeyboardInterrupt) and in_main_thread
        if is_interrupt or (isinstance(error, Exception) and not isinstance(error, StopIteration)):
            raise
        raise RuntimeError(
            f"generate: {what} {function} raised {type(error).__name__}; raise another error, "
            "or end a row by a stopping criterion that returns True"
        ) from error


def is_true(what: str, function: Callable[..., Any], *args: Any) -> bool:
    """Call a caller's function and return whether its result is true.

    Args:
      what, function, *args: see `called`.

    Raises:
      ValueError: the result is neither true nor false.
      RuntimeError: see `called`.
    """
    result = called(what, function, *args)
    try:
        return bool(result)
    except Exception as error:
        raise ValueError(
            f"generate: {what} {function} must return True or False, got {type(result).__name__}"
        ) from error
