"""gpt-oss (OpenAI 2025): attention sinks, a window in every second layer, experts in MXFP4."""

from fdjax.models.config import (
    CheckpointError,
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_windows,
)
from fdjax.models.experts import ONLY_TRAINING, read_routing
from fdjax.models.name_map import TensorNames
from fdjax.models.rope import read_rope, rope_sections
from fdjax.pallas_kernels.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("gpt_oss",)
ARCHITECTURE = "GptOssForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
}
TENSORS = TensorNames(
    own={"router": ("mlp.router",)},
    experts=(("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)),
    alternating_experts=True,
)
_THETA = 150000.0
# What transformers takes if the file says nothing of scaling.
_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
# Fields that repeat other fields, or have no effect.
_IGNORABLE = (*ONLY_TRAINING, "experts_per_token", "initial_context_length")


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GptOssForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    sections = rope_sections(reader, "rope_parameters", "rope_scaling")
    sections = sections or [ConfigReader(dict(_SCALING), reader.source)]
    rope = read_rope(reader, head_dim, default_theta=_THETA, sections=sections)
    windows = read_windows(reader, lambda i: "full_attention" if i % 2 else "sliding_attention")
    bias = reader.get("attention_bias", bool, True)
    _check_activation(reader)
    return read_decoder(
        reader,
        "gpt_oss",
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, rope=rope, window=window, sinks=True)
            for window in windows
        ),
        activation="clamped_swiglu",
        qkv_bias=bias,
        out_bias=bias,
        experts=read_routing(reader, "num_local_experts", normalised=True),
        router_bias=True,
        expert_bias=True,
        ignorable=_IGNORABLE,
        **dimensions,
    )


def _check_activation(reader: ConfigReader) -> None:
    reader.one_of("hidden_act", {"silu": None, "swish": None}, "silu")
    for key, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if (value := reader.get(key, float, known)) != known:
            raise CheckpointError(
                f"{reader.source}: {key!r} must be {known}, as in all published models, got {value}"
            )
