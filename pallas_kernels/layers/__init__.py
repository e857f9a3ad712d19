"""All layers of a decode step: `decode_layers`."""

from fdjax.pallas_kernels.layers.decode_layers import (
    DECODE_LAYERS,
    Formats,
    LayerWeights,
    decode_layers,
    formats_of,
    ranks_key,
)
from fdjax.pallas_kernels.layers.hopper.decode_layers import DecodeLayersConfig

__all__ = [
    "DECODE_LAYERS",
    "DecodeLayersConfig",
    "Formats",
    "LayerWeights",
    "decode_layers",
    "formats_of",
    "ranks_key",
]
