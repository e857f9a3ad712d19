"""Qwen3, dense: q and k normalised per head, heads of their own width (Yang et al. 2025)."""

from fdjax.models.config import ConfigReader, DecoderConfig, read_decoder, read_dimensions
from fdjax.models.families.qwen2 import read_upper_windows
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("qwen3",)
ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of a `Qwen3ForCausalLM`, of either generation."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    bias = reader.get("attention_bias", bool, False)
    return read_decoder(
        reader,
        "qwen3",
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
            for window in read_upper_windows(reader)
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        **dimensions,
    )
