"""Granite 3 with mixtures of experts, each stored in one tensor (Granite Team 2024)."""

from fdjax.models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_dimensions,
    read_layers,
)
from fdjax.models.experts import ONLY_TRAINING, read_routing
from fdjax.models.families.granite import read_granite
from fdjax.models.name_map import TensorNames

MODEL_TYPES = ("granitemoe",)
ARCHITECTURE = "GraniteMoeForCausalLM"
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
TENSORS = TensorNames(
    own={"router": ("block_sparse_moe.router.layer",)},
    experts=(
        ("block_sparse_moe.input_linear.weight",),
        ("block_sparse_moe.output_linear.weight",),
    ),
    renamed={
        r"\.experts\.gate_up_proj$": ".input_linear.weight",
        r"\.experts\.down_proj$": ".output_linear.weight",
        r"\.router\.weight$": ".router.layer.weight",
    },
)


def parse_config(reader: ConfigReader) -> DecoderConfig:
    """Parse the config.json of a `GraniteMoeForCausalLM`, in the old or the new format."""
    dimensions = read_dimensions(reader)
    return read_decoder(
        reader,
        "granitemoe",
        **read_granite(reader, dimensions["head_dim"], read_layers(reader)),
        experts=read_routing(reader, "num_local_experts", normalised=True),
        ignorable=ONLY_TRAINING,
        **dimensions,
    )
