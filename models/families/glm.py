"""GLM-4 9B (GLM Team 2024): RoPE on half of each head, 2 KV heads, biases of Q, K and V."""

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

MODEL_TYPES = ("glm",)
ARCHITECTURE = "GlmForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
TENSORS = TensorNames(own={"gate_up": ("mlp.gate_up_proj",)}, interleaved=True)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GlmForCausalLM`, in the old or the new format."""
    return read_decoder(reader, "glm", **read_glm(reader))


def read_glm(reader: ConfigReader) -> dict:
    """Read the fields that GLM and GLM-4-0414 share, as fields of `DecoderConfig`."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_partial=0.5)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    return {
        "attention": (spec,) * read_layers(reader),
        "qkv_bias": reader.get("attention_bias", bool, True),
        **dimensions,
    }
