"""From the tensors of a Hugging Face checkpoint to fused parameters, and back.

Hugging Face stores a linear layer as [N, K]; we store [K, N], with Q, K and V fused and grouped by
KV head, and gate and up fused (shared layouts that tensor parallelism can slice).
"""

import dataclasses
import functools
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
        """[N,K] → [K,N]."""
        return parts[0].T

    def split(self, parameter):
        """[K,N] → [N,K]."""
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
class Weight:
    """One parameter's origin.

    Attributes:
      sources: checkpoint tensors as (name, shape).
      layout: how they become the parameter.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout = Same()


WeightMap = dict[Path, Weight]


def decoder_weights(config: DecoderConfig) -> WeightMap:
    """The tensor names that Llama and most of its descendants share."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv = GroupedQKV(c.kv_heads, c.group, c.head_dim)
    weights: WeightMap = {
        ("embed",): Weight((("model.embed_tokens.weight", (c.vocab_size, c.width)),)),
        ("norm", "scale"): Weight((("model.norm.weight", (c.width,)),)),
    }
    if not c.tie_embeddings:
        head = (("lm_head.weight", (c.vocab_size, c.width)),)
        weights["head", "weight"] = Weight(head, Transposed())
    for i in range(c.layers):
        block = ("blocks", i)
        hf = f"model.layers.{i}."

        def linear(path, names, outs, width, bias, layout, bias_layout, block=block, hf=hf):
            weights[(*block, *path, "weight")] = Weight(
                tuple(
                    (f"{hf}{n}.weight", (out, width)) for n, out in zip(names, outs, strict=True)
                ),
                layout,
            )
            if bias:
                weights[(*block, *path, "bias")] = Weight(
                    tuple((f"{hf}{n}.bias", (out,)) for n, out in zip(names, outs, strict=True)),
                    bias_layout,
                )

        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            weights[(*block, ours, "scale")] = Weight(((f"{hf}{theirs}.weight", (c.width,)),))
        names = [f"self_attn.{n}_proj" for n in "qkv"]
        linear(("attention", "qkv"), names, (q, kv, kv), c.width, c.qkv_bias, qkv, qkv)
        linear(
            ("attention", "out"),
            ["self_attn.o_proj"],
            (c.width,),
            q,
            c.out_bias,
            Transposed(),
            Same(),
        )
        names = ["mlp.gate_proj", "mlp.up_proj"]
        outs = (c.mlp_width, c.mlp_width)
        linear(("mlp", "gate_up"), names, outs, c.width, c.mlp_bias, GateUp(), GateUp())
        linear(
            ("mlp", "down"),
            ["mlp.down_proj"],
            (c.width,),
            c.mlp_width,
            c.mlp_bias,
            Transposed(),
            Same(),
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
