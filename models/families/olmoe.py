"""OLMoE: mixtures of experts, and norms over all of q and of k (Muennighoff et al. 2024)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.experts import ONLY_TRAINING, read_routing
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("olmoe",)
ARCHITECTURE = "OlmoeForCausalLM"
DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of an `OlmoeForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    bias = reader.get("attention_bias", bool, False)
    return read_decoder(
        reader,
        "olmoe",
        attention=(spec,) * read_layers(reader),
        qkv_bias=bias,
        out_bias=bias,
        whole_qk_norm=True,
        experts=read_routing(
            reader, "num_experts", normalised=reader.get("norm_topk_prob", bool, False)
        ),
        ignorable=ONLY_TRAINING,
        **dimensions,
    )
