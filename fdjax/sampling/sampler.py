"""From logits to the next token. Every value is data, one per row; only the set of active
processors is static, so two requests that differ in temperature share a program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.row_tiles import in_row_tiles
from fdjax.sampling.callbacks import called
from fdjax.sampling.processors import edit_logits, where_asked
from fdjax.sampling.values import Sampling

# (ids [B,S] int32, lengths [B] int32, scores [B,V] fp32) → scores [B,V] fp32. Of the ids, those
# before a row's length are its prompt and what it has generated.
LogitsProcessor = Callable[[Array, Array, Array], Array]

# Chosen in place of a token where a row's logits are not finite, or where no token is left.
NOT_FINITE = -2
ALL_FORBIDDEN = -3

# Alternatives whose log-probabilities can be asked for.
MAX_TOP_LOGPROBS = 20

# Draws for each key by itself, whatever JAX is told to take for other keys.
_GENERATOR = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class Processors:
    """The static set of active processors: a program per set, whatever the values.

    Attributes:
      edit: biases, penalties and bans, before a token is chosen.
      sample: temperature, and with it the draw.
      truncate: top-k, top-p, min-p and typical-p.
      logprobs: log-probabilities.
      custom: one's own, in this order, after the edits and before the temperature.
    """

    edit: bool = False
    sample: bool = False
    truncate: bool = False
    logprobs: bool = False
    custom: tuple[LogitsProcessor, ...] = ()

    def __or__(self, other: "Processors") -> "Processors":
        return Processors(
            self.edit or other.edit,
            self.sample or other.sample,
            self.truncate or other.truncate,
            self.logprobs or other.logprobs,
            self.custom or other.custom,
        )

    @property
    def tier(self) -> "Processors":
        """The smallest of a few sets that holds this one: few sets are few programs."""
        tier = next(t for t in _TIERS if t | dataclasses.replace(self, custom=()) == t)
        return dataclasses.replace(tier, custom=self.custom)

    @property
    def everything(self) -> "Processors":
        """All processors, for a program that runs too seldom to have variants."""
        return dataclasses.replace(_TIERS[-1], custom=self.custom)


_TIERS = (
    Processors(),
    Processors(logprobs=True),
    Processors(sample=True),
    Processors(sample=True, truncate=True),
    Processors(edit=True, sample=True, truncate=True, logprobs=True),
)


class Logprobs(NamedTuple):
    """Log-probabilities under the raw logits, with N = `MAX_TOP_LOGPROBS` or the vocabulary.

    Attributes:
      chosen: [B] fp32, of the token chosen.
      top: [B, N] fp32, of the likeliest tokens in descending order, where any row asked for some.
      top_ids: [B, N] int32.
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
    batch_invariant: bool = False,
) -> tuple[Array, Logprobs | None]:
    """Choose the next token of each row.

    Processors apply in the order of transformers: the edits of `edit_logits`, one's own, then,
    where a row is sampled, temperature, top-k, top-p, min-p, typical-p. Unlike there, tokens that
    tie at the edge of top-p are all kept. A row's random key is fold_in(key(seed), sample index,
    step), so its samples do not depend on the batch it is in.

    Args:
      logits: [B, V] fp32.
      sampling: per-row values.
      ids: [B, S] int32 tokens of each row, prompt and response.
      lengths: [B] int32 how many of them there are.
      steps: [B] int32 tokens generated so far.
      processors: which of them act.
      batch_invariant: log-probabilities do not depend, in their last bit, on B below 128.

    Returns:
      (tokens [B] int32 or `NOT_FINITE` or `ALL_FORBIDDEN`, their `Logprobs` or None).
    """
    best, tokens = _best(logits)
    finite = jnp.isfinite(best)
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
    if processors.edit or processors.custom:
        best, tokens = _best(scores)
        finite &= best < jnp.inf
        tokens = jnp.where(best == -jnp.inf, ALL_FORBIDDEN, tokens)
    if processors.sample:
        drawn = _sample(scores, sampling, steps, processors)
        tokens = jnp.where((sampling.temperature > 0) & (tokens >= 0), drawn, tokens)
    tokens = jnp.where(finite, tokens, NOT_FINITE)
    if not processors.logprobs:
        return tokens, None
    return tokens, _logprobs(logits, tokens, sampling, batch_invariant)


def _best(scores):
    """The largest score of each row, NaN where there is one, and the first token that has it."""

    def larger(a, b):
        first = (a[0] > b[0]) | jnp.isnan(a[0]) & ~jnp.isnan(b[0])
        same = (a[0] == b[0]) | jnp.isnan(a[0]) & jnp.isnan(b[0])
        first = first | same & (a[1] < b[1])
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    tokens = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    nothing = scores.dtype.type(-jnp.inf), jnp.int32(0)
    return lax.reduce((scores, tokens), nothing, larger, (scores.ndim - 1,))


def _sample(scores, sampling, steps, processors):
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Relative to the maximum, a temperature however small divides to -inf and never to +inf.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / temperature[:, None]
    if processors.truncate:
        scores = _truncate(scores, sampling)

    def draw(seed, index, step, scores):
        key = jax.random.key(seed, impl=_GENERATOR)
        key = jax.random.fold_in(jax.random.fold_in(key, index), step)
        return jax.random.categorical(key, scores, mode="low")

    # Settings of JAX that change what a key draws are pinned, so that a seed keeps its meaning.
    with jax.threefry_partitionable(True):
        tokens = jax.vmap(draw)(sampling.seed, sampling.sample_index, steps, scores)
    return tokens.astype(jnp.int32)


def _truncate(scores, sampling):
    """Scores with a maximum of 0, and -inf for the tokens that are not to be drawn."""
    top_k, top_p = sampling.top_k, sampling.top_p
    min_p, typical_p = sampling.min_p, sampling.typical_p

    def keep_top_k(scores):
        limit = jnp.where(top_k > 0, top_k, scores.shape[-1]).astype(jnp.float32)
        return _keep_first(scores, -scores, jnp.ones_like(scores), limit)

    def keep_top_p(scores):
        p = jnp.exp(scores)
        limit = jnp.where(top_p < 1, top_p * jnp.sum(p, axis=-1), jnp.inf)
        return _keep_first(scores, -scores, p, limit)

    def keep_min_p(scores):
        return jnp.where(scores >= jnp.log(min_p)[:, None], scores, -jnp.inf)

    def keep_typical(scores):
        logp = jax.nn.log_softmax(scores, axis=-1)
        p = jnp.exp(logp)
        entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1, keepdims=True)
        limit = jnp.where(typical_p < 1, typical_p, jnp.inf)
        return _keep_first(scores, jnp.abs(logp + entropy), p, limit)

    scores = where_asked(top_k > 0, keep_top_k, scores)
    scores = where_asked(top_p < 1, keep_top_p, scores)
    scores = where_asked(min_p > 0, keep_min_p, scores)
    return where_asked(typical_p < 1, keep_typical, scores)


def _keep_first(scores, distance, weights, limit):
    """Keep a token while those that come before it weigh less than a limit.

    Without sorting, which takes many kernels and, where a library does it, cannot be part of a CUDA
    graph: digit by digit, find the greatest distance with less than the limit of weight before it.

    Args:
      scores: [B, V].
      distance: [B, V] fp32, at least 0; the least comes first, equals share their fate.
      weights: [B, V] fp32, at least 0.
      limit: [B] fp32; what comes first is kept however small it is.
    """
    limit = jnp.maximum(limit, jnp.finfo(jnp.float32).tiny)
    # Floats from 0 to infinity are ordered as the integers of the same bits, 31 of them.
    keys = lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)
    last = jnp.zeros((scores.shape[0],), jnp.int32)
    for shift in range(25, -1, -5):
        digits = jnp.arange(2 ** (6 if shift == 25 else 5), dtype=jnp.int32)
        ends = last[:, None] + (digits << shift)[None]
        before = keys[:, None, :] < ends[:, :, None]
        weight = jnp.sum(jnp.where(before, weights[:, None, :], 0.0), axis=-1)
        digit = jnp.sum(weight < limit[:, None], axis=-1, dtype=jnp.int32) - 1
        last += digit << shift
    return jnp.where(keys <= last[:, None], scores, -jnp.inf)


def _logprobs(logits, tokens, sampling, batch_invariant):
    b, v = logits.shape
    n = min(MAX_TOP_LOGPROBS, v)
    log_sum = functools.partial(jax.nn.logsumexp, axis=-1)
    total = in_row_tiles(log_sum, logits) if batch_invariant else log_sum(logits)

    def likeliest(none):
        rest, found = logits, []
        # Like any sort, `lax.top_k` may be a library's, which no CUDA graph can hold.
        for _ in range(n):
            best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
            found.append((_at(rest, best) - total, best))
            rest = jnp.where(jnp.arange(v)[None] == best[:, None], -jnp.inf, rest)
        return tuple(jnp.stack(part, axis=1) for part in zip(*found, strict=True))

    none = jnp.zeros((b, n), jnp.float32), jnp.zeros((b, n), jnp.int32)
    top, top_ids = where_asked(sampling.top_logprobs > 0, likeliest, none)
    return Logprobs(_at(logits, jnp.maximum(tokens, 0)) - total, top, top_ids)


def _at(scores, tokens):
    """scores [B,V] of tokens [B]."""
    return jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
