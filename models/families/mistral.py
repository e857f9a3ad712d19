"""Mistral: all layers have a sliding window, or none has one (Jiang et al. 2023)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("mistral",)
ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    # If config.json lacks this field, the window is this one. A null means no window.
    "sliding_window": 4096,
}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `MistralForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope, window=read_window(reader))
    return read_decoder(
        reader,
        "mistral",
        attention=(spec,) * read_layers(reader),
        **dimensions,
    )


def read_window(reader: ConfigReader) -> int | None:
    """Read the sliding window of all layers in tokens, or None."""
    window = reader.get("sliding_window", int, None)
    return None if window is None else reader.positive("sliding_window")
