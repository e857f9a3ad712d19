"""Beam search on the device, with the rules of transformers.

The beams of a prompt are rows next to each other. Each step keeps the best W · `kept` continuations
of all beams of a prompt together. Those that end and are among the first W are candidates for the
result. The best W of the others continue. Ties go to the lower beam and the lower token.

If a row's beam continues the beam of another row, no cache is copied. The row reads its past from
the other row, see `BeamState.sources`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.sampling.sampler import NOT_FINITE, BeamScores, Processors
from fdjax.sampling.values import Sampling

# The largest `num_beams`.
MOST_BEAMS = 64

# The score of a beam that does not exist, as in transformers: finite, but lower than any sum of
# log-probabilities. A score below the second constant comes from such a beam.
_NOTHING, _NEXT_TO_NOTHING = -1e9, -5e8

# Limits of the power of a length by which a sum of scores is divided; and the score where no beam
# has ended, lower than any such quotient, but finite.
_DIVISORS, _NONE = (1e-25, 1e25), -1e38

# Up to this many values of a row are compared pair by pair.
_MOST_COMPARED = 256

# Values of `early_stopping` on the device.
_WHEN_FULL, _NEVER = 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """The beams of a batch. Values of rows that are not beams have no meaning.

    Attributes:
      sources: [B, S] int32, for each position of the response, the row whose cache holds it.
      scores: [B] fp32, sum of the scores of a beam's tokens.
      ended: [B, W] fp32, the scores of the best ended beams of the row's prompt, best first.
      ends: [B, W, 3] int32, for each ended beam: its number of tokens, or 0 if there is none; its
        last token's parent beam, counted from the first beam of the prompt; and the last token.
    """

    sources: Array
    scores: Array
    ended: Array
    ends: Array

    @classmethod
    def empty(cls, batch: int, slots: int, width: int) -> "BeamState":
        """Host arrays for B rows of S slots with up to W beams per prompt."""
        return cls(
            np.zeros((batch, slots), np.int32),
            np.zeros(batch, np.float32),
            np.full((batch, width), _NONE, np.float32),
            np.zeros((batch, width, 3), np.int32),
        )

    @property
    def width(self) -> int:
        """Largest number of beams per prompt, W."""
        return self.ended.shape[1]

    def widened(self, width: int) -> "BeamState":
        """The state with room for at least `width` beams per prompt."""
        more = width - self.width
        if more <= 0:
            return self
        ended = jnp.pad(self.ended, ((0, 0), (0, more)), constant_values=_NONE)
        return dataclasses.replace(
            self, ended=ended, ends=jnp.pad(self.ends, ((0, 0), (0, more), (0, 0)))
        )


class BeamResults(NamedTuple):
    """The results of a call for each row that is the first beam of a prompt.

    Attributes:
      tokens, parents: [B, W, n] int32, for each step the beams' new tokens, -1 if there was no
        step, and the beams that they continue.
      ended, ends: see `BeamState`, after the last step.
      finished: [B] bool, whether the search has ended.
    """

    tokens: Array
    parents: Array
    ended: Array
    ends: Array
    finished: Array


class Candidates(NamedTuple):
    """The best continuations of each row, K of them, best first.

    Attributes:
      order: [B, K] fp32, values by which they are compared.
      scores: [B, K] fp32, the beam's score with the token.
      tokens: [B, K] int32.
      finite: [B] bool, whether the logits are finite.
    """

    order: Array
    scores: Array
    tokens: Array
    finite: Array


class Step(NamedTuple):
    """The result of a step of beam search, for each row.

    Attributes:
      moved: [B] bool, whether the row is a beam that takes part. If not, the other fields have no
        meaning.
      tokens: [B] int32 next tokens, or `NOT_FINITE`.
      rows: [B] int32, the row whose beam it continues.
      parents: [B] int32, the same row, counted from the first beam of the prompt.
      finished: [B] bool, whether the search has ended.
    """

    moved: Array
    tokens: Array
    rows: Array
    parents: Array
    finished: Array


def is_beam(sampling: Sampling) -> Array:
    """[B] whether a row is a beam."""
    return sampling.num_beams > 1


def first_rows(sampling: Sampling) -> Array:
    """[B] the row of the first beam of the same prompt."""
    rows = jnp.arange(sampling.num_beams.shape[0], dtype=jnp.int32)
    return jnp.where(is_beam(sampling), rows - sampling.sample_index, rows)


def member_rows(sampling: Sampling, width: int) -> Array:
    """[B, W] the rows of all beams of the same prompt, then arbitrary rows."""
    rows = first_rows(sampling)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.minimum(rows, rows.shape[0] - 1)


def are_aligned(widths: Sequence[int], beams: Sequence[int], most: int) -> bool:
    """Whether each row with work belongs to `most` beams that begin at a multiple of `most`.

    Args:
      widths: number of beams of each row's prompt, 0 for rows without work.
      beams: index of each row among the beams of its prompt.
      most: the largest number of beams of a prompt.
    """
    rows = enumerate(zip(widths, beams, strict=True))
    return all(width == most and i % most == beam for i, (width, beam) in rows if width)


def candidates(found: BeamScores, running: Array, processors: Processors) -> Candidates:
    """The best continuations of each row alone; K is W times the candidates per beam.

    Args:
      found: scores of the next tokens.
      running: [B] fp32 scores of the beams.
      processors: the active processors.
    """
    width, per_beam = processors.beams
    order, tokens = _largest(found.order + running[:, None], width * per_beam)
    scores = jnp.take_along_axis(found.scores, tokens, axis=1) + running[:, None]
    scores = jnp.where(order > -jnp.inf, scores, -jnp.inf)
    return Candidates(order, scores, tokens, found.finite)


def begin(
    found: Candidates, state: BeamState, sampling: Sampling, started: Array
) -> tuple[Step, BeamState]:
    """Choose the first tokens of prompts.

    Args:
      found: continuations of rows that are first beams of a prompt; other rows have no meaning.
      state: the beams.
      sampling: the options of all rows.
      started: [B] bool, whether this call has processed the last token of the row's prompt.
    """
    first = first_rows(sampling)
    # All beams of a prompt begin equal. Only the first counts, because the others would repeat it.
    found = jax.tree.map(lambda a: a[first], found)
    handicap = jnp.where(sampling.sample_index > 0, _NOTHING, 0.0)[:, None]
    found = found._replace(order=found.order + handicap, scores=found.scores + handicap)
    moved = is_beam(sampling) & started
    anew = moved[:, None]
    state = dataclasses.replace(
        state,
        ended=jnp.where(anew, _NONE, state.ended),
        ends=jnp.where(anew[:, :, None], 0, state.ends),
    )
    return advance(found, state, sampling, jnp.zeros_like(first), moved)


def advance(
    found: Candidates, state: BeamState, sampling: Sampling, steps: Array, moved: Array
) -> tuple[Step, BeamState]:
    """Choose the next tokens of beams among the continuations of all rows.

    Args:
      found: continuations of all rows.
      state: the beams.
      sampling: the options of all rows.
      steps: [B] int32 number of tokens before this step.
      moved: [B] bool, whether the row is a beam that takes part.

    Returns:
      (the step, the beams after it).
    """
    width = state.width
    beams = sampling.num_beams[:, None]
    members = member_rows(sampling, width)
    exists = jnp.arange(width, dtype=jnp.int32)[None] < beams
    best = _of_prompts(found, members, exists, sampling)
    length = steps + 1
    ends = length >= sampling.max_new_tokens
    hits = (best.tokens[:, :, None] == sampling.stop_tokens[:, None]).any(axis=-1) | ends[:, None]

    going = best.scores + jnp.where(hits, _NOTHING, 0.0)
    going, at = _largest(jnp.where(best.exists, going, -jnp.inf), width)
    own = jnp.take_along_axis(at, jnp.minimum(sampling.sample_index, width - 1)[:, None], axis=1)
    parents = jnp.take_along_axis(best.beams, own, axis=1)[:, 0]
    tokens = jnp.take_along_axis(best.tokens, own, axis=1)[:, 0]
    scores = jnp.take_along_axis(best.scores, own, axis=1)[:, 0]

    counts = jnp.arange(hits.shape[1], dtype=jnp.int32)[None] < beams
    counts &= hits & (best.scores > _NEXT_TO_NOTHING)
    ended, ends = _with_ended(state, best, counts, length, sampling)
    hopeless = _is_hopeless(going[:, 0], ended, exists, length, sampling)
    full = jnp.all((ends[:, :, 0] > 0) | ~exists, axis=1)
    finished = hopeless | full & (sampling.early_stopping == _WHEN_FULL)
    finished |= jnp.all(hits | ~best.exists, axis=1)
    finite = jnp.all(found.finite[members] | ~exists, axis=1)

    rows = jnp.where(moved, first_rows(sampling) + parents, jnp.arange(len(moved), dtype=jnp.int32))
    anew = moved[:, None]
    state = BeamState(
        sources=state.sources[rows],
        scores=jnp.where(moved, scores, state.scores),
        ended=jnp.where(anew, ended, state.ended),
        ends=jnp.where(anew[:, :, None], ends, state.ends),
    )
    tokens = jnp.where(finite, tokens, NOT_FINITE)
    return Step(moved, tokens, rows, parents, finished | ~finite), state


class _Best(NamedTuple):
    """The best continuations of each prompt, [B, K] each."""

    exists: Array
    scores: Array
    beams: Array
    tokens: Array


def _of_prompts(found: Candidates, members: Array, exists: Array, sampling: Sampling) -> _Best:
    """The best continuations of each prompt, over all of its beams."""
    b = len(members)
    per_row = found.order.shape[1]
    order = jnp.where(exists[:, :, None], found.order[members], -jnp.inf)
    order, at = _largest(order.reshape(b, -1), per_row)
    scores, tokens = (
        jnp.take_along_axis(a[members].reshape(b, -1), at, axis=1)
        for a in (found.scores, found.tokens)
    )
    ends = jnp.sum(sampling.stop_tokens >= 0, axis=-1, dtype=jnp.int32)
    count = sampling.num_beams * jnp.maximum(2, 1 + ends)
    return _Best(
        jnp.arange(per_row, dtype=jnp.int32)[None] < count[:, None],
        jnp.where(order > -jnp.inf, scores, -jnp.inf),
        at // per_row,
        tokens,
    )


def _with_ended(state, best, counts, length, sampling):
    """The best ended beams [B, W] including those of this step, and their `ends`."""
    scores = best.scores / _to_length(length, sampling)[:, None]
    scores = jnp.where(counts, scores, _NONE)
    lengths = jnp.where(counts, length[:, None], 0)
    ends = jnp.stack([lengths, best.beams, best.tokens], axis=-1)
    ended, at = _largest(jnp.concatenate([state.ended, scores], axis=1), state.width)
    ends = jnp.concatenate([state.ends, ends], axis=1)
    return ended, jnp.take_along_axis(ends, at[:, :, None], axis=1)


def _is_hopeless(best_going, ended, exists, length, sampling):
    """[B] whether no running beam can be expected to get among the best ended ones."""
    at_most = (sampling.early_stopping == _NEVER) & (sampling.length_penalty > 0)
    length = jnp.where(at_most, sampling.max_new_tokens, length)
    worst = jnp.min(jnp.where(exists, ended, jnp.inf), axis=1)
    return ~(best_going / _to_length(length, sampling) > worst)


def _to_length(length, sampling):
    """[B] the number by which a sum of scores is divided, limited so that fp32 holds the result."""
    power = length.astype(jnp.float32) ** sampling.length_penalty
    return jnp.clip(power, *_DIVISORS)


def _largest(values: Array, count: int) -> tuple[Array, Array]:
    """The largest values of each row [B, N] and their indices, [B, count] each.

    Equal values keep their order. If too few values are above -inf, the rest are -inf with index 0.
    """
    # `lax.top_k` may call a library, which cannot be part of a CUDA graph. In a graph, iterations
    # of a loop cost as much as their kernels.
    b, n = values.shape
    if n <= _MOST_COMPARED:
        return _by_rank(values, jnp.arange(n, dtype=jnp.int32)[None], count)
    # The largest values lie in the pieces that have the largest maxima. With this size, there are
    # about as many pieces as values in the chosen pieces.
    size = 2 ** max(round(math.log2(n / count) / 2), 0)
    pieces = jnp.pad(values, ((0, 0), (0, -n % size)), constant_values=-jnp.inf)
    pieces = pieces.reshape(b, -1, size)
    numbers = jnp.arange(pieces.shape[1], dtype=jnp.int32)[None]
    best, chosen = _by_rank(jnp.max(pieces, axis=2), numbers, count)
    near = jnp.take_along_axis(pieces, chosen[:, :, None], axis=1)
    near = jnp.where(best[:, :, None] > -jnp.inf, near, -jnp.inf)
    places = chosen[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    return _by_rank(near.reshape(b, -1), places.reshape(b, -1), count)


def _by_rank(values: Array, places: Array, count: int) -> tuple[Array, Array]:
    """`_largest` with the order of `places` [B or 1, N]. All pairs are compared, in one kernel."""
    one, other = values[:, :, None], values[:, None]
    earlier = places[:, None] < places[:, :, None]
    ranks = jnp.sum((other > one) | (other == one) & earlier, axis=2, dtype=jnp.int32)
    chosen = ranks[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None]
    chosen &= values[:, None] > -jnp.inf
    largest = jnp.max(jnp.where(chosen, values[:, None], -jnp.inf), axis=2)
    return largest, jnp.max(jnp.where(chosen, places[:, None], 0), axis=2)
