"""The common form of all formats: codes [N,K] of a linear layer, with scales and zeros by group.

All experts of a layer may be one weight [X,N,K]. All arrays then have a leading axis X.

Arrays begin with the axis N, as in a checkpoint, so that the layouts of `fdjax.models.name_map`
fuse them like plain weights. See `fdjax.pallas_kernels.quantised` for codes and zeros.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from fdjax.models import CheckpointError
from fdjax.pallas_kernels.quantised import BITS, WeightFormat
from fdjax.weights.stored import INDEX, SINGLE, StoredTensor

Stored = Mapping[str, StoredTensor]

_SCALES = {"F16": "float16", "BF16": "bfloat16"}
# Codes that are floating-point numbers, in the lowest bits of a byte.
_FLOATS = {"fp8": ml_dtypes.float8_e4m3fn, "fp4": ml_dtypes.float4_e2m1fn}


@dataclasses.dataclass(frozen=True)
class Codes:
    """The codes of a linear layer.

    Attributes:
      words: [N, W] int32; a word holds successive columns, the first in its lowest bits.
      scales: [N, G], in the dtype of the format.
      zeros: [N, G], or None.
    """

    words: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class StoredLinear:
    """A quantised linear layer [N,K] of a checkpoint.

    Attributes:
      shape: (N, K), or (X, N, K) of all experts of a layer.
      names: names of its tensors.
      format: its format, or None if `read` returns the dequantised weight [N,K] fp32.
      read: reads the tensors. Raises CheckpointError if their values are damaged.
      reason: why the weight is dequantised, if it is.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    format: WeightFormat | None
    read: Callable[[], Codes | np.ndarray]
    reason: str = ""

    def codes(self, wanted: WeightFormat) -> Codes:
        """The codes in a format of the same kind, whose group size divides this layer's."""
        codes, repeats = self.read(), self.format.group // wanted.group

        def grouped(a):
            return np.repeat(a, repeats, axis=-1).astype(np.dtype(wanted.scales))

        zeros = codes.zeros
        if zeros is None and wanted.zeros:
            zeros = np.full_like(codes.scales, 2 ** (BITS[wanted.kind] - 1))
        return Codes(codes.words, grouped(codes.scales), None if zeros is None else grouped(zeros))

    def dense(self) -> np.ndarray:
        """The dequantised weight [N,K] fp32."""
        read = self.read()
        return read if self.format is None else dequantised(read, self.format, self.shape[-1])


class Scheme(Protocol):
    """A format as a checkpoint's config.json describes it."""

    def linear(self, module: str, shape: tuple[int, ...], stored: Stored) -> StoredLinear | None:
        """The linear layer `module` of shape (N, K), or None if it is not quantised.

        The shape is (X, N, K) if one tensor holds all experts of a layer, as only in MXFP4 and
        compressed-tensors.

        Raises:
          CheckpointError: tensors are missing, or do not fit the description.
        """
        ...


def fused_format(linears: Sequence[StoredLinear | None]) -> WeightFormat | None:
    """The format to which several layers fuse without loss; None if there is none."""
    formats = [None if linear is None else linear.format for linear in linears]
    if None in formats or len({one.kind for one in formats}) > 1:
        return None
    scales = {one.scales for one in formats}
    return WeightFormat(
        formats[0].kind,
        math.gcd(*(one.group for one in formats)),
        any(one.zeros for one in formats),
        scales.pop() if len(scales) == 1 else "float32",
        rounded_activations=all(one.rounded_activations for one in formats),
    )


def dequantised(
    codes: Codes, kind: WeightFormat | str, k: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """The weight [N,K] fp32. `groups` [K] has the group of each column, by default in order."""
    kind = kind if isinstance(kind, str) else kind.kind
    values = unpack_rows(codes.words, BITS[kind], k)
    if kind in _FLOATS:
        values = values.view(_FLOATS[kind])
    if groups is None:
        groups = np.arange(k) // (k // codes.scales.shape[-1])
    zero = 0.0 if kind in _FLOATS else 2.0 ** (BITS[kind] - 1)
    if codes.zeros is not None:
        zero = codes.zeros.astype(np.float32)[..., groups]
    values = values.astype(np.float32) - np.float32(zero)
    return values * codes.scales.astype(np.float32)[..., groups]


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [...,K] uint8 → words [...,W] int32."""
    codes = np.pad(codes, (*((0, 0),) * (codes.ndim - 1), (0, -codes.shape[-1] % (32 // bits))))
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(codes).view("<i4")


def unpack_rows(words: np.ndarray, bits: int, k: int) -> np.ndarray:
    """The inverse of `pack_rows`: words [...,W] → codes [...,K] uint8."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return codes[..., :k]


def take(
    stored: Stored, name: str, dtypes: Iterable[str], *shapes: tuple[int, ...], why: str = ""
) -> StoredTensor:
    """A tensor of the checkpoint, which must exist with one of these dtypes and shapes.

    Args:
      stored: tensors of the checkpoint, by name.
      name: name of the tensor.
      dtypes: dtypes in the names of safetensors.
      *shapes: shapes it may have; any if none is given.
      why: added to the message about a shape.

    Raises:
      CheckpointError: it does not exist, or has another dtype or shape.
    """
    if name not in stored:
        raise CheckpointError(f"{_file(stored)}: tensor {name!r} is missing")
    tensor = stored[name]
    if tensor.dtype not in dtypes:
        raise damaged(tensor, f"has dtype {tensor.dtype}, supported here: {', '.join(dtypes)}")
    if shapes and tensor.shape not in shapes:
        wanted = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise damaged(tensor, f"must have shape {wanted}{why}, got {list(tensor.shape)}")
    return tensor


def damaged(tensor: StoredTensor, problem: str) -> CheckpointError:
    """An error that names the file and the tensor."""
    return CheckpointError(f"{tensor.file.name}: tensor {tensor.name!r} {problem}")


def _file(stored: Stored) -> str:
    files = {tensor.file.name for tensor in stored.values()}
    return files.pop() if len(files) == 1 else INDEX if files else SINGLE


def scale_dtype(tensor: StoredTensor) -> str:
    """The dtype of a `WeightFormat` with these scales."""
    return _SCALES.get(tensor.dtype, "float32")


def read_scales(tensor: StoredTensor) -> np.ndarray:
    """The scales in the dtype of the format.

    Raises:
      CheckpointError: a scale is not finite.
    """
    scales = np.asarray(tensor.view()).astype(np.dtype(scale_dtype(tensor)))
    if not np.isfinite(scales.astype(np.float32)).all():
        raise damaged(tensor, "has values that are not finite")
    return scales


def group_of(group_size: Any, k: int, source: str, module: str) -> int:
    """The group size of a layer from a `group_size`, where -1 and None mean all of K.

    Raises:
      CheckpointError: it is not an integer, or does not divide K.
    """
    if group_size in (-1, None):
        return k
    if type(group_size) is not int or group_size < 1:
        raise CheckpointError(f"{source}: 'group_size' must be positive, got {group_size!r}")
    if k % group_size:
        raise CheckpointError(
            f"{source}: 'group_size' {group_size} must divide the {k} inputs of {module!r}"
        )
    return group_size


def matches(module: str, patterns: Iterable[str], source: str) -> bool:
    """Whether a module matches one of these names, or regular expressions after "re:".

    Args:
      module: name of the module.
      patterns: full names of modules or their parents, last parts of names, or regular expressions.
      source: name of config.json, for errors.

    Raises:
      CheckpointError: an expression is malformed.
    """
    for pattern in patterns:
        if not pattern.startswith("re:"):
            if pattern in (module, module.rpartition(".")[2]) or module.startswith(f"{pattern}."):
                return True
            continue
        try:
            if re.match(pattern[3:], module):
                return True
        except re.error as error:
            raise CheckpointError(f"{source}: {pattern!r} is malformed, {error}") from None
    return False
