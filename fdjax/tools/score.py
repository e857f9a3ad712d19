"""Scores texts: log-probabilities of their tokens, and perplexity.

Texts run through the cache in chunks, like prompts. Only a few rows of logits exist at a time,
never [B, T, V] for whole texts.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from fdjax.engine.engine import Engine
from fdjax.engine.memory import MemoryPlan, plan_memory
from fdjax.engine.mesh import specs_of
from fdjax.engine.program import Program
from fdjax.engine.schedule import chunks_for, slots_for
from fdjax.engine.state import LayerCache, abstract_state, init_cache, kv_specs
from fdjax.engine.step import attend_prefill
from fdjax.models import Model, Params
from fdjax.pallas_kernels.rope import rotation
from fdjax.system.device_memory import free
from fdjax.system.process import refuse_forked, transfers_allowed
from fdjax.system.traces import refuse_trace
from fdjax.text.prompts import Prompt, as_several, token_ids
from fdjax.text.tokenizer import Tokenizer

# Cache slots that the texts of a batch may take together. One text may take more.
_CACHE_SLOTS = 8192
# Largest number of rows of logits that exist at a time.
_LOGITS_ROWS = 512


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    """The outcome of `LM.score`, one entry per text.

    Attributes:
      tokens: token ids of the text, with the special tokens that the tokenizer adds.
      logprobs: log-probability of each token after the first, given the tokens before it, under the
        raw model.
      likeliest: for each token after the first, whether greedy decoding would choose it.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    likeliest: list[list[bool]]

    @property
    def perplexities(self) -> list[float]:
        """exp(-mean log-probability) of each text; NaN for a text of one token."""
        return [_perplexity(logprobs) for logprobs in self.logprobs]

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability) over the tokens of all texts; NaN if none is scored."""
        return _perplexity([x for logprobs in self.logprobs for x in logprobs])


@transfers_allowed()
def score(
    engine: Engine,
    tokenizer: Tokenizer,
    texts: Prompt | Sequence[Prompt],
    *,
    stride: int | None = None,
    batch_size: int = 16,
) -> ScoreResult:
    """Compute the log-probabilities of the tokens of texts.

    Args:
      engine, tokenizer: the model's engine and tokenizer.
      texts, stride, batch_size: see `LM.score`.

    Returns, Raises:
      See `LM.score`.
    """
    refuse_forked()
    refuse_trace("score")
    limit = engine.context
    if not _is_integer(batch_size) or batch_size < 1:
        raise ValueError(f"score: batch_size must be a positive integer, got {batch_size}")
    if stride is not None and not (_is_integer(stride) and 0 < stride < limit):
        raise ValueError(
            f"score: stride must be a positive integer below the context of {limit}, got {stride}"
        )
    texts, _ = as_several(texts, "score: texts")
    vocab_size = engine.model.config.vocab_size
    ids = [
        token_ids(text, tokenizer, vocab_size, f"score: text {i}") for i, text in enumerate(texts)
    ]
    engine.agree("score", (ids, stride, batch_size))
    windows = [w for i, text in enumerate(ids) for w in _windows(i, text, limit, stride)]
    # The longest come first, so that a text that does not fit fails at once.
    windows.sort(key=lambda w: len(w.ids), reverse=True)
    scored: list[tuple[_Window, np.ndarray, np.ndarray]] = []
    while windows:
        longest = max(1, len(windows[0].ids) - 1)
        slots = slots_for(longest, longest, engine.max_len)
        count = max(1, min(batch_size, _CACHE_SLOTS // slots, engine.max_batch or batch_size))
        plan = functools.partial(_plan, engine.local, longest, slots)
        count = engine.fitting_rows("score", min(count, len(windows)), plan)
        scored += _score_batch(engine, windows[:count], slots)
        windows = windows[count:]
    result = ScoreResult(ids, [[] for _ in ids], [[] for _ in ids])
    for window, logprobs, likeliest in sorted(scored, key=lambda s: s[0].start):
        result.logprobs[window.text] += logprobs[window.known :].tolist()
        result.likeliest[window.text] += likeliest[window.known :].tolist()
    return result


def _plan(model: Model, longest: int, slots: int, texts: int) -> MemoryPlan:
    return plan_memory(model, batch=_cache_rows(texts), max_len=longest, slots=slots)


def _cache_rows(texts: int) -> int:
    return 2 ** math.ceil(math.log2(texts))


def _perplexity(logprobs: Sequence[float]) -> float:
    if not logprobs:
        return math.nan
    return float(np.exp(np.float64(-math.fsum(logprobs) / len(logprobs))))


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class _Window:
    """A part of a text: the tokens that the model sees at once, and the token after them.

    Attributes:
      text: index of the text.
      start: index of the window's first token in the text.
      ids: token ids of the window.
      known: number of log-probabilities at its beginning that an earlier window has computed.
    """

    text: int
    start: int
    ids: list[int]
    known: int = 0


def _windows(text: int, ids: list[int], limit: int, stride: int | None) -> Iterator[_Window]:
    if len(ids) > limit + 1 and stride is None:
        raise ValueError(
            f"score: text {text} has {len(ids)} tokens, the context is {limit}; "
            "shorten it, or give a stride to slide over it"
        )
    yield _Window(text, 0, ids[: limit + 1])
    start, end = 0, limit + 1
    while end < len(ids):
        start += stride
        yield _Window(text, start, ids[start : start + limit + 1], known=end - start - 1)
        end = start + limit + 1


def _score_batch(
    engine: Engine, windows: Sequence[_Window], slots: int
) -> list[tuple[_Window, np.ndarray, np.ndarray]]:
    """Score windows that share a cache.

    Returns:
      For each window (window, log-probabilities of its tokens after the first, `likeliest` of these
      tokens).
    """
    # The last token of a window is only a target, not an input.
    lengths = np.array([len(w.ids) - 1 for w in windows], np.int32)
    lengths = np.pad(lengths, (0, _cache_rows(len(windows)) - len(windows)))
    widths = chunks_for(max(1, int(lengths.max())))
    ids = np.zeros((len(lengths), sum(widths) + 1), np.int32)
    for row, window in zip(ids, windows, strict=False):
        row[: len(window.ids)] = window.ids
    cache = init_cache(engine.local, len(lengths), slots, False, engine.place.zeros)
    program = _program(engine)
    chunks = []
    offset = 0
    try:
        for width in widths:
            cache, *chunk = program(
                engine.tree,
                cache,
                ids[:, offset : offset + width],
                ids[:, offset + 1 : offset + width + 1],
                np.clip(lengths - offset, 0, width),
                np.full_like(lengths, offset),
                lengths,
            )
            chunks.append(chunk)
            offset += width
    finally:
        free(cache)
    logprobs, likeliest = (np.concatenate(c, axis=1) for c in zip(*chunks, strict=True))
    scored = []
    for row, window in enumerate(windows):
        n = len(window.ids) - 1
        if not np.isfinite(logprobs[row, :n]).all():
            raise FloatingPointError(
                f"score: text {window.text}: logits are not finite; the weights are damaged, "
                "or the dtype is too narrow (try dtype='float32')"
            )
        scored.append((window, logprobs[row, :n], likeliest[row, :n]))
    return scored


def _program(engine: Engine) -> Program:
    """The program of `_score_chunk`, kept with the other programs of the model."""
    key, model, programs = ("score", engine.place), engine.local, engine.programs
    if key not in programs:
        run_local = functools.partial(_score_chunk, model)
        kv_spec, whole = kv_specs(abstract_state(model).kv), PartitionSpec()
        inputs = specs_of(engine.tree), kv_spec, *[whole] * 5
        run = engine.place.over(run_local, inputs, (kv_spec, whole, whole))

        def describe(params, kv, tokens, *operands):
            rows, _, slots, _ = kv[0][0].shape
            return f"scores of {rows} x {tokens.shape[1]} tokens, cache of {rows} x {slots}"

        programs[key] = Program(run, describe, donate_argnums=1)
    return programs[key]


def _score_chunk(
    model: Model,
    params: Params,
    kv: list[LayerCache],
    tokens: Array,
    targets: Array,
    lengths: Array,
    offsets: Array,
    totals: Array,
) -> tuple[list[LayerCache], Array, Array]:
    """Score the token after each token of a chunk.

    Args:
      model, params: the model.
      kv: caches that hold the `offsets` tokens before the chunk.
      tokens: [B, T] int32 chunk of each text, padded at the end.
      targets: [B, T] int32 token after each of these.
      lengths: [B] int32 number of tokens in the chunk.
      offsets: [B] int32 number of tokens before the chunk.
      totals: [B] int32 tokens of the whole text, for rotary embeddings that depend on the length.

    Returns:
      (caches, log-probabilities of the targets [B, T] fp32, whether they are the likeliest [B, T]).
    """
    module = model.module(params)
    b, t = tokens.shape

    def rotation_at(positions, rope):
        return rotation(positions, rope, prompt=totals, limit=totals)

    attend = functools.partial(
        attend_prefill,
        ends=jnp.where(lengths > 0, offsets + lengths, 0),
        offsets=offsets,
        rows=None,
        rotation_at=rotation_at,
        plan=model.plan,
    )
    hidden, kv = module(tokens, kv, attend, model.plan, starts=offsets)
    block = math.gcd(t, max(1, _LOGITS_ROWS // b))

    def score_block(operands):
        hidden, targets = operands
        logits = module.logits(hidden, model.plan)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32) == targets
        # Relative to the largest logit, a log-probability near 0 is not rounded like a logit.
        largest = jnp.max(logits, axis=-1)
        log_sum = jnp.log(jnp.exp(logits - largest[..., None]).sum(axis=-1))
        return (chosen - largest) - log_sum, likeliest

    def blocks(a):
        return jnp.moveaxis(a.reshape(b, t // block, block, *a.shape[2:]), 1, 0)

    scores = lax.map(score_block, (blocks(hidden), blocks(targets)))
    logprobs, likeliest = (jnp.moveaxis(a, 0, 1).reshape(b, t) for a in scores)
    return kv, logprobs, likeliest
