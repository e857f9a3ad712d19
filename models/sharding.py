"""Tensor parallelism: which part of a model each device holds.

QKV is divided by KV heads, gate and up by F, the head by the vocabulary. Experts are divided like
an MLP: each device holds a part of every expert. The products after them are divided by their
inputs, and the devices sum the results. `local_config` is the model that one device runs, with its
own shapes. A comparison with the whole model (`whole_config`) gives the divided axis of each
parameter.

KV heads are repeated if there are fewer of them than devices, and the vocabulary is padded. Devices
with the same KV head can divide its tokens in the cache (`token_ranks`).
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fdjax.models.block import BlockSpec
from fdjax.models.config import DecoderConfig
from fdjax.pallas_kernels.attention.shared import needs_positions
from fdjax.pallas_kernels.dispatch import refuse_unknown, used_features
from fdjax.pallas_kernels.experts.routing import ROUTING_FEATURES
from fdjax.pallas_kernels.quantised import BITS, WEIGHT_FEATURES
from fdjax.pallas_kernels.ranks import AXIS

# Features of a `BlockSpec`, of its attention and of a `DecoderConfig` that devices can share.
_BLOCK_CAN = WEIGHT_FEATURES.union(
    """
    qkv_bias out_bias mlp_bias norm_offset norm_bias layer_norm qk_norm whole_qk_norm no_pre_norms
    post_norms sum_norms parallel shared_norm no_gate residual_multiplier experts shared_width
    shared_gate router_bias expert_bias
    """.split()
).union(f"experts.{name}" for name in ROUTING_FEATURES)
_ATTENTION_CAN = frozenset({"rope", "window", "soft_cap", "alibi", "phi", "unified", "sinks"})
_CONFIG_CAN = frozenset(
    """
    embedding_scale embedding_norm embedding_width position_offset final_norm head_bias logit_scale
    logit_soft_cap head_format
    """.split()
)
# Parameters that are divided along the vocabulary, by the first name in their path.
_BY_VOCABULARY = ("embed", "head")


def local_config(config: DecoderConfig, ranks: int) -> DecoderConfig:
    """The model that each of several devices runs. It keeps the whole vocabulary's size.

    Raises:
      ValueError: the number of devices does not divide the model. The message says what it must
        divide.
      NotImplementedError: devices cannot share a model with these features.
    """
    op = "tensor_parallel"
    refuse_unknown(op, used_features(config), _CONFIG_CAN)
    for block in config.blocks:
        refuse_unknown(op, block.features, _BLOCK_CAN)
        refuse_unknown(op, block.attention.features, _ATTENTION_CAN)
    blocks = tuple(_local_block(block, ranks) for block in config.blocks)
    form = config.head_format
    if form and config.vocab_size % ranks:
        raise ValueError(
            f"tensor_parallel: must divide the vocabulary {config.vocab_size} of a quantised head, "
            f"got {ranks}"
        )
    return dataclasses.replace(config, blocks=blocks)


def _local_block(block: BlockSpec, ranks: int) -> BlockSpec:
    for name, size in (
        ("query heads", block.heads),
        ("width of an expert" if block.experts else "MLP width", block.mlp_width),
        ("width of the shared expert", block.shared_width),
    ):
        if size % ranks:
            raise ValueError(f"tensor_parallel: must divide the {name} {size}, got {ranks}")
    if block.kv_heads % ranks and ranks % block.kv_heads:
        raise ValueError(
            f"tensor_parallel: must divide the KV heads {block.kv_heads} or be a multiple of them, "
            f"got {ranks}"
        )
    if block.whole_qk_norm and block.layer_norm:
        raise NotImplementedError("tensor_parallel: supports no LayerNorm over all heads")
    local = dataclasses.replace(
        block,
        heads=block.heads // ranks,
        kv_heads=max(1, block.kv_heads // ranks),
        mlp_width=block.mlp_width // ranks,
        shared_width=block.shared_width // ranks,
        attention=dataclasses.replace(block.attention, ranks=ranks),
        tensor_parallel=ranks,
    )
    formats = []
    for name, form in block.formats:
        _, k = local.weights[name]
        if k % (32 // BITS[form.kind]):
            raise ValueError(
                f"tensor_parallel: {ranks} devices would divide the words of quantised weights: "
                f"{name} has {k * ranks} inputs"
            )
        # Smaller groups repeat the scales of larger ones.
        formats.append((name, dataclasses.replace(form, group=math.gcd(form.group, k))))
    return dataclasses.replace(local, formats=tuple(formats))


def token_ranks(config: DecoderConfig, ranks: int) -> int:
    """Number of devices that divide the tokens of a KV head among themselves; 1 if none do.

    Args:
      config: the model, not divided.
      ranks: number of devices that share it.
    """
    alone = ranks <= config.kv_heads or why_tokens_repeat(config)
    return 1 if alone else ranks // config.kv_heads


def why_tokens_repeat(config: DecoderConfig) -> str | None:
    """Why devices with the same KV head all hold all of its tokens; None if they can divide them.

    Attention to a part of the tokens must not depend on where the other tokens are.
    """
    for i, spec in enumerate(config.attention):
        if names := sorted(needs_positions(spec)):
            return f"layer {i} has {', '.join(names)}"
    return None


def whole_config(local: DecoderConfig) -> DecoderConfig:
    """A model for one device with the joined parameters of all devices."""
    ranks = local.tensor_parallel
    blocks = tuple(
        dataclasses.replace(
            block,
            heads=block.heads * ranks,
            kv_heads=block.kv_heads * ranks,
            mlp_width=block.mlp_width * ranks,
            shared_width=block.shared_width * ranks,
            tensor_parallel=1,
        )
        for block in local.blocks
    )
    return dataclasses.replace(local, blocks=blocks, vocab_size=local.head_width * ranks)


def is_padded(path: tuple[str | int, ...]) -> bool:
    """Whether the parameter at a path is padded to a multiple of the devices."""
    return path[0] in _BY_VOCABULARY


def partitions(whole: Any, local: Any, ranks: int) -> Any:
    """The `PartitionSpec` of each array of a tree, from the whole shapes and those on a device."""
    return jax.tree.map(
        lambda a, b: _partition(a.shape, b.shape, ranks), whole, _like(local, whole)
    )


def _partition(whole: tuple[int, ...], local: tuple[int, ...], ranks: int) -> PartitionSpec:
    divided = [i for i, (n, m) in enumerate(zip(whole, local, strict=True)) if n != m]
    if len(divided) > 1 or any(whole[i] != ranks * local[i] for i in divided):
        raise NotImplementedError(f"tensor_parallel: cannot divide {whole} into {local}")
    return PartitionSpec(
        *(AXIS if i in divided else None for i in range(max(divided, default=-1) + 1))
    )


def _like(tree: Any, other: Any) -> Any:
    """The leaves of a tree in the structure of another, whose `QTensor`s have other shapes."""
    return jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(tree))
