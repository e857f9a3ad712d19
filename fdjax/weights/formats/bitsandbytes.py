"""bitsandbytes, 4 bits: nf4 and fp4. fdjax has no kernel for them and dequantises them."""

import dataclasses
import json
import math
from typing import Any

import numpy as np

from fdjax.models import CheckpointError, ConfigReader
from fdjax.weights.formats.layer import Stored, StoredLinear, damaged, read_scales, take
from fdjax.weights.stored import StoredTensor

_STATE = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


@dataclasses.dataclass(frozen=True)
class BitsAndBytes:
    """A checkpoint with 4-bit weights of bitsandbytes."""

    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "BitsAndBytes":
        """Parse a `quantization_config`."""
        reader = ConfigReader(data, source)
        if not (
            reader.get("load_in_4bit", bool, False) or reader.get("_load_in_4bit", bool, False)
        ):
            raise CheckpointError(
                f"{source}: bitsandbytes with 8 bits is not supported; supported: 4 bits"
            )
        return cls(source)

    def linear(self, module: str, shape: tuple[int, int], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        name = f"{module}.weight"
        state = next((s for kind in _STATE if (s := f"{name}.{kind}") in stored), None)
        if state is None:
            if f"{name}.absmax" in stored or (name in stored and stored[name].dtype == "U8"):
                take(stored, f"{name}.{_STATE[0]}", ["U8"])
            return None
        n, k = shape
        described = _describe(take(stored, state, ["U8"]), shape)
        count = n * k
        packed = take(stored, name, ["U8"], (-(-count // 2), 1), (1, -(-count // 2)))
        blocks = -(-count // described["blocksize"])
        nested = "nested_blocksize" in described
        scale = take(stored, f"{name}.absmax", ["U8"] if nested else ["F32"], (blocks,))
        values = take(stored, f"{name}.quant_map", ["F32"], (16,))
        used = [packed, scale, values]
        if nested:
            size = -(-blocks // described["nested_blocksize"])
            used.append(take(stored, f"{name}.nested_absmax", ["F32"], (size,)))
            used.append(take(stored, f"{name}.nested_quant_map", ["F32"], (256,)))

        def read():
            absmax = read_scales(scale)
            if nested:
                outer = np.repeat(read_scales(used[3]), described["nested_blocksize"])[:blocks]
                inner = read_scales(used[4])[scale.view()]
                absmax = inner * outer + np.float32(described["nested_offset"])
            codes = packed.view().reshape(-1)
            codes = np.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[:count]
            scales = np.repeat(absmax, described["blocksize"])[:count]
            return (read_scales(values)[codes] * scales).reshape(shape)

        names = (*(tensor.name for tensor in used), state)
        return StoredLinear(shape, names, None, read, "bitsandbytes")


def _describe(state: StoredTensor, shape: tuple[int, int]) -> dict[str, Any]:
    """The description that bitsandbytes stores beside a weight, as JSON in bytes."""
    try:
        described = json.loads(state.view().tobytes())
        sizes = [described[n] for n in ("blocksize", "nested_blocksize") if n in described]
        sound = described["shape"] == list(shape) and all(type(s) is int and s > 0 for s in sizes)
        sound = sound and bool(sizes) and math.isfinite(described.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise damaged(state, f"does not describe a weight of shape {list(shape)}")
    return described
