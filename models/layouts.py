"""Chooses the order of the words of quantised weights in memory."""

import dataclasses

from fdjax.models.block import BlockSpec, LinearShape
from fdjax.models.config import DecoderConfig
from fdjax.pallas_kernels.experts import moe_features, moe_key
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BRICKS, WeightFormat, no_bricks

Formats = tuple[tuple[str, WeightFormat], ...]


def laid_out(config: DecoderConfig, plan: Plan, itemsize: int) -> DecoderConfig:
    """The same model, with the layouts that the kernels of a plan read.

    Args:
      config: the model.
      plan: chooses the implementations.
      itemsize: bytes of an activation.
    """

    def chosen(shape: LinearShape) -> WeightFormat:
        columns = shape.n // 2 if shape.gate else shape.n
        if no_bricks((shape.k, columns)):
            return shape.weight
        other = dataclasses.replace(shape.weight, layout=BRICKS)
        features = dataclasses.replace(shape, weight=other).features
        choice = plan.choose("matmul", features, **shape.key(1, itemsize))
        return shape.weight if choice.implementation == "xla" else other

    def formats_of(block: BlockSpec) -> Formats:
        linears = block.linears
        return tuple(
            (name, chosen(linears[name].shape) if name in linears else form)
            for name, form in _with_experts_laid_out(block, plan, itemsize)
        )

    blocks = tuple(dataclasses.replace(block, formats=formats_of(block)) for block in config.blocks)
    head = config.head_format and chosen(config.linear_shapes["head"])
    return dataclasses.replace(config, blocks=blocks, head_format=head)


def _with_experts_laid_out(block: BlockSpec, plan: Plan, itemsize: int) -> Formats:
    """The formats of a block; its experts in bricks if a kernel reads them."""
    own, names = dict(block.formats), ("experts.gate_up", "experts.down")
    if block.experts is None or not any(name in own for name in names):
        return block.formats
    if no_bricks((block.width, block.mlp_width)):
        return block.formats
    bricks = {name: dataclasses.replace(own[name], layout=BRICKS) for name in names if name in own}
    formats = tuple(bricks.values())
    features = moe_features(
        block.experts, block.activation, biases=block.expert_bias, formats=formats
    )
    key = moe_key(1, block.width, block.mlp_width, block.experts, itemsize, formats)
    is_xla = plan.choose("moe", features, **key).implementation == "xla"
    return block.formats if is_xla else tuple((own | bricks).items())
