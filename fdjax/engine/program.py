"""A jitted function that tells when it is compiled, which may take a minute."""

import functools
import gc
import logging
import threading
import time
from collections.abc import Callable

import jax

from fdjax.system.notice import Notice

logger = logging.getLogger("fdjax")


class _Current(threading.local):
    """A thread's call.

    Attributes:
      compiles: what is being compiled, or None.
      began: when that began.
      seconds: what compiling took of the last call that ended.
      collects: whether Python's garbage collector is to go on after it.
      notice: what a terminal shows meanwhile, unless it is logged.
    """

    compiles: str | None = None
    began = 0.0
    seconds = 0.0
    collects = False

    def __init__(self):
        self.notice = Notice()

    def begin(self, name: str) -> None:
        # A tenth of a first call whose programs are cached would go into it (benchmarks/LOG.md).
        self.collects = self.collects or gc.isenabled()
        gc.disable()
        self.compiles, self.began = name, time.perf_counter()
        logger.info("compiling %s", name, extra={"compiling": True})
        if not logger.isEnabledFor(logging.INFO):
            self.notice.show(f"compiling {name}")

    def leave_off(self) -> None:
        """Undo what `begin` did to the process and its terminal."""
        self.notice.clear()
        if self.collects:
            gc.enable()
            self.collects = False


class Program:
    """`jax.jit` of a function of arrays: one compilation for each set of shapes and dtypes.

    Each is logged as it begins and as it ends; `compiling`, an attribute of the log records, is
    true and false. Where that is not logged, a terminal shows it.

    Attributes:
      compilations: how many there were.
    """

    def __init__(self, function: Callable, describe: Callable[..., str], **options):
        """Nothing is compiled yet.

        Args:
          function: positional arguments only.
          describe: (*arguments, arrays or tracers) → what is compiled, for people.
          **options: of `jax.jit`.
        """
        self.compilations = 0
        self._describe = describe
        self._interrupted: set[str] = set()
        self._current = current = _Current()

        # Runs only where there is something to compile, so that finding out costs a call nothing.
        @functools.wraps(function)
        def traced(*args):
            if current.compiles is None:
                current.begin(describe(*args))
            return function(*args)

        self._jitted = jax.jit(traced, **options)

    @property
    def compile_seconds(self) -> float:
        """What compiling took of this thread's last call, tracing included; 0 if it did not."""
        return self._current.seconds

    def __call__(self, *args):
        """The function's results, as soon as they are on their way."""
        current = self._current
        if current.compiles is not None:
            self._interrupted.add(current.compiles)
            current.compiles = None
        try:
            # JAX may have kept the trace of what it did not compile to the end.
            if self._interrupted and (name := self._describe(*args)) in self._interrupted:
                current.begin(name)
            out = self._jitted(*args)
        finally:
            current.leave_off()
        current.seconds = 0.0 if current.compiles is None else self._end()
        return out

    def lower(self, *args) -> jax.stages.Lowered:
        """As of `jax.jit`, for whoever compiles by himself; counted and told as ended by no one."""
        try:
            return self._jitted.lower(*args)
        finally:
            self._current.compiles = None
            self._current.leave_off()

    def _end(self) -> float:
        name, self._current.compiles = self._current.compiles, None
        seconds = time.perf_counter() - self._current.began
        self.compilations += 1
        self._interrupted.discard(name)
        logger.info("compiled %s in %.1f s", name, seconds, extra={"compiling": False})
        return seconds
