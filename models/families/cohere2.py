"""Command R7B and Command A (Cohere 2024): Command R with windows; full attention has no RoPE."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.families.cohere import DEFAULTS as COHERE_DEFAULTS
from fdjax.models.families.cohere import NAMES as COHERE_NAMES
from fdjax.models.families.cohere import TENSORS as COHERE_TENSORS
from fdjax.models.families.cohere import read_cohere
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("cohere2",)
ARCHITECTURE = "Cohere2ForCausalLM"
NAMES = COHERE_NAMES
DEFAULTS = COHERE_DEFAULTS | {"sliding_window": 4096}
TENSORS = COHERE_TENSORS
_IGNORABLE = (
    *("_sliding_window_pattern", "order_of_interleaved_layers", "position_embedding_type"),
    *("rotary_pct", "use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
    "use_parallel_embedding",
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `Cohere2ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim)
    every = reader.positive("sliding_window_pattern", 4)
    windows = read_windows(
        reader, lambda i: "sliding_attention" if (i + 1) % every else "full_attention"
    )
    return read_decoder(
        reader,
        "cohere2",
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope if window else None, window=window)
            for window in windows
        ),
        **read_cohere(reader),
        **dimensions,
        ignorable=_IGNORABLE,
    )
