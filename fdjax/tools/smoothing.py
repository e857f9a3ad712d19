"""Scales activations down and weights up before quantisation, where this costs nothing.

The method is AWQ's (Lin et al. 2024). A linear layer computes the same if its input is divided by
s [K] and its weight multiplied by s. Large inputs then meet larger weights, which lose less by
rounding. The division by s moves into the weights before the layer: the weights of a norm, or the
rows of V or of the up projection. s is the mean magnitude of the inputs to a power between 0 and 1.
The power is the one with the smallest error of the layer's outputs on a sample of its inputs.

If inputs become int8, too, s decides how much weights and inputs lose, as in SmoothQuant (Xiao et
al. 2023): an input that is much larger than the others of its token leaves few codes for them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fdjax.engine.engine import Engine
from fdjax.engine.generation import attend_without_cache
from fdjax.models import DecoderConfig
from fdjax.models.name_map import StackedRows, Weight, WeightMap
from fdjax.pallas_kernels.norm import rms_norm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BITS, WEIGHT_FEATURES, WeightFormat
from fdjax.system.process import transfers_allowed
from fdjax.weights.stored import FLOATS, StoredTensor

# Number of rows of a layer's inputs in its sample.
_SAMPLE = 256
# Tokens that run through a layer at once. More would need more memory beside the weights.
_TOKENS = 4096
_POWERS = tuple(i / 20 for i in range(21))


# Features of blocks in which the weights before each layer can take a factor.
_CAN = WEIGHT_FEATURES | frozenset(
    {"qkv_bias", "out_bias", "mlp_bias", "norm_offset", "qk_norm", "post_norms"}
)


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """The inputs of a linear layer.

    Attributes:
      magnitude: [K] mean of |x|.
      square: [K] mean of x².
      sample: [S, K] some of the inputs.
    """

    magnitude: np.ndarray
    square: np.ndarray
    sample: np.ndarray


@transfers_allowed()
def observe(engine: Engine, pieces: Sequence[Sequence[int]]) -> list[dict[str, LayerInputs]]:
    """Run texts through a model and observe the inputs of its linear layers.

    Args:
      engine: the model's engine.
      pieces: token ids of texts, each within the context.

    Returns:
      For each layer, the inputs by the names of `BlockSpec.linears`.
    """
    model = engine.model
    module = model.module(engine.tree)
    width = max(map(len, pieces))
    batch = min(len(pieces), max(1, _TOKENS // width))
    options = {"plan": model.plan, "rows": max(1, -(-_SAMPLE // len(pieces)))}
    blocks = [
        (*nnx.split(block), spec)
        for block, spec in zip(module.blocks, model.config.blocks, strict=True)
    ]
    batches = []
    for some in itertools.batched(pieces, batch):
        ids, lengths = np.zeros((batch, width), np.int32), np.zeros(batch, np.int32)
        for i, piece in enumerate(some):
            ids[i, : len(piece)], lengths[i] = piece, len(piece)
        x, seen = module.embedded(jnp.asarray(ids), None, model.plan), []
        for graph, params, spec in blocks:
            x, inputs = _observe(graph, params, x, lengths, spec=spec, **options)
            seen.append(inputs)
        batches.append(jax.device_get(seen))
    tokens = sum(map(len, pieces))

    def whole(parts: Sequence[tuple[np.ndarray, ...]]) -> LayerInputs:
        magnitudes, squares, samples = zip(*parts, strict=True)
        sample = np.concatenate(samples)[: len(pieces)].reshape(-1, samples[0].shape[-1])
        return LayerInputs(sum(magnitudes) / tokens, sum(squares) / tokens, sample[:_SAMPLE])

    return [
        {name: whole([part[name] for part in block]) for name in block[0]}
        for block in zip(*batches, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("graph", "spec", "plan", "rows"))
def _observe(graph, params, x: Array, lengths: Array, *, spec, plan: Plan, rows: int):
    """Run a layer on texts x [B,T,E] of some lengths [B].

    Returns:
      (x [B,T,E]; by linear layer, for its inputs: the sums of |x| and of x² [K], and `rows` samples
      of each text [B,rows,K]).
    """
    block = nnx.merge(graph, params)
    seen = {}

    def tapped(name, linear):
        def call(x, norm=None, **fused):
            normed = x if norm is None else rms_norm(x, norm.scale, eps=norm.eps)
            seen[name] = normed.astype(jnp.float32)
            return linear(x, norm=norm, **fused)

        return call

    for name, linear in spec.linears.items():
        owner = functools.reduce(getattr, linear.path[:-1], block)
        setattr(owner, linear.path[-1], tapped(name, getattr(owner, linear.path[-1])))
    x, _ = block(x, None, attend_without_cache(lengths, plan), plan)
    live = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None] < lengths[:, None, None]
    chosen = jnp.arange(rows, dtype=jnp.int32)[None] * lengths[:, None] // rows

    def statistics(a):
        a = jnp.where(live, a, 0.0)
        sample = jnp.take_along_axis(a, chosen[..., None], axis=1).astype(x.dtype)
        return jnp.sum(jnp.abs(a), axis=(0, 1)), jnp.sum(a * a, axis=(0, 1)), sample

    return x, {name: statistics(a) for name, a in seen.items()}


@dataclasses.dataclass
class Smoothed:
    """How the tensors of a checkpoint change before they are quantised.

    Attributes:
      columns: factors [K] of the columns of a weight, by name.
      rows: factors [N] of the rows of a weight, or of a bias.
      norms: new weights of norms.
      importance: [K] weights of the squared errors of a weight, by name.
    """

    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    rows: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    norms: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    importance: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def apply(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """The changed tensor: a weight [N,K] or a bias [N] in fp32, or a norm."""
        if name in self.norms:
            return self.norms[name]
        if name in self.columns:
            tensor = tensor.astype(np.float32) * self.columns[name]
        if name in self.rows:
            rows = self.rows[name].reshape(-1, *[1] * (tensor.ndim - 1))
            tensor = tensor.astype(np.float32) * rows
        return tensor


def smoothed(
    config: DecoderConfig,
    weights: WeightMap,
    stored: Mapping[str, StoredTensor],
    inputs: Sequence[Mapping[str, LayerInputs]],
) -> Smoothed:
    """Find the factors of all layers.

    Layers with features beyond those of Llama and Gemma get no factors. Only the importance of
    their errors is found.

    Args:
      config: the model with the formats of its weights.
      weights: the checkpoint tensors of each parameter.
      stored: the tensors.
      inputs: the inputs of each layer, from `observe`.
    """
    found = Smoothed()
    for i, block in enumerate(config.blocks):
        foldable = block.features <= _CAN
        if block.experts is not None:
            # Experts have the same inputs as the router. The inputs of their down projections are
            # not observed.
            of_experts = weights["blocks", i, "mlp", "experts", "gate_up"]
            square = inputs[i]["router"].square
            found.importance |= {tensor: square for tensor, _ in of_experts.sources}
        for name, linear in block.linears.items():
            weight = weights["blocks", i, *linear.path, "weight"]
            seen = inputs[i][name]
            if not foldable:
                found.importance |= {tensor: seen.square for tensor, _ in weight.sources}
                continue
            heads = (block.kv_heads, block.group) if name == "out" else None
            scale = _scale(weight, stored, seen, linear.weight, heads)
            if name in ("qkv", "gate_up"):
                norm = "attention_norm" if name == "qkv" else "mlp_norm"
                ((tensor, _),) = weights["blocks", i, norm, "scale"].sources
                old = stored[tensor].view(FLOATS)
                found.norms[tensor], scale = _divided(old, scale, block.norm_offset)
            else:
                before, part = ("qkv", 2) if name == "out" else ("gate_up", 1)
                divisor = scale
                if heads:
                    divisor = scale.reshape(*heads, -1)[:, 0].reshape(-1)
                path = "blocks", i, *block.linears[before].path
                for kind in ("weight", "bias"):
                    if (*path, kind) in weights:
                        _divide_rows(found, weights[*path, kind], part, divisor)
            for tensor, _ in weight.sources:
                found.columns[tensor] = scale
                found.importance[tensor] = seen.square / scale**2
    return found


def _divided(old: np.ndarray, scale: np.ndarray, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """(weights of a norm divided by a scale, the divisor that results from rounding them)."""
    wide = old.astype(np.float32) + np.float32(offset)
    new = (wide / scale - np.float32(offset)).astype(old.dtype)
    rounded = new.astype(np.float32) + np.float32(offset)
    usable = (rounded != 0) & (wide != 0)
    exact = np.where(usable, wide, 1) / np.where(usable, rounded, 1)
    return np.where(usable, new, old), exact.astype(np.float32)


def _divide_rows(found: Smoothed, weight: Weight, part: int, divisor: np.ndarray) -> None:
    """Divide the rows of one of the linear layers that fuse, which may share a tensor."""
    start = 0
    if isinstance(weight.layout, StackedRows):
        start, part = sum(weight.layout.outs[:part]), 0
    name, shape = weight.sources[part]
    factors = np.ones(shape[0], np.float32)
    factors[start : start + len(divisor)] = 1 / divisor
    found.rows[name] = factors


def _scale(
    weight: Weight,
    stored: Mapping[str, StoredTensor],
    seen: LayerInputs,
    form: WeightFormat,
    heads: tuple[int, int] | None,
) -> np.ndarray:
    """The scale [K] of the smallest error. With `heads` (Hkv, G), the heads of a group share it."""
    magnitude = seen.magnitude
    if heads:
        grouped = magnitude.reshape(*heads, -1).mean(axis=1, keepdims=True)
        magnitude = np.broadcast_to(grouped, (*heads, grouped.shape[2])).reshape(-1)
    magnitude = np.maximum(magnitude, 1e-4 * max(magnitude.max(), 1e-20)).astype(np.float32)
    views = [stored[name].view(FLOATS) for name, _ in weight.sources]
    errors = jax.device_get([_errors(view, seen.sample, magnitude, form=form) for view in views])
    errors = np.sum(errors, axis=0, dtype=np.float64)
    return _power(magnitude, np.float32(_POWERS[int(errors.argmin())]), np)


def _power(magnitude, power, numpy):
    scale = magnitude**power
    return scale / numpy.sqrt(scale.max() * scale.min())


@functools.partial(jax.jit, static_argnames="form")
def _errors(weight: Array, sample: Array, magnitude: Array, *, form: WeightFormat) -> Array:
    """Squared errors of the outputs of a layer [N,K] on a sample [S,K], for each power."""
    weight, sample = weight.astype(jnp.float32), sample.astype(jnp.float32)
    half = 2.0 ** (BITS[form.kind] - 1)

    def error(power):
        scale = _power(magnitude, power, jnp)[None]
        groups = (weight * scale).reshape(weight.shape[0], -1, form.group)
        largest = jnp.max(jnp.abs(groups), axis=2, keepdims=True)
        if form.kind == "fp8":
            step = jnp.where(largest == 0, 1.0, largest / 448)
            codes = (groups / step).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        else:
            step = jnp.where(largest == 0, 1.0, largest / (half - 1))
            codes = jnp.clip(jnp.round(groups / step), -half, half - 1)
        rounded = (codes * step).reshape(weight.shape)
        lost = sample @ (rounded / scale - weight).T
        if form.rounded_activations and form.kind == "int8":
            lost += _lost_by_int8(sample / scale) @ rounded.T
        return jnp.sum(lost**2)

    return jax.lax.map(error, jnp.array(_POWERS, jnp.float32))


def _lost_by_int8(x: Array) -> Array:
    """What rows [S,K] lose if each is rounded to int8."""
    step = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), 1e-30) / 127
    return jnp.round(x / step) * step - x
