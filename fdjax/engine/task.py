"""What a runner runs: the sequences of callers, and results that are on their way."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fdjax.engine.sequence import Chunk, RequestState

# Decode steps of a chunk while a caller streams an answer.
STREAM_STEPS = 4


@dataclasses.dataclass(eq=False)
class Call:
    """One caller's sequences.

    Attributes:
      rows: the sequences.
      steps: largest number of decode steps in a chunk.
      receive: called with each chunk after the rows have taken their parts, in the thread that
        advances.
      cancelled: whether the caller no longer wants them.
      taking: whether rows take parts of a chunk that the call has not received yet.
    """

    rows: Sequence[RequestState]
    steps: int
    receive: Callable[[Chunk], None]
    cancelled: bool = False
    taking: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.cancelled or (not self.taking and all(row.ended for row in self.rows))


@dataclasses.dataclass(eq=False)
class Task:
    """A sequence as the scheduler sees it.

    Attributes:
      row: the sequence.
      call: the call that it belongs to.
      budget: number of decode steps that may still be dispatched, or None until the call for its
        first token has been dispatched.
      pages, cached, arrival: see `Schedulable`.
    """

    row: RequestState
    call: Call
    budget: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    arrival: int = 0

    @property
    def slots(self) -> int:
        """Number of slots that its row must have."""
        return self.row.slots

    @property
    def width(self) -> int:
        """Number of rows that it takes."""
        return self.row.width

    def pages_for(self, tokens: int) -> int:
        """Number of pages for a number of its tokens."""
        return self.row.pages_for(tokens)

    @property
    def ids(self) -> np.ndarray:
        """[n] int32, its prompt and its tokens so far."""
        return self.row.ids

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it may have."""
        return self.row.most_tokens

    @property
    def group(self) -> tuple:
        """A value that is equal for all sequences that run together."""
        return self.row.group

    def tokens_after(self, steps: int) -> int:
        """Largest number of tokens in the cache after `steps` further decode steps."""
        # The last token has no slot.
        return self.tokens - 1 - max(self.budget - steps, 0)

    @property
    def prompt(self) -> tuple | None:
        """A value that is equal for samples of one prompt; None after the first token."""
        request, alone = self.row.request, self.row.tokens or self.row.width > 1
        return None if alone else (id(request.ids), id(request.config))

    @property
    def begun(self) -> bool:
        """Whether the call for its first token has been dispatched."""
        return self.budget is not None

    @property
    def streams(self) -> bool:
        """Whether a caller streams its answer."""
        return self.call.steps <= STREAM_STEPS

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.row.ended or self.call.cancelled


class InFlight(NamedTuple):
    """A dispatched program whose results have not been read yet.

    Attributes:
      owners: the task of each row of the results, or None.
      results: tokens, log-probabilities, reruns and results of beams; None for results that were
        not computed.
      is_first: whether these are first tokens, from a call with prompts.
    """

    owners: tuple[Task | None, ...]
    results: tuple
    is_first: bool

    def without(self, task: Task) -> "InFlight":
        """A copy in which a task no longer owns results."""
        return self._replace(owners=tuple(None if o is task else o for o in self.owners))
