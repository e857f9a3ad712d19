"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, an MLP without a gate, biases, a sliding window."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.families.mistral import read_window
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("starcoder2",)
ARCHITECTURE = "Starcoder2ForCausalLM"
NAMES = {"rms_norm_eps": ("norm_epsilon",)}
DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TENSORS = TensorNames(own={"up": ("mlp.c_fc",), "down": ("mlp.c_proj",)})
_IGNORABLE = (
    "activation_function",
    "embedding_dropout",
    "mlp_type",
    "norm_type",
    "residual_dropout",
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Starcoder2ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope, window=read_window(reader))
    bias = reader.get("use_bias", bool, True)
    return read_decoder(
        reader,
        "starcoder2",
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        no_gate=True,
        **dimensions,
        ignorable=_IGNORABLE,
    )
