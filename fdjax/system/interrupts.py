"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread is. In a finaliser or in a callback of the
garbage collector, of which JAX has one, an exception is ignored; in a comparison that a cache of
JAX asks for it becomes a RuntimeError. One Ctrl-C in four while JAX compiles met one of the two.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

# Long enough to be back from where exceptions are ignored.
_AGAIN_AFTER_SECONDS = 0.05


@contextlib.contextmanager
def delivered() -> Iterator[None]:
    """Raise a KeyboardInterrupt once more that was ignored, and one that became another error.

    For the main thread of a program on Unix, elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    before = sys.unraisablehook

    def hook(unraisable):
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_SECONDS)
        else:
            before(unraisable)

    alarm = signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = hook
    try:
        yield
    except RuntimeError as error:
        if "\nKeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
