"""Chooses the order of the words of quantised weights in memory."""

import dataclasses

from fdjax.models.block import LinearShape
from fdjax.models.config import DecoderConfig
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BRICKS, WeightFormat, no_bricks


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

    blocks = tuple(
        dataclasses.replace(
            block,
            formats=tuple(
                (name, chosen(linears[name].shape) if name in linears else form)
                for name, form in block.formats
            ),
        )
        for block in config.blocks
        for linears in [block.linears]
    )
    head = config.head_format and chosen(config.linear_shapes["head"])
    return dataclasses.replace(config, blocks=blocks, head_format=head)
