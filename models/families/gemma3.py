"""Gemma 3, text only: q and k are normalised, and five of six layers have a window.

Gemma Team 2025, section 2. Each of the two kinds of layer has its own rotary embedding.
"""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.families.gemma2 import IGNORABLE, read_gemma
from fdjax.models.families.gemma2 import TENSORS as GEMMA_TENSORS
from fdjax.models.rope import read_rope, sections_by_layer_type
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("gemma3_text",)
ARCHITECTURE = "Gemma3ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
TENSORS = GEMMA_TENSORS


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Gemma3ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    full, local = sections_by_layer_type(reader)
    rope = read_rope(reader, head_dim, default_theta=1e6, sections=full)
    local_rope = read_rope(reader, head_dim, theta_key="rope_local_base_freq", sections=local)
    every = reader.positive("sliding_window_pattern", 6)
    windows = read_windows(
        reader, lambda i: "sliding_attention" if (i + 1) % every else "full_attention"
    )
    return read_decoder(
        reader,
        "gemma3",
        attention=tuple(
            AttentionSpec(
                scale=reader.positive("query_pre_attn_scalar", kind=float) ** -0.5,
                rope=rope if window is None else local_rope,
                window=window,
            )
            for window in windows
        ),
        qk_norm=True,
        **read_gemma(reader),
        **dimensions,
        ignorable=(*IGNORABLE, "_sliding_window_pattern"),
    )
