"""Llama 2, 3 and 3.x, CodeLlama, Vicuna, Falcon 3 (Touvron et al. 2023): RMSNorm, RoPE, SwiGLU."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("llama",)
ARCHITECTURE = "LlamaForCausalLM"
DEFAULTS = {}


# Written by some exporters. It does not affect the forward pass of a Llama.
_IGNORABLE = ("mlp_only_layers",)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `LlamaForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    bias = reader.get("attention_bias", bool, False)
    return read_decoder(
        reader,
        "llama",
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.get("mlp_bias", bool, False),
        **dimensions,
        ignorable=_IGNORABLE,
    )
