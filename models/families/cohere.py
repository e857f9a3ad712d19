"""Command R (Cohere 2024): parallel attention and MLP after one LayerNorm without bias."""

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

MODEL_TYPES = ("cohere",)
ARCHITECTURE = "CohereForCausalLM"
NAMES = {"rms_norm_eps": ("layer_norm_eps",)}
DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TENSORS = TensorNames(interleaved=True)
THETA = 500000.0


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `CohereForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_theta=THETA)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    return read_decoder(
        reader,
        "cohere",
        attention=(spec,) * read_layers(reader),
        **read_cohere(reader),
        **dimensions,
    )


def read_cohere(reader: ConfigReader) -> dict:
    """Read the fields that Command R and R7B share, as fields of `DecoderConfig`."""
    bias = reader.get("attention_bias", bool, False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "layer_norm": True,
        "parallel": True,
        "shared_norm": True,
        "logit_scale": reader.positive("logit_scale", kind=float),
    }
