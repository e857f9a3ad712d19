"""From the tensors of a Hugging Face checkpoint to fused parameters, and back.

Hugging Face stores a linear layer as [N, K]; we store [K, N], with Q, K and V fused and grouped by
KV head, and gate and up fused (shared layouts that tensor parallelism can slice).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.models.config import DecoderConfig

Path = tuple[str | int, ...]


class Layout(Protocol):
    """A reversible way from checkpoint tensors to one parameter."""

    def join(self, parts: Sequence[Array]) -> Array:
        """Checkpoint tensors → parameter."""
        ...

    def split(self, parameter: Array) -> list[Array]:
        """Parameter → checkpoint tensors."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """One tensor as it is."""

    def join(self, parts):
        """[...] → [...]."""
        return parts[0]

    def split(self, parameter):
        """[...] → [...]."""
        return [parameter]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """One linear layer."""

    def join(self, parts):
        """[N,K] → [K,N]; a bias as it is."""
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
        """[H·D, E], [Hkv·D, E], [Hkv·D, E] → [E, Hkv, G+2, D]; biases without E."""
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
        """[F,E], [F,E] → [E,2,F]; biases without E."""
        stacked = jnp.stack(parts)
        return jnp.moveaxis(stacked, -1, 0) if stacked.ndim == 3 else stacked

    def split(self, parameter):
        """The inverse of `join`."""
        if parameter.ndim == 3:
            parameter = jnp.moveaxis(parameter, 0, -1)
        return [parameter[0], parameter[1]]


@dataclasses.dataclass(frozen=True)
class StackedRows:
    """Linear layers that the checkpoint holds as one, their outputs one after the other."""

    outs: tuple[int, ...]
    layout: Layout

    def join(self, parts):
        """[sum of N, K] → that of `layout`."""
        ends = list(itertools.accumulate(self.outs))
        return self.layout.join(jnp.split(parts[0], ends[:-1]))

    def split(self, parameter):
        """The inverse of `join`."""
        return [jnp.concatenate(self.layout.split(parameter))]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter's origin.

    Attributes:
      sources: checkpoint tensors as (name, shape).
      layout: how they become the parameter.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout = Same()


WeightMap = dict[Path, Weight]


def decoder_weights(config: DecoderConfig, *, fused: bool = False) -> WeightMap:
    """The tensor names that Llama and most of its descendants share.

    Args:
      config: the architecture.
      fused: the checkpoint holds Q, K and V in one tensor, and gate and up in one.
    """
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights: WeightMap = {
        ("embed",): Weight((("model.embed_tokens.weight", (c.vocab_size, c.width)),)),
        ("norm", "scale"): Weight((("model.norm.weight", (c.width,)),)),
    }
    if not c.tie_embeddings:
        head = (("lm_head.weight", (c.vocab_size, c.width)),)
        weights["head", "weight"] = Weight(head, Transposed())
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if c.post_norms:
        norms = {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    qkv = GroupedQKV(c.kv_heads, c.group, c.head_dim)
    linears: dict[Path, tuple[list[str], tuple[int, ...], int, bool, Layout]] = {
        ("attention", "qkv"): (
            [f"self_attn.{n}_proj" for n in "qkv"],
            (q, kv, kv),
            c.width,
            c.qkv_bias,
            qkv,
        ),
        ("attention", "out"): (["self_attn.o_proj"], (c.width,), q, c.out_bias, Transposed()),
        ("mlp", "gate_up"): (
            ["mlp.gate_proj", "mlp.up_proj"],
            (c.mlp_width, c.mlp_width),
            c.width,
            c.mlp_bias,
            GateUp(),
        ),
        ("mlp", "down"): (
            ["mlp.down_proj"],
            (c.width,),
            c.mlp_width,
            c.mlp_bias,
            Transposed(),
        ),
    }
    if fused:
        for path, name in (
            (("attention", "qkv"), "self_attn.qkv_proj"),
            (("mlp", "gate_up"), "mlp.gate_up_proj"),
        ):
            _, outs, width, bias, layout = linears[path]
            linears[path] = ([name], (sum(outs),), width, bias, StackedRows(outs, layout))
    for i in range(c.layers):
        block, hf = ("blocks", i), f"model.layers.{i}."
        for ours, theirs in norms.items():
            weights[(*block, ours, "scale")] = Weight(((f"{hf}{theirs}.weight", (c.width,)),))
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                tensor = f"{hf}self_attn.{name}.weight"
                weights[(*block, "attention", name, "scale")] = Weight(((tensor, (c.head_dim,)),))
        for path, (names, outs, width, bias, layout) in linears.items():
            sources = [(f"{hf}{name}", out) for name, out in zip(names, outs, strict=True)]
            weights[(*block, *path, "weight")] = Weight(
                tuple((f"{name}.weight", (out, width)) for name, out in sources), layout
            )
            if bias:
                weights[(*block, *path, "bias")] = Weight(
                    tuple((f"{name}.bias", (out,)) for name, out in sources), layout
                )
    return weights


@functools.partial(jax.jit, static_argnames=("layout", "dtype"))
def join(parts: Sequence[Array], *, layout: Layout, dtype: str) -> Array:
    """Fuse checkpoint tensors on the device, converting the dtype: one program per shape."""
    return layout.join(parts).astype(dtype)


def export_tensors(params: dict, weights: WeightMap) -> dict[str, Array]:
    """The checkpoint tensors, by name, of parameters: the inverse of loading."""
    tensors = {}
    for path, weight in weights.items():
        leaf = functools.reduce(lambda node, key: node[key], path, params)
        parts = weight.layout.split(leaf)
        for (name, shape), part in zip(weight.sources, parts, strict=True):
            tensors[name] = part.reshape(shape)
    return tensors
