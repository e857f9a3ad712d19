"""Calibration of the unified maximum φ: measures the inputs of the softmax of every head.

The method is that of FlashDecoding++ (Hong et al. 2024), section 3 and Fig. 5. A softmax subtracts
the maximum of its row. The kernels subtract a constant φ, which is exact as long as the maximum
lies within the safe range φ ± 32 in units of log2, or φ ± 22.18 in natural units. A row is one
query token of one head. It *leaves the range* if its largest score lies outside.

The kernels tolerate a wider range than the safe one, so some of these rows cost little or nothing.
The results are exact in any case. A kernel loses time if it runs again:

- A prefill kernel runs a row again if its sum, relative to φ, is not within 2^-60 and 2^100.
- A decode kernel runs a split of a row again if its sum, relative to m, is not within 2^±64. m is
  φ, or the maximum of the split's first block if that is further than 32 from φ. So a row that lies
  outside as a whole costs only one reduction.

A row inside the range seldom makes a decode kernel run again. That needs a split with a first block
below the range and a later score about 64 above this block. `stats.reruns` reports the share that
ran again.

`gather` runs texts through a model and counts the scores and the row maxima on the device, without
storing the scores. `choose` finds, for each head, the φ with the fewest rows outside the range.
Their share is the prediction for other texts. The paper requires that all scores lie within the
range. Here only the row maxima must, because the lowest scores of a row contribute less than the
rounding error of the sum.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from fdjax.engine.engine import Engine
from fdjax.engine.memory import MemoryPlan, plan_memory
from fdjax.engine.mesh import Place
from fdjax.engine.schedule import chunks_for, covered_slots
from fdjax.engine.state import LayerCache, init_cache, kv_specs
from fdjax.models import AttentionSpec, Model, Params
from fdjax.pallas_kernels.attention import prefill_attention, split_qkv, with_norms
from fdjax.pallas_kernels.attention.cache import dequantised, stored_in
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.pallas_kernels.rope import apply_rope
from fdjax.system.device_memory import free
from fdjax.system.process import transfers_allowed
from fdjax.text.prompts import Prompt, as_several, token_ids
from fdjax.text.tokenizer import Tokenizer
from fdjax.weights.calibration import SAFE_LOG2, Calibration, LayerCalibration

# Width of the histograms' bins in units of log2, and their number. The first and the last bin also
# count all values beyond them.
BIN_LOG2 = 0.25
BINS = 8192
# Share of the scores that an interval holds, as in Fig. 5.
INTERVAL_SHARE = 0.9999

# Longest piece of a text by default, in tokens.
_CONTEXT = 4096
# Cache slots that the pieces of a batch may take together. One piece may take more.
_CACHE_SLOTS = 8192
# The scores of a block of queries stay below this many bytes.
_SCORES_BYTES = 64 * 2**20
_LOG2E = math.log2(math.e)


class ScoreStatistics(NamedTuple):
    """Counts per layer and head.

    Attributes:
      scores: [L, H, BINS] int64 histogram of the scores of all visible pairs of query and key. The
        scores are the inputs of the softmax, after scale, soft cap and position bias.
      maxima: [L, H, BINS] int64 histogram of the largest score of each row.
      lowest, highest: [L, H] float64 smallest and largest score, in natural units.
    """

    scores: np.ndarray
    maxima: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


@transfers_allowed()
def gather(
    engine: Engine,
    tokenizer: Tokenizer,
    texts: Prompt | Sequence[Prompt],
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoreStatistics:
    """Run texts through a model in chunks, as prefill does, and count their scores.

    Args:
      engine, tokenizer: the model's engine and tokenizer.
      texts: a text, a sequence of token ids, or a sequence of either. A text longer than `context`
        is cut into pieces, and each piece begins with the special tokens that begin a text.
      context: largest number of tokens in a piece; default the model's context, but at most 4096. A
        larger context represents long prompts better.
      progress: called with (tokens done, tokens in all).

    Raises:
      ValueError: there is no text, a text is neither text nor ids, an id is outside the vocabulary,
        or `context` is out of range.
      FloatingPointError: scores are not finite.
      MemoryError: the cache that a piece needs does not fit beside the weights.
      NotImplementedError: the model spans several processes.
    """
    if engine.place.spans_processes:
        raise NotImplementedError("calibrate: the model must not span several processes")
    limit = engine.context
    context = min(limit, _CONTEXT) if context is None else context
    if not (isinstance(context, int | np.integer) and 1 < context <= limit):
        raise ValueError(f"calibrate: context must be from 2 to {limit}, got {context!r}")
    texts, _ = as_several(texts, "calibrate: texts")
    pieces = [
        piece
        for i, text in enumerate(texts)
        for piece in pieces_of(engine, tokenizer, text, i, context)
    ]
    if not pieces:
        raise ValueError("calibrate: there is no text")
    # The longest come first, so that pieces of similar length share calls.
    pieces.sort(key=len, reverse=True)
    longest = len(pieces[0])
    slots = covered_slots(longest)
    rows = min(len(pieces), max(1, _CACHE_SLOTS // slots))
    rows = engine.fitting_rows("calibrate", rows, functools.partial(_plan, engine.local, longest))
    config = engine.model.config
    layers, heads = config.layers, config.heads
    total = ScoreStatistics(
        np.zeros((layers, heads, BINS), np.int64),
        np.zeros((layers, heads, BINS), np.int64),
        np.full((layers, heads), np.inf),
        np.full((layers, heads), -np.inf),
    )
    tokens, done = sum(map(len, pieces)), 0
    for first in range(0, len(pieces), rows):
        batch = pieces[first : first + rows]
        for chunk in _observe_batch(engine, batch, rows, slots):
            combine = np.add, np.add, np.minimum, np.maximum
            for operation, so_far, new in zip(combine, total, chunk, strict=True):
                operation(so_far, new, out=so_far)
        done += sum(map(len, batch))
        progress(done, tokens)
    finite = np.isfinite(total.lowest) & np.isfinite(total.highest)
    if not finite.all():
        raise FloatingPointError(
            f"calibrate: scores of layer {np.argwhere(~finite)[0, 0]} are not finite; the weights "
            "are damaged, or the dtype is too narrow (try dtype='float32')"
        )
    return total


def _plan(model: Model, longest: int, rows: int) -> MemoryPlan:
    """The memory for `rows` pieces: prefill, three arrays of scores, and two sets of counts.

    The scores exist raw, masked and as bins. The counts of two chunks exist at the same time.
    """
    plan = plan_memory(model, batch=rows, max_len=longest, slots=covered_slots(longest))
    counts = 2 * 4 * model.config.layers * model.config.heads * BINS
    workspace_bytes = plan.workspace_bytes + 3 * _SCORES_BYTES + 2 * counts
    return dataclasses.replace(plan, workspace_bytes=workspace_bytes)


def pieces_of(
    engine: Engine, tokenizer: Tokenizer, text: Prompt, i: int, context: int
) -> list[list[int]]:
    """Cut a text into pieces of up to `context` tokens, each with the tokens that begin a text.

    Args:
      engine, tokenizer: the model's engine and tokenizer.
      text: a text or its token ids.
      i: index of the text, for errors.
      context: largest number of tokens in a piece.

    Raises:
      ValueError: the text is neither text nor ids, an id is outside the vocabulary, or `context` is
        too small.
    """
    if isinstance(text, str | Sequence) and not text:
        return []
    ids = token_ids(text, tokenizer, engine.model.config.vocab_size, f"calibrate: text {i}")
    prefix = tokenizer.encode("") if isinstance(text, str) else []
    prefix = prefix if ids[: len(prefix)] == prefix else []
    step = context - len(prefix)
    if step < 1:
        raise ValueError(
            f"calibrate: context must exceed the {len(prefix)} special tokens of a text, "
            f"got {context}"
        )
    body = ids[len(prefix) :]
    return [prefix + body[start : start + step] for start in range(0, len(body), step)]


def _observe_batch(engine: Engine, pieces: Sequence[list[int]], rows: int, slots: int):
    """Yield the statistics of each chunk of a batch of pieces, as host arrays.

    Args:
      engine: the engine of the model.
      pieces: token ids of the pieces, the longest first.
      rows: rows of the batch; those without a piece are empty.
      slots: cache slots per row.
    """
    lengths = np.array([*map(len, pieces), *[0] * (rows - len(pieces))], np.int32)
    widths = chunks_for(len(pieces[0]))
    ids = np.zeros((rows, sum(widths)), np.int32)
    for row, piece in zip(ids, pieces, strict=False):
        row[: len(piece)] = piece
    cache = init_cache(engine.local, rows, slots, zeros=engine.place.zeros)
    offset = 0
    try:
        for width in widths:
            cache, observed = _observe_chunk(
                engine.model,
                engine.place,
                engine.tree,
                cache,
                ids[:, offset : offset + width],
                np.clip(lengths - offset, 0, width),
                np.int32(offset),
                lengths,
            )
            yield ScoreStatistics(*map(np.stack, zip(*jax.device_get(observed), strict=True)))
            offset += width
    finally:
        free(cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _observe_chunk(
    model: Model, place: Place, params: Params, kv: list[LayerCache], *host: Array
) -> tuple[list[LayerCache], list[ScoreStatistics]]:
    """`_observe_own_heads` on each device; the statistics have the heads of all devices."""
    whole, heads = PartitionSpec(), PartitionSpec(AXIS)
    observe = place.over(
        functools.partial(_observe_own_heads, model.local),
        (model.partitions, kv_specs(kv), *[whole] * len(host)),
        (kv_specs(kv), heads),
    )
    return observe(params, kv, *host)


def _observe_own_heads(
    model: Model,
    params: Params,
    kv: list[LayerCache],
    tokens: Array,
    lengths: Array,
    offset: Array,
    totals: Array,
) -> tuple[list[LayerCache], list[ScoreStatistics]]:
    """Run one chunk of a batch of texts and count the scores of its queries.

    Args:
      model, params: the model, or a device's part of it.
      kv: caches that hold the `offset` tokens before the chunk.
      tokens: [B, T] int32 chunk of each text, padded at the end; offset + T <= S.
      lengths: [B] int32 number of tokens in the chunk.
      offset: int32 scalar, the number of tokens before the chunk.
      totals: [B] int32 tokens of the whole text, for rotary embeddings that depend on the length.

    Returns:
      (caches, statistics of each layer, with int32 counts and without the axis L).
    """
    b, t = tokens.shape
    offsets = jnp.broadcast_to(offset, (b,))
    positions = offsets[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    ends = jnp.where(lengths > 0, offsets + lengths, 0)

    def attend(spec, cache, qkv, sinks=None, norms=None):
        q, k, v = split_qkv(qkv if norms is None else with_norms(qkv, norms, model.plan))
        if spec.rope is not None:
            q, k = (
                apply_rope(a, positions, spec.rope, prompt=totals, limit=totals) for a in (q, k)
            )
        # For a row that has ended, padding goes into the cache. No query sees slots past `ends`.
        cache = tuple(
            jax.tree.map(
                lambda old, new: lax.dynamic_update_slice_in_dim(
                    old, new.swapaxes(1, 2), offset, 2
                ),
                old,
                stored_in(old, new),
            )
            for old, new in zip(cache, (k, v), strict=True)
        )
        o = prefill_attention(
            q,
            *cache,
            ends,
            offsets,
            spec=spec,
            sinks=sinks,
            plan=model.plan,
        )
        return o, (cache, _observe(spec, q, dequantised(cache[0]), positions, ends))

    _, updated = model.module(params)(tokens, kv, attend, model.plan, starts=offsets)
    caches, observed = zip(*updated, strict=True)
    return list(caches), list(observed)


def _observe(
    spec: AttentionSpec, q: Array, keys: Array, positions: Array, ends: Array
) -> ScoreStatistics:
    """Count the scores of q [B,T,H,D] at positions [B,T] against keys [B,Hkv,S,D], both rotated."""
    b, t, h, _ = q.shape
    block = t
    while block % 2 == 0 and 4 * b * h * block * keys.shape[2] > _SCORES_BYTES:
        block //= 2

    def observe_block(counts, operands):
        scores, seen = _scores(spec, *operands, keys, ends)
        # A reduction may drop a NaN, but it keeps infinity.
        scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
        top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1)
        lowest = jnp.min(jnp.where(seen, scores, jnp.inf), axis=(1, 2, 3))
        live = jnp.any(seen, axis=-1)
        counts = _count(counts[0], scores, seen), _count(counts[1], top, live)
        return counts, (lowest, jnp.max(top, axis=(1, 2)))

    def blocks(a):
        return jnp.moveaxis(a.reshape(b, t // block, block, *a.shape[2:]), 1, 0)

    none = jnp.zeros((h, BINS), jnp.int32)
    counts, (lowest, highest) = lax.scan(
        observe_block, (none, none), (blocks(q), blocks(positions))
    )
    return ScoreStatistics(*counts, jnp.min(lowest, axis=0), jnp.max(highest, axis=0))


def _scores(spec, q, positions, keys, ends):
    """(scores [H,B,T,S] fp32, whether the query sees the key [1,B,T,S] bool)."""
    b, t, h, d = q.shape
    kv_heads, s = keys.shape[1:3]
    scores = jnp.einsum(
        "btkgd,bksd->kgbts",
        q.reshape(b, t, kv_heads, h // kv_heads, d),
        keys,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(h, b, t, s) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    query = positions[None, :, :, None]
    key = jnp.arange(s, dtype=jnp.int32)[None, None, None]
    if spec.alibi is not None:
        slopes = spec.slopes()[:, None, None, None]
        scores = scores + slopes * (key - query).astype(jnp.float32)
    seen = (key <= query) & (query < ends[None, :, None, None])
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    return scores, seen


def _count(counts: Array, values: Array, counted: Array) -> Array:
    """Add values [H, ...] in natural units to counts [H, BINS], if `counted` is true for them."""
    heads = jnp.arange(values.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (values.ndim - 1))
    bins = jnp.floor(values * (_LOG2E / BIN_LOG2)) + BINS / 2
    bins = jnp.clip(bins, 0, BINS - 1).astype(jnp.int32)
    return counts.at[heads, jnp.where(counted, bins, BINS)].add(1, mode="drop")


def bin_edges() -> np.ndarray:
    """[BINS + 1] edges of the histograms' bins, in natural units."""
    return (np.arange(BINS + 1) - BINS / 2) * (BIN_LOG2 / _LOG2E)


def interval(counts: np.ndarray, share: float = INTERVAL_SHARE) -> tuple[np.ndarray, np.ndarray]:
    """The central interval that holds a share of the values of each histogram.

    Args:
      counts: [..., BINS] histograms.
      share: share of the values inside the interval, from 0 to 1.

    Returns:
      (lower [...], upper [...]) in natural units: the outer edges of the two bins at the ends.
    """
    below = np.cumsum(counts, axis=-1) / np.sum(counts, axis=-1, keepdims=True)
    lower = np.argmax(below > (1 - share) / 2, axis=-1)
    upper = np.argmax(below >= (1 + share) / 2, axis=-1)
    edges = bin_edges()
    return edges[lower], edges[upper + 1]


def choose(maxima: np.ndarray, safe_log2: float = SAFE_LOG2) -> tuple[np.ndarray, np.ndarray]:
    """Choose the φ with the fewest rows outside the safe range. Among equals, take the middle one.

    Args:
      maxima: [..., BINS] histograms of the largest scores of the rows.
      safe_log2: half the width of the safe range in units of log2, a multiple of BIN_LOG2.

    Returns:
      (φ [...] in natural units, share of rows outside the range [...], from 0 to 1).
    """
    half = round(safe_log2 / BIN_LOG2)
    # Values in the first and the last bin may lie anywhere beyond, so they count as outside.
    below = np.cumsum(maxima[..., :-1], axis=-1)
    inside = below[..., 2 * half :] - below[..., : -2 * half]
    most = np.max(inside, axis=-1, keepdims=True)
    best = inside == most
    rank = np.cumsum(best, axis=-1)
    middle = np.argmax(rank >= (rank[..., -1:] + 1) // 2, axis=-1)
    return bin_edges()[middle + 1 + half], 1 - most[..., 0] / np.sum(maxima, axis=-1)


def calibration_of(
    statistics: ScoreStatistics, fingerprint: str, provenance: Mapping[str, Any]
) -> Calibration:
    """Choose φ for every head.

    Args:
      statistics: counts from `gather`.
      fingerprint: fingerprint of the checkpoint.
      provenance: origin of the counts, which is stored in the file.
    """
    layers = []
    for scores, maxima, lowest, highest in zip(*statistics, strict=True):
        phi, rates = choose(maxima)
        # The interval ends at edges of bins, which may lie beyond the exact extremes.
        lower, upper = (np.clip(end, lowest, highest) for end in interval(scores))
        phi, *ranges = (
            tuple(np.round(a, 4).tolist()) for a in (phi, lower, upper, lowest, highest)
        )
        layers.append(LayerCalibration(phi, tuple(rates.tolist()), *ranges))
    return Calibration(fingerprint, tuple(layers), provenance)


def check_plot(path: Path) -> None:
    """Raise ValueError if matplotlib is missing or cannot write a file of this type."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("calibrate: a plot needs matplotlib: pip install 'fdjax[bench]'")
    from matplotlib.figure import Figure

    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"calibrate: a plot's file type must be one of {', '.join(formats)}, got {path.name!r}"
        )


def plot(statistics: ScoreStatistics, title: str, path: str | Path) -> None:
    """Draw the distribution of all scores, like Fig. 5, and in grey that of each layer.

    Args:
      statistics: counts from `gather`.
      title: title of the figure.
      path: file of the figure; its ending chooses the type.

    Raises:
      ValueError: see `check_plot`.
    """
    check_plot(Path(path))
    from matplotlib.figure import Figure

    layers = statistics.scores.sum(axis=1)
    whole = layers.sum(axis=0)
    edges = bin_edges()
    centres = (edges[1:] + edges[:-1]) / 2
    shown = slice(np.flatnonzero(whole)[0], np.flatnonzero(whole)[-1] + 1)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for counts, style in (
        *((layer, {"color": "0.8", "linewidth": 0.8}) for layer in layers),
        (whole, {"color": "tab:blue"}),
    ):
        density = counts / counts.sum() / (edges[1] - edges[0])
        axes.plot(centres[shown], density[shown], **style)
    top = axes.get_xaxis_transform()
    for end, side in zip(interval(whole), ("right", "left"), strict=True):
        axes.axvline(end, color="tab:red", linestyle="--", linewidth=1)
        axes.text(end, 0.98, f" {end:.1f} ", transform=top, color="tab:red", ha=side, va="top")
    axes.set(title=title, xlabel="input of the softmax", ylabel="probability density")
    figure.savefig(path)
