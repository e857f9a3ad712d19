"""Quantises weights by rounding to nearest, with the scales of the smallest squared error.

A group of weights w is stored as codes round(w / scale) within -8..7 for 4 bits. With the usual
scale, max|w| / 7, steps are coarse. A smaller scale clips the largest weights, but often has the
smaller error. So many scales are tried for each group. Negative scales put the weight of the
largest magnitude at -8, which uses all codes.

fp8 has steps that grow with a weight. There, the largest weight becomes the largest code or less,
by up to a factor of 2: the error depends on where the steps of other weights begin.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fdjax.models import DecoderConfig
from fdjax.models.name_map import ParamPath
from fdjax.pallas_kernels.quantised import BITS, WeightFormat
from fdjax.weights.formats.layer import Codes

# Scales to try, relative to the scale that puts the largest weight at code -2^(bits-1).
_FACTORS = tuple(float(f) for f in np.linspace(0.4, 1.2, 41))
# Number of weights that are quantised at once.
_AT_ONCE = 2**24
GROUPS = (128, 64, 32)
_LARGEST_FP8 = 448.0
_FP8_FACTORS = tuple(float(2 ** (i / 8)) for i in range(8))
# Layers that choose experts or gate the shared one. They are small, and their errors matter.
KEPT = ("router", "shared_gate")


def to_quantise(config: DecoderConfig) -> Iterator[tuple[str, ParamPath, int]]:
    """The (name, path, K) of all linear layers and experts, except the head and `KEPT`.

    Weights that are quantised already are left out.
    """
    for i, block in enumerate(config.blocks):
        for name, (path, k) in block.weights.items():
            if name not in KEPT and name not in dict(block.formats):
                yield name, ("blocks", i, *path), k


def quantised_formats(
    config: DecoderConfig, kind: str, scales: str, *, rounded_activations: bool = True
) -> DecoderConfig:
    """The model with the weights of `to_quantise` quantised.

    Args:
      config: the model.
      kind: "int4", with the largest group size of `GROUPS` that divides K; or "int8", "fp8" or
        "w8a8", with one scale per column.
      scales: dtype of the scales.
      rounded_activations: whether activations may be rounded to fp8 beside weights in fp8, and to
        int8 with "w8a8".
    """
    rounds = kind in ("fp8", "w8a8") and rounded_activations
    kind = "int8" if kind == "w8a8" else kind
    formats = config.formats_by_path
    for _, path, k in to_quantise(config):
        group = next((g for g in GROUPS if kind == "int4" and k % g == 0), k)
        formats[path] = WeightFormat(kind, group, scales=scales, rounded_activations=rounds)
    return config.with_formats(formats)


def quantise(
    weight: np.ndarray | Array,
    form: WeightFormat,
    importance: np.ndarray | None = None,
    *,
    columns: np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> Codes:
    """Quantise a linear layer.

    Args:
      weight: [N,K], or [X,N,K].
      form: the format, without zeros; not "fp4".
      importance: [K] weights of the squared errors; default all equal.
      columns, rows: factors [K] and [N] by which the weight is multiplied first.

    Returns:
      The codes. The scale of a group with values that are not finite is NaN.
    """
    *outs, k = weight.shape
    weight = weight.reshape(-1, k)
    importance = np.ones(k, np.float32) if importance is None else importance
    step, parts = max(1, _AT_ONCE // k), []

    def dispatch(start: int) -> tuple[Array, Array]:
        some = slice(start, start + step)
        factors = columns, None if rows is None else rows[some]
        return _quantise(weight[some], importance, *factors, form=form)

    # The device computes a part while the one before is fetched.
    running = dispatch(0)
    for start in range(step, len(weight), step):
        following = dispatch(start)
        parts.append(jax.device_get(running))
        running = following
    parts.append(jax.device_get(running))
    words, scales = (np.concatenate(part).reshape(*outs, -1) for part in zip(*parts, strict=True))
    return Codes(words, scales)


@functools.partial(jax.jit, static_argnames="form")
def _quantise(
    weight: Array,
    importance: Array,
    columns: Array | None,
    rows: Array | None,
    *,
    form: WeightFormat,
) -> tuple[Array, Array]:
    """(words [N,W] int32, scales [N,G])."""
    n, k = weight.shape
    weight = weight.astype(jnp.float32)
    if columns is not None:
        weight *= columns[None]
    if rows is not None:
        weight *= rows[:, None]
    groups = weight.reshape(n, -1, form.group)
    importance = importance.astype(jnp.float32).reshape(1, -1, form.group)
    place = jnp.argmax(jnp.abs(groups), axis=2, keepdims=True)
    largest = jnp.take_along_axis(groups, place, axis=2)
    half = 2.0 ** (BITS[form.kind] - 1)
    if form.kind == "fp8":
        widest, factors = jnp.abs(largest) / _LARGEST_FP8, _FP8_FACTORS
    else:
        widest, usual = -largest / half, half / (half - 1)
        factors = [sign * factor for factor in (usual, *_FACTORS) for sign in (1, -1)]

    def codes_of(scales):
        codes = groups / jnp.where(scales == 0, 1.0, scales)
        if form.kind == "fp8":
            codes = jnp.clip(codes, -_LARGEST_FP8, _LARGEST_FP8)
            return codes.astype(jnp.float8_e4m3fn)
        return jnp.clip(jnp.round(codes), -half, half - 1)

    def tried(best, factor):
        scales = (widest * factor).astype(form.scales).astype(jnp.float32)
        errors = (codes_of(scales).astype(jnp.float32) * scales - groups) ** 2
        error = jnp.sum(errors * importance, axis=2, keepdims=True)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

    start = jnp.full(widest.shape, jnp.inf), jnp.zeros_like(widest)
    (_, scales), _ = lax.scan(tried, start, jnp.array(factors, jnp.float32))
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    codes = codes_of(scales)
    if form.kind == "fp8":
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    else:
        codes += half
    codes = codes.astype(jnp.uint32).reshape(n, k)
    return _words(codes, BITS[form.kind]), scales[..., 0].astype(form.scales)


def _words(codes: Array, bits: int) -> Array:
    """Codes [N,K] uint32 → words [N,W] int32, as `pack_rows` packs them."""
    count = 32 // bits
    codes = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    codes = codes.reshape(len(codes), -1, count)
    places = bits * jnp.arange(count, dtype=jnp.uint32)[None, None]
    return lax.bitcast_convert_type((codes << places).sum(axis=2, dtype=jnp.uint32), jnp.int32)
