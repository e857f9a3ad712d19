"""ChatGLM2, ChatGLM3 (Zeng et al. 2023) and GLM-4 in its first format: GLM with other names."""

from fdjax.models.config import (
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import TensorNames
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.rope import Rope

MODEL_TYPES = ("chatglm",)
ARCHITECTURE = "ChatGLMForConditionalGeneration"
NAMES = {
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size",),
    "num_key_value_heads": ("multi_query_group_num",),
    "num_hidden_layers": ("num_layers",),
    "head_dim": ("kv_channels",),
    "max_position_embeddings": ("seq_length",),
    "rms_norm_eps": ("layernorm_epsilon",),
}
DEFAULTS = {"layernorm_epsilon": 1e-5}
TENSORS = TensorNames(
    embed="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    layer="transformer.encoder.layers.{}.",
    own={
        "qkv": ("self_attention.query_key_value",),
        "out": ("self_attention.dense",),
        "gate_up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    interleaved=True,
)
IGNORED_TENSORS = (r"transformer\.rotary_pos_emb\.inv_freq",)
# Fields with a single supported value. No published model has other values.
_FIXED = {
    "multi_query_attention": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "prefix_projection": False,
}
_IGNORABLE = (
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"),
    *("classifier_dropout", "interleaved_qkv", "quantization_bit", "tie_word_embeddings"),
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of ChatGLM2 or later, which has RMSNorm."""
    for key, value in _FIXED.items():
        if reader.get(key, bool, value) is not value:
            raise CheckpointError(f"{reader.source}: {key!r} {not value} is not supported")
    if reader.get("quantization_bit", int, 0) or reader.get("pre_seq_len", int, 0):
        raise CheckpointError(
            f"{reader.source}: quantised or prefix-tuned models are not supported"
        )
    if reader.get("rope_ratio", float, 1.0) != 1:
        raise CheckpointError(
            f"{reader.source}: 'rope_ratio' is not supported: ChatGLM2 divides positions by it and "
            "ChatGLM3 multiplies theta; use the checkpoint with model_type 'glm'"
        )
    dimensions = read_dimensions(reader) | {"tie_embeddings": False}
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=Rope(dim=head_dim // 2, theta=10000.0))
    return read_decoder(
        reader,
        "chatglm",
        activation="silu",
        attention=(spec,) * read_layers(reader),
        qkv_bias=reader.get("add_qkv_bias", bool, False),
        **dimensions,
        ignorable=_IGNORABLE,
    )
