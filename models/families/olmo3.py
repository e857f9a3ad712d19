"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in three of four layers, whose RoPE is plain."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.families.olmo2 import TENSORS as OLMO_TENSORS
from fdjax.models.families.olmo2 import read_olmo
from fdjax.models.rope import read_rope, sections_by_layer_type
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("olmo3",)
ARCHITECTURE = "Olmo3ForCausalLM"
DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
TENSORS = OLMO_TENSORS
_THETA = 500000.0


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of an `Olmo3ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    full, local = (
        read_rope(reader, head_dim, default_theta=_THETA, sections=sections)
        for sections in sections_by_layer_type(reader)
    )
    windows = read_windows(
        reader, lambda i: "sliding_attention" if (i + 1) % 4 else "full_attention"
    )
    return read_decoder(
        reader,
        "olmo3",
        attention=tuple(
            AttentionSpec(
                scale=head_dim**-0.5, rope=full if window is None else local, window=window
            )
            for window in windows
        ),
        **read_olmo(reader),
        **dimensions,
    )
