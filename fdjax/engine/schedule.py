"""Splits a batch of prompts into calls of a few fixed shapes."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# Widths of prefill programs. A prompt of any length is covered by a sum of these.
CHUNKS = (128, 512, 1024)
# Limit of prompt tokens per call over all its rows, padding included.
_CALL_TOKENS = 8192
# Cost of one more call, in tokens of compute, because it reads the weights again.
_CALL_OVERHEAD_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call of `fdjax.engine.step.prefill`, as host arrays.

    Attributes:
      rows: [R] rows of the state, or None for all of them in order.
      tokens: [R, T].
      lengths, offsets, final, prompts: [R].
    """

    rows: np.ndarray | None
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    final: np.ndarray
    prompts: np.ndarray


def chunks_for(length: int) -> tuple[int, ...]:
    """The cheapest sequence of chunk widths that covers a prompt of `length` tokens."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1:] * widest + rest


def widest_chunk(length: int) -> int:
    """The first of `chunks_for`."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1] if widest else rest[0]


def covered_slots(length: int) -> int:
    """Cache slots needed to prefill `length` tokens, padding included."""
    widest, rest = _widest_and_rest(length)
    return CHUNKS[-1] * widest + sum(rest)


def _widest_and_rest(length: int) -> tuple[int, tuple[int, ...]]:
    """The cheapest chunks: (number of the widest, widths of the chunks after them)."""
    widest = max(0, -(-length // CHUNKS[-1]) - 2)
    return widest, _cheapest(-(-length // CHUNKS[0]) - widest * (CHUNKS[-1] // CHUNKS[0]))


@functools.cache
def _cheapest(units: int) -> tuple[int, ...]:
    """The cheapest chunks that cover `units` of the narrowest; for up to twice the widest."""
    if units <= 0:
        return ()
    options = [(c, *_cheapest(units - c // CHUNKS[0])) for c in reversed(CHUNKS)]
    return min(options, key=lambda o: sum(o) + _CALL_OVERHEAD_TOKENS * len(o))


def rows_of_call(width: int, batch: int) -> int:
    """Rows of a call with chunks of `width`, for a state of `batch` rows.

    All rows, or half of them, a quarter and so on, rounded down. So there are few different
    programs, whatever the prompts.
    """
    rows = batch
    while rows > 1 and rows * width > _CALL_TOKENS:
        rows //= 2
    return rows


def most_rows_of_call(length: int) -> int:
    """Largest number of rows of a call with the widest chunk of prompts of `length` tokens."""
    return max(1, _CALL_TOKENS // widest_chunk(length))


def call_tokens(length: int, batch: int) -> int:
    """Tokens in the largest call for prompts of up to `length` tokens, padding included."""
    widest = widest_chunk(length)
    return max(rows_of_call(width, batch) * width for width in CHUNKS if width <= widest)


def prefill_calls(prompts: Sequence[Sequence[int]], batch: int) -> list[PrefillCall]:
    """Calls that process `prompts` into rows 0, 1, … of a state of `batch` rows.

    Prompts of similar length share a call, whose number of rows comes from `rows_of_call`.
    """
    order = sorted(
        (i for i in range(len(prompts)) if len(prompts[i])), key=lambda i: len(prompts[i])
    )
    calls = []
    while order:
        widths = chunks_for(len(prompts[order[-1]]))
        # The longest prompt sets the widths. The next longest prompts fill the rows of the call.
        count = rows_of_call(max(widths), batch)
        whole = count == batch
        work = {i: prompts[i] for i in order[-count:]}
        order = order[:-count]
        # Rows without work fill up the call. Some of them may have been processed already.
        group = list(work) + [i for i in range(batch) if i not in work][: count - len(work)]
        calls += _calls(work, sorted(group) if whole else group, widths, whole)
    return calls


def _calls(work, group, widths, whole):
    offset = 0
    for width in widths:
        tokens = np.zeros((len(group), width), np.int32)
        lengths = np.zeros(len(group), np.int32)
        final = np.zeros(len(group), bool)
        for r, i in enumerate(group):
            prompt = work.get(i, ())
            piece = prompt[offset : offset + width]
            tokens[r, : len(piece)] = piece
            lengths[r] = len(piece)
            final[r] = len(piece) > 0 and len(prompt) <= offset + width
        yield PrefillCall(
            rows=None if whole else np.asarray(group, np.int32),
            tokens=tokens,
            lengths=lengths,
            offsets=np.full(len(group), offset, np.int32),
            final=final,
            prompts=np.array([len(work.get(i, ())) for i in group], np.int32),
        )
        offset += width


def slots_for(longest_prompt: int, total: int, limit: int | None) -> int:
    """Cache slots per row: the smallest of a few sizes that holds `total` tokens.

    The sizes are 512, four times that, and so on, so that there are few programs. With a `limit`,
    the size is always what a prompt of `limit` tokens needs.
    """
    if limit is not None:
        return covered_slots(limit)
    slots = 512
    while slots < max(total, covered_slots(longest_prompt)):
        slots *= 4
    return slots
