"""Qwen1.5, Qwen2 and Qwen2.5, dense: biases of Q, K and V only (Yang et al. 2024)."""

from fdjax.models.config import (
    ACTIVATION_NAMES,
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_dimensions,
    read_windows,
)
from fdjax.models.name_map import WeightMap, decoder_weights
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("qwen2",)
ARCHITECTURE = "Qwen2ForCausalLM"
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
IGNORED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of a `Qwen2ForCausalLM`, of either generation."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    config = DecoderConfig.alike(
        family="qwen2",
        activation=reader.one_of("hidden_act", ACTIVATION_NAMES, "silu"),
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
            for window in read_upper_windows(reader)
        ),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        **dimensions,
    )
    reader.finish()
    return config


def read_upper_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Sliding windows in layers from `max_window_layers` on, if they are used at all."""
    used = reader.get("use_sliding_window", bool, False)
    slides = used and reader.get("sliding_window", int, None) is not None
    first = reader.get("max_window_layers", int, 28)
    windows = read_windows(
        reader, lambda i: "sliding_attention" if slides and i >= first else "full_attention"
    )
    if any(windows) and not used:
        raise CheckpointError(
            f"{reader.source}: 'layer_types' has sliding_attention, 'use_sliding_window' is false"
        )
    return windows


def weight_map(config: DecoderConfig) -> WeightMap:
    """Where each parameter comes from in the checkpoint."""
    return decoder_weights(config)
