"""Qwen1.5-MoE and Qwen2-MoE: experts beside a gated MLP for all tokens (Yang et al. 2024)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.experts import ONLY_TRAINING, read_dense_layers, read_routing, with_dense_layers
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("qwen2_moe",)
ARCHITECTURE = "Qwen2MoeForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Qwen2MoeForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    attention = tuple(
        AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
        for window in _read_lower_windows(reader)
    )
    dense = read_dense_layers(reader, len(attention))
    width = dimensions.pop("mlp_width")
    config = read_decoder(
        reader,
        "qwen2_moe",
        attention=attention,
        qkv_bias=reader.get("qkv_bias", bool, True),
        mlp_width=reader.positive("moe_intermediate_size"),
        experts=read_routing(
            reader, "num_experts", normalised=reader.get("norm_topk_prob", bool, False)
        ),
        shared_width=reader.positive("shared_expert_intermediate_size"),
        shared_gate=True,
        ignorable=ONLY_TRAINING,
        **dimensions,
    )
    return with_dense_layers(config, dense, width)


def _read_lower_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Read sliding windows: if used, every other layer before `max_window_layers` has one."""
    used = reader.get("use_sliding_window", bool, False)
    end = reader.get("max_window_layers", int, 28)
    return read_windows(
        reader, lambda i: f"{'sliding' if used and i < end and i % 2 == 0 else 'full'}_attention"
    )
