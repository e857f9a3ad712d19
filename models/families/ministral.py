"""Ministral 8B (Mistral AI 2024): Mistral with a list of the layers that have a window."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.families.mistral import DEFAULTS as MISTRAL_DEFAULTS
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("ministral",)
ARCHITECTURE = "MinistralForCausalLM"
DEFAULTS = MISTRAL_DEFAULTS


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `MinistralForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    slides = reader.get("sliding_window", int, None) is not None
    kind = "sliding_attention" if slides else "full_attention"
    return read_decoder(
        reader,
        "ministral",
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
            for window in read_windows(reader, lambda i: kind)
        ),
        **dimensions,
    )
