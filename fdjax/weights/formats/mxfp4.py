"""MXFP4, as in the experts of gpt-oss: codes in e2m1, and a power of 2 scales each 32 weights.

Rouhani et al. 2023, Microscaling Data Formats for Deep Learning.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from fdjax.models import CheckpointError, ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.layer import Codes, Stored, StoredLinear, damaged, take

GROUP = 32  # weights that share a scale
_NAN = 255  # the code of NaN in e8m0


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A checkpoint whose experts are in MXFP4.

    Attributes:
      source: name of config.json, for errors.
    """

    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "MXFP4":
        """Parse a `quantization_config`."""
        ConfigReader(data, source).get("quant_method", str)
        return cls(source)

    def linear(self, module: str, shape: tuple[int, ...], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        names = f"{module}_blocks", f"{module}_scales"
        if not any(name in stored for name in names):
            return None
        *outs, k = shape
        blocks = *outs, k // GROUP, GROUP // 2
        return read_mxfp4(module, shape, stored, self.source, names, blocks)


def read_mxfp4(
    module: str,
    shape: tuple[int, ...],
    stored: Stored,
    source: str,
    names: tuple[str, str],
    packed: tuple[int, ...],
) -> StoredLinear:
    """A weight in MXFP4.

    Args:
      module: name of the layer, for errors.
      shape: (N, K), or (X, N, K) of all experts of a layer.
      stored: tensors of the checkpoint, by name.
      source: name of config.json, for errors.
      names: the tensors of codes and of scales.
      packed: shape of the codes, two in a byte.

    Raises:
      CheckpointError: tensors are missing or do not fit.
    """
    *outs, k = shape
    if k % GROUP:
        raise CheckpointError(
            f"{source}: MXFP4 needs inputs that are a multiple of {GROUP}, but {module!r} has {k}"
        )
    codes = take(stored, names[0], ["U8"], packed)
    scale = take(stored, names[1], ["U8"], (*outs, k // GROUP))

    def read():
        exponents = np.asarray(scale.view())
        if (exponents == _NAN).any():
            raise damaged(scale, "has values that are not finite")
        # A byte has two codes, the first in its lower half, which is also their order in words.
        words = np.ascontiguousarray(codes.view()).view("<i4").reshape(*outs, k // 8)
        return Codes(words, exponents.view(ml_dtypes.float8_e8m0fnu))

    form = WeightFormat("fp4", GROUP, scales="float8_e8m0fnu")
    return StoredLinear(tuple(shape), names, form, read)
