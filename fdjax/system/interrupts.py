"""Makes sure that Ctrl-C is not lost.

Python raises KeyboardInterrupt wherever the main thread is, and there are places that lose it:

- A finaliser or a callback of the garbage collector ignores exceptions. JAX has such a callback.
- A comparison inside one of JAX's caches turns it into a RuntimeError or a ValueError. While JAX
  compiled, one Ctrl-C in four met this case or the one above.
- An import may turn it into an ImportError, or it may end the process inside a C++ module.
- JAX logs and drops it while it starts its platforms.
- Code in C clears it, such as `PyObject_HasAttr` when it calls Python.

So an interrupt is raised again and again until it leaves the block that waits for it.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

# Time between attempts, long enough to leave the code that ignores exceptions.
_AGAIN_AFTER_SECONDS = 0.05

# Number of `held` blocks that the main thread is inside.
_holds = 0


@contextlib.contextmanager
def delivered() -> Iterator[None]:
    """Raise KeyboardInterrupt until it leaves this block, and at its end at the latest.

    During an import, inside `held` and while a KeyboardInterrupt is being handled, the next attempt
    waits for their end. Code that handles one and goes on has a `delivered` of its own inside its
    `try`. This works in the main thread on Unix. Elsewhere the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    before = sys.unraisablehook
    interrupted = False

    def attempt(signum, frame):
        nonlocal interrupted
        interrupted = True
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_SECONDS)
        if not (_holds or _imports(frame) or _handles()):
            raise KeyboardInterrupt

    def hook(unraisable):
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)

    alarm = signal.signal(signal.SIGALRM, attempt)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, attempt)
    sys.unraisablehook = hook
    try:
        yield
        if interrupted:
            raise KeyboardInterrupt
    except (RuntimeError, ValueError) as error:
        if "\nKeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, alarm)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of this block. It works only inside `delivered`."""
    global _holds
    main = threading.current_thread() is threading.main_thread()
    _holds += main
    try:
        yield
    finally:
        _holds -= main


def _imports(frame: FrameType | None) -> bool:
    """Whether the interrupted code runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _handles() -> bool:
    """Whether the interrupted code handles a KeyboardInterrupt, such as in a `finally`."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
