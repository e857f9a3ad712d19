"""Qwen3 with mixtures of experts (Yang et al. 2025)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.experts import ONLY_TRAINING, read_dense_layers, read_routing, with_dense_layers
from fdjax.models.families.mistral import read_window
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("qwen3_moe",)
ARCHITECTURE = "Qwen3MoeForCausalLM"
NAMES = {"num_experts": ("num_local_experts",)}
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Qwen3MoeForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim, width = dimensions["head_dim"], dimensions.pop("mlp_width")
    rope = read_rope(reader, head_dim)
    slides = reader.get("use_sliding_window", bool, False)
    reader.get("sliding_window", int, None)
    window = read_window(reader) if slides else None
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
    bias = reader.get("attention_bias", bool, False)
    layers = read_layers(reader)
    dense = read_dense_layers(reader, layers)
    config = read_decoder(
        reader,
        "qwen3_moe",
        attention=(spec,) * layers,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        mlp_width=reader.positive("moe_intermediate_size"),
        experts=read_routing(
            reader, "num_experts", normalised=reader.get("norm_topk_prob", bool, False)
        ),
        # Either all layers have a window, or none has, so `max_window_layers` does not matter.
        ignorable=(*ONLY_TRAINING, "max_window_layers"),
        **dimensions,
    )
    return with_dense_layers(config, dense, width)
