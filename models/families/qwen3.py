"""Qwen3, dense: q and k normalised per head, heads of their own width (Yang et al. 2025)."""

from fdjax.models.config import ACTIVATION_NAMES, ConfigReader, DecoderConfig, read_dimensions
from fdjax.models.families.qwen2 import read_upper_windows
from fdjax.models.name_map import WeightMap, decoder_weights
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
IGNORED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of a `Qwen3ForCausalLM`, of either generation."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    bias = reader.get("attention_bias", bool, False)
    config = DecoderConfig.alike(
        family="qwen3",
        activation=reader.one_of("hidden_act", ACTIVATION_NAMES, "silu"),
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window)
            for window in read_upper_windows(reader)
        ),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=True,
        **dimensions,
    )
    reader.finish()
    return config


def weight_map(config: DecoderConfig) -> WeightMap:
    """Where each parameter comes from in the checkpoint."""
    return decoder_weights(config)
