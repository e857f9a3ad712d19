"""SmolLM3 (Hugging Face 2025): a Llama whose every fourth layer has no RoPE."""

from fdjax.models.config import (
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("smollm3",)
ARCHITECTURE = "SmolLM3ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_THETA = 2000000.0


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `SmolLM3ForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    rope = read_rope(reader, head_dim, default_theta=_THETA)
    bias = reader.get("attention_bias", bool, False)
    slides = reader.get("use_sliding_window", bool, False)
    rotates = _layers_with_rope(reader)
    windows = read_windows(
        reader,
        lambda i: "sliding_attention" if slides and not rotates[i] else "full_attention",
    )
    if any(windows) and not slides:
        raise CheckpointError(
            f"{reader.source}: 'layer_types' has sliding_attention, "
            "but 'use_sliding_window' is false"
        )
    return read_decoder(
        reader,
        "smollm3",
        attention=tuple(
            AttentionSpec(
                scale=head_dim**-0.5,
                rope=rope if rotated else None,
                window=window,
            )
            for window, rotated in zip(windows, rotates, strict=True)
        ),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.get("mlp_bias", bool, False),
        **dimensions,
        ignorable=("max_window_layers",),
    )


def _layers_with_rope(reader: ConfigReader) -> list[bool]:
    """Whether each layer has RoPE: 1 in `no_rope_layers`, despite its name."""
    layers = reader.positive("num_hidden_layers")
    every = reader.positive("no_rope_layer_interval", 4)
    rotates = reader.get("no_rope_layers", list, [int((i + 1) % every > 0) for i in range(layers)])
    if len(rotates) != layers or not all(
        type(value) is int and value in (0, 1) for value in rotates
    ):
        raise CheckpointError(
            f"{reader.source}: 'no_rope_layers' must be 0 or 1 for each layer ({layers})"
        )
    return [value == 1 for value in rotates]
