"""GLM-4-0414 (GLM Team 2025): GLM-4 with norms after attention and MLP."""

import dataclasses

from fdjax.models.config import ConfigReader, DecoderConfig, read_decoder
from fdjax.models.families.glm import DEFAULTS as GLM_DEFAULTS
from fdjax.models.families.glm import TENSORS as GLM_TENSORS
from fdjax.models.families.glm import read_glm

MODEL_TYPES = ("glm4",)
ARCHITECTURE = "Glm4ForCausalLM"
DEFAULTS = GLM_DEFAULTS
TENSORS = dataclasses.replace(
    GLM_TENSORS,
    own={
        **GLM_TENSORS.own,
        "attention_post_norm": ("post_self_attn_layernorm",),
        "mlp_post_norm": ("post_mlp_layernorm",),
    },
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Glm4ForCausalLM`, in the old or the new format."""
    return read_decoder(reader, "glm4", post_norms=True, **read_glm(reader))
