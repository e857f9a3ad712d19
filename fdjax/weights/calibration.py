"""The calibration file beside a checkpoint: φ of every head, and the layers that use it.

`fdjax.tools.calibrate` makes the file, and `fdjax.load` reads it. It changes the speed, never a
result.
"""

import dataclasses
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fdjax.models import CheckpointError, DecoderConfig
from fdjax.models.readable import readable
from fdjax.system.files import json_by_line, write_whole
from fdjax.weights.checkpoint import fingerprint, is_there, read_json

FILE = "fdjax_calibration.json"
SCHEMA = 1
_REMEDY = "run `fdjax calibrate` again, or remove the file"

# Half the width of the safe range, in units of log2. Decode kernels keep φ if the maximum of a
# split's first block is at most this far from φ.
SAFE_LOG2 = 32.0
# A layer uses the unified maximum if at most this share of its rows is outside the safe range.
RATE_LIMIT = 0.01

_LOG2E = math.log2(math.e)

logger = logging.getLogger("fdjax")


@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """The calibration of one layer. Every field has one value per query head, in natural units.

    Attributes:
      phi: unified maximum; the safe range is phi ± SAFE_LOG2 / log2(e).
      rates: predicted share of rows that leave the safe range, from 0 to 1.
      lower, upper: interval that holds 99.99 % of the scores.
      lowest, highest: smallest and largest score observed.
    """

    phi: tuple[float, ...]
    rates: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Predicted share of the layer's rows that leave the safe range, from 0 to 1."""
        return math.fsum(self.rates) / len(self.rates)

    @property
    def applies(self) -> bool:
        """Whether the layer uses the unified maximum: the rate is at most RATE_LIMIT."""
        return self.rate <= RATE_LIMIT


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The calibration of a model.

    Attributes:
      fingerprint: identifies the checkpoint, see `fdjax.weights.checkpoint.fingerprint`.
      layers: one entry per layer.
      provenance: texts, versions, device and date of the measurement.
    """

    fingerprint: str
    layers: tuple[LayerCalibration, ...]
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """A readable table of the layers."""
        head = ("layer", "99.99 % of scores", "all scores", "constant", "outside", "uses it")
        cells = [head]
        for i, layer in enumerate(self.layers):
            ranges = (
                (layer.lower, layer.upper),
                (layer.lowest, layer.highest),
                (layer.phi, layer.phi),
            )
            cells.append(
                (
                    str(i),
                    *(f"{min(low):.1f} .. {max(high):.1f}" for low, high in ranges),
                    f"{layer.rate:.4%}",
                    "yes" if layer.applies else "no",
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
        count = sum(layer.applies for layer in self.layers)
        lines += [
            "",
            f"{count} of {len(self.layers)} layers subtract a constant in the softmax. That is "
            "faster than the largest score of each row.",
            f"A layer does so if at most {RATE_LIMIT:.0%} of its rows have their largest score "
            f"outside constant +- {SAFE_LOG2 / _LOG2E:.2f}.",
            "Rows outside may be computed again, so no answer changes. See docs/performance.md.",
        ]
        return "\n".join(lines)


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration as JSON, with one layer per line."""
    head = {
        "schema": SCHEMA,
        "fingerprint": calibration.fingerprint,
        "provenance": calibration.provenance,
        "safe_range": [-SAFE_LOG2 / _LOG2E, SAFE_LOG2 / _LOG2E],
        "rate_limit": RATE_LIMIT,
    }
    layers = (
        {"applies": layer.applies, "rate": layer.rate} | dataclasses.asdict(layer)
        for layer in calibration.layers
    )
    # Half a file must not remain: a model with a damaged calibration does not load.
    write_whole(path, json_by_line(head, "layers", layers))


def read_calibration(path: str | Path, config: DecoderConfig) -> Calibration | None:
    """Read a calibration file.

    Args:
      path: the file.
      config: the model that the calibration must fit.

    Returns:
      The calibration, or None if the file has another schema.

    Raises:
      CheckpointError: the file is damaged, or does not fit the model.

    Warns:
      UserWarning: the file has another schema.
    """
    try:
        data = read_json(Path(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_REMEDY}") from None
    if data.get("schema") != SCHEMA:
        warnings.warn(
            readable(
                f"{path}: not used, the schema must be {SCHEMA}, got {data.get('schema')!r}; "
                "run `fdjax calibrate` again"
            ),
            stacklevel=4,
        )
        return None
    layers = data.get("layers")
    count = len(layers) if isinstance(layers, list) else 0
    if count != config.layers:
        raise _damaged(path, f"must have {config.layers} layers, got {count}")
    names = [field.name for field in dataclasses.fields(LayerCalibration)]
    read = []
    for i, layer in enumerate(layers):
        values = [layer.get(name) if isinstance(layer, dict) else None for name in names]
        for name, value in zip(names, values, strict=True):
            if not _one_per_head(value, config.heads):
                raise _damaged(path, f"{name!r} of layer {i} must be {config.heads} finite numbers")
        read.append(LayerCalibration(*map(tuple, values)))
    return Calibration(str(data.get("fingerprint")), tuple(read), data.get("provenance", {}))


def _one_per_head(values: Any, heads: int) -> bool:
    if not isinstance(values, list) or len(values) != heads:
        return False
    largest = float(np.finfo(np.float32).max)
    return all(type(x) in (int, float) and abs(x) <= largest for x in values)


def _damaged(path: str | Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}; {_REMEDY}")


def calibrated(config: DecoderConfig, folder: Path) -> DecoderConfig:
    """The architecture with φ in every layer, if there is a calibration beside the checkpoint.

    A layer with too many rows outside the safe range keeps the maximum of each row.

    Args:
      config: the architecture.
      folder: folder of the checkpoint.

    Raises:
      CheckpointError: the calibration is damaged, or belongs to a model of another shape.

    Warns:
      UserWarning: the calibration is not used, because of another schema or other weights.
    """
    path = folder / FILE
    if not is_there(path):
        return config
    calibration = read_calibration(path, config)
    if calibration is None:
        return config
    if calibration.fingerprint != fingerprint(folder):
        warnings.warn(f"{path}: not used, it was made for other weights; {_REMEDY}", stacklevel=3)
        return config
    outside = [str(i) for i, layer in enumerate(calibration.layers) if not layer.applies]
    if outside:
        logger.info(
            "%s: more than %g of the rows leave the safe range in layers %s, which run without a "
            "unified maximum",
            path,
            RATE_LIMIT,
            ", ".join(outside),
        )
    specs = zip(config.attention, calibration.layers, strict=True)
    attention = tuple(
        dataclasses.replace(spec, phi=layer.phi, unified=layer.applies) for spec, layer in specs
    )
    logger.info("%s: a unified maximum for each head", path)
    return config.with_attention(attention)
