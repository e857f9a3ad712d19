"""The state of a request on the host: its tokens, text and log-probabilities, and when it ends."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fdjax.engine.pages import page_count
from fdjax.engine.schedule import least_slots
from fdjax.engine.state import SLOT_MULTIPLE
from fdjax.sampling.beams import BeamResults
from fdjax.sampling.callbacks import is_true
from fdjax.sampling.options import GenerationConfig
from fdjax.sampling.sampler import ALL_FORBIDDEN
from fdjax.text.tokenizer import Detokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and its options, for one sequence of tokens.

    Attributes:
      ids: [n] int32 token ids of the prompt.
      config: the options, with a value in every field.
      prompt: index of the prompt among the caller's prompts.
      sample: index of the sample among those of the prompt.
    """

    ids: np.ndarray
    config: GenerationConfig
    prompt: int = 0
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Results from the device, as host arrays.

    Attributes:
      tokens: [B, n], below 0 where a row has none.
      logprobs: [B, n] or None.
      top: ([B, n, N] log-probabilities, [B, n, N] ids) or None.
      compile_seconds: seconds spent compiling since the previous chunk.
      reruns: [L] reruns of each layer, summed over the steps, or None.
      is_first: whether it holds the first tokens of rows, from a prefill call.
      beams: the results of beams, or None if there are no beams.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    compile_seconds: float = 0.0
    reruns: np.ndarray | None = None
    is_first: bool = False
    beams: BeamResults | None = None

    def rows(self, index: Sequence[int]) -> "Chunk":
        """The results of some rows."""
        if [*index] == [*range(len(self.tokens))]:
            return self
        top = self.top and tuple(a[index] for a in self.top)
        logprobs = None if self.logprobs is None else self.logprobs[index]
        return dataclasses.replace(self, tokens=self.tokens[index], logprobs=logprobs, top=top)


class Answer(NamedTuple):
    """An answer so far, or all of it. Later tokens of the request do not change it.

    Attributes: see `RequestState`.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    score: float | None


class RequestState:
    """The tokens of one request, gathered from chunks until the request ends.

    Attributes:
      request: the prompt and the options.
      page_tokens: tokens of a page of the cache, see `Engine.page_tokens`.
      tokens: generated ids, including the id that ended the request.
      logprobs: log-probability of each token; empty unless requested.
      top_logprobs: for each step, {id: log-probability} of the likeliest tokens, likeliest first.
      cached_tokens: number of prompt tokens that the cache held already.
      finish_reason: "stop", "length", or None while the request runs.
      error: the exception that ended the request, or None.
      score: score of an answer of beam search; None before it ends and for other requests.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        streamed: bool = False,
        page_tokens: int = SLOT_MULTIPLE,
    ):
        config = request.config
        self.request = request
        self.page_tokens = page_tokens
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason = None if config.max_new_tokens else "length"
        self.error: BaseException | None = None
        self.score: float | None = None
        self._tokenizer = tokenizer
        # One thread takes chunks while another reads the text, or a stopping criterion does.
        self._lock = threading.RLock()
        self._stop_tokens = frozenset(config.eos_token_ids)
        self._text = None
        if streamed or config.stop_strings:
            keeps = config.include_stop_str_in_output
            self._text = GrowingText(tokenizer, config.stop_strings, keeps_stop=keeps)

    @property
    def width(self) -> int:
        """Number of adjacent rows of the state that it takes."""
        return 1

    @property
    def answers(self) -> list["RequestState"]:
        """The requests whose tokens are results: this one."""
        return [self]

    @property
    def has_begun(self) -> bool:
        """Whether it has tokens."""
        return bool(self.tokens)

    @property
    def slots_read(self) -> int:
        """Number of cache slots that the decode steps had to read."""
        n = max(len(self.tokens) - 1, 0)
        return n * len(self.request.ids) + n * (n + 1) // 2

    def pages_for(self, tokens: int) -> int:
        """Number of cache pages for a number of tokens."""
        return page_count(tokens, self.page_tokens)

    def table(self, pages: list[int], beam: int) -> list[int]:
        """The pages of one of its rows, in order."""
        return pages

    def begin(self) -> None:
        """Note that it has got a row. The tokens so far remain."""

    def set(self, tokens: list[int], score: float) -> None:
        """End the request with the tokens and the score of a beam."""
        self.tokens, self.score = tokens, score
        self.finish_reason = "stop" if tokens[-1] in self._stop_tokens else "length"

    @property
    def ids(self) -> np.ndarray:
        """[n] int32, prompt and answer so far."""
        ids = self.request.ids
        return np.concatenate([ids, np.array(self.tokens, np.int32)]) if self.tokens else ids

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the prompt and the longest answer."""
        return len(self.request.ids) + self.request.config.max_new_tokens

    @property
    def slots(self) -> int:
        """Number of cache slots that it needs."""
        return least_slots(len(self.request.ids), self.most_tokens)

    @property
    def group(self) -> tuple:
        """A value that must be equal for all rows of a program."""
        config = self.request.config
        return config.logits_processors, config.return_reruns

    @property
    def ended(self) -> bool:
        """Whether no more tokens come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def ended_on_device(self) -> bool:
        """Whether the device knows that the request has ended. It does not know stop strings."""
        by_token = bool(self.tokens) and self.tokens[-1] in self._stop_tokens
        return by_token or self.finish_reason == "length"

    @property
    def text(self) -> str:
        """The text so far, cut at the start of a stop string, or at its end if it is included."""
        return self._tokenizer.decode(self.tokens) if self._text is None else self._text.whole

    def answer(self, *, with_text: bool) -> Answer:
        """The answer so far, whose parts belong together."""
        with self._lock:
            return Answer(
                tokens=[*self.tokens],
                text=self.text if with_text else None,
                finish_reason=self.finish_reason,
                logprobs=[*self.logprobs],
                top_logprobs=[*self.top_logprobs],
                score=self.score,
            )

    def take(self, chunk: Chunk, row: int) -> None:
        """Take this request's part of a chunk. Tokens after its end are dropped.

        Raises:
          FloatingPointError: logits were not finite.
          ValueError: no token was left to choose.
        """
        with self._lock:
            for step, token in enumerate(chunk.tokens[row].tolist()):
                if self.finish_reason is not None:
                    break
                if token >= 0:
                    self._take(token, chunk, row, step)
                elif token != -1:
                    raise self._failure(token, len(self.tokens))
            if self.finish_reason is not None and self._text is not None:
                self._text.finish()

    def new_text(self) -> str:
        """Text that is final and has not been returned before."""
        with self._lock:
            return self._text.take()

    def _take(self, token, chunk, row, step):
        config = self.request.config
        self.tokens.append(token)
        if config.return_logprobs is not None:
            self.logprobs.append(chunk.logprobs[row, step].item())
            top, ids = (part[row, step, : config.return_logprobs].tolist() for part in chunk.top)
            self.top_logprobs.append(dict(zip(ids, top, strict=True)))
        if token in self._stop_tokens:
            self.finish_reason = "stop"
        if self._text is not None:
            self._text.push(token)
            if self._text.stopped:
                self.finish_reason = "stop"
        # Each criterion gets its own list, so that changing it does not change the result.
        criteria = config.stopping_criteria
        if any(is_true("stopping criterion", c, list(self.tokens)) for c in criteria):
            self.finish_reason = "stop"
        if self.finish_reason is None and len(self.tokens) >= config.max_new_tokens:
            self.finish_reason = "length"

    def _failure(self, token, count):
        """The error for a token below -1, after `count` tokens."""
        where = f"generate: prompt {self.request.prompt}:"
        if token == ALL_FORBIDDEN:
            return ValueError(f"{where} the options forbid every token at token {count}")
        causes = ["the weights are damaged", "the dtype is too narrow (try dtype='float32')"]
        if self.request.config.logits_processors:
            causes.insert(0, "a logits processor makes them so")
        return FloatingPointError(
            f"{where} logits are not finite at token {count}; {', or '.join(causes)}"
        )


class GrowingText:
    """The growing text of a request. It is cut where the first stop string begins.

    With `keeps_stop` it is cut where that stop string ends.

    A stop string counts as soon as it is in the text, even in the last part, which further tokens
    could change: the request ends there, so no tokens follow.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), *, keeps_stop: bool = False
    ):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._text = ""
        self._taken = 0
        self._finished = False
        self.stopped = False

    @property
    def whole(self) -> str:
        """The text so far, including the last part, which may still change."""
        return self._text if self._finished else self._text + self._detokenizer.pending

    def push(self, token: int) -> None:
        """Add a token."""
        # A new stop string must end in the new text.
        start = max(0, len(self._text) - self._held)
        self._text += self._detokenizer.push([token])
        if not self._stops:
            return
        recent = self._text[start:] + self._detokenizer.pending
        found = [(recent.find(stop), len(stop)) for stop in self._stops if stop in recent]
        if found:
            at, length = min(found)
            self._text = self._text[:start] + recent[: at + length * self._keeps_stop]
            self.stopped = self._finished = True

    def finish(self) -> None:
        """End the text: no more tokens follow."""
        if not self._finished:
            self._text += self._detokenizer.push([], last=True)
            self._finished = True

    def take(self) -> str:
        """Text that is final, cannot begin a stop string, and has not been returned before."""
        end = len(self._text)
        if not self._finished:
            waiting = range(min(self._held, end - self._taken), 0, -1)
            end -= next((n for n in waiting if self._may_stop(self._text[end - n :])), 0)
        piece, self._taken = self._text[self._taken : end], end
        return piece

    def _may_stop(self, tail):
        return any(stop.startswith(tail) for stop in self._stops)
