"""A jitted function that tells when it is compiled, which may take a minute."""

import functools
import logging
import time
from collections.abc import Callable

import jax

logger = logging.getLogger("fdjax")


class Program:
    """`jax.jit` of a function of arrays: one compilation for each set of shapes and dtypes.

    Each is logged as it begins and as it ends; `compiling`, an attribute of the log records, is
    true and false.

    Attributes:
      compilations: how many there were.
      compile_seconds: what one took of the last call, tracing included; 0 where there was none.
    """

    def __init__(self, function: Callable, describe: Callable[..., str], **options):
        """Nothing is compiled yet.

        Args:
          function: positional arguments only.
          describe: (*arguments, arrays or tracers) → what is compiled, for people.
          **options: of `jax.jit`.
        """
        self.compilations = 0
        self.compile_seconds = 0.0
        self._describe = describe
        # What the current call compiles, and since when; and what earlier ones did not finish.
        self._begun: list[tuple[str, float]] = []
        self._interrupted: set[str] = set()
        begun = self._begun

        # Runs only where there is something to compile, so that finding out costs a call nothing.
        @functools.wraps(function)
        def traced(*args):
            if not begun:
                _begin(begun, describe(*args))
            return function(*args)

        self._jitted = jax.jit(traced, **options)

    def __call__(self, *args):
        """The function's results, as soon as they are on their way."""
        if self._begun:
            self._interrupted.add(self._begun.pop()[0])
        # JAX may have kept the trace of what it did not compile to the end.
        if self._interrupted and (name := self._describe(*args)) in self._interrupted:
            _begin(self._begun, name)
        out = self._jitted(*args)
        self.compile_seconds = self._end() if self._begun else 0.0
        return out

    def _end(self) -> float:
        name, began = self._begun.pop()
        seconds = time.perf_counter() - began
        self.compilations += 1
        self._interrupted.discard(name)
        logger.info("compiled %s in %.1f s", name, seconds, extra={"compiling": False})
        return seconds


def _begin(begun: list[tuple[str, float]], name: str) -> None:
    begun.append((name, time.perf_counter()))
    logger.info("compiling %s", name, extra={"compiling": True})
