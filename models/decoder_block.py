"""The modules of a decoder block: norms, linear layers, attention, MLP, experts.

They hold weights and no cache. A `BlockSpec` describes them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from fdjax.models.attend import Attend
from fdjax.models.block import DECODER_CAN, BlockSpec, LinearSpec
from fdjax.pallas_kernels.all_reduce import all_reduce
from fdjax.pallas_kernels.dispatch import refuse_unknown
from fdjax.pallas_kernels.experts import moe
from fdjax.pallas_kernels.gemm import linear_chain, matmul
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised, rms_norm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import QTensor, WeightFormat
from fdjax.pallas_kernels.ranks import only_first
from fdjax.pallas_kernels.row_tiles import by_row


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
            stack = weight.shape[:1]  # unused if it is quantised
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
            return normed(norm, self.gate_up, x, plan, gate=self.activation)
        return normed(norm, self.up, x, plan, activation=self.activation)

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
        logits = normed(norm, self.router, x, plan, preferred_element_type=jnp.float32)
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


def normed(norm: Norm | None, linear: Callable[..., Array], x: Array, plan: Plan, **fused) -> Array:
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
        return normed(self.attention_norm, self.attention.qkv, x, plan)

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
