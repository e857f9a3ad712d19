"""Converts the tensors of a Hugging Face checkpoint to fused parameters, and back.

Hugging Face stores a linear layer as [N, K]. fdjax stores [K, N], with Q, K and V fused and grouped
by KV head, and with gate and up fused. Tensor parallelism can slice these layouts.

RoPE rotates pairs (i, i + dim/2). Some checkpoints are trained with pairs (2i, 2i + 1). Their rows
of Q and K are reordered, which changes no score. So kernels need only one kind of pairs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.models.block import BlockSpec, LinearSpec
from fdjax.models.config import DecoderConfig

ParamPath = tuple[str | int, ...]


class Layout(Protocol):
    """A reversible conversion of checkpoint tensors to one parameter."""

    def join(self, parts: Sequence[Array]) -> Array:
        """Checkpoint tensors → parameter."""
        ...

    def split(self, parameter: Array) -> list[Array]:
        """Parameter → checkpoint tensors."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """One tensor, unchanged."""

    def join(self, parts):
        """[...] → [...]."""
        return parts[0]

    def split(self, parameter):
        """[...] → [...]."""
        return [parameter]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The weight of one linear layer, transposed."""

    def join(self, parts):
        """[N,K] → [K,N]; a bias stays as it is."""
        return parts[0].T

    def split(self, parameter):
        """The inverse of `join`."""
        return [parameter.T]


@dataclasses.dataclass(frozen=True)
class GroupedQKV:
    """Q, K and V weights, or biases, grouped by KV head: G query heads, then K, then V.

    Attributes:
      kv_heads, group, head_dim: Hkv, G, D.
      interleaved: number of dimensions at the beginning of a head of Q or K that form pairs (2i, 2i
        + 1).
      spread: number of dimensions at the beginning of a head of Q or K that form pairs, if the two
        of a pair are placed D/2 apart, see `Rope.span`; otherwise 0.
    """

    kv_heads: int
    group: int
    head_dim: int
    interleaved: int = 0
    spread: int = 0

    def join(self, parts):
        """[H·D, E], [Hkv·D, E], [Hkv·D, E] → [E, Hkv, G+2, D]; biases have no axis E."""
        parts = [p.reshape(self.kv_heads, -1, self.head_dim, *p.shape[1:]) for p in parts]
        if self.interleaved or self.spread:
            parts = [p[:, :, self._order()] for p in parts[:2]] + parts[2:]
        joined = jnp.concatenate(parts, axis=1)
        return jnp.moveaxis(joined, -1, 0) if joined.ndim == 4 else joined

    def split(self, parameter):
        """The inverse of `join`."""
        if parameter.ndim == 4:
            parameter = jnp.moveaxis(parameter, 0, -1)
        g = self.group
        parts = [parameter[:, :g], parameter[:, g : g + 1], parameter[:, g + 1 :]]
        if self.interleaved or self.spread:
            parts = [p[:, :, np.argsort(self._order())] for p in parts[:2]] + parts[2:]
        return [p.reshape(-1, *p.shape[3:]) for p in parts]

    def _order(self) -> np.ndarray:
        """[D] for each dimension of a head here, its dimension in the checkpoint."""
        paired, interleaved = self.interleaved or self.spread, self.interleaved > 0
        return head_order(self.head_dim, paired, interleaved=interleaved, spread=self.spread > 0)


def head_order(
    head_dim: int, paired: int, *, interleaved: bool = False, spread: bool = False
) -> np.ndarray:
    """[D] for each dimension of a head here, its dimension in a checkpoint.

    Args:
      head_dim: D.
      paired: number of dimensions that RoPE rotates, at the beginning of the checkpoint's head.
      interleaved: pairs are (2i, 2i + 1) there, otherwise (i, i + paired/2).
      spread: pairs are (i, i + D/2) here, otherwise (i, i + paired/2).
    """
    pairs = np.arange(paired).reshape((-1, 2) if interleaved else (2, -1))
    first, second = pairs.T if interleaved else pairs
    rest = np.arange(paired, head_dim)
    middle = len(rest) // 2 if spread else 0
    return np.r_[first, rest[:middle], second, rest[middle:]]


@dataclasses.dataclass(frozen=True)
class PerGroupQKV:
    """Q, K and V in one tensor, which is grouped by KV head already.

    Attributes: see `GroupedQKV`.
    """

    kv_heads: int
    group: int
    head_dim: int
    spread: int = 0

    def join(self, parts):
        """[Hkv·(G+2)·D, E] → [E, Hkv, G+2, D]; biases have no axis E."""
        (part,) = parts
        grouped = part.reshape(self.kv_heads, self.group + 2, self.head_dim, *part.shape[1:])
        if self.spread:
            grouped = self._with_q_and_k(grouped, self._order())
        return jnp.moveaxis(grouped, -1, 0) if grouped.ndim == 4 else grouped

    def split(self, parameter):
        """The inverse of `join`."""
        if parameter.ndim == 4:
            parameter = jnp.moveaxis(parameter, 0, -1)
        if self.spread:
            parameter = self._with_q_and_k(parameter, np.argsort(self._order()))
        return [parameter.reshape(-1, *parameter.shape[3:])]

    def _order(self) -> np.ndarray:
        return head_order(self.head_dim, self.spread, spread=True)

    def _with_q_and_k(self, grouped, order):
        end = self.group + 1
        return jnp.concatenate([grouped[:, :end, order], grouped[:, end:]], axis=1)


@dataclasses.dataclass(frozen=True)
class GateUp:
    """Gate and up weights, or biases."""

    def join(self, parts):
        """[F,E], [F,E] → [E,2,F]; biases have no axis E."""
        stacked = jnp.stack(parts)
        return jnp.moveaxis(stacked, -1, 0) if stacked.ndim == 3 else stacked

    def split(self, parameter):
        """The inverse of `join`."""
        if parameter.ndim == 3:
            parameter = jnp.moveaxis(parameter, 0, -1)
        return [parameter[0], parameter[1]]


@dataclasses.dataclass(frozen=True)
class StackedRows:
    """Linear layers that the checkpoint stores in one tensor, one after another along N."""

    outs: tuple[int, ...]
    layout: Layout

    def join(self, parts):
        """[sum of N, K] → the parameter of `layout`."""
        ends = list(itertools.accumulate(self.outs))
        return self.layout.join(jnp.split(parts[0], ends[:-1]))

    def split(self, parameter):
        """The inverse of `join`."""
        return [jnp.concatenate(self.layout.split(parameter))]


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Two linear layers in one tensor. Even rows belong to the first, odd rows to the second."""

    layout: Layout

    def join(self, parts):
        """[2·N, K] → the parameter of `layout`; biases have no axis K."""
        return self.layout.join([parts[0][0::2], parts[0][1::2]])

    def split(self, parameter):
        """The inverse of `join`."""
        parts = jnp.stack(self.layout.split(parameter), axis=1)
        return [parts.reshape(-1, *parts.shape[2:])]


@dataclasses.dataclass(frozen=True)
class InputsFirst:
    """Weights that the checkpoint stores as [..., K, N]. `layout` takes [..., N, K]."""

    layout: Layout

    def join(self, parts):
        """[..., K, N] each → the parameter of `layout`; biases stay as they are."""
        return self.layout.join([_swapped(p) for p in parts])

    def split(self, parameter):
        """The inverse of `join`."""
        return [_swapped(p) for p in self.layout.split(parameter)]


def _swapped(part):
    return part.swapaxes(-1, -2) if part.ndim > 1 else part


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """Weights of X experts, one expert after another, each in the form that `layout` takes."""

    experts: int
    layout: Layout

    def join(self, parts):
        """Checkpoint tensors → the parameters of `layout` [X, ...]."""
        each = len(parts) // self.experts
        return jnp.stack([self.layout.join(part) for part in itertools.batched(parts, each)])

    def split(self, parameter):
        """The inverse of `join`."""
        return [part for expert in parameter for part in self.layout.split(expert)]


@dataclasses.dataclass(frozen=True)
class AllExperts:
    """Weights of X experts in one tensor, each in the form that `layout` takes."""

    layout: Layout

    def join(self, parts):
        """[X, ...] → the parameters of `layout` [X, ...]."""
        return jax.vmap(lambda part: self.layout.join([part]))(parts[0])

    def split(self, parameter):
        """The inverse of `join`."""
        return [jax.vmap(lambda expert: self.layout.split(expert)[0])(parameter)]


@dataclasses.dataclass(frozen=True)
class Weight:
    """The checkpoint tensors of one parameter.

    Attributes:
      sources: the tensors as (name, shape).
      layout: converts them to the parameter.
      whole: a tensor (name, shape) that newer checkpoints have instead of `sources`, with all their
        values one after another; None if there is none.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout = Same()
    whole: tuple[str, tuple[int, ...]] | None = None

    def outputs_first(self) -> tuple["Weight", bool]:
        """(the weight with sources [..., N, K], as quantised weights need; whether it differs)."""
        if not isinstance(self.layout, InputsFirst):
            return self, False
        sources = tuple((name, (*head, n, k)) for name, (*head, k, n) in self.sources)
        return dataclasses.replace(self, sources=sources, layout=self.layout.layout), True


WeightMap = dict[ParamPath, Weight]


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The names of a checkpoint's modules, and how it stores their tensors. Defaults are Llama's.

    Attributes:
      embed, norm, head: modules outside the layers.
      positions, embed_norm, embed_in, embed_out: modules that few models have, see `DecoderConfig`.
      layer: beginning of the names in a layer; {} is its index.
      own: linear layer or norm of a block here → its modules in a layer of the checkpoint, where
        they differ from Llama's. A single module for Q, K and V, or for gate and up, holds them one
        after another.
      per_group: the single module of Q, K and V has them grouped by KV head.
      interleaved: RoPE rotates pairs (2i, 2i + 1) of the checkpoint's dimensions.
      inputs_first: weights in the layers are stored as [K, N].
      experts: modules of the experts in a layer, for gate and up, and for down. {} is the index of
        the expert. A name without {} is one tensor with the weights of all experts.
      alternating_experts: the tensors of all experts are [X, K, N], and the columns, or biases, of
        gate and of up alternate.
      router_bias: name of a layer's tensor with the bias for choosing experts.
      renamed: pattern → replacement in names of the checkpoint, for newer names.
    """

    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""
    embed_norm: str = ""
    embed_in: str = ""
    embed_out: str = ""
    layer: str = "model.layers.{}."
    own: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    per_group: bool = False
    interleaved: bool = False
    inputs_first: bool = False
    experts: tuple[tuple[str, ...], tuple[str, ...]] = (
        ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        ("mlp.experts.{}.down_proj",),
    )
    alternating_experts: bool = False
    router_bias: str = "mlp.gate.e_score_correction_bias"
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, name: str) -> tuple[str, ...]:
        """The modules of a linear layer or norm."""
        return self.own[name] if name in self.own else _LLAMA[name]


_LLAMA = {
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "sinks": ("self_attn.sinks",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
    "router": ("mlp.gate",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}


def decoder_weights(config: DecoderConfig, names: TensorNames = TensorNames()) -> WeightMap:
    """The weight map of a model whose checkpoint has these names."""
    c, n = config, names
    inner = c.embedding_width or c.width
    weights: WeightMap = {("embed",): Weight(((f"{n.embed}.weight", (c.vocab_size, inner)),))}
    if c.position_offset is not None:
        table = (f"{n.positions}.weight", (c.position_rows, c.width))
        weights["positions",] = Weight((table,))
    for ours, theirs, there in (
        ("norm", n.norm, c.final_norm),
        ("embed_norm", n.embed_norm, c.embedding_norm),
    ):
        if there:
            weights |= _norm(c.blocks[-1], (ours,), theirs, c.width)
    if inner != c.width:
        weights |= _linear(("embed_in",), n.embed_in, inner, c.width)
        weights |= _linear(("embed_out",), n.embed_out, c.width, inner)
    if not c.tie_embeddings:
        weights |= _linear(("head",), n.head, inner, c.vocab_size, bias=c.head_bias)
    for i, block in enumerate(c.blocks):
        weights |= _block_weights(block, ("blocks", i), names.layer.format(i), names)
    return weights


def _norm(block: BlockSpec, ours: ParamPath, theirs: str, width: int) -> WeightMap:
    """The weights of a norm."""
    weights = {(*ours, "scale"): Weight(((f"{theirs}.weight", (width,)),))}
    if block.norm_bias:
        weights[(*ours, "bias")] = Weight(((f"{theirs}.bias", (width,)),))
    return weights


def _linear(ours: ParamPath, theirs: str, k: int, n: int, *, bias: bool = False) -> WeightMap:
    """The weights of a linear layer outside of the layers."""
    weights = {(*ours, "weight"): Weight(((f"{theirs}.weight", (n, k)),), Transposed())}
    if bias:
        weights[(*ours, "bias")] = Weight(((f"{theirs}.bias", (n,)),))
    return weights


def _block_weights(block: BlockSpec, ours: ParamPath, theirs: str, names: TensorNames) -> WeightMap:
    """The weights of one layer: paths begin with `ours`, tensor names with `theirs`."""
    weights: WeightMap = {}
    for path, width in block.norms.items():
        (module,) = names.of(path[-1])
        weights |= _norm(block, (*ours, *path), theirs + module, width)
    for name, linear in block.linears.items():
        modules = [theirs + module for module in names.of(name)]
        outs, layout = _stored(block, name, linear, len(modules), names)
        first = names.inputs_first
        weights[(*ours, *linear.path, "weight")] = Weight(
            tuple(
                (f"{module}.weight", (linear.k, out) if first else (out, linear.k))
                for module, out in zip(modules, outs, strict=True)
            ),
            InputsFirst(layout) if first else layout,
        )
        if linear.bias:
            sources = [(f"{m}.bias", (out,)) for m, out in zip(modules, outs, strict=True)]
            weights[(*ours, *linear.path, "bias")] = Weight(tuple(sources), layout)
    if block.attention.sinks:
        (sinks,) = names.of("sinks")
        weights[(*ours, "attention", "sinks")] = Weight(((theirs + sinks, (block.heads,)),))
    if block.experts is not None:
        weights |= _expert_weights(block, (*ours, "mlp", "experts"), theirs, names)
    return weights


def _expert_weights(
    block: BlockSpec, ours: ParamPath, theirs: str, names: TensorNames
) -> WeightMap:
    """The weights of the experts of one layer."""
    experts, width, hidden = block.experts.experts, block.width, block.mlp_width
    weights: WeightMap = {}
    for name, modules, outs, k in (
        ("gate_up", names.experts[0], (hidden, hidden), width),
        ("down", names.experts[1], (width,), hidden),
    ):
        layout = GateUp() if name == "gate_up" else Transposed()
        whole = experts, sum(outs), k
        if "{}" not in modules[0]:
            weights |= _experts_in_one(block, (*ours, name), theirs + modules[0], outs, k, names)
            continue
        sources = tuple(
            (f"{theirs}{module.format(i)}.weight", (out, k))
            for i in range(experts)
            for module, out in zip(modules, outs, strict=True)
        )
        beginning = modules[0].partition("{}")[0]
        weights[(*ours, name)] = Weight(
            sources, PerExpert(experts, layout), (f"{theirs}{beginning}{name}_proj", whole)
        )
    if block.experts.biased:
        weights[(*ours, "bias")] = Weight(((theirs + names.router_bias, (experts,)),))
    return weights


def _experts_in_one(
    block: BlockSpec,
    ours: ParamPath,
    theirs: str,
    outs: tuple[int, ...],
    k: int,
    names: TensorNames,
) -> WeightMap:
    """The weight of all experts in one tensor, and their biases."""
    experts, n = block.experts.experts, sum(outs)
    first = names.alternating_experts
    if len(outs) == 1:
        layout, bias = Transposed(), Same()
    elif first:
        layout = bias = Alternating(GateUp())
    else:
        layout = bias = StackedRows(outs, GateUp())
    source = (theirs, (experts, k, n) if first else (experts, n, k))
    layout = AllExperts(layout)
    weights = {ours: Weight((source,), InputsFirst(layout) if first else layout)}
    if block.expert_bias:
        path = (*ours[:-1], f"{ours[-1]}_bias")
        weights[path] = Weight(((f"{theirs}_bias", (experts, n)),), AllExperts(bias))
    return weights


def _stored(
    block: BlockSpec, name: str, linear: LinearSpec, modules: int, names: TensorNames
) -> tuple[tuple[int, ...], Layout]:
    """The numbers of outputs of a linear layer's modules, and the layout that joins them."""
    if name not in ("qkv", "gate_up", "shared_gate_up"):
        return linear.outs, Transposed()
    heads = block.kv_heads, block.group, block.head_dim
    rope = block.attention.rope
    spread = rope.dim if rope is not None and rope.span is not None else 0
    if name == "qkv" and names.per_group:
        return (math.prod(linear.outs),), PerGroupQKV(*heads, spread)
    if name == "qkv":
        q, kv = (n * block.head_dim for n in (block.heads, block.kv_heads))
        pairs = rope.dim if names.interleaved and rope is not None else 0
        outs, layout = (q, kv, kv), GroupedQKV(*heads, interleaved=pairs, spread=spread)
    else:
        outs, layout = linear.outs[1:] * 2, GateUp()
    return (outs, layout) if modules > 1 else ((sum(outs),), StackedRows(outs, layout))


@functools.partial(jax.jit, static_argnames=("layout", "dtype"))
def join(parts: Sequence[Array], *, layout: Layout, dtype: str) -> Array:
    """Fuse checkpoint tensors on the device and convert the dtype; compiled once per shape."""
    return layout.join(parts).astype(dtype)


def export_tensors(params: dict, weights: WeightMap) -> dict[str, Array]:
    """Convert parameters to checkpoint tensors by name, the inverse of loading."""
    tensors = {}
    for path, weight in weights.items():
        leaf = functools.reduce(lambda node, key: node[key], path, params)
        parts = weight.layout.split(leaf)
        for (name, shape), part in zip(weight.sources, parts, strict=True):
            tensors[name] = part.reshape(shape)
    return tensors
