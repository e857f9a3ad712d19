"""Chooses the format of a checkpoint, and finds the quantised weights of a model in it."""

from collections.abc import Mapping
from typing import Any

from fdjax.models import CheckpointError, DecoderConfig, weight_map
from fdjax.weights.formats.awq import AWQ
from fdjax.weights.formats.bitsandbytes import BitsAndBytes
from fdjax.weights.formats.compressed_tensors import CompressedTensors
from fdjax.weights.formats.fp8 import FP8
from fdjax.weights.formats.gptq import GPTQ
from fdjax.weights.formats.layer import Scheme, Stored, StoredLinear, fused_format
from fdjax.weights.formats.mxfp4 import MXFP4

FORMATS = {
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
}
_WEIGHT = ".weight"


def scheme_of(data: Mapping[str, Any], source: str = "config.json") -> Scheme | None:
    """The format that a config.json describes; None if nothing is quantised.

    Args:
      data: content of the file.
      source: name of the file, for errors.

    Raises:
      CheckpointError: the format is unknown or not supported.
    """
    described = data.get("quantization_config") or data.get("compression_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{source}: 'quantization_config' of {method!r} is not supported; "
            f"supported: {', '.join(FORMATS)}. Or use the unquantised checkpoint"
        )
    if not isinstance(described, dict):
        raise CheckpointError(
            f"{source}: 'quantization_config' must be an object that describes the format, "
            f"got {described!r}"
        )
    return FORMATS[method].parse(described, f"{source}: 'quantization_config'")


def quantisable(config: DecoderConfig) -> set[tuple[str | int, ...]]:
    """The paths of the parameters that may be quantised."""
    blocks = enumerate(config.blocks)
    paths = {("blocks", i, *path) for i, block in blocks for path, _ in block.weights.values()}
    return paths | {(name, "weight") for name in ("head", "embed_in", "embed_out")}


def stored_linears(
    scheme: Scheme | None, config: DecoderConfig, stored: Stored
) -> dict[str, StoredLinear]:
    """The quantised linear layers of a checkpoint, by the name of their weight.

    Args:
      scheme: the checkpoint's format, or None.
      config: the model that the checkpoint must contain.
      stored: its tensors, by name.

    Raises:
      CheckpointError: tensors are missing or do not fit the format, or nothing is quantised.
    """
    if scheme is None:
        return {}
    found = {}
    paths = quantisable(config)
    for path, weight in weight_map(config).items():
        if path not in paths:
            continue
        for name, shape in weight.outputs_first()[0].sources:
            if len(shape) > 2 and not isinstance(scheme, MXFP4 | CompressedTensors):
                continue
            linear = scheme.linear(name.removesuffix(_WEIGHT), shape, stored)
            if linear is not None:
                found[name] = linear
    if not found:
        raise CheckpointError(f"{scheme.source} exists, but no weight is quantised")
    return found


def with_stored_formats(
    config: DecoderConfig, linears: Mapping[str, StoredLinear]
) -> DecoderConfig:
    """The model with the formats of a checkpoint's weights.

    Weights that fuse to one parameter share a format. If they cannot, they get none.
    """
    formats = {}
    paths = quantisable(config)
    for path, weight in weight_map(config).items():
        if path not in paths:
            continue
        fused = fused_format([linears.get(name) for name, _ in weight.sources])
        if fused is not None:
            formats[path] = fused
    return config.with_formats(formats)
