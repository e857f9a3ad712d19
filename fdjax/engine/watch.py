"""Finds out which of several devices is stalled while the others wait for it."""

import contextlib
import logging
import threading
from collections.abc import Iterator

logger = logging.getLogger("fdjax")


class Watch:
    """Counts the collective operations that each device has reached, and reports a stall.

    Every device announces an operation before it takes part. An operation ends only when all
    devices take part. So the counts differ by at most one, and the stalled device has the smallest
    count.

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
        self._reached: dict[int, tuple[int, str]] = {}

    def arrive(self, rank: int, name: str) -> None:
        """Note that a device has reached a collective operation."""
        with self._lock:
            count, _ = self._reached.get(rank, (0, ""))
            self._reached[rank] = count + 1, name

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
            reached = [self._reached.get(rank, (0, "")) for rank in range(ranks)]
        last, name = max(reached)
        behind = [str(rank) for rank, (count, _) in enumerate(reached) if count < last]
        where = f"collective operation {last} ({name})"
        if not last:
            state = "no device has reached a collective operation"
        elif behind:
            state = f"device {', '.join(behind)} of {ranks} has not reached {where}"
        else:
            state = f"all {ranks} devices have reached {where}, and none the next"
        logger.error("no %s for %g s: %s", what, self.seconds, state)


def waiting(watch: Watch | None, what: str, ranks: int) -> contextlib.AbstractContextManager[None]:
    """`watch.waiting`, or a context that does nothing if there is no watch."""
    return contextlib.nullcontext() if watch is None else watch.waiting(what, ranks)
