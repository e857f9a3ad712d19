"""GPTQ: 4 or 8 bits by group, packed along K. Version 1 stores each zero minus 1."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdjax.models import CheckpointError, ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.compressed_tensors import in_order
from fdjax.weights.formats.layer import (
    Codes,
    Stored,
    StoredLinear,
    damaged,
    group_of,
    read_scales,
    scale_dtype,
    take,
    unpack_rows,
)


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """A GPTQ checkpoint.

    Attributes:
      bits: 4 or 8.
      group_size: rows that share a scale, -1 for all.
      symmetric: whether all zeros are the middle code.
      stored_less: number that is subtracted from zeros before they are stored, 1 or 0.
      dynamic: exceptions for some modules: regular expression → changed settings, or None if they
        are not quantised.
      source: name of config.json, for errors.
    """

    bits: int
    group_size: int
    symmetric: bool
    stored_less: int
    dynamic: tuple[tuple[str, Mapping[str, Any] | None], ...]
    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "GPTQ":
        """Parse a `quantization_config`."""
        reader = ConfigReader(data, source)
        less = reader.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, "gptq")
        reader.one_of("pack_dtype", {"int32": None}, "int32")
        rules = []
        for pattern, change in (reader.get("dynamic", dict, None) or {}).items():
            plain = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
            if not isinstance(change, dict) or not _is_expression(plain):
                raise CheckpointError(f"{source}: 'dynamic' has a malformed entry {pattern!r}")
            rules.append((plain, None if pattern.startswith("-:") else change))
        bits = _bits(reader.get("bits", int), source)
        size, symmetric = reader.get("group_size", int, 128), reader.get("sym", bool, True)
        return cls(bits, size, symmetric, less, tuple(rules), source)

    def linear(self, module: str, shape: tuple[int, int], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        parts = ("qweight", "qzeros", "scales", "g_idx")
        if not any(f"{module}.{name}" in stored for name in parts):
            return None
        n, k = shape
        own = self._for(module)
        bits, less = own.bits, own.stored_less
        group = group_of(own.group_size, k, self.source, module)
        words = -(-k * bits // 32), n
        weight = take(stored, f"{module}.qweight", ["I32"], words, why=f" for {bits} bits")
        scale = take(stored, f"{module}.scales", ["F16", "BF16", "F32"], (k // group, n))
        zero = take(stored, f"{module}.qzeros", ["I32"], (k // group, -(-n * bits // 32)))
        names = [weight.name, scale.name, zero.name]
        order = None
        if f"{module}.g_idx" in stored:
            order = take(stored, f"{module}.g_idx", ["I32", "I64"], (k,))
            names.append(order.name)
        bias = stored.get(f"{module}.bias")
        if bias is not None and not bias.view().any():
            names.append(bias.name)  # some tools write such a tensor for every layer

        def read():
            scales = read_scales(scale).T
            # Tools subtract 1 from each code of a word at once, so a zero of 0 borrows from its
            # neighbour.
            ones = np.uint32(less * (0xFFFFFFFF // (2**bits - 1)))
            stored_zeros = np.asarray(zero.view()).view(np.uint32) + ones
            zeros = unpack_rows(stored_zeros, bits, n).T.astype(scales.dtype)
            if own.symmetric:
                if (zeros != 2 ** (bits - 1)).any():
                    raise damaged(zero, "must hold the middle code by 'sym' of config.json")
                zeros = None
            return Codes(np.ascontiguousarray(weight.view().T), scales, zeros)

        form = WeightFormat(f"int{bits}", group, not own.symmetric, scale_dtype(scale))
        return in_order(shape, tuple(names), form, read, order)

    def _for(self, module: str) -> "GPTQ":
        """The settings of one module. The first entry of `dynamic` that matches applies."""
        for pattern, change in self.dynamic:
            if not re.match(pattern, module):
                continue
            if change is None:
                raise CheckpointError(
                    f"{self.source}: {module!r} is quantised, but 'dynamic' leaves it out"
                )
            reader = ConfigReader(change, self.source)
            return dataclasses.replace(
                self,
                bits=_bits(reader.get("bits", int, self.bits), self.source),
                group_size=reader.get("group_size", int, self.group_size),
                symmetric=reader.get("sym", bool, self.symmetric),
            )
        return self


def _is_expression(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _bits(bits: int, source: str) -> int:
    if bits not in (4, 8):
        raise CheckpointError(f"{source}: GPTQ with {bits} bits is not supported; supported: 4, 8")
    return bits
