"""Splits a batch of prompts into calls of a few fixed shapes."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

# Widths of prefill programs. Chunks of these widths cover a prompt of any length.
CHUNKS = (128, 512, 1024)
# Width of a call for short prompts on a CPU, where time is proportional to the number of tokens.
# Such a call has at least `_SHORT_ROWS` rows, so it has as many tokens as the narrowest of
# `CHUNKS`.
SHORT_CHUNK, _SHORT_ROWS = 16, 8
# Limit of prompt tokens per call over all its rows, padding included.
CALL_TOKENS = 8192
# Cost of another call, which reads the weights again, as a number of tokens to compute.
_CALL_OVERHEAD_TOKENS = 128
# Widths and the cost of a call in units of the narrowest chunk.
_UNITS = tuple(chunk // CHUNKS[0] for chunk in CHUNKS)
_CALL_OVERHEAD = _CALL_OVERHEAD_TOKENS // CHUNKS[0]


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call of `fdjax.engine.step.prompt_logits`, as host arrays.

    Attributes:
      rows: [R] rows of the state, or None for all of them in order.
      tokens: [M, T], blocks of tokens.
      lengths, offsets: [M].
      final, prompts, generated: [R].
      owners: [M], the entry of `rows` that a block belongs to, or None: each row has one block.
      last: [R], the block in which a row's tokens end, -1 if it has none; or None with `owners`.
      copied: for some rows without blocks, the row of the same prompt whose last page each copies
        after the call.
    """

    rows: np.ndarray | None
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    final: np.ndarray
    prompts: np.ndarray
    generated: np.ndarray
    owners: np.ndarray | None = None
    last: np.ndarray | None = None
    copied: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of tokens that the call computes, padding included."""
        return self.tokens.size

    def leave_out(self, row: int) -> "PrefillCall":
        """Remove a row's work from the call, and return the call."""
        at = np.arange(len(self.tokens)) == row if self.rows is None else self.rows == row
        self.lengths[at], self.final[at] = 0, False
        return self


def chunks_for(length: int) -> tuple[int, ...]:
    """The cheapest sequence of chunk widths that covers a prompt of `length` tokens."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1:] * widest + rest


def widest_chunk(length: int) -> int:
    """The width of the first chunk of `chunks_for`."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1] if widest else rest[0]


def covered_slots(length: int) -> int:
    """Cache slots needed to prefill `length` tokens, padding included."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1] * widest + sum(rest)


def _widest_and_rest(length: int) -> tuple[int, tuple[int, ...]]:
    """The cheapest chunks: (number of the widest chunks, widths of the chunks after them)."""
    widest = max(0, -(-length // CHUNKS[-1]) - 2)
    units = cheapest(-(-length // CHUNKS[0]) - widest * _UNITS[-1], _UNITS)
    return widest, tuple(CHUNKS[0] * n for n in units)


@functools.cache
def cheapest(units: int, sizes: tuple[int, ...], overhead: int = _CALL_OVERHEAD) -> tuple[int, ...]:
    """The cheapest sizes that cover `units` of 128 tokens each; at most twice the largest size.

    `overhead` is the cost of another size, in units.
    """
    if units <= 0:
        return ()
    options = [(size, *cheapest(units - size, sizes, overhead)) for size in reversed(sizes)]
    return min(options, key=lambda o: sum(o) + overhead * len(o))


def rows_of_call(width: int, batch: int) -> int:
    """Rows of a call with chunks of `width`, for a state of `batch` rows.

    The number is all rows, half of them, a quarter and so on, rounded down. So a few programs serve
    any prompts.
    """
    rows = batch
    while rows > 1 and rows * width > CALL_TOKENS:
        rows //= 2
    return rows


def most_rows_of_call(length: int) -> int:
    """Largest number of rows of a call with the widest chunk of prompts of `length` tokens."""
    return max(1, CALL_TOKENS // widest_chunk(length))


def call_tokens(length: int, batch: int) -> int:
    """Tokens in the largest call for prompts of up to `length` tokens, padding included."""
    widest = widest_chunk(length)
    return max(rows_of_call(width, batch) * width for width in CHUNKS if width <= widest)


def prefill_calls(
    prompts: Mapping[int, Sequence[int]],
    batch: int,
    *,
    slots: int | None = None,
    cached: Mapping[int, int] = {},
    generated: Mapping[int, int] = {},
    short: bool = False,
) -> list[PrefillCall]:
    """Calls that process prompts into rows of a state.

    Prompts of similar length share a call. A call has one of a few numbers of rows.

    Args:
      prompts: tokens of each row that has a prompt.
      batch: B, rows of the state.
      slots: S of the state; default as many as the calls need.
      cached: number of each row's first tokens that the cache holds already.
      generated: number of each row's tokens that belong to an unfinished answer.
      short: whether to use `SHORT_CHUNK` as well.
    """
    prompts = {i: ids[cached.get(i, 0) :] for i, ids in prompts.items()}
    order = sorted((i for i in prompts if len(prompts[i])), key=lambda i: len(prompts[i]))
    calls = []
    while order:
        # The longest prompt sets the widths. The next longest prompts fill the rows of the call.
        longest = len(prompts[order[-1]])
        widths = chunks_for(longest)
        if slots is not None and sum(widths) > slots:
            widths = CHUNKS[:1] * -(-longest // CHUNKS[0])
        least = 1
        if short and longest <= SHORT_CHUNK and batch >= _SHORT_ROWS:
            widths, least = (SHORT_CHUNK,), _SHORT_ROWS
        count = _rows_for(len(order), widths, least, rows_of_call(max(widths), batch))
        whole = count == batch
        work = {i: prompts[i] for i in order[-count:]}
        order = order[:-count]
        # Rows without work fill up the call. Some of them may have been processed already.
        group = list(work) + [i for i in range(batch) if i not in work][: count - len(work)]
        group = sorted(group) if whole else group
        calls += _calls(work, group, widths, whole, cached, generated)
    return calls


class PromptsOfRows:
    """Prompts that wait to be computed, for a cache whose rows are in one piece."""

    def __init__(self, batch: int, slots: int, *, short: bool):
        """Begin with no prompts; see `prefill_calls`."""
        self._options = {"batch": batch, "slots": slots, "short": short}
        self._calls: collections.deque[PrefillCall] = collections.deque()

    def __bool__(self) -> bool:
        """Whether any prompt waits."""
        return bool(self._calls)

    def add(
        self,
        prompts: Mapping[int, Sequence[int]],
        cached: Mapping[int, int],
        generated: Mapping[int, int],
    ) -> None:
        """Queue prompts, see `prefill_calls`."""
        self._calls += prefill_calls(prompts, cached=cached, generated=generated, **self._options)

    def leave_out(self, row: int) -> None:
        """Stop computing the prompt of a row."""
        calls = [call.leave_out(row) for call in self._calls]
        self._calls = collections.deque(call for call in calls if call.lengths.any())

    def take(self, most_tokens: float) -> PrefillCall:
        """The next call, whatever its size."""
        return self._calls.popleft()


def least_slots(prompt: int, total: int) -> int:
    """Smallest number of cache slots for a row.

    Args:
      prompt: tokens of the prompt.
      total: tokens of prompt and answer.
    """
    return max(covered_slots(prompt), -(-total // CHUNKS[0]) * CHUNKS[0])


def _rows_for(count: int, widths: Sequence[int], least: int, most: int) -> int:
    """Rows of a call for `count` prompts: `least` or `most`, so that there are few programs."""

    def cost(rows):
        tokens = sum(rows * width + _CALL_OVERHEAD_TOKENS for width in widths)
        return -(-count // rows) * tokens

    return least if cost(least) < cost(most) else most


def _calls(work, group, widths, whole, cached, generated):
    offset = 0
    begun = np.array([cached.get(i, 0) if i in work else 0 for i in group], np.int32)
    answered = np.array([generated.get(i, 0) if i in work else 0 for i in group], np.int32)
    lengths_of = np.array([len(work.get(i, ())) for i in group], np.int32)
    for width in widths:
        tokens = np.zeros((len(group), width), np.int32)
        for r, i in enumerate(group):
            piece = work.get(i, ())[offset : offset + width]
            tokens[r, : len(piece)] = piece
        lengths = np.clip(lengths_of - offset, 0, width).astype(np.int32)
        yield PrefillCall(
            rows=None if whole else np.asarray(group, np.int32),
            tokens=tokens,
            lengths=lengths,
            offsets=begun + np.int32(offset),
            final=(lengths > 0) & (lengths_of <= offset + width),
            prompts=begun + lengths_of - answered,
            generated=answered,
        )
        offset += width


def slots_for(longest_prompt: int, total: int, limit: int | None) -> int:
    """Cache slots per row: the smallest of a few sizes that holds `total` tokens.

    The sizes are 512, four times that, and so on, so that there are few programs. With a `limit`,
    the size is always the one for a prompt of `limit` tokens.
    """
    if limit is not None:
        return covered_slots(limit)
    slots = 512
    while slots < max(total, covered_slots(longest_prompt)):
        slots *= 4
    return slots
