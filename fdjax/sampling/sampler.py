"""Chooses the next token from logits.

All option values are data, one per row. Only the set of active processors is static, so requests
that differ in temperature share a program.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fdjax.pallas_kernels.dispatch import Dispatch
from fdjax.pallas_kernels.row_tiles import in_row_tiles
from fdjax.pallas_kernels.truncation import truncate
from fdjax.pallas_kernels.where_asked import where_asked
from fdjax.sampling.callbacks import called
from fdjax.sampling.processors import edit_logits
from fdjax.sampling.values import Sampling

# (ids [B,S] int32, lengths [B] int32, scores [B,V] fp32) → scores [B,V] fp32. The first `lengths`
# ids of a row are its prompt and response. The others are meaningless.
LogitsProcessor = Callable[[Array, Array, Array], Array]

# Results instead of a token, if a row's logits are not finite, or if all tokens are forbidden.
NOT_FINITE = -2
ALL_FORBIDDEN = -3

# Largest number of likeliest tokens that `return_logprobs` may ask for.
MAX_TOP_LOGPROBS = 20

# The random generator, fixed so that the user's JAX settings do not change the draws.
_GENERATOR = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class Processors:
    """The set of active processors. It is static: each set has one program.

    Attributes:
      edit: whether biases, penalties and bans change the logits.
      sample: whether tokens are drawn, with a temperature.
      truncate: whether top-k, top-p, min-p and typical-p limit the draw.
      logprobs: whether log-probabilities are returned.
      beams: (largest number of beams, largest number of candidates per beam), or zeros if no row
        is a beam.
      custom: the caller's own processors. They run in this order, after the edits and before the
        temperature.
    """

    edit: bool = False
    sample: bool = False
    truncate: bool = False
    logprobs: bool = False
    beams: tuple[int, int] = (0, 0)
    custom: tuple[LogitsProcessor, ...] = ()

    def __or__(self, other: "Processors") -> "Processors":
        return Processors(
            self.edit or other.edit,
            self.sample or other.sample,
            self.truncate or other.truncate,
            self.logprobs or other.logprobs,
            tuple(map(max, self.beams, other.beams)),
            self.custom or other.custom,
        )

    @property
    def tier(self) -> "Processors":
        """The smallest set in `_TIERS` that contains this one, so that there are few programs."""
        common = dataclasses.replace(self, beams=(0, 0), custom=())
        tier = next(t for t in _TIERS if t | common == t)
        return dataclasses.replace(tier, beams=self.beams, custom=self.custom)


_TIERS = (
    Processors(),
    Processors(logprobs=True),
    Processors(sample=True),
    Processors(sample=True, truncate=True),
    Processors(edit=True, sample=True, truncate=True, logprobs=True),
)


class Logprobs(NamedTuple):
    """Log-probabilities under the raw logits, with N = `MAX_TOP_LOGPROBS` or the vocabulary size.

    Attributes:
      chosen: [B] fp32 log-probability of the chosen token.
      top: [B, N] fp32 log-probabilities of the likeliest tokens in descending order; zeros if no
        row asked for them.
      top_ids: [B, N] int32 ids of these tokens.
    """

    chosen: Array
    top: Array
    top_ids: Array


def next_tokens(
    logits: Array,
    sampling: Sampling,
    ids: Array,
    lengths: Array,
    steps: Array,
    processors: Processors,
    *,
    plan: Dispatch | None = None,
) -> tuple[Array, Logprobs | None]:
    """Choose the next token of each row.

    Processors run in the order of transformers: the edits of `edit_logits`, the caller's own, and
    in sampled rows temperature, top-k, top-p, min-p, typical-p. Unlike transformers, top-p keeps
    all tokens that tie at its limit. A row's random key is fold_in(key(seed), sample index, step),
    so its samples do not depend on the rest of the batch.

    Args:
      logits: [B, V] fp32.
      sampling: options of each row.
      ids: [B, S] int32 tokens of each row, prompt and response.
      lengths: [B] int32 number of tokens in the row.
      steps: [B] int32 number of tokens generated so far.
      processors: the active processors.
      plan: chooses the implementation of `truncate`, and whether log-probabilities must be equal to
        the last bit for all B below 128.

    Returns:
      (tokens [B] int32, where `NOT_FINITE` and `ALL_FORBIDDEN` mark errors; their `Logprobs`, or
      None).

    Raises:
      ValueError: a custom processor returns another shape, or numbers that are not real.
    """
    best, tokens = first_best(logits)
    finite = jnp.isfinite(best)
    scores = _edited(logits, sampling, ids, lengths, steps, processors)
    if processors.edit or processors.custom:
        best, tokens = first_best(scores)
        finite &= best < jnp.inf
        tokens = jnp.where(best == -jnp.inf, ALL_FORBIDDEN, tokens)
    if processors.sample:
        drawn = _sample(scores, sampling, steps, processors, plan)
        tokens = jnp.where((sampling.temperature > 0) & (tokens >= 0), drawn, tokens)
    tokens = jnp.where(finite, tokens, NOT_FINITE)
    if not processors.logprobs:
        return tokens, None
    return tokens, _logprobs(logits, tokens, sampling, _is_invariant(plan))


class BeamScores(NamedTuple):
    """The scores of the next tokens of all rows, where some rows are beams.

    Attributes:
      scores: [B, V] fp32, what each token adds to the sum of a beam's scores; -inf if it is not
        allowed.
      order: [B, V] fp32, the scores, in sampled rows with the noise by which tokens are drawn.
      finite: [B] bool, whether a row's logits are finite.
    """

    scores: Array
    order: Array
    finite: Array


def next_tokens_and_scores(
    logits: Array,
    sampling: Sampling,
    ids: Array,
    lengths: Array,
    steps: Array,
    processors: Processors,
    *,
    plan: Dispatch | None = None,
) -> tuple[Array, Logprobs | None, BeamScores]:
    """`next_tokens` for a batch with beams, and the scores for the beams.

    As in transformers, the scores of a beam are log-probabilities, to which the processors are
    applied. Top-k, top-p, min-p and typical-p keep at least one token more than there are
    end-of-sequence ids. The returned tokens of beams have no meaning.
    """
    beam = (sampling.num_beams > 1)[:, None]
    finite = jnp.isfinite(first_best(logits)[0])
    largest, log_sum = _log_total(logits, _is_invariant(plan))
    scores = jnp.where(beam, (logits - largest) - log_sum, logits)
    scores = order = _edited(scores, sampling, ids, lengths, steps, processors)
    best, _ = first_best(scores)
    finite &= best < jnp.inf
    if processors.sample:
        scores, order = _noisy(scores, best, beam, sampling, steps, processors, plan)
    tokens = jnp.where(best == -jnp.inf, ALL_FORBIDDEN, first_best(order)[1])
    tokens = jnp.where(finite, tokens, NOT_FINITE)
    logprobs = None
    if processors.logprobs:
        logprobs = _logprobs(logits, tokens, sampling, _is_invariant(plan))
    return tokens, logprobs, BeamScores(scores, order, finite)


def _noisy(scores, best, beam, sampling, steps, processors, plan):
    """The scores with temperature and noise in sampled rows; `best` [B] are the largest scores."""
    drawn = (sampling.temperature > 0)[:, None]
    temperature = jnp.where(drawn, sampling.temperature[:, None], 1.0)
    relative = kept = (scores - best[:, None]) / temperature
    if processors.truncate:
        ends = jnp.sum(sampling.stop_tokens >= 0, axis=-1, dtype=jnp.int32)
        least = jnp.where(beam[:, 0], jnp.maximum(2, 1 + ends), 1)
        kept = _limited(relative, sampling, plan, least)
    # Sums of scores of beams are compared, so the scores of beams are not made relative to `best`.
    tempered = jnp.where(beam, scores / temperature, relative)
    scores = jnp.where(drawn, jnp.where(kept > -jnp.inf, tempered, -jnp.inf), scores)

    return scores, jnp.where(drawn, scores + _noise(scores, sampling, steps), scores)


def _edited(logits, sampling, ids, lengths, steps, processors):
    """The scores after penalties, bans and the caller's own processors."""
    scores = logits
    if processors.edit:
        scores = edit_logits(scores, sampling, ids, lengths, steps)
    for process in processors.custom:
        scores = called("logits processor", process, ids, lengths, scores)
        if getattr(scores, "shape", None) != logits.shape:
            raise ValueError(
                f"generate: a logits processor must return scores [B,V] = {list(logits.shape)}, "
                f"got {getattr(scores, 'shape', scores)} of {process}"
            )
        if not any(jnp.issubdtype(scores.dtype, kind) for kind in (jnp.floating, jnp.integer)):
            raise ValueError(
                f"generate: a logits processor must return real numbers, got {scores.dtype} "
                f"of {process}"
            )
        scores = jnp.asarray(scores, jnp.float32)
    return scores


def first_best(scores: Array) -> tuple[Array, Array]:
    """(largest score of each row, or NaN if the row has a NaN; first token with this score)."""

    def larger(a, b):
        first = (a[0] > b[0]) | jnp.isnan(a[0]) & ~jnp.isnan(b[0])
        same = (a[0] == b[0]) | jnp.isnan(a[0]) & jnp.isnan(b[0])
        first = first | same & (a[1] < b[1])
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    tokens = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    nothing = scores.dtype.type(-jnp.inf), jnp.int32(0)
    return lax.reduce((scores, tokens), nothing, larger, (scores.ndim - 1,))


def _sample(scores, sampling, steps, processors, plan):
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # The maximum is subtracted first, so a tiny temperature gives -inf but never +inf.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / temperature[:, None]
    if processors.truncate:
        scores = _limited(scores, sampling, plan)

    noisy = scores + _noise(scores, sampling, steps)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _noise(scores, sampling, steps):
    """Noise [B, V]. The largest score with noise is a draw from the softmax of the scores."""

    def bits(seed, index, step):
        return jax.random.bits(_key(seed, index, step), scores.shape[1:], jnp.uint32)

    # This JAX setting would change the bits of a key, so it is fixed: a seed keeps its meaning.
    with jax.threefry_partitionable(True):
        return gumbel(jax.vmap(bits)(sampling.seed, sampling.sample_index, steps))


def gumbel(bits: Array) -> Array:
    """Noise of the Gumbel distribution, in fp32, from uniform random bits in uint32.

    `jax.random.gumbel` uses 23 of the bits and ends at 15.9. In a vocabulary of 100 000 tokens,
    unlikely ones would then be drawn half as often as they should. Here, the finest steps are where
    the noise is large, up to 22.9.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    largest = np.nextafter(np.float32(1), np.float32(0))
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, largest)))


def _limited(scores, sampling, plan, least=None):
    """Set the scores of tokens that must not be drawn to -inf. The largest score must be 0."""
    rules = sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p
    return truncate(scores, *rules, least=least, plan=plan)


def _is_invariant(plan):
    return plan is not None and plan.batch_invariant


def _key(seed, index, step):
    """The random key of a row, from its options and its number of tokens."""
    key = jax.random.key(seed, impl=_GENERATOR)
    return jax.random.fold_in(jax.random.fold_in(key, index), step)


def _logprobs(logits, tokens, sampling, batch_invariant):
    b, v = logits.shape
    n = min(MAX_TOP_LOGPROBS, v)
    largest, log_sum = _log_total(logits, batch_invariant)

    def likeliest(none):
        index = jnp.arange(v, dtype=jnp.int32)[None]
        found = [first_best(logits)]
        # `lax.top_k` may call a library, which cannot be part of a CUDA graph.
        for _ in range(n - 1):
            last, at = (a[:, None] for a in found[-1])
            after = (logits < last) | ((logits == last) & (index > at))
            found.append(first_best(jnp.where(after, logits, -jnp.inf)))
        best, tokens = (jnp.stack(part, axis=1) for part in zip(*found, strict=True))
        return (best - largest) - log_sum, tokens

    none = jnp.zeros((b, n), jnp.float32), jnp.zeros((b, n), jnp.int32)
    top, top_ids = where_asked(sampling.top_logprobs > 0, likeliest, none)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return Logprobs(((chosen - largest) - log_sum)[:, 0], top, top_ids)


def _log_total(logits, batch_invariant):
    """(largest logit, logarithm of the sum of the exponentials relative to it), each [B, 1].

    They are not added, because a log-probability near 0 would then be rounded like a logit.
    """

    def of_rows(logits):
        largest = jnp.max(logits, axis=-1, keepdims=True)
        return largest, jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True))

    return in_row_tiles(of_rows, logits) if batch_invariant else of_rows(logits)
