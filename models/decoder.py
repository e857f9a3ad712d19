"""The decoder that all families share: blocks of attention and MLP, described by `BlockSpec`s.

Modules hold no cache. `describe` splits them once into a static graph and plain parameters, and
`Model.module` puts both together again inside a trace.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdjax.models.attend import Attend, Stack
from fdjax.models.block import DECODER_CAN, BlockSpec, LinearSpec
from fdjax.models.config import DecoderConfig
from fdjax.models.layouts import laid_out
from fdjax.models.sharding import local_config, partitions, token_ranks, whole_config
from fdjax.pallas_kernels.all_reduce import all_reduce, sum_shape
from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Features, refuse_unknown
from fdjax.pallas_kernels.experts import moe
from fdjax.pallas_kernels.gemm import chain_counters, chain_key, linear_chain, matmul
from fdjax.pallas_kernels.layers import (
    Formats,
    LayerWeights,
    decode_layers,
    formats_of,
    ranks_key,
)
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised, rms_norm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import (
    QTensor,
    WeightFormat,
    is_quantised,
    random_quantised,
)
from fdjax.pallas_kernels.ranks import AXIS, all_columns, only_first
from fdjax.pallas_kernels.rope import Rope
from fdjax.pallas_kernels.row_tiles import by_row

Params = dict[str, Any]
# From so many tokens on, GPUs that share a model compute calls of prompts in tiles.
_TOKENS_OF_TILES = 4096

# Function of (path of a parameter, parameter) that returns the parameter or a replacement.
Take = Callable[[tuple[str | int, ...], Any], Any]


class Norm(nnx.Module):
    """The weights of a norm. A linear layer that follows an RMS norm takes them as an operand."""

    def __init__(self, width: int, spec: BlockSpec, dtype, ranks: int = 1):
        self.scale = nnx.Param(jnp.zeros((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype)) if spec.norm_bias else None
        self.is_layer_norm = spec.layer_norm
        self.offset = spec.norm_offset
        self.eps = spec.norm_eps
        self.ranks = ranks

    @classmethod
    def of(cls, spec: BlockSpec, dtype, *path: str) -> "Norm | None":
        """The norm at a path of a block, or None if the block has none there."""
        if path not in spec.norms:
            return None
        divided = spec.whole_qk_norm and path[-1] in ("q_norm", "k_norm")
        return cls(spec.norms[path], spec, dtype, spec.tensor_parallel if divided else 1)

    def operand(self) -> RMSNorm | LayerNorm:
        """The norm as an operand of `matmul`."""
        scale = self.scale[...]
        if self.is_layer_norm:
            return LayerNorm(scale, None if self.bias is None else self.bias[...], self.eps)
        if self.offset:
            # In fp32: weights around 0 would lose bits when 1 is added.
            scale = scale.astype(jnp.float32) + self.offset
        return RMSNorm(scale, self.eps)

    def __call__(self, x: Array, plan: Plan) -> Array:
        """Normalise x [B,T,...,width] over the last axis."""
        norm = self.operand()
        if self.ranks > 1:
            run = functools.partial(rms_norm, scale=norm.scale, eps=norm.eps, ranks=self.ranks)
        else:
            run = functools.partial(normalised, norm=norm)
        return by_row(run, x, plan)


@dataclasses.dataclass(frozen=True)
class LayerOf:
    """The weight of one layer as an index into stacked weights, inside a trace.

    Attributes:
      stack: [L, ...].
      index: [] int32.
    """

    stack: Array
    index: Array


class Linear(nnx.Module):
    """A weight [K, ...] and an optional bias, applied through `matmul`.

    A quantised weight is a `QTensor` [K,N], or [K,2,N] with a gate. Inside a loop over layers, the
    weight is a `LayerOf` these.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        bias: bool,
        dtype,
        weight: WeightFormat | None = None,
        ranks: int = 1,
    ):
        empty = jnp.zeros(shape, dtype) if weight is None else weight.empty(flat_shape(shape))
        self.ranks = ranks
        self.weight = nnx.Param(empty)
        self.bias = nnx.Param(jnp.zeros(shape[1:], dtype)) if bias else None

    @classmethod
    def of(cls, spec: LinearSpec, dtype) -> "Linear":
        """The linear layer that a spec describes."""
        return cls((spec.k, *spec.outs), spec.bias, dtype, spec.weight, spec.ranks)

    def __call__(self, x: Array, **fused) -> Array:
        """x [..., K] → [..., N]; `fused` are keywords of `matmul`."""
        weight = self.weight.get_value()
        bias = None if self.bias is None else self.bias[...]
        stack = ()
        if isinstance(weight, LayerOf):
            fused["layer"], weight = weight.index, weight.stack
            stack = weight.shape[:1]
        if "gate" not in fused:
            if not isinstance(weight, QTensor):
                weight = weight.reshape(*stack, weight.shape[len(stack)], -1)
            bias = None if bias is None else bias.reshape(-1)
        if self.ranks > 1:
            return _summed(x, weight, bias, **fused)
        return matmul(x, weight, bias=bias, **fused)


def _summed(
    x: Array, weight: Array | QTensor, bias: Array | None, residual: Array | None = None, **fused
) -> Array:
    """`matmul` by weights whose rows are divided among devices: x [..., K/ranks] → [..., N]."""
    y = matmul(x, weight, **fused)
    if bias is not None:
        bias = bias.astype(y.dtype)
    return all_reduce(y, "products", bias=bias, residual=residual, plan=fused.get("plan"))


def flat_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a linear layer's quantised weight: [K,N], or [K,2,F] of gate and up."""
    return shape if len(shape) == 3 else (shape[0], math.prod(shape[1:]))


class Attention(nnx.Module):
    """Attention, with Q, K and V in one product, grouped by KV head, and the output projection."""

    def __init__(self, spec: BlockSpec, dtype):
        linears = spec.linears
        self.spec = spec.attention
        self.heads = linears["qkv"].outs
        self.qkv = Linear.of(linears["qkv"], dtype)
        self.out = Linear.of(linears["out"], dtype)
        self.q_norm = Norm.of(spec, dtype, "attention", "q_norm")
        self.k_norm = Norm.of(spec, dtype, "attention", "k_norm")
        self.norms_heads = spec.qk_norm
        self.sinks = nnx.Param(jnp.zeros((spec.heads,), dtype)) if spec.attention.sinks else None

    def __call__(self, qkv: Array, kv: Any, attend: Attend, plan: Plan) -> tuple[Array, Any]:
        """Results of `self.qkv` [B,T,...] → (input of `self.out` [B,T,H·D], updated cache)."""
        b, t, _ = qkv.shape
        qkv = qkv.reshape(b, t, *self.heads)
        options = {} if self.sinks is None else {"sinks": self.sinks[...]}
        if self.norms_heads:
            options["norms"] = self.q_norm.operand(), self.k_norm.operand()
        elif self.q_norm is not None:
            *qk, v = jnp.split(qkv, (-2, -1), axis=3)
            qk = [
                norm(a.reshape(b, t, -1), plan).reshape(a.shape)
                for norm, a in zip((self.q_norm, self.k_norm), qk, strict=True)
            ]
            qkv = jnp.concatenate([*qk, v], axis=3)
        o, kv = attend(self.spec, kv, qkv, **options)
        return o.reshape(b, t, -1), kv


class MLP(nnx.Module):
    """MLP: down(act(gate(x)) * up(x)), or down(act(up(x))).

    The names of its linear layers begin with `beside`.
    """

    def __init__(self, spec: BlockSpec, dtype, beside: str = ""):
        linears = spec.linears
        self.activation = spec.activation
        self.up = Linear.of(linears["up"], dtype) if spec.no_gate else None
        self.gate_up = None if spec.no_gate else Linear.of(linears[f"{beside}gate_up"], dtype)
        self.down = Linear.of(linears[f"{beside}down"], dtype)

    def hidden(self, x: Array, norm: Norm | None, plan: Plan) -> Array:
        """x [B,T,E] → input of `down` [B,T,F]."""
        if self.up is None:
            return _normed(norm, self.gate_up, x, plan, gate=self.activation)
        return _normed(norm, self.up, x, plan, activation=self.activation)

    def output(self, hidden: Array, **fused) -> Array:
        """Result of `hidden` [B,T,F] → [B,T,E]; `fused` are keywords of `matmul`."""
        return self.down(hidden, **fused)


class ExpertWeights(nnx.Module):
    """The weights of all experts of a layer, quantised or not."""

    def __init__(self, spec: BlockSpec, dtype):
        count, width, hidden = spec.experts.experts, spec.width, spec.mlp_width
        formats = dict(spec.formats)

        def weight(name, *shape):
            form = formats.get(f"experts.{name}")
            empty = (
                jnp.zeros((count, *shape), dtype) if form is None else form.empty(shape, (count,))
            )
            return nnx.Param(empty)

        def bias(there, *shape):
            return nnx.Param(jnp.zeros((count, *shape), dtype)) if there else None

        self.gate_up = weight("gate_up", width, 2, hidden)
        self.down = weight("down", hidden, width)
        self.ranks = spec.tensor_parallel
        self.gate_up_bias = bias(spec.expert_bias, 2, hidden)
        self.down_bias = bias(spec.expert_bias, width)
        self.bias = bias(spec.experts.biased)

    def operands(self) -> dict[str, Array | QTensor]:
        """The arrays by the names that `moe` has for them."""
        names = "gate_up", "down", "gate_up_bias", "down_bias", "bias"
        found = {name: getattr(self, name) for name in names}
        found = {name: param.get_value() for name, param in found.items() if param is not None}
        if self.ranks > 1 and self.down_bias is not None:
            # The devices sum their results, so only one of them adds the bias.
            found["down_bias"] = only_first(found["down_bias"])
        return found


class Experts(nnx.Module):
    """A mixture of experts, and an MLP beside them if the block has one."""

    def __init__(self, spec: BlockSpec, dtype):
        linears = spec.linears
        self.routing = spec.experts
        self.activation = spec.activation
        self.ranks = spec.tensor_parallel
        self.router = Linear.of(linears["router"], dtype)
        self.experts = ExpertWeights(spec, dtype)
        self.shared = MLP(spec, dtype, "shared_") if spec.shared_width else None
        self.shared_gate = Linear.of(linears["shared_gate"], dtype) if spec.shared_gate else None

    def hidden(self, x: Array, norm: Norm | None, plan: Plan) -> tuple[Array, Array]:
        """x [B,T,E] → (input of the experts [B,T,E], logits of the router [B,T,X])."""
        logits = _normed(norm, self.router, x, plan, preferred_element_type=jnp.float32)
        return x if norm is None else norm(x, plan), logits

    def output(
        self,
        hidden: tuple[Array, Array],
        *,
        plan: Plan,
        residual: Array | None = None,
        live: Array | None = None,
    ) -> Array:
        """Result of `hidden` → [B,T,E], plus a residual. For `live` see `Decoder`."""
        hidden, logits = hidden
        if live is not None:
            live = jnp.broadcast_to(live[:, None], hidden.shape[:2]).reshape(-1)
        # Nothing comes between the experts and the residual.
        alone = residual is not None and self.shared is None and self.ranks == 1
        y = moe(
            hidden.reshape(-1, hidden.shape[-1]),
            logits.reshape(-1, self.routing.experts),
            **self.experts.operands(),
            routing=self.routing,
            gate=self.activation,
            live=live,
            residual=residual.reshape(-1, residual.shape[-1]) if alone else None,
            plan=plan,
        ).reshape(hidden.shape)
        if alone:
            return y
        if self.shared is not None:
            y = y + self._shared(hidden, plan)
        if self.ranks > 1:
            return all_reduce(y, "experts", residual=residual, plan=plan)
        return y if residual is None else residual + y

    def _shared(self, hidden: Array, plan: Plan) -> Array:
        y = self.shared.output(self.shared.hidden(hidden, None, plan), plan=plan)
        if self.shared_gate is None:
            return y
        gate = self.shared_gate(hidden, preferred_element_type=jnp.float32, plan=plan)
        # A separate multiplication, like that by the residual multiplier of a block.
        return by_row(
            lambda y, g: (y.astype(jnp.float32) * jax.nn.sigmoid(g)).astype(y.dtype), y, plan, gate
        )


def _normed(
    norm: Norm | None, linear: Callable[..., Array], x: Array, plan: Plan, **fused
) -> Array:
    """linear(norm(x)), x [...,K]; `fused` are keywords of `matmul`."""
    if norm is not None:
        fused["norm"] = norm.operand()
    return linear(x, plan=plan, **fused)


class DecoderBlock(nnx.Module):
    """One decoder layer."""

    def __init__(self, spec: BlockSpec, dtype):
        refuse_unknown("decoder", spec.features, DECODER_CAN)
        norm = functools.partial(Norm.of, spec, dtype)
        self.attention_norm = norm("attention_norm")
        self.attention = Attention(spec, dtype)
        self.attention_post_norm = norm("attention_post_norm")
        self.attention_sum_norm = norm("attention_sum_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = MLP(spec, dtype) if spec.experts is None else Experts(spec, dtype)
        self.mlp_post_norm = norm("mlp_post_norm")
        self.mlp_sum_norm = norm("mlp_sum_norm")
        self.parallel = spec.parallel
        self.shared_norm = spec.shared_norm
        self.residual_multiplier = spec.residual_multiplier

    def __call__(
        self,
        x: Array,
        kv: Any,
        attend: Attend,
        plan: Plan,
        last: Array | None = None,
        live: Array | None = None,
    ) -> tuple[Array, Any]:
        """x [B,T,E] → ([B,T,E], or [B,1,E] with `last`; the layer's updated cache).

        Args: see `Decoder.__call__`.
        """
        return self.from_qkv(x, self.first_product(x, plan), kv, attend, plan, last, live)

    def first_product(self, x: Array, plan: Plan) -> Array:
        """x [B,T,E] → results of `attention.qkv` [B,T,N]."""
        return _normed(self.attention_norm, self.attention.qkv, x, plan)

    def from_qkv(
        self,
        x: Array,
        qkv: Array,
        kv: Any,
        attend: Attend,
        plan: Plan,
        last: Array | None = None,
        live: Array | None = None,
    ) -> tuple[Array, Any]:
        """`__call__` after the first product, whose result is `qkv` [B,T,N]."""
        o, kv = self.attention(qkv, kv, attend, plan)
        if last is not None:
            x, o = (jnp.take_along_axis(a, last[:, None, None], axis=1) for a in (x, o))
            # These products run once per prompt, so kernels would save less time than lowering
            # them takes.
            plan = plan.with_xla("matmul")
        y = self._add(x, self.attention.out, o, self.attention_post_norm, plan)
        if self.attention_sum_norm is not None:
            y = self.attention_sum_norm(y, plan)
        norm = self.attention_norm if self.shared_norm else self.mlp_norm
        hidden = self.mlp.hidden(x if self.parallel else y, norm, plan)
        output = self.mlp.output
        if isinstance(self.mlp, Experts):
            output = functools.partial(output, live=live)
        y = self._add(y, output, hidden, self.mlp_post_norm, plan)
        return y if self.mlp_sum_norm is None else self.mlp_sum_norm(y, plan), kv

    def _add(
        self,
        x: Array,
        linear: Callable[..., Array],
        hidden: Array,
        post_norm: Norm | None,
        plan: Plan,
    ) -> Array:
        """x [B,T,E] → x + residual_multiplier * post_norm(linear(hidden))."""
        scale = self.residual_multiplier
        if post_norm is None and scale == 1:
            y = linear(hidden, residual=x, plan=plan)
        else:
            y = linear(hidden, plan=plan)
            y = y if post_norm is None else post_norm(y, plan)
            # A separate multiplication: fused with the addition, it would round differently.
            y = y if scale == 1 else by_row(lambda y: y * jnp.asarray(scale, y.dtype), y, plan)
            y = x + y
        # Without the barrier, for many tokens, XLA would keep the addends of all layers and sum
        # them again at every use.
        return y if x.shape[1] == 1 else lax.optimization_barrier(y)

    def to_next_qkv(
        self,
        x: Array,
        qkv: Array,
        kv: Any,
        attend: Attend,
        plan: Plan,
        following: "DecoderBlock",
        counters: Any,
        index: Array,
    ) -> tuple[Array, Array, Any]:
        """`from_qkv` for one token per row, and the first product of the following block.

        Args: see `Decoder.__call__` and `linear_chain`.

        Returns:
          (x [B,1,E], qkv of the following block [B,1,N], the layer's updated cache).
        """
        o, kv = self.attention(qkv, kv, attend, plan)
        weight = following.attention.qkv.weight[...]
        x, qkv = linear_chain(
            *(o[:, 0], x[:, 0], counters, index),
            out=self.attention.out.weight[...],
            mlp_norm=self.mlp_norm.operand(),
            gate_up=self.mlp.gate_up.weight[...],
            down=self.mlp.down.weight[...],
            next_norm=following.attention_norm.operand(),
            following=weight.reshape(len(weight), -1),
            gate=self.mlp.activation,
            plan=plan,
        )
        return x[:, None], qkv[:, None], kv


def chain_shape(config: DecoderConfig, rows: int, itemsize: int) -> dict[str, int]:
    """A plan's key for the `linear_chain` of a decode step."""
    linears = config.linear_shapes
    sizes = linears["out"].k, config.width, config.mlp_width, linears["qkv"].n
    return chain_key(rows, *sizes, itemsize)


def layers_shape(config: DecoderConfig, rows: int, slots: int, itemsize: int) -> dict[str, int]:
    """A plan's key for the `decode_layers` of a decode step."""
    heads = {"hkv": config.kv_heads, "d": config.head_dim, "s": slots}
    ranks, formats = config.blocks[0].tensor_parallel, _formats(config.blocks[0])
    return chain_shape(config, rows, itemsize) | heads | ranks_key(ranks) | formats.key


def chain_features(config: DecoderConfig) -> Features:
    """Features that `linear_chain` must support; it does not run attention."""
    return _common_features(config.blocks, attention=AttentionSpec(1.0))


def layers_features(config: DecoderConfig) -> Features:
    """Features that `decode_layers` must support."""
    asked = frozenset().union(*(block.attention_features for block in config.blocks))
    # φ and `unified`, which calibration sets, may differ between layers.
    blocks = [
        dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, phi=None, unified=True)
        )
        for block in config.blocks
    ]
    return asked | _common_features(blocks) | _formats(config.blocks[0]).features


def _formats(block: BlockSpec) -> Formats:
    return formats_of((linear.k, linear.weight) for linear in block.linears.values())


def _common_features(blocks: Sequence[BlockSpec], **same: Any) -> Features:
    """Features of any block, and "differing_blocks" if blocks differ outside the fields `same`."""
    asked = frozenset().union(*(block.features for block in blocks))
    differ = len({dataclasses.replace(block, **same) for block in blocks}) > 1
    return asked | ({"differing_blocks"} if differ else set())


def layer_weights(stacked: dict[str, Array]) -> LayerWeights:
    """Operands of `decode_layers` from stacked parameters, by their names in a block."""
    return LayerWeights(
        attention_norm=stacked["attention_norm.scale"],
        qkv=stacked["attention.qkv.weight"],
        out=stacked["attention.out.weight"],
        mlp_norm=stacked["mlp_norm.scale"],
        gate_up=stacked["mlp.gate_up.weight"],
        down=stacked["mlp.down.weight"],
    )


class Decoder(nnx.Module):
    """A decoder: embedding, blocks, final norm, head."""

    def __init__(self, config: DecoderConfig, dtype):
        width, inner = config.width, config.embedding_width or config.width
        rows = config.head_width if config.tie_embeddings else config.vocab_size
        self.embed = nnx.Param(jnp.zeros((rows, inner), dtype))
        self.positions = (
            None
            if config.position_offset is None
            else nnx.Param(jnp.zeros((config.position_rows, width), dtype))
        )
        self.embed_norm = Norm(width, config.blocks[0], dtype) if config.embedding_norm else None
        self.embed_in, self.embed_out = (
            Linear(shape, False, dtype) if inner != width else None
            for shape in ((inner, width), (width, inner))
        )
        self.blocks = nnx.List([DecoderBlock(spec, dtype) for spec in config.blocks])
        self.config = config
        self.norm = Norm(width, config.blocks[-1], dtype) if config.final_norm else None
        self.head = (
            None
            if config.tie_embeddings
            else Linear((inner, config.head_width), config.head_bias, dtype, config.head_format)
        )

    def __call__(
        self,
        tokens: Array,
        kv: list[Any] | Stack,
        attend: Attend,
        plan: Plan,
        *,
        starts: Array | None,
        last: Array | None = None,
        live: Array | None = None,
    ) -> tuple[Array, list[Any] | Stack]:
        """Compute hidden states before the final norm.

        Args:
          tokens: [B, T] int32.
          kv: one cache per layer, or one `Stack` for all, in a form that `attend` takes.
          attend: attention against that cache.
          plan: chooses the implementations.
          starts: [B] int32 position of each row's first token; None for 0. Only a learned table of
            positions uses it.
          last: [B] int32 index of the one token per row whose state is wanted; default all tokens.
            For other tokens, the last block then only updates its cache.
          live: [B] bool; rows that are not live need no result, so no experts are read for them.
            Default all.

        Returns:
          ([B, T, E], or [B, 1, E] with `last`; the updated caches).
        """
        x = self.embedded(tokens, starts, plan)
        if tokens.shape[1] == 1 and last is None and self._chains(x, plan):
            return self._chained(x, kv, attend, plan)

        (x,), kv = self._through_blocks([x], kv, [attend], plan, [last], live)
        return x, kv

    def in_tiles(
        self,
        tokens: Array,
        kv: list[Any] | Stack,
        tiles: Sequence[tuple[slice, Attend]],
        plan: Plan,
        *,
        starts: Array,
        last: Array,
    ) -> tuple[Array, list[Any] | Stack]:
        """`__call__` for rows in tiles: within each block of the decoder, one tile after the other.

        If several devices share the model, the sums of a tile can travel while the next one is
        computed (FastAttention, section 4.2, tiling-AllReduce).

        Args:
          tokens, kv, plan, starts, last: see `__call__`.
          tiles: rows and their attention, in the order in which they run. A tile sees what the
            tiles before it have written to the cache.
        """
        x = self.embedded(tokens, starts, plan)
        parts, attends = zip(*tiles, strict=True)
        found, kv = self._through_blocks(
            [x[part] for part in parts], kv, attends, plan, [last[part] for part in parts]
        )
        order = sorted(range(len(parts)), key=lambda i: parts[i].start)
        return jnp.concatenate([found[i] for i in order]), kv

    def in_loop(
        self,
        tokens: Array,
        kv: Stack,
        stacked: dict[str, Array],
        attend: Attend,
        plan: Plan,
        *,
        starts: Array,
        last: Array,
    ) -> tuple[Array, Stack]:
        """`__call__` with the layers in a loop; requires `Model.loops`.

        The program holds one layer, so the host prepares it in a fraction of the time, and the
        first kernel begins earlier.

        Args:
          tokens, kv, attend, plan, starts, last: see `__call__`.
          stacked: parameters of the blocks, [L, ...] by names such as "attention.qkv.weight".
        """
        graph, params = nnx.split(self.blocks[0])
        tree = jax.tree.structure(params)

        def of_layer(name, stack, i):
            if name.endswith(".weight"):
                return LayerOf(stack, i)
            return lax.dynamic_index_in_dim(stack, i, keepdims=False)

        def run(i, carry):
            x, kv = carry
            layer = {name: of_layer(name, stack, i) for name, stack in stacked.items()}
            layer = traverse_util.unflatten_dict(layer, sep=".")
            block = nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(layer)))
            x, layer_kv = block(x, kv.layer(i), attend, plan)
            return x, kv.updated(i, layer_kv)

        x = self.embedded(tokens, starts, plan)
        x, kv = lax.fori_loop(0, len(self.blocks), run, (x, kv))
        return jnp.take_along_axis(x, last[:, None, None], axis=1), kv

    def _through_blocks(
        self,
        tiles: list[Array],
        kv: list[Any] | Stack,
        attends: Sequence[Attend],
        plan: Plan,
        last: Sequence[Array | None],
        live: Array | None = None,
    ) -> tuple[list[Array], list[Any] | Stack]:
        """Run tiles of x [B,T,E] through all blocks; each has an attention, and maybe `last`."""

        def through(attend, x):
            def run(graph, params, x, kv, last, live):
                return nnx.merge(graph, params)(x, kv, attend, plan, last, live)

            return _shared(run, x)

        runs = list(map(through, attends, tiles))
        end = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            graph, params = nnx.split(block)
            experts_of = live if isinstance(block.mlp, Experts) else None
            for j, run in enumerate(runs):
                wanted = last[j] if i == end else None
                tiles[j], layer_kv = run(graph, params, tiles[j], _layer(kv, i), wanted, experts_of)
                kv = _updated(kv, i, layer_kv)
        return tiles, kv

    def embedded(self, tokens: Array, starts: Array | None, plan: Plan) -> Array:
        """tokens [B,T], at positions from starts [B] on → [B,T,E]."""
        x = self._rows(tokens, plan)
        if (scale := self.config.embedding_scale) != 1:
            # For a single row, XLA would merge this factor with the factor of the first norm. It
            # would then round differently than in a batch.
            x = by_row(lambda x: x * jnp.asarray(scale, x.dtype), x, plan)
        if self.embed_in is not None:
            x = self.embed_in(x, plan=plan)
        if self.positions is not None:
            at = self.config.position_offset + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            at = at if starts is None else at + starts[:, None]
            # Padding may lie past the end of the table.
            x = x + jnp.take(
                self.positions[...], jnp.broadcast_to(at, tokens.shape), axis=0, mode="clip"
            )
        return x if self.embed_norm is None else self.embed_norm(x, plan)

    def _rows(self, tokens: Array, plan: Plan) -> Array:
        """Rows of the embedding: [B,T] → [B,T,E]. Devices share it if it is also the head."""
        embed = self.embed[...]
        if len(embed) == self.config.vocab_size:
            return jnp.take(embed, tokens, axis=0)
        index = tokens - lax.axis_index(AXIS) * len(embed)
        own = (index >= 0) & (index < len(embed))
        rows = jnp.take(embed, jnp.where(own, index, 0), axis=0)
        return all_reduce(jnp.where(own[..., None], rows, 0), "embedding", plan=plan)

    def in_one_launch(
        self,
        tokens: Array,
        kv: tuple[Array, Array],
        stacked: dict[str, Array],
        lengths: Array,
        rotation_at: Callable[[Rope], tuple[Array, Array]],
        plan: Plan,
        *,
        pages: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Run one token per row through all layers in one kernel; requires `Model.one_launch`.

        Args:
          tokens: [B] int32.
          kv: caches of keys and of values, [L,B,Hkv,S,D] each, or pools of `pages`.
          stacked: parameters of the blocks, [L, ...] by names such as "attention.qkv.weight".
          lengths: [B] int32 slots filled before this token.
          rotation_at: rotary embedding → (cos, sin) [B,1,D/2] at the tokens' positions.
          plan: chooses the implementations.
          pages: [B,N] int32, see `decode_attention`.

        Returns:
          (hidden states before the final norm [B,1,E], the updated caches).
        """
        x = self.embedded(tokens[:, None], lengths, plan)[:, 0]
        first = self.config.attention[0]
        x, *kv = decode_layers(
            *(x, *kv, lengths, rotation_at(first.rope), layer_weights(stacked)),
            eps=self.config.norm_eps,
            gate=self.config.activation,
            scale=first.scale,
            pages=pages,
            ranks=self.config.blocks[0].tensor_parallel,
            plan=plan,
        )
        return x[:, None], tuple(kv)

    def _chains(self, x: Array, plan: Plan) -> bool:
        """Whether one kernel runs everything between two attentions; x [B,1,E]."""
        shape = chain_shape(self.config, len(x), x.dtype.itemsize)
        choice = plan.choose("linear_chain", chain_features(self.config), **shape)
        return choice.implementation != "xla"

    def _chained(
        self, x: Array, kv: list[Any] | Stack, attend: Attend, plan: Plan
    ) -> tuple[Array, list[Any] | Stack]:
        """Run the blocks with one launch between two attentions; x [B,1,E]."""

        def run(graph, params, *args):
            block, following = nnx.merge(graph, params)
            x, qkv, kv, counters, index = args
            return block.to_next_qkv(x, qkv, kv, attend, plan, following, counters, index)

        run = _shared(run, x)
        first, end = self.blocks[0], self.blocks[-1]
        qkv = first.first_product(x, plan)
        counters = chain_counters(len(self.blocks) - 1)
        for i, pair in enumerate(itertools.pairwise(self.blocks)):
            graph, params = nnx.split(nnx.List(pair))
            x, qkv, layer_kv = run(graph, params, x, qkv, _layer(kv, i), counters, jnp.int32(i))
            kv = _updated(kv, i, layer_kv)
        last = len(self.blocks) - 1
        x, layer_kv = end.from_qkv(x, qkv, _layer(kv, last), attend, plan)
        return x, _updated(kv, last, layer_kv)

    def logits(self, hidden: Array, plan: Plan) -> Array:
        """hidden [..., E] → fp32 logits [..., V]."""
        norm = self.norm
        if self.embed_out is not None:
            hidden, norm = _normed(norm, self.embed_out, hidden, plan), None
        logits = _normed(norm, self._head, hidden, plan, preferred_element_type=jnp.float32)
        if self.config.tensor_parallel > 1:
            logits = all_columns(logits, "logits")
            logits = logits[..., : self.config.vocab_size]
        if (scale := self.config.logit_scale) != 1:
            logits = logits * scale
        if (cap := self.config.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def _head(self, hidden: Array, **fused) -> Array:
        """The head, or the transposed embedding; `fused` are keywords of `matmul`."""
        if self.head is not None:
            return self.head(hidden, **fused)
        # XLA reads the transposed embedding in place. A kernel would need a copy each time.
        head = self.embed[...].T
        return matmul(hidden, head, transposed=True, implementation="xla", **fused)


def _layer(kv: list[Any] | Stack, i: int) -> Any:
    return kv[i] if isinstance(kv, list) else kv.layer(i)


def _updated(kv: list[Any] | Stack, i: int, layer: Any) -> list[Any] | Stack:
    return kv[:i] + [layer] + kv[i + 1 :] if isinstance(kv, list) else kv.updated(i, layer)


def _shared(run: Callable, x: Array) -> Callable:
    """Jit run(graph, ...), so that equal blocks share one trace and one lowering.

    Call it only inside a trace. Outside, every call would jit a new function and compile it again.
    """
    return jax.jit(run, static_argnums=0) if isinstance(x, jax.core.Tracer) else run


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model without its weights: static, hashable by identity, usable as a jit static argument.

    Attributes:
      config: the architecture.
      dtype: dtype of activations and of parameters that are not quantised, a NumPy name.
      plan: chooses the implementations.
      kv_dtype: "int8", or None for a cache in the dtype of the activations.
      token_ranks: number of devices that divide the tokens of each KV head in a cache of pages; 1
        if each device has all tokens of its KV heads.
    """

    config: DecoderConfig
    dtype: str
    plan: Plan
    _graph: nnx.GraphDef = dataclasses.field(repr=False)
    _abstract: nnx.State = dataclasses.field(repr=False)
    _local: "Model | None" = dataclasses.field(default=None, repr=False)
    kv_dtype: str | None = None
    token_ranks: int = 1

    @property
    def local(self) -> "Model":
        """The model that each device runs, with its own shapes; on a single device, this model."""
        return self._local or self

    @property
    def ranks(self) -> int:
        """Number of devices that share the model."""
        return self.local.config.tensor_parallel

    @property
    def cache_features(self) -> Features:
        """Features that attention must support for the cache."""
        return cache_features(self.kv_dtype)

    @functools.cached_property
    def partitions(self) -> Any:
        """The `PartitionSpec` of each parameter, as a tree like `abstract_params`."""
        return partitions(self.abstract_params, self.local.abstract_params, self.ranks)

    def module(self, params: Params) -> Decoder:
        """The decoder with these parameters; call it inside a trace.

        Raises:
          NotImplementedError: several devices share the model. Each runs `local`.
        """
        if self._local is not None:
            raise NotImplementedError(
                "tensor_parallel: each device runs `Model.local` of a model that devices share"
            )
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        return nnx.merge(self._graph, state)

    @functools.cached_property
    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters, as a tree of `jax.ShapeDtypeStruct`."""
        params = nnx.to_pure_dict(self._abstract)
        if self._local is not None and not self.config.tie_embeddings:
            # Devices read few rows of it, so each has the whole table.
            params["embed"] = self._local.abstract_params["embed"]
        return params

    def one_launch(self, rows: int, slots: int) -> bool:
        """Whether one kernel runs all layers of a decode step with this many rows and slots.

        The kernel reads weights and caches that are stacked over the layers. It cannot exchange
        the results of devices that divide the tokens of a KV head.
        """
        if self.local.token_ranks > 1:
            return False
        itemsize = jnp.dtype(self.dtype).itemsize
        config = self.local.config
        shape = layers_shape(config, rows, slots, itemsize)
        features = layers_features(config) | self.cache_features
        choice = self.plan.choose("decode_layers", features, **shape)
        return choice.implementation != "xla"

    def loops(self, tokens: int) -> bool:
        """Whether a call of prompts with this many tokens runs the layers in a loop.

        The loop reads stacked weights. XLA would copy the weights of each layer before it
        multiplies by them, so our kernels must run all products.
        """
        block, *others = dict.fromkeys(self.local.config.blocks)
        if others or block.experts is not None or block.formats:
            return False  # quantised weights were not measured in a loop
        itemsize = jnp.dtype(self.dtype).itemsize
        shapes = [linear.shape for linear in block.linears.values()]
        choices = [
            self.plan.choose("matmul", shape.features, **shape.key(tokens, itemsize))
            for shape in shapes
        ]
        return all(choice.implementation != "xla" for choice in choices)

    def prompt_tiles(self, blocks: int, tokens: int) -> int:
        """Tiles of a call of prompts with so many blocks of `tokens` tokens each.

        While XLA's sums of one tile travel, another is computed (FastAttention, section 4.2). On
        two H200, two tiles of 2 048 tokens are faster than one of 4 096, and tiles of 512 are
        slower (benchmarks/LOG.md, 2026-11-27). With sums by our kernel, which takes less time and
        all multiprocessors, one tile is faster.
        """
        if self.ranks == 1:
            return 1
        tiles = self.plan.prompt_tiles
        if tiles is None:
            on_gpu = self.plan.compute_capability is not None
            many = blocks * tokens >= _TOKENS_OF_TILES
            tiles = 2 if on_gpu and many and self.sums_by_xla(blocks * tokens) else 1
        return 1 if blocks % tiles else tiles

    def sums_by_xla(self, rows: int) -> bool:
        """Whether the devices that share the model sum so many rows by XLA."""
        shape = sum_shape(rows, self.config.width, self.dtype, self.ranks)
        return self.plan.choose("all_reduce", **shape).implementation == "xla"

    @property
    def one_launch_possible(self) -> bool:
        """Whether `one_launch` holds for some batch: one in the plan's table, or one row."""
        shapes = [dict(e.shape) for e in self.plan.table if e.op == "decode_layers"]
        return any(self.one_launch(s.get("m", 1), s.get("s", 128)) for s in [{}, *shapes])

    @property
    def parameter_count(self) -> int:
        """Number of weights. Tied embeddings count once, repeated KV heads each time."""
        leaves = jax.tree.leaves(self.abstract_params, is_leaf=is_quantised)
        return sum(leaf.size for leaf in leaves)

    @property
    def active_parameter_count(self) -> int:
        """Number of weights that one token uses, without the experts that it does not choose."""
        return self.parameter_count - self.config.idle_expert_weights(1)

    @functools.cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert of each layer, 0 for a layer without experts."""

        def of(i: int, block: BlockSpec) -> int:
            if block.experts is None:
                return 0
            experts = self.abstract_params["blocks"][i]["mlp"]["experts"]
            leaves = jax.tree.leaves({**experts, "bias": None})
            return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // block.experts.experts

        return tuple(itertools.starmap(of, enumerate(self.config.blocks)))

    def idle_expert_bytes(self, rows: int) -> int:
        """Bytes of all layers' experts that this many tokens certainly do not choose."""
        layers = zip(self.config.blocks, self.expert_bytes, strict=True)
        return sum(block.idle_experts(rows) * size for block, size in layers)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        leaves = jax.tree.leaves(self.abstract_params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def describe(
    config: DecoderConfig,
    *,
    dtype: str | None = None,
    plan: Plan | None = None,
    tensor_parallel: int = 1,
    kv_dtype: str | None = None,
) -> Model:
    """Describe a model without allocating anything.

    Args:
      config: the architecture.
      dtype: dtype of activations and of parameters that are not quantised; default the
        checkpoint's.
      plan: chooses the implementations; default the plan of the first local device.
      tensor_parallel: number of devices that share the model. It must divide the query heads and F
        (the width of an MLP or of an expert, and of an MLP beside the experts). It must divide the
        KV heads or be a multiple of them; KV heads are then repeated, see `Plan.divide_tokens`.
      kv_dtype: "int8", or the dtype of the activations, which is the default.

    Raises:
      ValueError: `tensor_parallel` does not divide the model, or `kv_dtype` is another dtype.
      NotImplementedError: devices cannot share a model with its features.
    """
    dtype = dtype or config.dtype
    plan = Plan.for_device() if plan is None else plan
    if kv_dtype not in (None, "int8", dtype):
        raise ValueError(
            f"load: kv_dtype must be int8 or the dtype of the activations, {dtype}, "
            f"got {kv_dtype!r}"
        )
    kv_dtype = None if kv_dtype == dtype else kv_dtype
    if tensor_parallel == 1:
        return _described(config, dtype, plan, kv_dtype)
    plan = plan.for_several_devices()
    local = _described(local_config(config, tensor_parallel), dtype, plan, kv_dtype)
    divide = token_ranks(config, tensor_parallel) if plan.divide_tokens else 1
    local = dataclasses.replace(local, token_ranks=divide)
    whole = _described(whole_config(local.config), dtype, plan, lay_out=False)
    return Model(config, dtype, plan, whole._graph, whole._abstract, local, kv_dtype, divide)


def _described(
    config: DecoderConfig,
    dtype: str,
    plan: Plan,
    kv_dtype: str | None = None,
    *,
    lay_out: bool = True,
) -> Model:
    if config.weight_formats and lay_out:
        config = laid_out(config, plan, jnp.dtype(dtype).itemsize)
    return Model(config, dtype, plan, *_abstract(config, dtype), kv_dtype=kv_dtype)


@functools.lru_cache(maxsize=64)
def _abstract(config: DecoderConfig, dtype: str) -> tuple[nnx.GraphDef, nnx.State]:
    """The modules of a model without their parameters, and the shapes of these."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype))))


def random_params(
    model: Model,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
    take: Take = lambda path, weight: weight,
) -> Params:
    """Random parameters for benchmarks and tests, made on the devices in the real shapes.

    Weights are normal with the standard deviation of transformers, 0.02. Norms scale by 1. Codes of
    quantised weights are uniform, with the same standard deviation of the weights. Devices with the
    same KV head get the same keys and values, unless the weights are quantised.

    Args:
      model: the model.
      seed: seed of the random numbers.
      devices: devices that share the model; default the first local ones.
      take: called with the path and the value of each parameter as it is made, unless devices share
        it. The returned tree holds its results.
    """
    key = jax.random.key(seed)
    paths, tree = jax.tree.flatten_with_path(model.abstract_params, is_leaf=is_quantised)
    shardings = [None] * len(paths)
    if model.ranks > 1:
        devices = jax.local_devices()[: model.ranks] if devices is None else devices
        mesh = Mesh(np.array(devices), (AXIS,))
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            model.partitions,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        shardings = tree.flatten_up_to(shardings)
    leaves = []
    for i, ((path, leaf), sharding) in enumerate(zip(paths, shardings, strict=True)):
        names = tuple(entry.key for entry in path)
        if names[-1].endswith("scale"):
            scale = 1 - model.config.norm_offset
            made = jnp.full(leaf.shape, scale, leaf.dtype, device=sharding)
        else:
            copies = model.ranks // model.config.kv_heads if "qkv" in names else 1
            made = _random_weight(leaf, copies, sharding)(jax.random.fold_in(key, i))
        leaves.append(take(names, made) if model.ranks == 1 else made)
        del made
    return jax.tree.unflatten(tree, leaves)


# One program for all layers. A program that makes all weights at once takes a minute to compile.
@functools.cache
def _random_weight(like: Any, copies: int, sharding: Any) -> Callable[[Array], Any]:
    """A function from a key to a weight. Each device makes its own part.

    Args:
      like: shape and dtype of the weight, or a quantised weight of these.
      copies: number of devices that have the same keys and values, if this weight has them.
      sharding: sharding of the result, or None for one device.
    """

    def make(key):
        if is_quantised(like):
            return random_quantised(key, like, 0.02)
        made = 0.02 * jax.random.normal(key, like.shape, like.dtype)
        if copies > 1:
            kv = made[..., ::copies, -2:, :].repeat(copies, axis=-3)
            made = made.at[..., -2:, :].set(kv)
        return made

    if sharding is None or copies <= 1 or is_quantised(like):
        return jax.jit(make, out_shardings=sharding)

    # Each device makes the whole weight and keeps its part. To exchange keys and values, XLA would
    # start NCCL before an engine has set NCCL's options.
    axis = sharding.spec.index(AXIS)
    part = like.shape[axis] // sharding.mesh.size

    def own_part(key):
        return lax.dynamic_slice_in_dim(make(key), lax.axis_index(AXIS) * part, part, axis)

    specs = {"in_specs": PartitionSpec(), "out_specs": sharding.spec}
    return jax.jit(jax.shard_map(own_part, mesh=sharding.mesh, **specs, check_vma=False))
