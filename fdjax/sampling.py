"""From logits to the next token. Every value is data, one per row; only the set of active
processors is static, so two requests that differ in temperature share a program.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What each row asked for.

    Attributes:
      temperature: [B] fp32, 0 is greedy.
      top_k: [B] int32, 0 is off.
      top_p: [B] fp32, 1 is off.
      seed: [B] uint32.
      sample_index: [B] int32, which of several samples of one prompt this row is.
      max_new_tokens, min_new_tokens: [B] int32.
      stop_tokens: [B, N] int32 end-of-sequence ids, padded with -1.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    sample_index: Array
    max_new_tokens: Array
    min_new_tokens: Array
    stop_tokens: Array


@dataclasses.dataclass(frozen=True)
class Processors:
    """The static set of active processors: a program per set, whatever the values."""

    sample: bool = False
    top_k: bool = False
    top_p: bool = False
    min_new_tokens: bool = False
    logprobs: bool = False


# Chosen in place of a token where a row's logits are not finite.
NOT_FINITE = -2


def next_tokens(
    logits: Array, sampling: Sampling, steps: Array, processors: Processors
) -> tuple[Array, Array | None]:
    """Choose the next token of each row.

    Processors apply in the order of transformers: minimum length, temperature, top-k, top-p. A
    row's random key is fold_in(key(seed), sample index, step), so its samples do not depend on the
    batch it is in.

    Args:
      logits: [B, V] fp32.
      sampling: per-row values.
      steps: [B] int32 tokens generated so far.
      processors: which of them act.

    Returns:
      (tokens [B] int32 or `NOT_FINITE`, log-probabilities of these tokens under the raw logits [B],
      or None).
    """
    likeliest = jnp.argmax(logits, axis=-1, keepdims=True)
    finite = jnp.isfinite(jnp.take_along_axis(logits, likeliest, axis=-1))[:, 0]
    scores = logits
    if processors.min_new_tokens:
        scores = _forbid_stop_tokens(scores, sampling, steps)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if processors.sample:
        tokens = jnp.where(
            sampling.temperature > 0, _sample(scores, sampling, steps, processors), tokens
        )
    logprobs = None
    if processors.logprobs:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(finite, tokens, NOT_FINITE), logprobs


def _forbid_stop_tokens(scores, sampling, steps):
    ids = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    stops = jnp.any(ids[None, :, None] == sampling.stop_tokens[:, None, :], axis=-1)
    early = (steps < sampling.min_new_tokens)[:, None]
    return jnp.where(stops & early, -jnp.inf, scores)


def _sample(scores, sampling, steps, processors):
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Relative to the maximum, a temperature however small divides to -inf and never to +inf.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / temperature[:, None]
    if processors.top_k or processors.top_p:
        ranked = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        if processors.top_k:
            last = jnp.clip(sampling.top_k, 1, scores.shape[-1]) - 1
            cut = jnp.take_along_axis(ranked, last[:, None], axis=-1)
            cut = jnp.where(sampling.top_k[:, None] > 0, cut, -jnp.inf)
            scores = jnp.where(scores >= cut, scores, -jnp.inf)
            ranked = jnp.where(ranked >= cut, ranked, -jnp.inf)
        if processors.top_p:
            p = jax.nn.softmax(ranked, axis=-1)
            # A token stays while the mass before it is below top_p; the first always stays.
            before = jnp.cumsum(p, axis=-1) - p
            kept = (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
            kept = kept.at[:, 0].set(True)
            cut = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
            scores = jnp.where(scores >= cut, scores, -jnp.inf)

    def draw(seed, index, step, scores):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), step)
        return jax.random.categorical(key, scores)

    tokens = jax.vmap(draw)(sampling.seed, sampling.sample_index, steps, scores)
    return tokens.astype(jnp.int32)
