"""Reads the mixture of experts from a config.json."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fdjax.models.config import CheckpointError, ConfigReader, DecoderConfig
from fdjax.pallas_kernels.experts import Routing

# Fields that only training uses.
ONLY_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
# Far more than any model has. A damaged file must not fill the memory.
_MOST_EXPERTS = 4096


def read_routing(reader: ConfigReader, experts: str, **fields: Any) -> Routing:
    """Read the numbers of experts.

    Args:
      reader: reader of the whole file.
      experts: the key of their number.
      **fields: other fields of `Routing`.
    """
    number = reader.positive(experts)
    chosen = reader.positive("num_experts_per_tok")
    if number > _MOST_EXPERTS:
        raise CheckpointError(
            f"{reader.source}: {experts!r} must be at most {_MOST_EXPERTS}, got {number}"
        )
    if chosen > number:
        raise CheckpointError(
            f"{reader.source}: 'num_experts_per_tok' must be at most {experts!r}, "
            f"got {chosen} and {number}"
        )
    return Routing(number, chosen, **fields)


def read_dense_layers(reader: ConfigReader, layers: int) -> list[int]:
    """Read which layers of a Qwen have a single MLP: listed ones, or between sparse steps."""
    step = reader.positive("decoder_sparse_step", 1)
    listed = reader.get("mlp_only_layers", list, [])
    if not all(type(i) is int for i in listed):
        raise CheckpointError(
            f"{reader.source}: 'mlp_only_layers' must hold integers, got {listed!r}"
        )
    return [i for i in range(layers) if i in listed or (i + 1) % step]


def with_dense_layers(config: DecoderConfig, layers: Sequence[int], width: int) -> DecoderConfig:
    """A copy of a model in which these layers have a single MLP with F = `width`."""
    dense = {"experts": None, "shared_width": 0, "shared_gate": False, "mlp_width": width}
    blocks = [
        dataclasses.replace(block, **dense) if i in layers else block
        for i, block in enumerate(config.blocks)
    ]
    return dataclasses.replace(config, blocks=tuple(blocks))
