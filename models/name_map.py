"""Converts the tensors of a Hugging Face checkpoint to fused parameters, and back.

Hugging Face stores a linear layer as [N, K]. fdjax stores [K, N], with Q, K and V fused and grouped
by KV head, and with gate and up fused. Tensor parallelism can slice these layouts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.models.block import BlockSpec
from fdjax.models.config import DecoderConfig

Path = tuple[str | int, ...]


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
    """Q, K and V weights, or biases, grouped by KV head: G query heads, then K, then V."""

    kv_heads: int
    group: int
    head_dim: int

    def join(self, parts):
        """[H·D, E], [Hkv·D, E], [Hkv·D, E] → [E, Hkv, G+2, D]; biases have no axis E."""
        parts = [p.reshape(self.kv_heads, -1, self.head_dim, *p.shape[1:]) for p in parts]
        joined = jnp.concatenate(parts, axis=1)
        return jnp.moveaxis(joined, -1, 0) if joined.ndim == 4 else joined

    def split(self, parameter):
        """The inverse of `join`."""
        if parameter.ndim == 4:
            parameter = jnp.moveaxis(parameter, 0, -1)
        g = self.group
        parts = parameter[:, :g], parameter[:, g : g + 1], parameter[:, g + 1 :]
        return [p.reshape(-1, *p.shape[3:]) for p in parts]


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
    """Linear layers that the checkpoint stores in one tensor, one after the other along N."""

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
class Weight:
    """The checkpoint tensors of one parameter.

    Attributes:
      sources: the tensors as (name, shape).
      layout: converts them to the parameter.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout = Same()


WeightMap = dict[Path, Weight]


def decoder_weights(config: DecoderConfig, *, fused: bool = False) -> WeightMap:
    """The weight map with the tensor names of Llama and most of its descendants.

    Args:
      config: the architecture.
      fused: the checkpoint stores Q, K and V in one tensor, and gate and up in one.
    """
    c = config
    weights: WeightMap = {
        ("embed",): Weight((("model.embed_tokens.weight", (c.vocab_size, c.width)),)),
        ("norm", "scale"): Weight((("model.norm.weight", (c.width,)),)),
    }
    if not c.tie_embeddings:
        head = (("lm_head.weight", (c.vocab_size, c.width)),)
        weights["head", "weight"] = Weight(head, Transposed())
    for i, block in enumerate(c.blocks):
        weights |= _block_weights(block, ("blocks", i), f"model.layers.{i}.", fused)
    return weights


_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# Names in checkpoints whose blocks have post norms.
_NORMS_WITH_POST = _NORMS | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED_PROJECTIONS = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}


def _block_weights(block: BlockSpec, ours: Path, theirs: str, fused: bool) -> WeightMap:
    """The weights of one layer: paths begin with `ours`, tensor names with `theirs`."""
    weights: WeightMap = {}
    names = _NORMS_WITH_POST if block.post_norms else _NORMS
    for path, width in block.norms.items():
        tensor = f"{theirs}{names[path[-1]]}.weight"
        weights[(*ours, *path, "scale")] = Weight(((tensor, (width,)),))
    kv = block.kv_heads * block.head_dim
    # Linear layers that a checkpoint stores separately: their outputs, and how they are joined.
    several = {
        "qkv": (
            (block.heads * block.head_dim, kv, kv),
            GroupedQKV(block.kv_heads, block.group, block.head_dim),
        ),
        "gate_up": ((block.mlp_width, block.mlp_width), GateUp()),
    }
    for name, linear in block.linears.items():
        outs, layout = several.get(name, (linear.outs, Transposed()))
        projections = _PROJECTIONS[name]
        if fused and name in _FUSED_PROJECTIONS:
            layout = StackedRows(outs, layout)
            outs, projections = (sum(outs),), (_FUSED_PROJECTIONS[name],)
        sources = [(f"{theirs}{p}", out) for p, out in zip(projections, outs, strict=True)]
        weights[(*ours, *linear.path, "weight")] = Weight(
            tuple((f"{source}.weight", (out, linear.k)) for source, out in sources), layout
        )
        if linear.bias:
            weights[(*ours, *linear.path, "bias")] = Weight(
                tuple((f"{source}.bias", (out,)) for source, out in sources), layout
            )
    return weights


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
