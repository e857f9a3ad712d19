"""Makes sure that Ctrl-C is not lost.

Python raises KeyboardInterrupt wherever the main thread is, and there are places that lose it:

- A finaliser or a callback of the garbage collector ignores exceptions. JAX has such a callback.
- A comparison inside one of JAX's caches turns it into a RuntimeError. While JAX compiled, one
  Ctrl-C in four met this case or the one above.
- An import may turn it into an ImportError, or it may end the process inside a C++ module.
- JAX logs and drops it while it starts its platforms.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

# Time until the next attempt, long enough to leave the code that ignores exceptions.
_AGAIN_AFTER_SECONDS = 0.05

# Number of `held` blocks that the main thread is inside.
_holds = 0


@contextlib.contextmanager
def delivered() -> Iterator[None]:
    """Raise KeyboardInterrupt again if it was ignored or became another error inside this block.

    During an import and inside `held`, the interrupt is delayed until their end. This works in the
    main thread on Unix. Elsewhere the block changes nothing.
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
    """Delay KeyboardInterrupt to the end of this block. It works only inside `delivered`."""
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
    """Whether the interrupted code runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
