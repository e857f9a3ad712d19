"""What a plan is asked about `linear_chain` and `decode_layers`: keys and features of a model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fdjax.models.block import BlockSpec
from fdjax.models.config import DecoderConfig
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Features
from fdjax.pallas_kernels.gemm import chain_key
from fdjax.pallas_kernels.layers import Formats, formats_of, ranks_key


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
