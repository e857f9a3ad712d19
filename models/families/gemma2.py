"""Gemma 2: soft caps, norms before and after attention and MLP, a window in every second layer.

Gemma Team 2024, section 2.
"""

from fdjax.models.config import (
    ACTIVATION_NAMES,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("gemma2",)
ARCHITECTURE = "Gemma2ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    # If config.json lacks these fields, the caps are these. A null means no cap.
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

TENSORS = TensorNames(
    own={
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    }
)

# The activation is `hidden_activation`. A `hidden_act` beside it is left over from Gemma 1.
IGNORABLE = ("hidden_act",)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Gemma2ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    rope = read_rope(reader, dimensions["head_dim"])
    windows = read_windows(reader, lambda i: "full_attention" if i % 2 else "sliding_attention")
    return read_decoder(
        reader,
        "gemma2",
        attention=tuple(
            AttentionSpec(
                scale=reader.positive("query_pre_attn_scalar", kind=float) ** -0.5,
                rope=rope,
                window=window,
                soft_cap=read_soft_cap(reader, "attn_logit_softcapping"),
            )
            for window in windows
        ),
        **read_gemma(reader),
        **dimensions,
        ignorable=IGNORABLE,
    )


def read_soft_cap(reader: ConfigReader, key: str) -> float | None:
    """Read a positive number, or None for null."""
    return None if reader.get(key, float, None) is None else reader.positive(key, kind=float)


def read_gemma(reader: ConfigReader) -> dict:
    """Read the fields that Gemma 2 and 3 share, as fields of `DecoderConfig`."""
    bias = reader.get("attention_bias", bool, False)
    return {
        "activation": reader.one_of("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": False,
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": reader.positive("hidden_size") ** 0.5,
        "logit_soft_cap": read_soft_cap(reader, "final_logit_softcapping"),
    }
