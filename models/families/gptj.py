"""GPT-J (Wang & Komatsuzaki 2021): attention and MLP in parallel, RoPE on a part of each head."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.name_map import TensorNames
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.rope import Rope

MODEL_TYPES = ("gptj",)
ARCHITECTURE = "GPTJForCausalLM"
NAMES = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer",),
    "max_position_embeddings": ("n_positions",),
    "hidden_act": ("activation_function",),
    "rms_norm_eps": ("layer_norm_epsilon",),
}
DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
TENSORS = TensorNames(
    embed="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    own={
        "attention_norm": ("ln_1",),
        "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "out": ("attn.out_proj",),
        "up": ("mlp.fc_in",),
        "down": ("mlp.fc_out",),
    },
    interleaved=True,
)
# Masks that old checkpoints contain.
IGNORED_TENSORS = (r".*\.attn\.(masked_)?bias",)
IGNORABLE = (
    *("attn_pdrop", "gradient_checkpointing", "n_ctx", "reorder_and_upcast_attn", "rotary"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("scale_attn_weights", "summary_type", "summary_use_proj"),
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GPTJForCausalLM`."""
    dimensions = read_dimensions(reader, default_mlp=4)
    head_dim = dimensions["head_dim"]
    rope = Rope(dim=min(reader.positive("rotary_dim", 64), head_dim), theta=10000.0)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
    return read_decoder(
        reader,
        "gptj",
        attention=(spec,) * read_layers(reader),
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        parallel=True,
        shared_norm=True,
        no_gate=True,
        head_bias=True,
        **dimensions,
        ignorable=IGNORABLE,
    )
