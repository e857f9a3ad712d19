"""OPT (Zhang et al. 2022): LayerNorm, ReLU without a gate, a learned table of positions.

The 350M model normalises after each addition, and its embedding is narrower than the model.
"""

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

MODEL_TYPES = ("opt",)
ARCHITECTURE = "OPTForCausalLM"
NAMES = {
    "intermediate_size": ("ffn_dim",),
    "hidden_act": ("activation_function",),
}
DEFAULTS = {"tie_word_embeddings": True, "activation_function": "relu"}
TENSORS = TensorNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    embed_in="model.decoder.project_in",
    embed_out="model.decoder.project_out",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    own={
        "attention_norm": ("self_attn_layer_norm",),
        "attention_sum_norm": ("self_attn_layer_norm",),
        "mlp_norm": ("final_layer_norm",),
        "mlp_sum_norm": ("final_layer_norm",),
        "out": ("self_attn.out_proj",),
        "up": ("fc1",),
        "down": ("fc2",),
    },
)
_IGNORABLE = ("activation_dropout", "dropout", "init_std", "layerdrop")
_EPS = 1e-5  # config.json has no such field


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of an `OPTForCausalLM`."""
    dimensions = read_dimensions(reader) | {"norm_eps": _EPS}
    # Its scores span more than 800 (Hong et al. 2024, section 3), so no φ suits all of them.
    spec = AttentionSpec(scale=dimensions["head_dim"] ** -0.5, unified=False)
    bias = reader.get("enable_bias", bool, True)
    if not reader.get("layer_norm_elementwise_affine", bool, True):
        raise CheckpointError(f"{reader.source}: norms without weights are not supported")
    first = reader.get("do_layer_norm_before", bool, True)
    without_last = reader.get("_remove_final_layer_norm", bool, False)
    width = dimensions["width"]
    inner = reader.positive("word_embed_proj_dim", width)
    return read_decoder(
        reader,
        "opt",
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        no_pre_norms=not first,
        sum_norms=not first,
        no_gate=True,
        position_offset=2,
        embedding_width=None if inner == width else inner,
        final_norm=first and not without_last,
        **dimensions,
        ignorable=_IGNORABLE,
    )
