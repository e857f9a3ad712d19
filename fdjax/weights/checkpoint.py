"""Reads a Hugging Face checkpoint: finds the folder, reads JSON files, loads the tensors.

This module memory-maps the tensors itself. The safetensors package copies every tensor to anonymous
memory first, and its error for a truncated file names no tensor. A file consists of the header's
length in eight bytes, a JSON header, and the bytes of the tensors.
"""

import dataclasses
import hashlib
import importlib.resources
import json
import logging
import math
import mmap
import os
import re
import struct
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from fdjax.models import CheckpointError, Model, Params, ignored_tensors, weight_map
from fdjax.models.name_map import WeightMap, join
from fdjax.models.readable import readable

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
EMBEDDED = "tiny"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Longest file name in common file systems, in bytes.
_NAME_BYTES = 255
_DOWNLOAD_AGAIN = "download the file again"
# Beginning of the small file that a clone without Git LFS has in place of a large file.
_LFS_POINTER = b"version https://git-lfs"
# Names of quantised tensors end like this: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8.
_QUANTISED = (
    r".*\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|weight_packed|weight_scale(_inv)?)"
)
# A fingerprint reads this many values before and after the middle of each tensor.
_SAMPLE = 512
# XLA's CPU client uses host memory without a copy if its address is a multiple of this.
_ALIGNMENT_BYTES = 64

logger = logging.getLogger("fdjax")


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

    def view(self) -> np.ndarray:
        """The tensor as a memory-mapped array.

        Raises:
          CheckpointError: the dtype is not supported.
        """
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.file.name}: tensor {self.name!r} has dtype {self.dtype}, "
                f"supported: {', '.join(_DTYPES)}"
            )
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, mode="r", offset=self.start, shape=self.shape)


def locate(
    name_or_path: str | os.PathLike[str],
    *,
    weights: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """The folder of a checkpoint. A checkpoint of the hub is downloaded to the hub's cache.

    "tiny" is the embedded model, unless there is a folder of that name.

    Args:
      name_or_path: a folder, a hub id, or "tiny".
      weights: whether to download the weights as well.
      revision, token: options of the hub, see `fdjax.load`.

    Raises:
      CheckpointError: there is no such folder and the hub does not give it, or a revision is given
        for a folder.
    """
    name_or_path = os.fspath(name_or_path)
    if not name_or_path:
        raise CheckpointError("no checkpoint named; give a folder or a hub id like 'owner/name'")
    path = user_path(name_or_path)
    if revision is not None and (path.exists() or name_or_path == EMBEDDED):
        raise CheckpointError(
            f"{name_or_path}: revision {revision!r} is only for hub ids, but this is a local path"
        )
    if path.is_dir():
        if name_or_path == EMBEDDED and not is_there(path / "config.json"):
            raise CheckpointError(
                f"{name_or_path}: this folder has no config.json; to use the embedded model, run "
                "where there is no folder of this name"
            )
        return path
    if name_or_path == EMBEDDED:
        return Path(str(importlib.resources.files("fdjax.models.tiny")))
    if path.exists():
        raise CheckpointError(f"{name_or_path}: a checkpoint is a folder, this is a file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        raise CheckpointError(f"{name_or_path}: no such folder, and not a hub id like 'owner/name'")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name_or_path,
                revision=revision,
                token=token,
                allow_patterns=["*.json", "*.jinja"] + ["*.safetensors"] * weights,
            )
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name_or_path}: no such folder, and the hub did not give it ({reason})"
        ) from None


def user_path(name: str) -> Path:
    """The path of a name that a user gives; a leading ~ is expanded.

    Raises:
      CheckpointError: there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{name}: no such user") from None


def is_there(path: Path) -> bool:
    """Whether a file exists.

    Raises:
      CheckpointError: the path is a broken link, as in a cleaned-up cache of the hub, or exists but
        is no regular file.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path}: a broken link; download the checkpoint again")
    there = path.exists()
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
      CheckpointError: the file is required but missing, cannot be read, or is no JSON object.
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
    if is_there(folder / _SINGLE):
        if shards := sorted(folder.glob("model-*.safetensors")):
            warnings.warn(
                f"{folder}: {_SINGLE} is read, and {shards[0].name} is not; remove one of them",
                stacklevel=2,
            )
        return _read_header(folder / _SINGLE)
    if is_there(folder / _INDEX):
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
    raise CheckpointError(f"{folder}: no {_SINGLE} and no {_INDEX}; {hint}")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise CheckpointError(f"{_INDEX}: 'weight_map' must map tensors to files")
    tensors: dict[str, StoredTensor] = {}
    copies = []
    for file in sorted(set(index.values())):
        first = min(name for name, f in index.items() if f == file)
        # An index must not name files outside the folder.
        beside = file not in ("", "..") and Path(file).name == file
        if not (beside and file.isprintable() and len(file.encode()) <= _NAME_BYTES):
            raise CheckpointError(
                f"{_INDEX}: tensor {first!r} must be in a file beside the index, got {file!r}"
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
    if dtype in _DTYPES and end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path.name}: tensor {name!r} of shape {list(shape)} must take "
            f"{math.prod(shape) * _DTYPES[dtype].itemsize} bytes, got {end - start}; "
            f"{_DOWNLOAD_AGAIN}"
        )
    return tensor, data_start + end


def check_tensors(stored: dict[str, StoredTensor], weights: WeightMap, ignored: Iterable[str]):
    """Compare the tensors of a checkpoint with those that the model needs.

    Args:
      stored: tensors of the checkpoint, by name.
      weights: the tensors that the model needs.
      ignored: patterns of names that may be in the checkpoint but are not needed.

    Raises:
      CheckpointError: a tensor is missing, unexpected, quantised, or has a wrong shape.
    """
    files = {tensor.file.name for tensor in stored.values()}
    whole = files.pop() if len(files) == 1 else _INDEX if files else _SINGLE
    for name, tensor in stored.items():
        if re.fullmatch(_QUANTISED, name):
            raise CheckpointError(
                f"{tensor.file.name}: tensor {name!r} belongs to quantised weights, which are not "
                "supported; use the unquantised checkpoint"
            )
    needed = set()
    for weight in weights.values():
        for name, shape in weight.sources:
            needed.add(name)
            if name not in stored:
                raise CheckpointError(
                    f"{whole}: tensor {name!r} is missing; download the checkpoint again, "
                    "or config.json describes another model"
                )
            if stored[name].shape != shape:
                raise CheckpointError(
                    f"{stored[name].file.name}: tensor {name!r} must have shape {list(shape)} "
                    f"by config.json, got {list(stored[name].shape)}; "
                    "config.json describes another model"
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
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Params:
    """Load the parameters of a checkpoint onto a device, fused and in the model's dtype.

    The tensors are memory-mapped and fused on the device, one parameter at a time. Besides the
    parameters themselves, this needs memory for the largest fused parameter.

    Args:
      folder: the checkpoint.
      model: the model that the checkpoint must contain.
      device: device of the parameters; default JAX's default device.
      progress: called with (bytes read, bytes in all).

    Raises:
      CheckpointError: see `stored_tensors` and `check_tensors`; or config.json ties head and
        embedding, but the checkpoint has two that differ.

    Warns:
      UserWarning: a tensor has values that are not finite, or a matrix or norm is all zeros.
    """
    began = time.perf_counter()
    weights = weight_map(model.config)
    stored = _with_base(stored_tensors(folder), weights)
    check_tensors(stored, weights, ignored_tensors(model.config))
    if model.config.tie_embeddings:
        ((embedding, _),) = weights["embed",].sources
        _check_tied(stored, embedding)
    views = {name: stored[name].view() for weight in weights.values() for name, _ in weight.sources}
    total = sum(view.nbytes for view in views.values())
    done = 0
    # New dicts, because those of the model must not change.
    params = jax.tree.map(lambda leaf: leaf, model.abstract_params)
    for path, weight in weights.items():
        parts = [views.pop(name) for name, _ in weight.sources]
        nbytes = sum(part.nbytes for part in parts)
        parts = [jax.device_put(_staged(part), device) for part in parts]
        for (name, _), part in zip(weight.sources, parts, strict=True):
            _warn_of_damage(stored[name], float(_largest(part)), model)
        leaf = join(parts, layout=weight.layout, dtype=model.dtype)
        del parts
        # Wait for each parameter. Queued transfers would hold all pieces in memory at once.
        leaf.block_until_ready()
        node = params
        for key in path[:-1]:
            node = node[key]
        if node[path[-1]].shape != leaf.shape:
            raise AssertionError(f"{path}: weight map gives {leaf.shape}")
        node[path[-1]] = leaf
        done += nbytes
        progress(done, total)
    logger.info("%s: %.2f GB read in %.1f s", folder, total / 1e9, time.perf_counter() - began)
    return params


def _with_base(stored: dict[str, StoredTensor], weights: WeightMap) -> dict[str, StoredTensor]:
    """Tensors by the names of a whole model.

    Checkpoints such as those of GPT-2 and BLOOM were saved without the head. Their names lack the
    first part, "transformer.".
    """
    ((embedding, _),) = weights["embed",].sources
    base, _, rest = embedding.partition(".")
    if embedding in stored or rest not in stored:
        return stored
    needed = {name for weight in weights.values() for name, _ in weight.sources}
    return {name if name in needed else f"{base}.{name}": t for name, t in stored.items()}


def _check_tied(stored: dict[str, StoredTensor], embedding: str) -> None:
    head, embed = stored.get("lm_head.weight"), stored[embedding]
    if head is None or 0 in head.shape:
        return
    same = (head.shape, head.dtype) == (embed.shape, embed.dtype)
    if same:
        # Compared as bytes, because NaN is not equal to NaN, and in parts of at most 16 MiB.
        ours, theirs = (t.view().reshape(embed.shape[0], -1).view(np.uint8) for t in (head, embed))
        rows = max(1, 2**24 // ours.shape[1])
        starts = range(0, len(ours), rows)
        same = all(np.array_equal(ours[i : i + rows], theirs[i : i + rows]) for i in starts)
    if not same:
        raise CheckpointError(
            f"{head.file.name}: tensor {head.name!r} differs from {embed.name!r} "
            f"({head.dtype} {list(head.shape)}, {embed.dtype} {list(embed.shape)}), but "
            "config.json ties them; set 'tie_word_embeddings' to false there, or remove the tensor"
        )


def unnamed_dtype(folder: Path, config: dict[str, Any]) -> str | None:
    """The dtype of a checkpoint's matrices if its config.json names none.

    None if config.json names a dtype, if the matrices have several dtypes, or if there are none.

    Args:
      folder: the checkpoint.
      config: the content of its config.json.

    Raises:
      CheckpointError: see `stored_tensors`.
    """
    named = any(config.get(key) is not None for key in ("dtype", "torch_dtype"))
    if named or not any((folder / name).exists() for name in (_SINGLE, _INDEX)):
        return None
    dtypes = {tensor.dtype for tensor in stored_tensors(folder).values() if len(tensor.shape) > 1}
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    return names.get(dtypes.pop()) if len(dtypes) == 1 else None


def fingerprint(folder: Path) -> str:
    """A hash that identifies the weights of a checkpoint.

    It covers the names, dtypes and shapes of all tensors and a part of the values of each.

    Raises:
      CheckpointError: see `stored_tensors`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        if tensor.dtype not in _DTYPES:  # no model uses such a tensor
            continue
        values = tensor.view().reshape(-1)
        middle = values.size // 2
        digest.update(values[max(0, middle - _SAMPLE) : middle + _SAMPLE].tobytes())
    return digest.hexdigest()


@jax.jit
def _largest(tensor: Array) -> Array:
    """Maximum of |tensor|, [] fp32; not finite if any value is not. One pass without a copy."""
    largest = jnp.max(jnp.abs(tensor)).astype(jnp.float32)
    if tensor.dtype != jnp.float32:
        return largest
    return largest + jnp.sum(0 * tensor)  # on a CPU, a maximum in float32 may drop a NaN


def _warn_of_damage(tensor: StoredTensor, largest: float, model: Model) -> None:
    """Warn of a tensor that a failed download or training left behind: all zeros, or not finite."""
    problem = None if math.isfinite(largest) else "values that are not finite"
    # A bias may be all zeros. So may the weights of a norm if the model adds 1 to them.
    scales = tensor.name.endswith(".weight") and not model.config.norm_offset
    if largest == 0 and (len(tensor.shape) > 1 or scales):
        problem = "only zeros"
    if problem:
        warnings.warn(
            readable(
                f"{tensor.file.name}: tensor {tensor.name!r} has {problem}; answers may be wrong"
            ),
            stacklevel=3,
        )


def _staged(part: np.ndarray) -> np.ndarray:
    """A piece in memory that `device_put` on a CPU can use without another copy.

    Copies of the CPU client come from malloc. They leave holes between the parameters that are not
    returned, up to three times the largest parameter. An anonymous mapping is returned when freed.
    """
    aligned = part.ctypes.data % _ALIGNMENT_BYTES == 0
    if aligned or not part.size or jax.default_backend() != "cpu":
        return part
    private = mmap.mmap(-1, part.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    stage = np.frombuffer(private, part.dtype).reshape(part.shape)
    np.copyto(stage, part)
    return stage
