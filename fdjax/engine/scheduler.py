"""Who runs next, and in which row: policy of the host, which needs no device.

First come, first served. A state of B rows and S slots a row is open while sequences run in it. A
sequence waits for a row; one that the state cannot hold ends admission until it can be reopened.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Schedulable(Protocol):
    """What the scheduler has to know of a sequence.

    Attributes:
      slots: of a state, that it needs.
      group: what all sequences of one program must have in common.
      ended: nothing is left to do.
    """

    slots: Any
    group: Any
    ended: Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a state.

    Attributes:
      rows: sequences at once.
      slots: tokens that each may hold.
      limited: more rows were wanted.
    """

    rows: int
    slots: int
    limited: bool = False


class Scheduler[S: Schedulable]:
    """A queue, and the rows of the open state.

    Attributes:
      waiting: sequences without a row, the next one first.
      rows: the sequence of each row, None where it is free; empty while no state is open.
      shape: of the open state, or None.
      quarantined: rows that are not given out again: their cache holds what is not finite.
    """

    def __init__(self):
        self.waiting: collections.deque[S] = collections.deque()
        self.rows: list[S | None] = []
        self.shape: Shape | None = None
        self.quarantined: set[int] = set()
        self._group: Any = None

    @property
    def running(self) -> Iterator[tuple[int, S]]:
        """Rows that are taken, with their sequences."""
        return ((i, s) for i, s in enumerate(self.rows) if s is not None)

    @property
    def idle(self) -> bool:
        """Whether no row is taken."""
        return all(s is None for s in self.rows)

    def add(self, sequences: Sequence[S]) -> None:
        """Queue sequences."""
        self.waiting += sequences

    def candidates(self) -> list[S]:
        """Sequences that may share the next state: all of the queue until one of another group."""
        found: list[S] = []
        for sequence in self.waiting:
            if found and sequence.group != found[0].group:
                break
            if not sequence.ended:
                found.append(sequence)
        return found

    def open(self, shape: Shape) -> None:
        """Begin with a state of free rows, for the group of the first in the queue."""
        self.shape = shape
        self.rows = [None] * shape.rows
        self.quarantined = set()
        self._group = self.waiting[0].group

    def close(self) -> None:
        """Give up the state; what runs goes back to the head of the queue, the oldest first."""
        self.waiting.extendleft(reversed([s for _, s in self.running if not s.ended]))
        self.rows, self.shape = [], None

    def fits(self, sequence: S) -> bool:
        """Whether the open state can hold a sequence."""
        return sequence.group == self._group and sequence.slots <= self.shape.slots

    def should_reopen(self) -> bool:
        """Whether another state serves the queue better, at the price of computing anew what runs.

        It does where nothing runs and the next sequence does not fit, and where twice as many
        sequences as there are rows could run.
        """
        self.skip_ended()
        if not self.waiting or self.shape is None:
            return False
        free = any(s is None and i not in self.quarantined for i, s in enumerate(self.rows))
        if free and self.fits(self.waiting[0]):
            return False
        if self.idle:
            return True
        wanted = sum(1 for _ in self.running) + len(self.waiting)
        same_group = self.waiting[0].group == self._group
        return same_group and not self.shape.limited and wanted >= 2 * self.shape.rows

    def skip_ended(self) -> None:
        """Take those who ended while they waited from the head of the queue."""
        while self.waiting and self.waiting[0].ended:
            self.waiting.popleft()

    def admit(self) -> list[int]:
        """Give free rows to those who are next; returns the rows."""
        admitted = []
        for i, sequence in enumerate(self.rows):
            self.skip_ended()
            if sequence is None and i not in self.quarantined:
                if not self.waiting or not self.fits(self.waiting[0]):
                    break
                self.rows[i] = self.waiting.popleft()
                admitted.append(i)
        return admitted

    def release(self, row: int, *, quarantine: bool = False) -> None:
        """Free a row.

        Args:
          row: which.
          quarantine: it is not to be given out again while this state is open.
        """
        self.rows[row] = None
        if quarantine:
            self.quarantined.add(row)

    def drop(self, sequence: S) -> None:
        """Take a sequence out of the queue."""
        self.waiting.remove(sequence)
