"""Llama 2, 3 and 3.x: config.json and tensor names (Touvron et al. 2023, Dubey et al. 2024)."""

from fdjax.models.attention import AttentionSpec
from fdjax.models.config import (
    ACTIVATION_NAMES,
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_dtype,
    read_rope,
)
from fdjax.models.weights import WeightMap, decoder_weights

MODEL_TYPES = ("llama",)

# Tensors some checkpoints carry without need: precomputed frequencies, the head of a tied model.
IGNORED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")

# Written by some exporters; without effect on the forward pass of a Llama.
_IGNORABLE = ("mlp_only_layers", "rope_interleaved")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of a `LlamaForCausalLM`, of either generation."""
    width = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{reader.source}: 'num_attention_heads' must be a multiple of 'num_key_value_heads', "
            f"got {heads} and {kv_heads}"
        )
    if width % heads and reader.get("head_dim", int, None) is None:
        raise CheckpointError(
            f"{reader.source}: without 'head_dim', 'hidden_size' must be a multiple of "
            f"'num_attention_heads', got {width} and {heads}"
        )
    head_dim = reader.positive("head_dim", width // heads)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    bias = reader.get("attention_bias", bool, False)
    if reader.get("rope_interleaved", bool, False):
        raise CheckpointError(f"{reader.source}: 'rope_interleaved' true is not supported")
    config = DecoderConfig(
        family="llama",
        vocab_size=reader.positive("vocab_size"),
        width=width,
        mlp_width=reader.positive("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.positive("rms_norm_eps", 1e-6, float),
        activation=reader.one_of("hidden_act", ACTIVATION_NAMES, "silu"),
        attention=(spec,) * reader.positive("num_hidden_layers"),
        tie_embeddings=reader.get("tie_word_embeddings", bool, False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.get("mlp_bias", bool, False),
        max_position_embeddings=reader.positive("max_position_embeddings", 2048),
        dtype=read_dtype(reader),
    )
    reader.finish(_IGNORABLE)
    return config


def weight_map(config: DecoderConfig) -> WeightMap:
    """Where each parameter comes from in the checkpoint."""
    return decoder_weights(config)
