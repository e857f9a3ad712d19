"""Granite 3 (Granite Team 2024): a Llama with factors of embeddings, scores, layers and logits."""

from typing import Any

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("granite",)
ARCHITECTURE = "GraniteForCausalLM"
DEFAULTS = {}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GraniteForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    return read_decoder(
        reader,
        "granite",
        **read_granite(reader, dimensions["head_dim"], read_layers(reader)),
        mlp_bias=reader.get("mlp_bias", bool, False),
        **dimensions,
    )


def read_granite(reader: ConfigReader, head_dim: int, layers: int) -> dict[str, Any]:
    """Read the fields that all Granites have, as fields of `DecoderConfig`."""
    rope = read_rope(reader, head_dim)
    spec = AttentionSpec(scale=reader.positive("attention_multiplier", 1.0, float), rope=rope)
    bias = reader.get("attention_bias", bool, False)
    return {
        "attention": (spec,) * layers,
        "qkv_bias": bias,
        "out_bias": bias,
        "residual_multiplier": reader.positive("residual_multiplier", 1.0, float),
        "embedding_scale": reader.positive("embedding_multiplier", 1.0, float),
        "logit_scale": 1 / reader.positive("logits_scaling", 1.0, float),
    }
