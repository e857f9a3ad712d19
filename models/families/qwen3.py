"""Dense Qwen3: q and k are normalised per head, and head_dim is a field (Yang et al. 2025)."""

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
    """Parse the config.json of a `Qwen3ForCausalLM`, in the old or the new format."""
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
