"""A beam search on the host: it gathers the steps from chunks and finds the final answers."""

import dataclasses
from typing import NamedTuple

from fdjax.engine.pages import page_count
from fdjax.engine.sequence import Chunk, Request, RequestState
from fdjax.engine.state import SLOT_MULTIPLE
from fdjax.text.tokenizer import Tokenizer


class _BeamStep(NamedTuple):
    """One step of a search: the new token of each beam [W], and which beam it continues [W]."""

    tokens: list[int]
    parents: list[int]


class BeamSearch(RequestState):
    """The beams of one prompt. The scheduler runs them like one request that takes several rows.

    A preempted search starts over, because its beams have no common answer that it could continue.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, page_tokens: int = SLOT_MULTIPLE):
        self._answers = [
            RequestState(dataclasses.replace(request, sample=i), tokenizer)
            for i in range(request.config.num_return_sequences)
        ]
        self._steps: list[_BeamStep] = []
        super().__init__(request, tokenizer, page_tokens=page_tokens)

    @property
    def width(self) -> int:
        """Number of beams, W."""
        return self.request.config.num_beams

    @property
    def answers(self) -> list[RequestState]:
        """The answers, best first; they have no tokens before the end."""
        return self._answers

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the search, or None."""
        return self._error

    @error.setter
    def error(self, error: BaseException | None) -> None:
        self._error = error
        for answer in self._answers:
            answer.error = error

    @property
    def slots(self) -> int:
        """Cache slots that each row needs. The response begins on a new page."""
        new = self.most_tokens - len(self.request.ids)
        pages = self._pages_of(len(self.request.ids)) + self._pages_of(new)
        return max(super().slots, pages * self.page_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether it has tokens."""
        return bool(self._steps)

    @property
    def slots_read(self) -> int:
        """Cache slots that the decode steps had to read: the prompt once for all beams."""
        n = max(len(self._steps) - 1, 0)
        return n * len(self.request.ids) + self.width * (n * (n + 1) // 2)

    def pages_for(self, tokens: int) -> int:
        """Pages for a number of tokens. The beams share only the pages of the prompt."""
        prompt = len(self.request.ids)
        return self._pages_of(prompt) + self.width * self._pages_of(max(0, tokens - prompt))

    def table(self, pages: list[int], beam: int) -> list[int]:
        """The pages of one beam: the prompt's pages, then every W-th of the remaining pages."""
        prompt = self._pages_of(len(self.request.ids))
        return pages[:prompt] + pages[prompt + beam :: self.width]

    def _pages_of(self, tokens):
        return page_count(tokens, self.page_tokens)

    def begin(self) -> None:
        """Forget all steps, because the search starts over."""
        self._steps = []
        self.cached_tokens = 0

    def take(self, chunk: Chunk, row: int) -> None:
        """Take the search's part of a chunk, which is in the row of the first beam.

        Raises:
          FloatingPointError: logits were not finite.
          ValueError: the options allow fewer answers than asked for.
        """
        beams = chunk.beams
        tokens, parents = beams.tokens[row].T.tolist(), beams.parents[row].T.tolist()
        for step in map(_BeamStep, tokens, parents):
            if step.tokens[0] == -1:
                break
            if step.tokens[0] < 0:
                raise self._failure(step.tokens[0], len(self._steps))
            self._steps.append(step)
        if beams.finished[row] and self._steps and self.finish_reason is None:
            self._finish(beams.ended[row].tolist(), beams.ends[row].tolist())

    def _finish(self, scores, ends):
        """Give the answers their tokens and scores."""
        found = sum(length > 0 for length, _, _ in ends[: self.width])
        if found < len(self._answers):
            raise ValueError(
                f"generate: prompt {self.request.prompt}: the options allow only {found} of the "
                f"answers, num_return_sequences is {len(self._answers)}"
            )
        for i, answer in enumerate(self._answers):
            answer.set(self._tokens(*ends[i]), scores[i])
        self.finish_reason = self._answers[0].finish_reason

    def _tokens(self, length, beam, last):
        """The tokens of a beam that ended, found backwards from its last token."""
        tokens = [last]
        for step in reversed(self._steps[: length - 1]):
            tokens.append(step.tokens[beam])
            beam = step.parents[beam]
        return tokens[::-1]


def request_state(
    request: Request,
    tokenizer: Tokenizer,
    *,
    streamed: bool = False,
    page_tokens: int = SLOT_MULTIPLE,
) -> RequestState:
    """The state of a request on the host: a `BeamSearch` if it asks for beams."""
    if request.config.num_beams > 1:
        return BeamSearch(request, tokenizer, page_tokens=page_tokens)
    return RequestState(request, tokenizer, streamed=streamed, page_tokens=page_tokens)
