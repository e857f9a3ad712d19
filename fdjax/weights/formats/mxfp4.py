"""MXFP4 as gpt-oss stores it: experts in e2m1, with a power of 2 as scale of each 32 weights.

Rouhani et al. 2023, Microscaling Data Formats for Deep Learning.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from fdjax.models import CheckpointError, ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.layer import Codes, Stored, StoredLinear, damaged, take

_GROUP = 32
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
        if k % _GROUP:
            raise CheckpointError(
                f"{self.source}: MXFP4 needs inputs that are a multiple of {_GROUP}, but "
                f"{module!r} has {k}"
            )
        groups = *outs, k // _GROUP
        blocks = take(stored, names[0], ["U8"], (*groups, _GROUP // 2))
        scale = take(stored, names[1], ["U8"], groups)

        def read():
            exponents = np.asarray(scale.view())
            if (exponents == _NAN).any():
                raise damaged(scale, "has values that are not finite")
            # A byte has two codes, the first in its lower half, which is also their order in words.
            words = np.ascontiguousarray(blocks.view()).view("<i4").reshape(*outs, k // 8)
            return Codes(words, exponents.view(ml_dtypes.float8_e8m0fnu))

        form = WeightFormat("fp4", _GROUP, scales="float8_e8m0fnu")
        return StoredLinear(tuple(shape), names, form, read)
