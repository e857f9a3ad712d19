"""OLMo 2 (OLMo Team 2024): norms only after attention and MLP, and over all of q and of k."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("olmo2",)
ARCHITECTURE = "Olmo2ForCausalLM"
DEFAULTS = {"rms_norm_eps": 1e-5}
TENSORS = TensorNames(
    own={
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    }
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of an `Olmo2ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    return read_decoder(
        reader,
        "olmo2",
        attention=(spec,) * read_layers(reader),
        **read_olmo(reader),
        **dimensions,
    )


def read_olmo(reader: ConfigReader) -> dict:
    """Read the fields that OLMo 2 and 3 share, as fields of `DecoderConfig`."""
    bias = reader.get("attention_bias", bool, False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "whole_qk_norm": True,
        "no_pre_norms": True,
        "post_norms": True,
    }
