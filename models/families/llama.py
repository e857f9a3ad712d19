"""Llama 2, 3 and 3.x, CodeLlama, Vicuna: config.json and tensor names (Touvron et al. 2023)."""

from fdjax.models.config import (
    ACTIVATION_NAMES,
    ConfigReader,
    DecoderConfig,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import WeightMap, decoder_weights
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("llama",)
ARCHITECTURE = "LlamaForCausalLM"
DEFAULTS = {}

# Tensors some checkpoints carry without need: precomputed frequencies, the head of a tied model.
IGNORED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")

# Written by some exporters; without effect on the forward pass of a Llama.
_IGNORABLE = ("mlp_only_layers",)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of a `LlamaForCausalLM`, of either generation."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    bias = reader.get("attention_bias", bool, False)
    config = DecoderConfig.alike(
        family="llama",
        activation=reader.one_of("hidden_act", ACTIVATION_NAMES, "silu"),
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.get("mlp_bias", bool, False),
        **dimensions,
    )
    reader.finish(_IGNORABLE)
    return config


def weight_map(config: DecoderConfig) -> WeightMap:
    """Where each parameter comes from in the checkpoint."""
    return decoder_weights(config)
