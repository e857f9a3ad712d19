"""GPT-2 (Radford et al. 2019): LayerNorm, a learned table of positions, weights [K, N]."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.families.gptj import IGNORABLE
from fdjax.models.families.gptj import IGNORED_TENSORS as GPTJ_IGNORED_TENSORS
from fdjax.models.families.gptj import NAMES as GPTJ_NAMES
from fdjax.models.name_map import TensorNames
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("gpt2",)
ARCHITECTURE = "GPT2LMHeadModel"
NAMES = GPTJ_NAMES
DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
TENSORS = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    own={
        "attention_norm": ("ln_1",),
        "mlp_norm": ("ln_2",),
        "qkv": ("attn.c_attn",),
        "out": ("attn.c_proj",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    inputs_first=True,
)
IGNORED_TENSORS = (*GPTJ_IGNORED_TENSORS, r"lm_head\.weight")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GPT2LMHeadModel`."""
    dimensions = read_dimensions(reader, default_mlp=4)
    scaled = reader.get("scale_attn_weights", bool, True)
    scale = dimensions["head_dim"] ** -0.5 if scaled else 1.0
    by_layer = reader.get("scale_attn_by_inverse_layer_idx", bool, False)
    return read_decoder(
        reader,
        "gpt2",
        attention=tuple(
            AttentionSpec(scale=scale / (i + 1) if by_layer else scale)
            for i in range(read_layers(reader))
        ),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        no_gate=True,
        position_offset=0,
        **dimensions,
        ignorable=IGNORABLE,
    )
