"""fp8 as DeepSeek and Qwen3 store it: e4m3 weights, with a scale for each block or tensor."""

import dataclasses
from typing import Any

from fdjax.models import CheckpointError, ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.compressed_tensors import (
    block_columns,
    expand_scales,
    is_block,
    words_of,
)
from fdjax.weights.formats.layer import (
    Codes,
    Stored,
    StoredLinear,
    read_scales,
    scale_dtype,
    take,
)

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclasses.dataclass(frozen=True)
class FP8:
    """A checkpoint with fp8 weights.

    Attributes:
      block: (rows of N, columns of K) of a block; None for one scale per tensor or channel.
      rounded_activations: whether activations may be rounded to fp8.
      source: name of config.json, for errors.
    """

    block: tuple[int, int] | None
    rounded_activations: bool
    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "FP8":
        """Parse a `quantization_config`."""
        reader = ConfigReader(data, source)
        reader.one_of("fmt", {"e4m3": None}, "e4m3")
        block = reader.get("weight_block_size", list, None)
        if block is not None and not is_block(block):
            raise CheckpointError(
                f"{source}: 'weight_block_size' must be two positive integers, got {block!r}"
            )
        # Scales of activations in the checkpoint ("static") are less accurate than new ones.
        scheme = reader.get("activation_scheme", str, "dynamic")
        return cls(tuple(block) if block else None, scheme in ("dynamic", "static"), source)

    def linear(self, module: str, shape: tuple[int, int], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        n, k = shape
        name = f"{module}.weight"
        scales = [f"{name}_scale_inv", f"{name}_scale"]
        there = next((scale for scale in scales if scale in stored), None)
        coded = name in stored and stored[name].dtype.startswith("F8")
        if not coded and there is None:
            return None
        weight = take(stored, name, ["F8_E4M3"], shape)
        if self.block:
            columns = block_columns(k, self.block[1])
            blocks = -(-n // self.block[0]), -(-k // self.block[1])
            scale = take(stored, there or scales[0], _SCALES, blocks)
        else:
            columns = [0]
            scale = take(stored, there or scales[1], _SCALES, (), (1,), (1, 1), (n,), (n, 1))

        def read():
            # Despite the name `weight_scale_inv`, it multiplies the codes.
            return Codes(
                words_of(weight), expand_scales(read_scales(scale), [n], columns, self.block)
            )

        form = WeightFormat(
            "fp8",
            k // len(columns),
            scales=scale_dtype(scale),
            rounded_activations=self.rounded_activations,
        )
        return StoredLinear(shape, (name, scale.name), form, read)
