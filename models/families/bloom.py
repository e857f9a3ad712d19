"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, Q, K and V in one tensor by head."""

from fdjax.models.config import (
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import TensorNames
from fdjax.pallas_kernels.attention.spec import AttentionSpec, alibi_slopes

MODEL_TYPES = ("bloom",)
ARCHITECTURE = "BloomForCausalLM"
NAMES = {
    "hidden_size": ("n_embed",),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer",),
    "max_position_embeddings": ("seq_length",),
    "rms_norm_eps": ("layer_norm_epsilon",),
}
DEFAULTS = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
TENSORS = TensorNames(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    own={
        "qkv": ("self_attention.query_key_value",),
        "out": ("self_attention.dense",),
        "up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    per_group=True,
)
_IGNORABLE = (
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner"),
    *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `BloomForCausalLM`."""
    dimensions = read_dimensions(reader, default_mlp=4)
    if reader.get("apply_residual_connection_post_layernorm", bool, False):
        raise CheckpointError(
            f"{reader.source}: 'apply_residual_connection_post_layernorm' True is not supported"
        )
    slopes = alibi_slopes(dimensions["heads"])
    spec = AttentionSpec(scale=dimensions["head_dim"] ** -0.5, alibi=slopes)
    return read_decoder(
        reader,
        "bloom",
        activation="gelu_tanh",
        attention=(spec,) * read_layers(reader),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        no_gate=True,
        embedding_norm=True,
        **dimensions,
        ignorable=_IGNORABLE,
    )
