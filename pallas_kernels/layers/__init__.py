"""All layers of a decode step: `decode_layers`."""

from fdjax.pallas_kernels.layers.decode_layers import LayerWeights, decode_layers
from fdjax.pallas_kernels.layers.hopper.decode_layers import DecodeLayersConfig

__all__ = ["DecodeLayersConfig", "LayerWeights", "decode_layers"]
