"""Dense Qwen1.5, Qwen2 and Qwen2.5: only Q, K and V have biases (Yang et al. 2024)."""

from fdjax.models.config import (
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("qwen2",)
ARCHITECTURE = "Qwen2ForCausalLM"
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Qwen2ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    return read_decoder(
        reader,
        "qwen2",
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
            for window in read_upper_windows(reader)
        ),
        qkv_bias=True,
        **dimensions,
    )


def read_upper_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Read sliding windows: if used, layers from `max_window_layers` on have one."""
    used = reader.get("use_sliding_window", bool, False)
    slides = used and reader.get("sliding_window", int, None) is not None
    first = reader.get("max_window_layers", int, 28)
    windows = read_windows(
        reader, lambda i: "sliding_attention" if slides and i >= first else "full_attention"
    )
    if any(windows) and not used:
        raise CheckpointError(
            f"{reader.source}: 'layer_types' has sliding_attention, "
            "but 'use_sliding_window' is false"
        )
    return windows
