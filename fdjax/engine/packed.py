"""Packs prompts into calls with little padding, for a cache of pages.

A call is a list of blocks. A block is up to 128 tokens of one prompt, which fill a page. A prompt
may have several blocks in a call, because all of them are written to the cache before any attends.
The padding is less than a block per prompt, and a few blocks per call, because there are few sizes
of calls.

Samples of one prompt share its blocks: one row, the leader, is computed. The others, which follow,
share its full pages, copy its last page, and choose their first tokens from the same logits.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fdjax.engine.schedule import CALL_TOKENS, CHUNKS, SHORT_CHUNK, PrefillCall, cheapest
from fdjax.engine.state import SLOT_MULTIPLE

# Allowed numbers of blocks in a call.
_SIZES = (1, 4, 16, 64)
# The usual largest call has this many blocks per row of the state: a row's widest chunk.
_BLOCKS_PER_ROW = CHUNKS[-1] // SLOT_MULTIPLE
# The call for long prompts has up to this many blocks per row. It reads the weights less often, and
# several devices sum fewer and larger arrays.
_MOST_BLOCKS_PER_ROW = 32
# On a CPU, time is proportional to the number of tokens, so larger calls save nothing.
_BLOCKS_ON_CPU = 8
_SHORT_BLOCKS = SLOT_MULTIPLE // SHORT_CHUNK
# A call of 4 blocks has 16 rows, because samples of one prompt need rows but no blocks. The logits
# of 16 rows take as long as those of 4: either way, the whole head is read.
_SMALL, _ROWS_OF_SMALL = 4, 16
# Cost of another call as a number of blocks, and for a mixture of experts: it reads all experts
# again. An H100 computes 8 and 64 blocks of a layer of Qwen3-30B-A3B in 0.5 and 1.4 ms.
_CALL_OVERHEAD, _CALL_OVERHEAD_OF_EXPERTS = 1, 10


def call_sizes(batch: int, *, on_cpu: bool = False, experts: bool = False) -> tuple[int, ...]:
    """Numbers of blocks that a call may have, for a state of `batch` rows. Each needs a program.

    With `experts`, a long prompt has the largest call for itself.
    """
    largest = _BLOCKS_ON_CPU if on_cpu else CALL_TOKENS // SLOT_MULTIPLE
    usual = min(_BLOCKS_PER_ROW * batch, largest)
    longest = largest if experts else min(_MOST_BLOCKS_PER_ROW * batch, largest)
    return tuple(sorted({usual, longest, *(size for size in _SIZES if size < usual)}))


def call_size(blocks: int, sizes: tuple[int, ...], *, experts: bool = False) -> int:
    """Blocks in the next call if so many wait, at least 1."""
    if blocks >= sizes[-1]:
        return sizes[-1]
    return cheapest(blocks, sizes, _CALL_OVERHEAD_OF_EXPERTS if experts else _CALL_OVERHEAD)[0]


def largest_call(length: int, batch: int, *, experts: bool = False) -> int:
    """Tokens in the largest call for `batch` prompts of up to `length` tokens, padding included."""
    sizes = call_sizes(batch, experts=experts)
    most = min(batch * -(-length // SLOT_MULTIPLE), sizes[-1])
    blocks = max(call_size(n, sizes, experts=experts) for n in range(1, most + 1))
    return blocks * SLOT_MULTIPLE


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt that waits. The cache holds the first `done` of its `tokens`."""

    row: int
    tokens: np.ndarray
    done: int
    generated: int
    followers: list[int] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class PackedPrompts:
    """Prompts that wait to be computed, in the order of arrival."""

    def __init__(
        self,
        batch: int,
        *,
        on_cpu: bool = False,
        experts: bool = False,
        page_tokens: int = SLOT_MULTIPLE,
    ):
        """Begin with no prompts.

        Args:
          batch: B, rows of the state.
          on_cpu: whether the model runs on a CPU, where larger calls save nothing.
          experts: whether the model is a mixture of experts, of which a call reads all.
          page_tokens: tokens of a page, see `Engine.page_tokens`.
        """
        self._page_tokens = page_tokens
        self._batch = batch
        self._sizes = call_sizes(batch, on_cpu=on_cpu, experts=experts)
        self._experts = experts
        self._short = on_cpu and batch >= _SHORT_BLOCKS
        self._on_cpu = on_cpu
        self._prompts: collections.deque[_Prompt] = collections.deque()

    def __bool__(self) -> bool:
        """Whether any prompt waits."""
        return bool(self._prompts)

    def add(
        self,
        prompts: Mapping[int, Sequence[int]],
        cached: Mapping[int, int],
        generated: Mapping[int, int],
    ) -> None:
        """Queue prompts, see `prefill_calls`."""
        for row, ids in prompts.items():
            tokens = np.asarray(ids, np.int32)
            self._prompts.append(_Prompt(row, tokens, cached[row], generated[row]))

    def follow(self, row: int, leader: int) -> None:
        """Let a row have what is computed for another row, whose equal prompt waits."""
        groups = (p for p in self._prompts if leader == p.row or leader in p.followers)
        next(groups).followers.append(row)

    def leave_out(self, row: int) -> None:
        """Stop computing the prompt of a row. Of the rows that follow it, one takes its place."""
        for prompt in self._prompts:
            if row in prompt.followers:
                prompt.followers.remove(row)
            elif row == prompt.row:
                prompt.row = prompt.followers.pop(0) if prompt.followers else -1
        self._prompts = collections.deque(p for p in self._prompts if p.row >= 0)

    def take(self, most_tokens: float) -> PrefillCall:
        """The next call, of at most `most_tokens` tokens, unless the smallest call is larger."""
        if self._short:
            short = [prompt for prompt in self._prompts if prompt.left <= SHORT_CHUNK]
            if short:
                return self._call(short, _SHORT_BLOCKS, SHORT_CHUNK)
        sizes = [size for size in self._sizes if size * SLOT_MULTIPLE <= most_tokens]
        sizes = tuple(sizes) or self._sizes[:1]
        blocks = 0
        for prompt in self._prompts:
            blocks += -(-prompt.left // SLOT_MULTIPLE)
            if blocks >= sizes[-1]:
                return self._call(self._prompts, sizes[-1], SLOT_MULTIPLE)
        size = call_size(blocks, sizes, experts=self._experts)
        if size < _SMALL <= sizes[-1] and any(prompt.followers for prompt in self._prompts):
            size = _SMALL
        return self._call(self._prompts, size, SLOT_MULTIPLE)

    def _rows(self, count: int) -> int:
        """Rows of a call of `count` blocks."""
        return min(self._batch, _ROWS_OF_SMALL if count == _SMALL and not self._on_cpu else count)

    def _call(self, prompts: Sequence[_Prompt], count: int, width: int) -> PrefillCall:
        """Take up to `count` blocks of `width` tokens."""
        blocks: list[tuple[_Prompt, int]] = []
        for prompt in prompts:
            while prompt.left and len(blocks) < count:
                blocks.append((prompt, prompt.done))
                prompt.done += min(width, prompt.left)
        work = list(dict.fromkeys(prompt for prompt, _ in blocks))
        self._prompts = collections.deque(p for p in self._prompts if p.left)
        # Blocks that see the most slots come first, because kernels start them in this order.
        blocks.sort(key=lambda block: -block[1])
        rows = self._rows(count)
        copied: dict[int, int] = {}
        for prompt in work:
            if prompt.left:
                continue
            room = rows - len(work) - len(copied)
            copied |= dict.fromkeys(prompt.followers[:room], prompt.row)
            if rest := prompt.followers[room:]:
                # One of those without room computes the last page again, for itself and the others.
                done = (len(prompt.tokens) - 1) // self._page_tokens * self._page_tokens
                group = _Prompt(rest[0], prompt.tokens, done, prompt.generated, rest[1:])
                self._prompts.appendleft(group)
        return _as_call(blocks, work, copied, (count, width), rows, self._batch)


def _as_call(
    blocks: Sequence[tuple[_Prompt, int]],
    work: Sequence[_Prompt],
    copied: Mapping[int, int],
    shape: tuple[int, int],
    size: int,
    batch: int,
) -> PrefillCall:
    """The call with these blocks (prompt, its first token) of the prompts in `work`.

    `copied` are the rows that follow them in this call, `shape` that of the blocks, and `size` the
    number of rows of the call.
    """
    count, width = shape
    rows = [prompt.row for prompt in work] + list(copied)
    # Rows without work fill up the call.
    busy = set(rows)
    rows += [row for row in range(batch) if row not in busy][: size - len(rows)]
    if size == batch:
        rows.sort()
    place = {row: r for r, row in enumerate(rows)}
    tokens = np.zeros((count, width), np.int32)
    lengths, offsets, owners = np.zeros((3, count), np.int32)
    last, prompts, generated = np.zeros((3, size), np.int32)
    last[:] = -1
    final = np.zeros(size, bool)
    for b, (prompt, start) in enumerate(blocks):
        piece = prompt.tokens[start : start + width]
        tokens[b, : len(piece)] = piece
        r = place[prompt.row]
        lengths[b], offsets[b], owners[b] = len(piece), start, r
        if start + len(piece) == prompt.done:
            last[r] = b
    for prompt in work:
        r = place[prompt.row]
        final[r] = not prompt.left
        prompts[r] = len(prompt.tokens) - prompt.generated
        generated[r] = prompt.generated
    for row, leader in copied.items():
        for array in (last, final, prompts, generated):
            array[place[row]] = array[place[leader]]
    return PrefillCall(
        rows=None if size == batch else np.asarray(rows, np.int32),
        tokens=tokens,
        lengths=lengths,
        offsets=offsets,
        final=final,
        prompts=prompts,
        generated=generated,
        # With one block per row, the blocks need no owners.
        owners=None if count == 1 else owners,
        last=None if count == 1 else last,
        copied=copied,
    )
