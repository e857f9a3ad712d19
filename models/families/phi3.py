"""Phi-3, Phi-3.5 and Phi-4, with their mini models: fused tensors in checkpoints, LongRoPE.

Abdin et al. 2024; Microsoft 2025.
"""

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

MODEL_TYPES = ("phi3",)
ARCHITECTURE = "Phi3ForCausalLM"
DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
TENSORS = TensorNames(own={"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)})

# Fields without effect; the last one has an effect with LongRoPE only.
_IGNORABLE = ("full_attn_mod", "interpolate_factor", "original_max_position_embeddings")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Phi3ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    # Early files use these names for LongRoPE.
    rope = read_rope(
        reader, head_dim, default_partial=1.0, aliases={"su": "longrope", "yarn": "longrope"}
    )
    spec = AttentionSpec(scale=head_dim**-0.5, rope=rope, window=read_window(reader))
    return read_decoder(
        reader,
        "phi3",
        attention=(spec,) * read_layers(reader),
        **dimensions,
        ignorable=_IGNORABLE,
    )
