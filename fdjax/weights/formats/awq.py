"""AWQ, version "gemm": 4 bits with zeros by group. Codes are packed along N in a special order."""

import dataclasses
from typing import Any

import numpy as np

from fdjax.models import ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.layer import (
    Codes,
    Stored,
    StoredLinear,
    group_of,
    pack_rows,
    read_scales,
    scale_dtype,
    take,
    unpack_rows,
)

# Position in a word of each of 8 successive columns.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class AWQ:
    """An AWQ checkpoint.

    Attributes:
      group_size: rows that share a scale, -1 for all.
      zeros: whether there are zeros.
      source: name of config.json, for errors.
    """

    group_size: int
    zeros: bool
    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "AWQ":
        """Parse a `quantization_config`."""
        data = {key: v.lower() if isinstance(v, str) else v for key, v in data.items()}
        reader = ConfigReader(data, source)
        reader.one_of("version", {"gemm": None}, "gemm")
        bits = "bits" if "bits" in data else "w_bit"
        ConfigReader({"bits": str(data.get(bits, 4))}, source).one_of("bits", {"4": None}, "4")
        size = "group_size" if "group_size" in data else "q_group_size"
        return cls(reader.get(size, int, 128), reader.get("zero_point", bool, True), source)

    def linear(self, module: str, shape: tuple[int, int], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        if not any(f"{module}.{name}" in stored for name in ("qweight", "qzeros", "scales")):
            return None
        n, k = shape
        group = group_of(self.group_size, k, self.source, module)
        words = -(-n // 8)
        weight = take(stored, f"{module}.qweight", ["I32"], (k, words), why=" for 4 bits")
        scale = take(stored, f"{module}.scales", ["F16", "BF16", "F32"], (k // group, n))
        zero = None
        if self.zeros or f"{module}.qzeros" in stored:
            zero = take(stored, f"{module}.qzeros", ["I32"], (k // group, words))

        def read():
            scales = read_scales(scale).T
            zeros = None if zero is None else _unpack(zero.view(), n).astype(scales.dtype)
            return Codes(pack_rows(_unpack(weight.view(), n), 4), scales, zeros)

        names = (weight.name, scale.name) + ((zero.name,) if zero else ())
        form = WeightFormat("int4", group, zero is not None, scale_dtype(scale))
        return StoredLinear(shape, names, form, read)


def _unpack(words: np.ndarray, n: int) -> np.ndarray:
    """Words [R, N/8] → codes [N, R] uint8."""
    codes = unpack_rows(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return np.ascontiguousarray(codes[:, :, _PLACES].reshape(len(words), -1)[:, :n].T)
