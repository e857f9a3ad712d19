"""A model without its weights: what it computes, what it takes, and which kernels run it.

`describe` splits the modules once into a static graph and plain parameters, and `Model.module` puts
both together again inside a trace.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fdjax.models.block import BlockSpec, LinearShape
from fdjax.models.config import DecoderConfig
from fdjax.models.decoder import Decoder
from fdjax.models.fused_layers import layers_features, layers_shape
from fdjax.models.layouts import laid_out
from fdjax.models.sharding import local_config, partitions, token_ranks, whole_config
from fdjax.pallas_kernels.all_reduce import sum_shape
from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.dispatch import Features, resolve
from fdjax.pallas_kernels.gemm import MATMUL
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import is_quantised

Params = dict[str, Any]
# From so many tokens on, GPUs that share a model compute calls of prompts in tiles.
_TOKENS_OF_TILES = 4096
_SHORT_PROMPT = 128


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
        multiplies by them, so kernels must run all products that read them in place.
        """
        block, *others = dict.fromkeys(self.local.config.blocks)
        if others or block.experts is not None:
            return False
        itemsize = jnp.dtype(self.dtype).itemsize

        def in_place(shape: LinearShape) -> bool:
            key = shape.key(tokens, itemsize)
            try:
                return resolve(MATMUL, self.plan, None, shape.features, **key)[0].in_place
            except NotImplementedError:  # the product says so when it runs
                return False

        return all(in_place(linear.shape) for linear in block.linears.values())

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
    def stacks_layers(self) -> bool:
        """Whether a program reads stacked weights: `one_launch`, or `loops` with short prompts.

        Without one launch, loops were measured with quantised weights only.
        """
        loops = self.ranks == 1 and self.config.weight_formats and self.loops(_SHORT_PROMPT)
        return self.one_launch_possible or bool(loops)

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
