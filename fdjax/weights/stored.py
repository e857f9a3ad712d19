"""Reads the files of a checkpoint: JSON, and the headers of safetensors files.

This module memory-maps the tensors itself. The safetensors package copies every tensor to anonymous
memory first, and its error for a truncated file names no tensor. A file consists of the header's
length in eight bytes, a JSON header, and the bytes of the tensors.
"""

import dataclasses
import json
import math
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fdjax.models import CheckpointError
from fdjax.models.readable import readable

# Dtypes of weights that are not quantised.
FLOATS = ("F32", "F16", "BF16", "F64")
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Longest file name in common file systems, in bytes.
_NAME_BYTES = 255
_DOWNLOAD_AGAIN = "download the file again"
# Beginning of the small file that a clone without Git LFS has in place of a large file.
_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file.

    Attributes:
      file: the safetensors file.
      name: name of the tensor.
      dtype: dtype in the names of safetensors, such as "BF16".
      shape: shape of the tensor.
      start: position of its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self, supported: Iterable[str] = DTYPES) -> np.ndarray:
        """The tensor as a memory-mapped array.

        Args:
          supported: the dtypes that it may have, in the names of safetensors.

        Raises:
          CheckpointError: it has another dtype.
        """
        if self.dtype not in supported:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name!r} has dtype {self.dtype}, "
                f"supported: {', '.join(supported)}"
            )
        dtype = DTYPES[self.dtype]
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, mode="r", offset=self.start, shape=self.shape)


def is_there(path: Path) -> bool:
    """Whether a file exists.

    Raises:
      CheckpointError: the path is a broken link, as in a cleaned-up cache of the hub, exists but is
        not a regular file, or is in a folder that may not be entered.
    """
    try:
        linked, there = path.is_symlink(), path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if linked and not there:
        raise CheckpointError(f"{path}: a broken link; download the checkpoint again")
    if there:
        _refuse_irregular(path)
    return there


def _refuse_irregular(path: Path) -> None:
    """Raise CheckpointError for a folder, and for a pipe or a device, which may never end."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise CheckpointError(f"{path}: must be a regular file, but is {kind}")


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing and not required.

    Raises:
      CheckpointError: the file is required but missing, cannot be read, or is not a JSON object.
    """
    if not is_there(path):
        if required:
            hint = "is this a checkpoint folder?"
            if (path.parent / "adapter_config.json").exists():
                hint = "this is an adapter: merge it into its base model first"
            raise CheckpointError(f"{path.parent}: no {path.name}; {hint}")
        return {}
    try:
        refuse_pointer(path)
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(data).__name__}")
    return data


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is only a pointer of Git LFS to the real file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a pointer of Git LFS, not the file itself; run `git lfs pull`"
            )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find all tensors of a checkpoint, which may have one file or several shards.

    Raises:
      CheckpointError: there are no weights, a shard is missing, or a file is damaged or truncated.

    Warns:
      UserWarning: a file or a tensor is there twice. The message says which one is read.
    """
    if is_there(folder / SINGLE):
        if shards := sorted(folder.glob("model-*.safetensors")):
            warnings.warn(
                f"{folder}: {SINGLE} is read, and {shards[0].name} is not; remove one of them",
                stacklevel=2,
            )
        return _read_header(folder / SINGLE)
    if is_there(folder / INDEX):
        return _read_shards(folder)
    others = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
    if others:
        raise CheckpointError(
            f"{others[0].name}: pickled weights are not supported; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    hint = "is this a checkpoint folder?"
    if (folder / "adapter_model.safetensors").exists():
        hint = "this is an adapter: merge it into its base model first"
    elif parts := sorted(folder.glob("*.safetensors")):
        hint = f"{parts[0].name} alone is not enough; download the index too"
    elif any(folder.glob("*.gguf")):
        hint = "GGUF files are not supported; take the checkpoint that they were made from"
    raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}; {hint}")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise CheckpointError(f"{INDEX}: 'weight_map' must map tensors to files")
    tensors: dict[str, StoredTensor] = {}
    copies = []
    for file in sorted(set(index.values())):
        first = min(name for name, f in index.items() if f == file)
        # An index must not name files outside the folder.
        beside = file not in ("", "..") and Path(file).name == file
        if not (beside and file.isprintable() and len(file.encode()) <= _NAME_BYTES):
            raise CheckpointError(
                f"{INDEX}: tensor {first!r} must be in a file beside the index, got {file!r}"
            )
        if not (folder / file).exists():
            raise CheckpointError(
                f"{file}: shard is missing, needed for tensor {first!r}; {_DOWNLOAD_AGAIN}"
            )
        _refuse_irregular(folder / file)
        for name, tensor in _read_header(folder / file).items():
            # A tensor without an index entry is kept, so that `check_tensors` reports it.
            if index.get(name, file) == file:
                tensors[name] = tensor
            else:
                copies.append(
                    f"{file}: tensor {name!r} is not read, the index has it in {index[name]}"
                )
    for name, file in index.items():
        if name not in tensors:
            raise CheckpointError(
                f"{file}: tensor {name!r} is in the index but not in the file; {_DOWNLOAD_AGAIN}"
            )
    for copy in copies:
        warnings.warn(readable(copy), stacklevel=3)
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        refuse_pointer(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            raw = file.read(length) if 8 + length <= size else b""
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from None
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path.name}: truncated, {size} bytes are too few for a header; {_DOWNLOAD_AGAIN}"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path.name}: truncated or not safetensors, header of {length} bytes "
            f"in a file of {size}; {_DOWNLOAD_AGAIN}"
        )
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = header.items()
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{path.name}: header is not that of a safetensors file; {_DOWNLOAD_AGAIN}"
        ) from None
    spans = [_read_entry(path, name, entry, 8 + length, size) for name, entry in entries]
    spans.sort(key=lambda span: (span[0].start, span[1]))
    # The format forbids gaps and overlaps, so that no bytes can be hidden or read twice.
    end = 8 + length
    for tensor, tensor_end in spans:
        if tensor.start != end:
            problem = "overlaps another" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(
                f"{path.name}: tensor {tensor.name!r} {problem}; {_DOWNLOAD_AGAIN}"
            )
        end = tensor_end
    if end != size:
        raise CheckpointError(
            f"{path.name}: {size - end} bytes follow the last tensor; {_DOWNLOAD_AGAIN}"
        )
    return {tensor.name: tensor for tensor, _ in spans}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of these pairs. Raises ValueError if a key occurs twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _read_entry(
    path: Path, name: str, entry: Any, data_start: int, size: int
) -> tuple[StoredTensor, int]:
    """(tensor, position of the first byte after it) from an entry of the header."""
    try:
        start, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        sound = isinstance(dtype, str) and all(type(n) is int for n in (*shape, start, end))
        sound = sound and 0 <= start <= end and min(shape, default=0) >= 0
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"{path.name}: header entry of tensor {name!r} is malformed; {_DOWNLOAD_AGAIN}"
        )
    tensor = StoredTensor(path, name, dtype, shape, data_start + start)
    if data_start + end > size:
        raise CheckpointError(
            f"{path.name}: truncated, tensor {name!r} ends at byte {data_start + end} "
            f"of {size}; {_DOWNLOAD_AGAIN}"
        )
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path.name}: tensor {name!r} of shape {list(shape)} must take "
            f"{math.prod(shape) * DTYPES[dtype].itemsize} bytes, got {end - start}; "
            f"{_DOWNLOAD_AGAIN}"
        )
    return tensor, data_start + end
