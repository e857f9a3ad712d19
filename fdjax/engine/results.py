"""Results of `LM.generate` and `LM.stream`."""

import atexit
import collections
import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import overload

import jax
import numpy as np

from fdjax.engine.memory import divided_by
from fdjax.engine.sequence import Chunk, RequestState
from fdjax.engine.state import cache_bytes
from fdjax.models import Model, Params

# Datasheet memory bandwidth in GB/s by device kind.
PEAK_GB_PER_S = {
    "NVIDIA A100-SXM4-40GB": 1555.0,
    "NVIDIA A100-SXM4-80GB": 2039.0,
    "NVIDIA A100 80GB PCIe": 1935.0,
    "NVIDIA H100 80GB HBM3": 3352.0,
    "NVIDIA H100 PCIe": 2039.0,
    "NVIDIA H200": 4800.0,
    "NVIDIA B200": 8000.0,
}


@dataclasses.dataclass(frozen=True)
class Stats:
    """The cost of a call. Compilation, which happens in the first call of a shape, is separate.

    For a stream, the seconds are the time that the reader waited. The clock stops until the reader
    asks for the first piece, and while the reader processes a piece. Meanwhile the device may run
    one more chunk of steps. So with a slow reader, times per step and rates are better than those
    of the device.

    Attributes:
      prompt_tokens: tokens of all prompts.
      decode_tokens: tokens generated, all rows.
      prefill_seconds: time from the call to the first token of the last row, without compilation.
      decode_seconds: time from there to the last token, without compilation.
      decode_bytes: bytes that the decode steps had to read: the weights in each step, and the cache
        slots in use. For a mixture of experts, this counts the largest number of experts that the
        rows of a step can choose.
      decode_steps: number of decode steps. A step makes one token for each row that has not ended.
        The first token of a row comes from prefill.
      peak_gb_per_s: datasheet bandwidth of the device, or None if it is not known.
      chunk_ms_per_token: milliseconds per decode step of each chunk, in the order of arrival.
      chunk_steps: decode steps of each chunk.
      compile_seconds: time in which the host traced and compiled programs, or loaded compiled ones.
      reruns: for each layer, the share of decode attention's blocks (row, KV head, split) that ran
        again because their scores left the range of the unified maximum. None unless
        `return_reruns` was set and a decode step ran.
      cached_tokens: prompt tokens that the cache held already.
    """

    prompt_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_bytes: int = 0
    decode_steps: int = 0
    peak_gb_per_s: float | None = None
    chunk_ms_per_token: tuple[float, ...] = ()
    chunk_steps: tuple[int, ...] = ()
    compile_seconds: float = 0.0
    reruns: tuple[float, ...] | None = None
    cached_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the whole call."""
        return self.prefill_seconds + self.decode_seconds + self.compile_seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole call, without compilation."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.decode_tokens / seconds if seconds else 0.0

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per decode step (one token for each row), the first token left out."""
        return 1e3 * self.decode_seconds / self.decode_steps if self.decode_steps else None

    @property
    def gb_per_s(self) -> float | None:
        """`decode_bytes` per second of the decode steps, in GB/s."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_steps else None

    @property
    def share_of_peak(self) -> float | None:
        """`gb_per_s` over the datasheet's bandwidth."""
        if self.gb_per_s is None or self.peak_gb_per_s is None:
            return None
        return self.gb_per_s / self.peak_gb_per_s

    def __str__(self) -> str:
        """A readable line."""
        line = (
            f"{self.prompt_tokens} prompt + {self.decode_tokens} new tokens in {self.seconds:.2f} s"
        )
        if self.compile_seconds:
            line += f" ({self.compile_seconds:.2f} s of it compiling)"
        line += f", {self.tokens_per_s:.1f} tok/s"
        if self.ms_per_token is not None:
            line += f", {self.ms_per_token:.2f} ms/step, {self.gb_per_s:.1f} GB/s"
        if self.share_of_peak is not None:
            line += f" ({self.share_of_peak:.0%} of peak)"
        return line


@dataclasses.dataclass(frozen=True)
class Generation:
    """One entry of a `GenerateResult`, with the same attributes for this entry."""

    tokens: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    sequences_score: float | None = None


@dataclasses.dataclass(frozen=True)
class GenerateResult(Sequence[Generation]):
    """The result of `LM.generate`, with one entry for each answer to each prompt.

    It is a sequence of `Generation`: `result[0].text`, `for one in result`, `len(result)`.

    Attributes:
      tokens: generated ids, the end-of-sequence id included.
      texts: their text, special tokens left out, up to where a stop string begins; None without a
        tokenizer. As in transformers, a text may begin with the space that joins it to the prompt.
      finish_reasons: "stop" (end of sequence, stop string, stopping criterion) or "length"; None
        for a stream that has not ended.
      logprobs: log-probability of each token under the raw model, if any row asked for it; empty
        for the others.
      top_logprobs: of the likeliest tokens at each step, {id: log-probability}, likeliest first, if
        any row asked for it.
      stats: what the call cost.
      sequences_scores: scores of the answers of beam search, with the length penalty, best first
        for each prompt; None for other answers. None if no prompt used beams.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str | None]
    logprobs: list[list[float]] | None
    stats: Stats
    top_logprobs: list[list[dict[int, float]]] | None = None
    sequences_scores: list[float | None] | None = None

    @classmethod
    def of(
        cls, requests: Sequence[RequestState], timer: "Timer", *, with_text: bool
    ) -> "GenerateResult":
        """The result of requests."""
        rows = [answer for row in requests for answer in row.answers]
        asked = [row.request.config.return_logprobs for row in rows]
        answers = [row.answer(with_text=with_text) for row in rows]
        scores = [answer.score for answer in answers]
        return cls(
            tokens=[answer.tokens for answer in answers],
            texts=[answer.text for answer in answers] if with_text else None,
            finish_reasons=[answer.finish_reason for answer in answers],
            logprobs=None if set(asked) <= {None} else [answer.logprobs for answer in answers],
            top_logprobs=[answer.top_logprobs for answer in answers] if any(asked) else None,
            stats=timer.stats(requests),
            sequences_scores=None if set(scores) <= {None} else scores,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Generation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Generation]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        columns = self.tokens, self.texts, self.finish_reasons, self.logprobs, self.top_logprobs
        columns = *columns, self.sequences_scores
        return Generation(*(None if column is None else column[index] for column in columns))

    @property
    def text(self) -> str:
        """The only answer's text.

        Raises:
          ValueError: there are several answers, or no tokenizer.
        """
        if self.texts is None or len(self.texts) != 1:
            raise ValueError("text: needs one answer and a tokenizer; see `texts` and `tokens`")
        return self.texts[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedGeneration(Generation):
    """A generation and the prompt it answers, as `LM.generate_iter` yields it.

    Attributes:
      index: position of the prompt among the prompts of the call.
      sample: position among the generations for that prompt, with `num_return_sequences`.
      error: the exception that ended it, or None.
    """

    index: int
    sample: int
    error: BaseException | None

    @classmethod
    def of(cls, row: RequestState, *, with_text: bool) -> "IndexedGeneration":
        """The result of one request."""
        asked = row.request.config.return_logprobs
        answer = row.answer(with_text=with_text)
        return cls(
            index=row.request.prompt,
            sample=row.request.sample,
            tokens=answer.tokens,
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=None if asked is None else answer.logprobs,
            top_logprobs=answer.top_logprobs if asked else None,
            error=row.error,
            sequences_score=answer.score,
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `LM.generate` or `LM.chat`.

    Attributes:
      answers: the answers that were complete by then, a list of `IndexedGeneration` in the order of
        the prompts.
    """

    def __init__(self, answers: Sequence[IndexedGeneration]):
        super().__init__(f"{len(answers)} answers were complete; see `answers` of this exception")
        self.answers = list(answers)

    def __reduce__(self):
        return type(self), (self.answers,)


class TextStream(Iterator[str]):
    """Pieces of the text of one prompt, as they come.

    The loop may be left early. `close` then frees the stream's row and memory at once.
    """

    def __init__(self, pieces: Generator[str], row: RequestState, timer: "Timer"):
        self._pieces = pieces
        self._row = row
        self._timer = timer
        closed_at_exit(self)

    def __repr__(self) -> str:
        return f"TextStream({len(self._row.tokens)} tokens)"

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the stream."""
        self._pieces.close()

    @property
    def result(self) -> GenerateResult:
        """The result so far, which is complete after the last piece."""
        return GenerateResult.of([self._row], self._timer, with_text=True)

    @property
    def stats(self) -> Stats:
        """The cost of the stream so far."""
        return self._timer.stats([self._row])


_open: weakref.WeakSet[TextStream | Generator] = weakref.WeakSet()


def closed_at_exit[T: TextStream | Generator](iterator: T) -> T:
    """The iterator, which the process closes when it ends."""
    _open.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    """Close open iterators at exit, while Python's modules still exist."""
    for iterator in list(_open):
        with contextlib.suppress(ValueError):  # another thread is reading it
            iterator.close()


class Timer:
    """Measures a call on the host's clock, and counts the bytes read by its decode steps."""

    def __init__(self, model: Model, params_bytes: tuple[int, int]):
        """Start the clock. `params_bytes` is the result of `bytes_of_params`."""
        self._model = model
        self._params_bytes = params_bytes
        self._last = self._paused = time.perf_counter()
        self._prefill = self._decode = self._compile = 0.0
        self._steps = 0
        # Number of steps by their number of rows.
        self._steps_of_rows: collections.Counter[int] = collections.Counter()
        self._chunk_ms: list[float] = []
        self._chunk_steps: list[int] = []
        self._reruns: list[np.ndarray] = []

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the clock run on, after `pause`."""
        self._last += time.perf_counter() - self._paused

    def chunk(self, chunk: Chunk) -> None:
        """Note the arrival of a chunk."""
        before, self._last = self._last, time.perf_counter()
        seconds = self._last - before - chunk.compile_seconds
        self._compile += chunk.compile_seconds
        if chunk.is_first:
            self._prefill += seconds
            return
        self._decode += seconds
        rows = (chunk.tokens >= 0).sum(axis=0)
        rows = rows[rows > 0].tolist()
        steps = len(rows)
        self._steps += steps
        self._steps_of_rows.update(rows)
        if steps:
            self._chunk_ms.append(1e3 * seconds / steps)
            self._chunk_steps.append(steps)
            if chunk.reruns is not None:
                self._reruns.append(chunk.reruns)

    def stats(self, rows: Sequence[RequestState]) -> Stats:
        """The cost of the call up to the last chunk."""
        model, sizes = self._model, self._params_bytes
        weights = sum(n * step_bytes(model, *sizes, m) for m, n in self._steps_of_rows.items())
        slots = sum(row.slots_read for row in rows)
        slot_bytes = cache_bytes(model.local, 1, 1) // divided_by(model.local) if slots else 0
        return Stats(
            prompt_tokens=sum(len(row.request.ids) for row in rows),
            cached_tokens=sum(row.cached_tokens for row in rows),
            decode_tokens=sum(len(answer.tokens) for row in rows for answer in row.answers),
            prefill_seconds=self._prefill,
            decode_seconds=self._decode,
            decode_bytes=weights + slots * slot_bytes,
            decode_steps=self._steps,
            peak_gb_per_s=PEAK_GB_PER_S.get(model.plan.device_kind),
            chunk_ms_per_token=tuple(self._chunk_ms),
            chunk_steps=tuple(self._chunk_steps),
            compile_seconds=self._compile,
            reruns=tuple((sum(self._reruns) / self._steps).tolist()) if self._reruns else None,
        )


def bytes_of_params(params: Params) -> tuple[int, int]:
    """Bytes of all parameters, and of the embedding table, on each device."""
    leaves = jax.tree.leaves(params)
    return sum(map(_bytes_of_device, leaves)), _bytes_of_device(params["embed"])


def _bytes_of_device(array: jax.Array) -> int:
    """Bytes that an array takes on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def step_bytes(model: Model, params_bytes: int, embed_bytes: int, rows: int) -> int:
    """Bytes of weights that a decode step of this many rows reads on each device.

    It leaves out an embedding table that is only looked up, and experts that no row chooses.
    """
    idle = model.local.idle_expert_bytes(rows)
    return params_bytes - idle - (0 if model.config.tie_embeddings else embed_bytes)
