"""How a batch of prompts becomes calls of a few fixed shapes."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# Widths of a prefill program. A prompt of any length is a sum of these.
CHUNKS = (128, 512, 1024)
# Prompt tokens per call, padding included, over all its rows.
_CALL_TOKENS = 8192
# What one more call costs, in tokens of compute: the weights are read once more.
_CALL_OVERHEAD_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call of `fdjax.step.prefill`, as host arrays.

    Attributes:
      rows: [R] state rows, or None for all of them in order.
      tokens: [R, T].
      lengths, offsets, final, prompts: [R].
    """

    rows: np.ndarray | None
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    final: np.ndarray
    prompts: np.ndarray


@functools.cache
def chunks_for(length: int) -> tuple[int, ...]:
    """The cheapest sequence of chunk widths that covers a prompt of `length` tokens."""
    if length <= 0:
        return ()
    if length > 2 * CHUNKS[-1]:
        widest = -(-length // CHUNKS[-1]) - 2
        return CHUNKS[-1:] * widest + chunks_for(length - widest * CHUNKS[-1])
    options = [(c, *chunks_for(length - c)) for c in reversed(CHUNKS)]
    return min(options, key=lambda o: sum(o) + _CALL_OVERHEAD_TOKENS * len(o))


def covered_slots(length: int) -> int:
    """Cache slots that prefilling `length` tokens needs, padding included."""
    return sum(chunks_for(length))


def rows_of_call(width: int, batch: int) -> int:
    """Rows of a state of `batch` rows that a call with chunks of `width` takes."""
    rows = batch
    while rows > 1 and rows * width > _CALL_TOKENS:
        rows //= 2
    return rows


def most_rows_of_call(length: int) -> int:
    """Rows that a call with the widest chunks of prompts of `length` tokens takes at most."""
    return max(1, _CALL_TOKENS // max(chunks_for(length)))


def call_tokens(length: int, batch: int) -> int:
    """Tokens of the largest call for prompts of up to `length` tokens, padding included."""
    widest = max(chunks_for(length))
    return max(rows_of_call(width, batch) * width for width in CHUNKS if width <= widest)


def prefill_calls(prompts: Sequence[Sequence[int]], batch: int) -> list[PrefillCall]:
    """Calls that process `prompts` into rows 0, 1, … of a state of `batch` rows.

    Rows of similar length share calls; a call has a power of two of rows, or all of them.
    """
    order = sorted(
        (i for i in range(len(prompts)) if len(prompts[i])), key=lambda i: len(prompts[i])
    )
    calls = []
    while order:
        widths = chunks_for(len(prompts[order[-1]]))
        # The longest prompt decides the widths; as many of the next longest join it as fit.
        count = rows_of_call(max(widths), batch)
        whole = count == batch
        work = {i: prompts[i] for i in order[-count:]}
        order = order[:-count]
        # Distinct rows without work fill the call; some may have had theirs in an earlier one.
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

    Few sizes mean few programs: 512, then four times that, and so on, or what `limit` tokens need,
    as prompt or otherwise.
    """
    if limit is not None:
        return covered_slots(limit)
    slots = 512
    while slots < max(total, covered_slots(longest_prompt)):
        slots *= 4
    return slots
