"""Every op in NumPy float64, written from its docstring. It shares no code with what it tests.

Each exact value comes with its magnitude: the factor from a relative rounding error of the terms to
an error of the result (to first order). `tolerance.py` makes bounds from both.
"""

import dataclasses
import math
from types import MappingProxyType

import numpy as np

# The largest slope of silu is 1.100, that of gelu 1.129 and that of relu 1.
_ACTIVATION_SLOPE = 1.13

NO_MASKS = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Exact:
    """A value and its magnitude; for `matmul` also the magnitude before the epilogue."""

    value: np.ndarray
    magnitude: np.ndarray
    product: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ExactAttention:
    """`o` and `lse`, with the quantities that their errors are proportional to [B,T,H].

    Attributes:
      o: [B,T,H,D].
      lse: [B,T,H], -inf for a query that sees no slot.
      o_magnitude: sum of p |v|, [B,T,H,D].
      o_per_score: bound of the sum of p · |score terms| · |v - o|, the error of o per relative
        error of the scores.
      lse_per_score: sum of p · |score terms|.
      largest_value: largest visible |v|, [B,T,H].
    """

    o: np.ndarray
    lse: np.ndarray
    o_magnitude: np.ndarray
    o_per_score: np.ndarray
    lse_per_score: np.ndarray
    largest_value: np.ndarray


def _f64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x * 0.5 * (1 + np.tanh(x / 2))
    if name == "gelu":
        return x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"oracle: unknown activation, got {name!r}")


def rms_norm(x, scale, *, eps: float) -> Exact:
    """x [..., K], scale [K]."""
    x, scale = _f64(x), _f64(scale)
    value = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale
    return Exact(value, np.abs(value))


def layer_norm(x, scale, bias=None, *, eps: float) -> Exact:
    """x [..., K], scale and bias [K]. The magnitude also has what the subtraction cancels."""
    x, scale = _f64(x), _f64(scale)
    mean = x.mean(axis=-1, keepdims=True)
    size = (np.abs(x - mean) + np.abs(x).mean(axis=-1, keepdims=True)) * np.abs(scale)
    deviation = np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
    value, magnitude = (x - mean) / deviation * scale, size / deviation
    if bias is None:
        return Exact(value, magnitude)
    return Exact(value + _f64(bias), magnitude + np.abs(_f64(bias)))


def matmul(x, w, *, norm=None, bias=None, gate=None, activation=None, residual=None) -> Exact:
    """x [..., K]; w [K,N], or [K,2,N] with gate; norm (scale, eps), or LayerNorm with its bias."""
    x, w = _f64(x), _f64(w)
    size = np.abs(x)
    if norm is not None:
        scale, eps, *shift = norm
        exact = layer_norm(x, scale, *shift, eps=eps) if shift else rms_norm(x, scale, eps=eps)
        x, size = exact.value, exact.magnitude
    columns = w.reshape(w.shape[0], -1)
    y, magnitude = x @ columns, size @ np.abs(columns)
    product = np.abs(y)
    if bias is not None:
        y, magnitude = y + _f64(bias).reshape(-1), magnitude + np.abs(_f64(bias)).reshape(-1)
    if gate is not None:
        n = w.shape[-1]
        act, up = _activation(gate, y[..., :n]), y[..., n:]
        magnitude, product = (
            _ACTIVATION_SLOPE * a[..., :n] * np.abs(up) + np.abs(act) * a[..., n:]
            for a in (magnitude, product)
        )
        magnitude = (
            magnitude
            # 1 + erf(g) and 1 + tanh(g) cancel for negative g, so the error scales with g itself.
            + np.abs(y[..., :n] * up)
        )
        y = act * up
    if activation is not None:
        magnitude, product = _ACTIVATION_SLOPE * magnitude + np.abs(y), _ACTIVATION_SLOPE * product
        y = _activation(activation, y)
    if residual is not None:
        y, magnitude = y + _f64(residual), magnitude + np.abs(_f64(residual))
    return Exact(y, magnitude, product)


def dequantised(codes, scales) -> np.ndarray:
    """codes [..., S, D], scales [..., S]."""
    return _f64(codes) * _f64(scales)[..., None]


def attention(
    q,
    k,
    v,
    lengths,
    offsets,
    *,
    scale,
    causal=True,
    window=None,
    soft_cap=None,
    alibi=None,
    sinks=None,
) -> ExactAttention:
    """q [B,T,H,D]; k, v [B,Hkv,S,D]; sinks [H]. One query at a time, over its visible slots only.

    A sink is the exact score of one more slot, whose value is zero.
    """
    q, k, v = _f64(q), _f64(k), _f64(v)
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    o, o_magnitude, o_per_score = np.zeros((3, batch, tokens, heads, dim))
    lse_per_score, largest_value = np.zeros((2, batch, tokens, heads))
    sink = np.full((heads, 1), -np.inf) if sinks is None else _f64(sinks)[:, None]
    lse = np.broadcast_to(sink[:, 0], (batch, tokens, heads)).copy()
    for b, t in np.ndindex(batch, tokens):
        position = int(offsets[b]) + t
        if not 0 <= position < lengths[b]:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if causal else int(lengths[b])
        query = q[b, t].reshape(kv_heads, -1, dim)
        keys, values = k[b, :, first:end], v[b, :, first:end]
        scores = (query @ keys.mT * scale).reshape(heads, -1)
        terms = (np.abs(query) @ np.abs(keys).mT * scale).reshape(heads, -1)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if alibi is not None:
            bias = np.outer(alibi, np.arange(first, end) - position)
            scores, terms = scores + bias, terms + np.abs(bias)
        terms = terms + np.abs(scores)
        top = np.maximum(scores.max(axis=1, keepdims=True), sink)
        total = np.exp(scores - top).sum(axis=1, keepdims=True) + np.exp(sink - top)
        p = np.exp(scores - top) / total
        lse[b, t] = (top + np.log(total))[:, 0]
        p, weighted = (a.reshape(kv_heads, -1, end - first) for a in (p, p * terms))
        o[b, t] = (p @ values).reshape(heads, dim)
        o_magnitude[b, t] = (p @ np.abs(values)).reshape(heads, dim)
        lse_per_score[b, t] = weighted.sum(axis=2).reshape(heads)
        # |v_i - o| <= (1 - p_i) |v_i| + sum of the other p |v|, which is 0 if a key has all weight.
        o_per_score[b, t] = (((1 - 2 * p) * weighted) @ np.abs(values)).reshape(
            heads, dim
        ) + lse_per_score[b, t, :, None] * o_magnitude[b, t]
        largest_value[b, t] = np.abs(values).max(axis=(1, 2)).repeat(heads // kv_heads)
    return ExactAttention(o, lse, o_magnitude, o_per_score, lse_per_score, largest_value)


def inverse_frequencies(dim: int, theta: float, scaling=None, length: int = 0) -> np.ndarray:
    """Angles per position: theta ** (-2i / dim), rescaled for a sequence of `length` tokens."""
    pairs = range(dim // 2)
    frequencies = np.array([theta ** (-2 * i / dim) for i in pairs])
    kind = type(scaling).__name__
    if kind == "NoneType":
        return frequencies
    if kind == "LinearScaling":
        return frequencies / scaling.factor
    if kind == "LongRope":
        is_long = length > scaling.original_max_position
        return frequencies / (scaling.long_factors if is_long else scaling.short_factors)
    if kind == "Dynamic":
        ratio = max(length / scaling.original_max_position, 1.0)
        growth = scaling.factor * ratio - scaling.factor + 1
        return inverse_frequencies(dim, theta * growth ** (dim / (dim - 2)))
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    if kind == "Llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        undivided = np.interp(rotations, [low, high], [0.0, 1.0])
    elif kind == "Yarn":
        # The pair, not rounded, that makes n rotations. The ramp is linear in pairs.
        first, last = (
            dim / 2 * math.log(scaling.original_max_position / (2 * math.pi * n)) / math.log(theta)
            for n in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        undivided = np.interp(pairs, [max(first, 0), min(last, dim - 1)], [1.0, 0.0])
    return undivided * frequencies + (1 - undivided) * frequencies / scaling.factor


def rope(x, positions, frequencies: np.ndarray, attention_factor: float = 1.0) -> Exact:
    """Rotate x [B,T,H,D] at positions [B,T]: pairs (i, i + dim/2) are complex numbers.

    The magnitude is the length of a pair.
    """
    x = _f64(x)
    half = len(frequencies)
    pairs = x[..., :half] + 1j * x[..., half : 2 * half]
    pairs = pairs * attention_factor
    turned = pairs * np.exp(1j * _f64(positions)[:, :, None, None] * frequencies)
    value = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)
    magnitude = np.concatenate([np.abs(pairs)] * 2 + [np.zeros_like(x[..., 2 * half :])], axis=-1)
    return Exact(value, magnitude)


def moe(
    x, logits, gate_up, down, *, routing, gate, bias=None, gate_up_bias=None, down_bias=None
) -> Exact:
    """x [M,E], logits [M,X], gate_up [X,E,2,F], down [X,F,E], bias [X]; one row at a time.

    The biases of the linear layers are [X,2,F] and [X,E].
    """
    if down_bias is None:
        gate_up_bias = np.zeros((len(down), 2, down.shape[1]))
        down_bias = np.zeros((len(down), x.shape[1]))
    value, magnitude = np.zeros((2, *x.shape))
    for row, scores in enumerate(_f64(logits)):
        experts, weights = _routed(scores, routing, 0 if bias is None else _f64(bias))
        for expert, weight in zip(experts, weights, strict=True):
            hidden = _hidden(x[row], gate_up[expert], gate_up_bias[expert], gate)
            w, b = _f64(down[expert]), _f64(down_bias[expert])
            value[row] += weight * (hidden.value @ w + b)
            magnitude[row] += weight * (hidden.magnitude @ np.abs(w) + np.abs(b))
    return Exact(value, magnitude)


def _hidden(x, w, bias, gate) -> Exact:
    """What an expert's down projection reads: x [E], w [E,2,F], bias [2,F]."""
    if gate != "clamped_swiglu":
        return matmul(x, w, bias=bias, gate=gate)
    both = matmul(x, w.reshape(len(w), -1), bias=bias)
    (g, u), (g_error, u_error) = (a.reshape(2, -1) for a in (both.value, both.magnitude))
    act = np.minimum(g, 7.0) / (1 + np.exp(-1.702 * np.minimum(g, 7.0)))
    up = np.clip(u, -7.0, 7.0) + 1
    return Exact(act * up, _ACTIVATION_SLOPE * g_error * np.abs(up) + np.abs(act) * (u_error + 1))


def _routed(logits: np.ndarray, routing, bias) -> tuple[list[int], np.ndarray]:
    """The experts of a row with logits [X], and their weights."""
    if routing.sigmoid:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    size = routing.experts // routing.groups
    ranked = scores + bias

    def best_two(group: int) -> float:
        return sum(sorted(ranked[group * size : (group + 1) * size])[-2:])

    groups = list(range(routing.groups))
    if routing.groups > 1:
        groups = sorted(groups, key=lambda g: (-best_two(g), g))[: routing.chosen_groups]
    allowed = [expert for expert in range(routing.experts) if expert // size in groups]
    experts = sorted(allowed, key=lambda e: (-ranked[e], e))[: routing.chosen]
    weights = scores[experts]
    if routing.normalised:
        weights = weights / weights.sum()
    return experts, weights * routing.scale
