"""Models: a family is one file with its config.json and its tensor names.

`parse_config` reads any supported config.json, `describe` makes a `Model` of it without allocating
anything, `weight_map` says which checkpoint tensors its parameters come from.
"""

from collections.abc import Mapping
from typing import Any

from fdjax.models import llama
from fdjax.models.attention import Attend, AttentionSpec
from fdjax.models.config import CheckpointError, ConfigReader, DecoderConfig
from fdjax.models.decoder import Decoder, Model, Params, describe, random_params
from fdjax.models.weights import WeightMap, export_tensors

FAMILIES = {"llama": llama}

__all__ = [
    "FAMILIES",
    "Attend",
    "AttentionSpec",
    "CheckpointError",
    "Decoder",
    "DecoderConfig",
    "Model",
    "Params",
    "describe",
    "export_tensors",
    "ignored_tensors",
    "parse_config",
    "random_params",
    "weight_map",
]


def parse_config(data: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """Parse a Hugging Face config.json.

    Args:
      data: its content.
      source: what to call it in errors.

    Raises:
      CheckpointError: a missing, malformed or unsupported field; the message lists what is
        supported.
    """
    reader = ConfigReader(data, source)
    model_type = reader.get("model_type", str, None)
    types = {name: family for family in FAMILIES.values() for name in family.MODEL_TYPES}
    if model_type not in types:
        problem = "is missing" if model_type is None else f"{model_type!r} is not supported"
        raise CheckpointError(
            f"{source}: model_type {problem}; supported: {', '.join(sorted(types))}"
        )
    try:
        return types[model_type].parse_config(reader)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def weight_map(config: DecoderConfig) -> WeightMap:
    """Where each parameter of a model comes from in its checkpoint."""
    return FAMILIES[config.family].weight_map(config)


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of tensors a checkpoint may carry without need."""
    return FAMILIES[config.family].IGNORED_TENSORS
