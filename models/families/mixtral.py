"""Mixtral: a Mistral whose MLPs are mixtures of experts (Jiang et al. 2024)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.experts import ONLY_TRAINING, read_routing
from fdjax.models.families.mistral import read_window
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("mixtral",)
ARCHITECTURE = "MixtralForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
TENSORS = TensorNames(
    own={"router": ("block_sparse_moe.gate",)},
    experts=(
        ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        ("block_sparse_moe.experts.{}.w2",),
    ),
    renamed={r"\.mlp\.": ".block_sparse_moe."},
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `MixtralForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_theta=1000000.0)
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope, window=read_window(reader))
    return read_decoder(
        reader,
        "mixtral",
        attention=(spec,) * read_layers(reader),
        experts=read_routing(reader, "num_local_experts", normalised=True),
        ignorable=ONLY_TRAINING,
        **dimensions,
    )
