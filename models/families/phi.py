"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): parallel attention and MLP, partial RoPE, biases."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("phi",)
ARCHITECTURE = "PhiForCausalLM"
NAMES = {"rms_norm_eps": ("layer_norm_eps",)}
DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
TENSORS = TensorNames(
    norm="model.final_layernorm",
    own={"out": ("self_attn.dense",), "up": ("mlp.fc1",), "down": ("mlp.fc2",)},
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `PhiForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_partial=0.5)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    return read_decoder(
        reader,
        "phi",
        attention=(spec,) * read_layers(reader),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        parallel=True,
        shared_norm=True,
        no_gate=True,
        head_bias=True,
        **dimensions,
    )
