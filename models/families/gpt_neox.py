"""GPT-NeoX and Pythia (Black et al. 2022): parallel attention and MLP with a norm each.

RoPE turns a quarter of each head. Q, K and V are in one tensor, head by head.
"""

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

MODEL_TYPES = ("gpt_neox",)
ARCHITECTURE = "GPTNeoXForCausalLM"
NAMES = {
    "rms_norm_eps": ("layer_norm_eps",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
}
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5}
TENSORS = TensorNames(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{}.",
    own={
        "qkv": ("attention.query_key_value",),
        "out": ("attention.dense",),
        "up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    per_group=True,
)
# Masks and frequencies that old checkpoints contain.
IGNORED_TENSORS = (r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GPTNeoXForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_partial=0.25)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    bias = reader.get("attention_bias", bool, True)
    return read_decoder(
        reader,
        "gpt_neox",
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        parallel=reader.get("use_parallel_residual", bool, True),
        no_gate=True,
        **dimensions,
        ignorable=("classifier_dropout",),
    )
