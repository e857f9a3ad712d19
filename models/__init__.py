"""Models. Each family is one file, which parses its config.json and names its tensors.

`parse_config` reads any supported config.json. `describe` makes a `Model` from the result without
allocating anything. `weight_map` maps the model's parameters to checkpoint tensors.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from fdjax.models.attend import Attend
from fdjax.models.block import BlockSpec, LinearShape
from fdjax.models.config import CheckpointError, ConfigReader, DecoderConfig
from fdjax.models.decoder import Decoder
from fdjax.models.families import FAMILIES
from fdjax.models.fused_layers import chain_features, chain_shape, layers_features, layers_shape
from fdjax.models.model import Model, Params, describe
from fdjax.models.name_map import TensorNames, WeightMap, decoder_weights, export_tensors
from fdjax.models.random_weights import random_params
from fdjax.models.readable import readable
from fdjax.models.refused import REFUSED
from fdjax.models.rope import with_spans
from fdjax.pallas_kernels.attention.spec import AttentionSpec

__all__ = [
    "FAMILIES",
    "Attend",
    "AttentionSpec",
    "BlockSpec",
    "CheckpointError",
    "Decoder",
    "DecoderConfig",
    "LinearShape",
    "Model",
    "Params",
    "chain_features",
    "chain_shape",
    "describe",
    "export_tensors",
    "head_tensor",
    "ignored_tensors",
    "layers_features",
    "layers_shape",
    "parse_config",
    "random_params",
    "renamed_tensors",
    "weight_map",
]

# Tensors that many checkpoints have but no model needs: frequencies, the head of a tied model.
_IGNORED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")


def parse_config(data: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """Parse a Hugging Face config.json.

    Args:
      data: content of the file.
      source: name of the file in error messages.

    Raises:
      CheckpointError: a field is missing, malformed or unsupported; the message lists what is
        supported.
    """
    model_type = ConfigReader(data, source).get("model_type", str, None)
    types = {name: family for family in FAMILIES.values() for name in family.MODEL_TYPES}
    if model_type not in types:
        problem = "is missing" if model_type is None else f"{model_type!r} is not supported"
        if reason := REFUSED.get(model_type):
            problem += f", because {reason}"
        code = " (the checkpoint's own code is never run)" if data.get("auto_map") else ""
        raise CheckpointError(
            f"{source}: model_type {problem}{code}; supported: {', '.join(sorted(types))}"
        )
    family = types[model_type]
    _warn_of_code(data, family.ARCHITECTURE, source)
    try:
        names = getattr(family, "NAMES", {})
        return with_spans(family.parse_config(ConfigReader(data, source, family.DEFAULTS, names)))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _warn_of_code(data: Mapping[str, Any], architecture: str, source: str) -> None:
    """Warn if a checkpoint brings its own code, which is not run and may be another model."""
    auto_map = data.get("auto_map")
    code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else auto_map
    if code and not str(code).endswith(f".{architecture}"):
        warnings.warn(
            readable(
                f"{source}: 'auto_map' names the checkpoint's own code {code}, which is not run: "
                f"the model is loaded as a {architecture}"
            ),
            stacklevel=3,
        )


def weight_map(config: DecoderConfig) -> WeightMap:
    """The checkpoint tensors of each parameter of a model."""
    return decoder_weights(config, _tensor_names(config))


def renamed_tensors(config: DecoderConfig) -> Mapping[str, str]:
    """Patterns in names of checkpoint tensors → replacements to get the names in `weight_map`."""
    return _tensor_names(config).renamed


def head_tensor(config: DecoderConfig) -> str:
    """The checkpoint tensor of the head. A checkpoint of a tied model may also have it."""
    return f"{_tensor_names(config).head}.weight"


def _tensor_names(config: DecoderConfig) -> TensorNames:
    return getattr(FAMILIES[config.family], "TENSORS", TensorNames())


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of checkpoint tensors that the model does not need."""
    return getattr(FAMILIES[config.family], "IGNORED_TENSORS", _IGNORED_TENSORS)
