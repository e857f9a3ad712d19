"""The calibration beside a checkpoint: φ of every head, and where a unified maximum pays.

`fdjax.tools.calibrate` makes it; loading a model reads it. It changes the speed, never a result.
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

# In units of log2: how far from φ the maximum of a split's first block may be for decode kernels to
# keep φ.
SAFE_LOG2 = 32.0
# Largest share of a layer's rows outside the safe range with which the technique applies.
RATE_LIMIT = 0.01

_LOG2E = math.log2(math.e)

logger = logging.getLogger("fdjax")


@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """What a layer's heads were found to be; every field has one value per query head.

    Attributes:
      phi: unified maximum; the safe range is phi ± SAFE_LOG2 / log2(e).
      rates: predicted share of rows that leave the safe range.
      lower, upper: interval that holds 99.99 % of the scores.
      lowest, highest: extremes of the scores.
    """

    phi: tuple[float, ...]
    rates: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Predicted share of the layer's rows that leave the safe range."""
        return math.fsum(self.rates) / len(self.rates)

    @property
    def applies(self) -> bool:
        """Whether a unified maximum pays: the rate is within RATE_LIMIT."""
        return self.rate <= RATE_LIMIT


@dataclasses.dataclass(frozen=True)
class Calibration:
    """φ of a model, and what it was chosen by.

    Attributes:
      fingerprint: of the checkpoint, see `fdjax.weights.checkpoint.fingerprint`.
      layers: one entry per layer.
      provenance: where the numbers come from.
    """

    fingerprint: str
    layers: tuple[LayerCalibration, ...]
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """A table for people."""
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
            f"{count} of {len(self.layers)} layers subtract a constant in the softmax, not "
            "the largest score of each row, which is faster.",
            "A layer does where the largest score of at most "
            f"{RATE_LIMIT:.0%} of its rows is outside constant +- {SAFE_LOG2 / _LOG2E:.2f}.",
            "Rows outside may be computed again: no answer changes. docs/performance.md says more.",
        ]
        return "\n".join(lines)


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration as JSON, a layer to a line."""
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
    # A model with half a calibration beside it would not load.
    write_whole(path, json_by_line(head, "layers", layers))


def read_calibration(path: str | Path, config: DecoderConfig) -> Calibration | None:
    """Read the calibration of a model; None, with a warning, for one of another schema.

    Raises:
      CheckpointError: the file is damaged, or not of such a model.
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
    """The architecture with φ of every layer, if there is a calibration beside the checkpoint.

    A layer where the technique does not apply runs with the maximum of its rows.

    Raises:
      CheckpointError: the calibration is damaged, or of a model of another shape.

    Warns:
      UserWarning: the calibration is of another schema or of other weights, and not used.
    """
    path = folder / FILE
    if not is_there(path):
        return config
    calibration = read_calibration(path, config)
    if calibration is None:
        return config
    if calibration.fingerprint != fingerprint(folder):
        warnings.warn(f"{path}: not used, made for other weights; {_REMEDY}", stacklevel=3)
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
