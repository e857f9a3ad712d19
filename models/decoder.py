"""The decoder that all families share: blocks of attention and MLP, described by `BlockSpec`s."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array, lax

from fdjax.models.attend import Attend, Stack
from fdjax.models.config import DecoderConfig
from fdjax.models.decoder_block import DecoderBlock, Experts, LayerOf, Linear, Norm, normed
from fdjax.models.fused_layers import chain_features, chain_shape
from fdjax.pallas_kernels.all_reduce import all_reduce
from fdjax.pallas_kernels.gemm import chain_counters, matmul
from fdjax.pallas_kernels.layers import LayerWeights, decode_layers
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import is_quantised
from fdjax.pallas_kernels.ranks import AXIS, all_columns
from fdjax.pallas_kernels.rope import Rope
from fdjax.pallas_kernels.row_tiles import by_row


def layers_of_a_turn(layers: int) -> int:
    """Layers in a turn of a loop over layers, up to 4: a GPU waits about 5 us for each turn."""
    return math.gcd(layers, 4)


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

        The program holds few layers, so the host prepares it in a fraction of the time, and the
        first kernel begins earlier.

        Args:
          tokens, kv, attend, plan, starts, last: see `__call__`.
          stacked: parameters of the blocks, [L, ...] by names such as "attention.qkv.weight".
        """
        graph, params = nnx.split(self.blocks[0])
        tree = jax.tree.structure(params, is_leaf=is_quantised)

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

        each = layers_of_a_turn(len(self.blocks))
        shared = jax.jit(run)  # traced and lowered once

        def turn(i, carry):
            for at in range(each):
                carry = shared(each * i + at, carry)
            return carry

        x = self.embedded(tokens, starts, plan)
        x, kv = lax.fori_loop(0, len(self.blocks) // each, turn, (x, kv))
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
            hidden, norm = normed(norm, self.embed_out, hidden, plan), None
        logits = normed(norm, self._head, hidden, plan, preferred_element_type=jnp.float32)
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
