"""Finds out which of several devices is stalled while the others wait for it."""

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator

logger = logging.getLogger("fdjax")

# Number of operations whose names are kept: more than devices can be ahead of each other.
_NAMES = 64


class Watch:
    """Counts the collective operations that each device has reached, and reports a stall.

    Every device announces an operation before it takes part. An operation ends only when all
    devices of its group take part. So the stalled device has the smallest count. Devices of other
    groups may be some operations ahead.

    A report is an error in the log "fdjax". The wait continues, because the host cannot end a
    program that hangs on a device.

    Attributes:
      seconds: time without results after which to report.
    """

    def __init__(self, seconds: float = 60.0):
        """Prepare a watch.

        Raises:
          ValueError: `seconds` is not positive.
        """
        if not seconds > 0:
            raise ValueError(f"watch: seconds must be positive, got {seconds}")
        self.seconds = seconds
        self._lock = threading.Lock()
        self._reached: collections.Counter[int] = collections.Counter()
        self._names: dict[int, str] = {}  # of the last operations, by their numbers

    def arrive(self, rank: int, name: str) -> None:
        """Note that a device has reached a collective operation."""
        with self._lock:
            self._reached[rank] += 1
            self._names[self._reached[rank]] = name
            self._names.pop(self._reached[rank] - _NAMES, None)

    @contextlib.contextmanager
    def waiting(self, what: str, ranks: int) -> Iterator[None]:
        """Report if this block takes too long.

        Args:
          what: name of the awaited results, for the report.
          ranks: number of devices.
        """
        timer = threading.Timer(self.seconds, self._report, (what, ranks))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self, what: str, ranks: int) -> None:
        with self._lock:
            reached = [self._reached[rank] for rank in range(ranks)]
            names = dict(self._names)
        least, last = min(reached), max(reached)

        def where(count):
            return f"collective operation {count} ({names.get(count)})"

        if not last:
            state = "no device has reached a collective operation"
        elif least < last:
            behind = ", ".join(str(rank) for rank, count in enumerate(reached) if count == least)
            state = f"device {behind} of {ranks} has not reached {where(least + 1)}"
        else:
            state = f"all {ranks} devices have reached {where(last)}, and none the next"
        logger.error("no %s for %g s: %s", what, self.seconds, state)


def waiting(watch: Watch | None, what: str, ranks: int) -> contextlib.AbstractContextManager[None]:
    """`watch.waiting`, or a context that does nothing if there is no watch."""
    return contextlib.nullcontext() if watch is None else watch.waiting(what, ranks)
