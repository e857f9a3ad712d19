"""Edits of the logits before a token is chosen: biases, penalties and bans.

The formulas are those of transformers, or those of vLLM if transformers lacks the option. A row
that does not use an option keeps its logits bit for bit. The device skips edits that no row uses.
"""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.where_asked import where_asked
from fdjax.sampling.values import Sampling

# The longest `no_repeat_ngram_size`.
MAX_NGRAM = 32


def edit_logits(
    logits: Array, sampling: Sampling, ids: Array, lengths: Array, steps: Array
) -> Array:
    """Apply biases, repetition, frequency and presence penalty, and bans of n-grams and words.

    A repetition penalty r changes the logit x of each token t in the prompt or the response: it
    divides x by r if x > 0 and multiplies it by r if x < 0. Then x becomes
    x - frequency · c(t) - presence · [c(t) > 0], where c(t) counts t in the response.

    Args:
      logits: [B, V] fp32.
      sampling: options of each row.
      ids: [B, S] int32 tokens of each row, prompt and response.
      lengths: [B] int32 number of tokens in the row.
      steps: [B] int32 number of tokens in the response.

    Returns:
      [B, V] fp32, -inf where a token is forbidden.
    """
    v = logits.shape[-1]
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    bias = jnp.where(steps[:, None] < sampling.bias_until, sampling.bias, 0.0)
    logits = _rows_at(logits, sampling.bias_ids).add(bias, mode="drop")

    def penalise_repetition(logits):
        penalty = sampling.repetition_penalty[:, None]
        seen = _counts(ids, positions < lengths[:, None], v) > 0
        return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)

    def penalise_frequency(logits):
        response = (positions >= (lengths - steps)[:, None]) & (positions < lengths[:, None])
        counts = _counts(ids, response, v)
        logits -= sampling.frequency_penalty[:, None] * counts.astype(jnp.float32)
        return logits - jnp.where(counts > 0, sampling.presence_penalty[:, None], 0.0)

    def ban_ngrams(logits):
        return _ban_ngrams(logits, ids, lengths, sampling.no_repeat_ngram_size)

    def ban_words(logits):
        return _ban_words(logits, ids, lengths, sampling.bad_words)

    counted = (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0)
    logits = where_asked(sampling.repetition_penalty != 1, penalise_repetition, logits)
    logits = where_asked(counted, penalise_frequency, logits)
    logits = where_asked(sampling.no_repeat_ngram_size > 0, ban_ngrams, logits)
    return where_asked(sampling.bad_words >= 0, ban_words, logits)


def _counts(ids, counted, v):
    """[B, V] int32 number of occurrences of each token in the places where `counted` [B, S]."""
    zeros = jnp.zeros((ids.shape[0], v), jnp.int32)
    return _rows_at(zeros, jnp.where(counted, ids, -1)).add(1, mode="drop")


def _ban_ngrams(logits, ids, lengths, n):
    """Forbid each token that followed an earlier occurrence of the row's last n-1 tokens."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
    back = jnp.arange(1, MAX_NGRAM, dtype=jnp.int32)
    before = positions[:, None] - back[None]
    earlier = ids[:, jnp.maximum(before, 0)]
    recent = jnp.take_along_axis(ids, jnp.maximum(lengths[:, None] - back[None], 0), axis=1)
    same = (earlier == recent[:, None, :]) & (before >= 0)[None]
    repeats = jnp.all(same | (back[None, None] >= n[:, None, None]), axis=-1)
    repeats &= (positions[None] < lengths[:, None]) & (n > 0)[:, None]
    return _rows_at(logits, jnp.where(repeats, ids, -1)).set(-jnp.inf, mode="drop")


def _ban_words(logits, ids, lengths, words):
    """Forbid the last token of each word, if the row ends with the other tokens of the word."""
    start, final = words[:, :, :-1], words[:, :, -1]
    t = start.shape[-1]
    at = lengths[:, None] - t + jnp.arange(t, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(ids, jnp.maximum(at, 0), axis=1)
    recent = jnp.where(at >= 0, recent, -1)[:, None, :]
    begun = jnp.all((start == recent) | (start < 0), axis=-1)
    return _rows_at(logits, jnp.where(begun, final, -1)).set(-jnp.inf, mode="drop")


def _rows_at(array, ids):
    """`array.at` for ids [B, N] in each row of array [B, V]; negative ids are dropped."""
    b, v = array.shape
    rows = jnp.arange(b, dtype=jnp.int32)[:, None]
    return array.at[rows, jnp.where(ids < 0, v, ids)]
