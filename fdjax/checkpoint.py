"""Read a Hugging Face checkpoint folder: config, tensors, generation defaults, tokenizer.

The tensors are memory-mapped here rather than through the safetensors package: its readers copy
every tensor to anonymous memory first, and a truncated file is an error that names no tensor. The
format is eight bytes of header length, a JSON header, and the bytes.
"""

import dataclasses
import importlib.resources
import json
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fdjax.models import CheckpointError, Model, Params, ignored_tensors, weight_map
from fdjax.models.weights import WeightMap, join

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
EMBEDDED = "tiny"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes are."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def view(self) -> np.ndarray:
        """The tensor, memory-mapped."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name!r} has dtype {self.dtype}, "
                f"supported: {', '.join(_DTYPES)}"
            )
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, mode="r", offset=self.start, shape=self.shape)


def locate(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one, or a hub id downloaded to the hub's cache.

    "tiny" is the model that comes with the package, unless there is a folder of that name.

    Raises:
      CheckpointError: neither a folder nor something the hub gives.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{name_or_path}: a checkpoint is a folder, this is a file")
    if name_or_path == EMBEDDED:
        return Path(str(importlib.resources.files("fdjax.models.tiny")))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        raise CheckpointError(f"{name_or_path}: no such folder, and not a hub id like 'owner/name'")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name_or_path, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name_or_path}: no such folder, and the hub did not give it ({reason})"
        ) from None


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object; {} for a missing file that is not required.

    Raises:
      CheckpointError: missing, unreadable, or not an object.
    """
    if not path.exists():
        if required:
            raise CheckpointError(f"{path.parent}: no {path.name}; is this a checkpoint folder?")
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(data).__name__}")
    return data


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, single or sharded.

    Raises:
      CheckpointError: no weights, a missing shard, a damaged or truncated file.
    """
    if (folder / _INDEX).exists():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
            raise CheckpointError(f"{_INDEX}: 'weight_map' must map tensors to files")
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(index.values())):
            if not (folder / file).exists():
                lost = next(name for name, f in sorted(index.items()) if f == file)
                raise CheckpointError(
                    f"{file}: shard is missing, needed for tensor {lost!r}; download it again"
                )
            tensors |= _read_header(folder / file)
        for name, file in index.items():
            if name not in tensors or tensors[name].file.name != Path(file).name:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is in the index but not in the file"
                )
        return tensors
    if (folder / _SINGLE).exists():
        return _read_header(folder / _SINGLE)
    others = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
    if others:
        raise CheckpointError(
            f"{others[0].name}: pickled weights are not supported; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    raise CheckpointError(f"{folder}: no {_SINGLE} and no {_INDEX}")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path.name}: truncated, {size} bytes hold no header")
        (length,) = struct.unpack("<Q", prefix)
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name}: truncated or not safetensors, header of {length} bytes "
                f"in a file of {size}"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(
                    path, name, t["dtype"], tuple(t["shape"]), 8 + length + t["data_offsets"][0]
                )
                for name, t in header.items()
            }
            ends = {name: 8 + length + t["data_offsets"][1] for name, t in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(
                f"{path.name}: header is not that of a safetensors file"
            ) from None
    for name, tensor in tensors.items():
        if ends[name] > size:
            raise CheckpointError(
                f"{path.name}: truncated, tensor {name!r} ends at byte {ends[name]} "
                f"of {size}; download the file again"
            )
        dtype = _DTYPES.get(tensor.dtype)
        expected = int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize if dtype else None
        if expected is not None and ends[name] - tensor.start != expected:
            raise CheckpointError(
                f"{path.name}: tensor {name!r} of shape {list(tensor.shape)} must take "
                f"{expected} bytes, got {ends[name] - tensor.start}"
            )
    return tensors


def check_tensors(stored: dict[str, StoredTensor], weights: WeightMap, ignored: Iterable[str]):
    """Compare what a checkpoint holds with what the model needs.

    Raises:
      CheckpointError: a missing, wrongly shaped or unexpected tensor.
    """
    some_file = next(iter(stored.values())).file.name if stored else _SINGLE
    needed = set()
    for weight in weights.values():
        for name, shape in weight.sources:
            needed.add(name)
            if name not in stored:
                raise CheckpointError(f"{some_file}: tensor {name!r} is missing")
            if stored[name].shape != shape:
                raise CheckpointError(
                    f"{stored[name].file.name}: tensor {name!r} must have shape {list(shape)} "
                    f"by config.json, got {list(stored[name].shape)}"
                )
    for name in sorted(set(stored) - needed):
        if not any(re.fullmatch(pattern, name) for pattern in ignored):
            raise CheckpointError(
                f"{stored[name].file.name}: tensor {name!r} is unexpected; "
                "config.json describes another model"
            )


def load_params(
    folder: Path,
    model: Model,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Params:
    """Read, fuse and convert the parameters onto the default device.

    Pieces are read through a memory map and fused on the device, one parameter at a time: beyond
    the parameters themselves, no more than the largest fused one is held.

    Args:
      folder: the checkpoint.
      model: what it must contain.
      progress: called with (bytes read, bytes in all).

    Raises:
      CheckpointError: see `stored_tensors` and `check_tensors`.
    """
    stored = stored_tensors(folder)
    weights = weight_map(model.config)
    check_tensors(stored, weights, ignored_tensors(model.config))
    views = {name: stored[name].view() for weight in weights.values() for name, _ in weight.sources}
    total = sum(view.nbytes for view in views.values())
    done = 0
    params = model.abstract_params
    for path, weight in weights.items():
        parts = [views.pop(name) for name, _ in weight.sources]
        nbytes = sum(part.nbytes for part in parts)
        leaf = join(
            [jax.device_put(part) for part in parts], layout=weight.layout, dtype=model.dtype
        )
        del parts
        # One at a time: queued transfers would hold every piece at once.
        leaf.block_until_ready()
        node = params
        for key in path[:-1]:
            node = node[key]
        if node[path[-1]].shape != leaf.shape:
            raise AssertionError(f"{path}: weight map gives {leaf.shape}")
        node[path[-1]] = leaf
        done += nbytes
        progress(done, total)
    return params
