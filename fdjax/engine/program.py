"""A jitted function that reports its compilations, which may take a minute."""

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
    """The current call of a thread.

    Attributes:
      compiles: description of the program being compiled, or None.
      began: time when that compilation began.
      seconds: seconds that the last finished call spent compiling.
      collects: whether to enable Python's garbage collector again after the call.
      notice: what a terminal shows during the compilation, unless it is logged.
    """

    compiles: str | None = None
    began = 0.0
    seconds = 0.0
    collects = False

    def __init__(self):
        self.notice = Notice()

    def begin(self, name: str) -> None:
        # Garbage collection would take a tenth of a first call with cached programs
        # (benchmarks/LOG.md).
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
    """`jax.jit` of a function of arrays, compiled once for each set of shapes and dtypes.

    Each compilation is logged when it begins and when it ends. The attribute `compiling` of the log
    record is then True or False. If no handler receives the log, the terminal shows the
    compilation.

    Attributes:
      compilations: number of compilations so far.
    """

    def __init__(self, function: Callable, describe: Callable[..., str], **options):
        """Wrap a function without compiling it.

        Args:
          function: function of positional arguments.
          describe: function of the arguments (arrays or tracers) that returns a description for the
            log.
          **options: options of `jax.jit`.
        """
        self.compilations = 0
        self._describe = describe
        self._interrupted: set[str] = set()
        self._current = current = _Current()

        # JAX calls this only to compile, so a call that compiles nothing has no overhead.
        @functools.wraps(function)
        def traced(*args):
            if current.compiles is None:
                current.begin(describe(*args))
            return function(*args)

        self._jitted = jax.jit(traced, **options)

    @property
    def compile_seconds(self) -> float:
        """Time that this thread's last call spent compiling, tracing included; 0 if none."""
        return self._current.seconds

    def __call__(self, *args):
        """Call the function. It returns when the program is dispatched, like `jax.jit`."""
        current = self._current
        if current.compiles is not None:
            self._interrupted.add(current.compiles)
            current.compiles = None
        try:
            # JAX may have cached the trace of an interrupted compilation, and not trace it again.
            if self._interrupted and (name := self._describe(*args)) in self._interrupted:
                current.begin(name)
            out = self._jitted(*args)
        finally:
            current.leave_off()
        current.seconds = 0.0 if current.compiles is None else self._end()
        return out

    def lower(self, *args) -> jax.stages.Lowered:
        """Lower like `jax.jit`, to compile separately. That compilation is not counted."""
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
