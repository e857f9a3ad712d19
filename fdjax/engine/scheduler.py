"""Decides which sequence runs next, in which rows and pages. It needs no device.

First come, first served. While sequences run, a state with B rows of S slots is open. A sequence
waits for a free row, or for several next to each other. If the state cannot hold it, nothing is
admitted until there is a larger one. If rows consist of pages, a sequence also waits for the pages
of its tokens, and takes more while it grows. If no page is left, the sequence that came last gives
up its pages and waits again.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fdjax.engine.pages import PagePool


class Schedulable(Protocol):
    """A sequence, as the scheduler needs to know it.

    Attributes:
      slots: slots that a row must have to hold it.
      tokens: largest number of tokens that it may have, prompt and answer.
      group: a value that must be equal for all sequences of a state.
      ended: whether it has nothing left to do.
      width: number of adjacent rows that it takes.
      prompt: a value that is equal for samples of one prompt, or None if no other sample may use
        what is computed for this one.
      begun: whether its prompt has been computed.
      pages_for: number of tokens → pages that they take.
      ids: its tokens so far.
      pages: its pages in order; empty if it has no row.
      cached: number of its tokens that the pages held already when it got its row.
      arrival: its number in the order of arrival.
    """

    slots: Any
    tokens: Any
    group: Any
    ended: Any
    width: Any
    prompt: Any
    begun: Any
    pages_for: Any
    ids: Any
    pages: list[int]
    cached: int
    arrival: int


@dataclasses.dataclass(frozen=True)
class StateShape:
    """Sizes of a state.

    Attributes:
      rows: number of rows, B.
      slots: slots of each row, S.
      limited: whether more rows were wanted than memory or the limit allows.
      pages: pages of the pool, or 0 if each row is in one piece.
      most_rows: the largest number of rows of a state with a pool and so many slots.
    """

    rows: int
    slots: int
    limited: bool = False
    pages: int = 0
    most_rows: int = 0

    @property
    def room(self) -> int:
        """Number of rows of the state's arrays, of which decode steps run the first `rows`.

        Programs for prompts depend on it. Of all numbers of rows, only a single row has its own
        programs, which compute nothing for others.
        """
        return self.rows if self.rows == 1 else max(self.rows, self.most_rows)


class Scheduler[S: Schedulable]:
    """The queue of sequences, and the rows of the open state.

    Attributes:
      waiting: sequences without a row, in the order in which they will get one.
      rows: for the first row of each sequence, the sequence; None for other rows. Empty while no
        state is open.
      shape: shape of the open state, or None.
      quarantined: rows that are no longer used, because their cache has values that are not finite.
      pool: the pages of the open state, or None if each row is in one piece.
    """

    def __init__(self):
        self.waiting: collections.deque[S] = collections.deque()
        self.rows: list[S | None] = []
        self.shape: StateShape | None = None
        self.quarantined: set[int] = set()
        self.pool: PagePool | None = None
        self._group: Any = None
        self._arrived = 0

    @property
    def running(self) -> Iterator[tuple[int, S]]:
        """The first row of each running sequence, and the sequence."""
        return ((i, s) for i, s in enumerate(self.rows) if s is not None)

    @property
    def idle(self) -> bool:
        """Whether no row is in use."""
        return all(s is None for s in self.rows)

    def add(self, sequences: Sequence[S]) -> None:
        """Queue sequences."""
        for sequence in sequences:
            sequence.arrival = self._arrived
            self._arrived += 1
        self.waiting += sequences

    def candidates(self) -> list[S]:
        """Sequences that may share the next state: the queue up to the first of another group."""
        found: list[S] = []
        for sequence in self.waiting:
            if found and sequence.group != found[0].group:
                break
            if not sequence.ended:
                found.append(sequence)
        return found

    def open(self, shape: StateShape, pool: PagePool | None = None) -> None:
        """Open a state with free rows, for the group of the first sequence in the queue."""
        self.shape = shape
        self.pool = pool
        self.rows = [None] * shape.rows
        self.quarantined = set()
        self._group = self.waiting[0].group

    def close(self) -> None:
        """Close the state. Running sequences return to the head of the queue, the oldest first."""
        running = [(i, s) for i, s in self.running]
        for i, _ in running:
            self.release(i)
        self.waiting.extendleft(reversed([s for _, s in running if not s.ended]))
        self.rows, self.shape, self.pool = [], None, None

    def reshape(self, shape: StateShape) -> list[int]:
        """Go on with another number of rows or slots. Each sequence takes one row.

        Returns:
          The row that each sequence had. They now have the first rows, in this order.
        """
        kept = [i for i, _ in self.running]
        self.rows = [self.rows[i] for i in kept] + [None] * (shape.rows - len(kept))
        self.shape = shape
        return kept

    def fits(self, sequence: S) -> bool:
        """Whether the open state can hold a sequence with its largest number of tokens."""
        if self.pool is not None and sequence.pages_for(sequence.tokens) >= self.pool.count:
            return False
        holds = sequence.slots <= self.shape.slots and sequence.width <= self.shape.rows
        return sequence.group == self._group and holds

    def should_reopen(self) -> bool:
        """Whether a larger state is needed.

        There are three such cases: nothing runs and the next sequence does not fit; the rows of a
        pool are too short for it; or more sequences could run than the state has rows. Without a
        pool they must be twice as many, because all that run would be computed again.
        """
        self.skip_ended()
        if not self.waiting or self.shape is None:
            return False
        if self.fits(self.waiting[0]) and self._place(self.waiting[0].width) is not None:
            return False
        if self.idle or self._is_too_short(self.waiting[0]):
            return True
        wanted = sum(s.width for _, s in self.running) + sum(s.width for s in self.waiting)
        same_group = self.waiting[0].group == self._group
        enough = self.shape.rows + 1 if self.pool is not None else 2 * self.shape.rows
        return same_group and not self.shape.limited and wanted >= enough

    def _is_too_short(self, sequence: S) -> bool:
        """Whether a sequence fits into the pool, but not into a row of this state."""
        if self.pool is None or sequence.pages_for(sequence.tokens) >= self.pool.count:
            return False
        too_short = sequence.slots > self.shape.slots or sequence.width > self.shape.rows
        return sequence.group == self._group and too_short

    def skip_ended(self) -> None:
        """Remove sequences from the head of the queue that ended while they waited."""
        while self.waiting and self.waiting[0].ended:
            self.waiting.popleft()

    def admit(self) -> dict[int, int | None]:
        """Give free rows to the next sequences.

        Returns:
          By first row of each admitted sequence: the row of another sample of the same prompt,
          which computes the prompt for both; None if there is none.
        """
        admitted: dict[int, int | None] = {}
        self.skip_ended()
        while self.waiting and self.fits(self.waiting[0]):
            row, leader = self._place(self.waiting[0].width), self._leader(self.waiting[0])
            if row is None or not self._take_pages(self.waiting[0], leader is not None):
                break
            self.rows[row] = self.waiting.popleft()
            admitted[row] = leader
            self.skip_ended()
        return admitted

    def _leader(self, sequence: S) -> int | None:
        """The row of a sample of the same prompt that has not been computed yet."""
        if self.pool is None or not self.pool.prefix_cache or sequence.prompt is None:
            return None
        rows = (i for i, s in self.running if s.prompt == sequence.prompt and not s.begun)
        return next(rows, None)

    def members(self) -> list[tuple[S, int] | None]:
        """For each row (sequence, index among the sequence's rows), or None if the row is free."""
        found: list[tuple[S, int] | None] = [None] * len(self.rows)
        for row, sequence in self.running:
            for i in range(sequence.width):
                found[row + i] = sequence, i
        return found

    def _place(self, width: int) -> int | None:
        """The first of `width` adjacent free rows, or None."""
        free = 0
        for row, member in enumerate(self.members()):
            free = free + 1 if member is None and row not in self.quarantined else 0
            if free == width:
                return row - width + 1
        return None

    def _take_pages(self, sequence: S, follows: bool) -> bool:
        if self.pool is None:
            return True
        # Each running row will soon need a page, and so will each beam.
        spare = sum(s.width for _, s in self.running)
        spare += sequence.width if sequence.width > 1 else 0
        taken = self.pool.admit(sequence.ids, spare=spare, pending=follows)
        if taken is None:
            return False
        sequence.pages, sequence.cached = taken
        self.pool.register(sequence.ids, sequence.pages, pending=True)
        return True

    def grow(self, sequence: S, tokens: int) -> bool:
        """Take the pages that a sequence needs for `tokens` tokens; False if there are too few."""
        if self.pool is None:
            return True
        missing = sequence.pages_for(tokens) - len(sequence.pages)
        if missing > self.pool.available:
            return False
        sequence.pages += self.pool.take(max(missing, 0))
        return True

    @property
    def youngest(self) -> int:
        """The row of the running sequence that arrived last."""
        return max(self.running, key=lambda item: item[1].arrival)[0]

    def preempt(self, row: int) -> None:
        """Take the row and pages of a running sequence, which becomes the first in the queue."""
        sequence = self.rows[row]
        self.release(row)
        self.waiting.appendleft(sequence)

    def release(self, row: int, *, quarantine: bool = False) -> None:
        """Free a row, and its pages.

        Args:
          row: index of the row.
          quarantine: whether the row's cache is damaged. A row in one piece is then not used again
            while this state is open. Pages are used again, because a sequence reads only slots that
            it has written.
        """
        sequence, self.rows[row] = self.rows[row], None
        if self.pool is None:
            if quarantine:
                self.quarantined.add(row)
        elif sequence is not None:
            self.pool.release(sequence.pages, forget=quarantine)
            sequence.pages, sequence.cached = [], 0

    def drop(self, sequence: S) -> None:
        """Remove a sequence from the queue."""
        self.waiting.remove(sequence)
