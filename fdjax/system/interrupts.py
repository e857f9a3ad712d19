"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread is. In a finaliser or in a callback of the
garbage collector, of which JAX has one, an exception is ignored; in a comparison that a cache of
JAX asks for it becomes a RuntimeError. One Ctrl-C in four while JAX compiles met one of the two.
In an import it may become an ImportError, or end the process in the middle of a C++ module, and
while JAX starts its platforms it is logged and forgotten.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

# Long enough to be back from where exceptions are ignored.
_AGAIN_AFTER_SECONDS = 0.05

# Inside how many `held` blocks the main thread is.
_holds = 0


@contextlib.contextmanager
def delivered() -> Iterator[None]:
    """Raise a KeyboardInterrupt once more that was ignored, and one that became another error.

    It waits for the end of an import, and of `held`. For the main thread of a program on Unix,
    elsewhere nothing is changed.
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

    alarm = signal.signal(signal.SIGALRM, _interrupt)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
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
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, alarm)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A part that would lose a KeyboardInterrupt: inside `delivered`, it is raised afterwards."""
    global _holds
    main = threading.current_thread() is threading.main_thread()
    _holds += main
    try:
        yield
    finally:
        _holds -= main


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _holds or _imports(frame):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_SECONDS)
    else:
        raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether code that an import runs is interrupted."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
