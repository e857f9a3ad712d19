"""Loads a Hugging Face checkpoint: finds the folder, checks and loads the tensors."""

import dataclasses
import hashlib
import importlib.resources
import logging
import math
import mmap
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.models import (
    CheckpointError,
    DecoderConfig,
    Model,
    Params,
    head_tensor,
    ignored_tensors,
    renamed_tensors,
    weight_map,
)
from fdjax.models.name_map import AllExperts, PerExpert, Weight, WeightMap, join
from fdjax.models.readable import readable
from fdjax.pallas_kernels.quantised import QTensor, WeightFormat, in_layout
from fdjax.weights.division import Division
from fdjax.weights.formats.layer import Codes, StoredLinear
from fdjax.weights.formats.scheme import scheme_of, stored_linears, with_stored_formats
from fdjax.weights.quantise import quantise, to_quantise
from fdjax.weights.stored import (
    DTYPES,
    FLOATS,
    INDEX,
    SINGLE,
    StoredTensor,
    is_there,
    read_json,
    stored_tensors,
)

EMBEDDED = "tiny"
# Ends of the names of quantised tensors: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8, MXFP4.
_QUANTISED = (
    r".*(\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|weight_packed|weight_scale(_inv)?)"
    r"|_proj_(blocks|scales))"
)
# Scales of activations and of the cache, which fdjax does not quantise.
_OTHER_SCALES = r".*\.(input|output|[qkv])_(scale|zero_point)"
# A fingerprint reads this many values before and after the middle of each tensor.
_SAMPLE = 512
# XLA's CPU client uses host memory without a copy if its address is a multiple of this.
_ALIGNMENT_BYTES = 64

logger = logging.getLogger("fdjax")


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
      CheckpointError: neither the folder nor the hub's repository can be read, or a revision is
        given for a folder.
    """
    name_or_path = os.fspath(name_or_path)
    if not name_or_path:
        raise CheckpointError("no checkpoint named; give a folder or a hub id like 'owner/name'")
    path = user_path(name_or_path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError as error:
        raise CheckpointError(f"{name_or_path}: cannot be read ({error.strerror})") from None
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
    """The path that a user names; a leading ~ is expanded.

    Raises:
      CheckpointError: there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{name}: no such user") from None


def check_tensors(
    stored: dict[str, StoredTensor],
    weights: WeightMap,
    ignored: Iterable[str],
    linears: Mapping[str, StoredLinear] = {},
) -> None:
    """Compare the tensors of a checkpoint with those that the model needs.

    Args:
      stored: tensors of the checkpoint, by name.
      weights: the tensors that the model needs.
      ignored: patterns of names that may be in the checkpoint but are not needed.
      linears: the quantised weights, by name.

    Raises:
      CheckpointError: a tensor is missing, unexpected, quantised, or has a wrong shape.
    """
    files = {tensor.file.name for tensor in stored.values()}
    whole = files.pop() if len(files) == 1 else INDEX if files else SINGLE
    needed = {name for linear in linears.values() for name in linear.names}
    for name, tensor in stored.items():
        if re.fullmatch(_QUANTISED, name) and name not in needed:
            raise CheckpointError(
                f"{tensor.file.name}: tensor {name!r} belongs to quantised weights, which "
                "config.json does not describe"
            )
    for weight in weights.values():
        for name, shape in weight.sources:
            if name in linears:
                continue
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


def checked_tensors(
    folder: Path, config: DecoderConfig
) -> tuple[dict[str, StoredTensor], dict[str, StoredLinear]]:
    """The tensors of a checkpoint by name, and its quantised weights, as config.json describes.

    Raises:
      CheckpointError: see `stored_tensors` and `check_tensors`; or config.json ties head and
        embedding, but they differ in the checkpoint.
    """
    weights, stored = weight_map(config), by_our_names(folder, config)
    linears = _stored_linears(folder, config, stored)
    ignored, head = ignored_tensors(config), head_tensor(config)
    if config.tie_embeddings:
        ignored = (*ignored, re.escape(head))
    check_tensors(stored, weights, (*ignored, *[_OTHER_SCALES] * bool(linears)), linears)
    if config.tie_embeddings:
        ((embedding, _),) = weights["embed",].sources
        _check_tied(stored, head, embedding)
    return stored, linears


def load_params(
    folder: Path,
    model: Model,
    *,
    devices: Sequence[jax.Device | None] = (None,),
    progress: Callable[[int, int], None] = lambda done, total: None,
    take: Callable[[Path, Any], Any] = lambda path, weight: weight,
) -> Params:
    """Load the parameters of a checkpoint onto a device, fused and in the model's dtypes.

    The tensors are memory-mapped and fused on the device, one parameter at a time. Besides the
    parameters themselves, this needs memory for the largest fused parameter. Weights are quantised
    or dequantised if the model's format differs from the checkpoint's.

    Args:
      folder: the checkpoint.
      model: the model that the checkpoint must contain.
      devices: devices that share the model; default JAX's default device. Each device gets only its
        part of each tensor.
      progress: called with (bytes read, bytes in all).
      take: called with the path and the value of each parameter as it is loaded. The returned tree
        holds its results.

    Raises:
      CheckpointError: see `checked_tensors`.

    Warns:
      UserWarning: a tensor has values that are not finite, or a matrix or norm is all zeros.
    """
    began = time.perf_counter()
    weights = weight_map(model.config)
    stored, linears = checked_tensors(folder, model.config)
    _warn_of_dequantised(folder, linears, model.config)
    views = {
        name: stored[name].view(FLOATS)
        for weight in weights.values()
        for name, _ in weight.sources
        if name not in linears
    }
    division = Division(model, devices)
    total = sum(view.nbytes for view in views.values())
    total += sum(stored[name].nbytes for linear in linears.values() for name in linear.names)
    done = 0
    # New dicts, because the model's own dicts must not change.
    params = jax.tree.map(lambda leaf: leaf, model.abstract_params)
    for path, weight in weights.items():
        form = model.local.config.format_of(path)
        if form is None:
            tensors = []
            mixed = any(name in linears for name, _ in weight.sources)
            swap = weight.outputs_first()[1]
            for name, _ in weight.sources:
                tensor = _dense_of(linears[name], swap) if name in linears else views.pop(name)
                tensors.append(tensor.astype(np.dtype(model.dtype)) if mixed else tensor)
            shares, largest = _dense(tensors, division, path, model.dtype)
            for (name, _), value in zip(weight.sources, largest, strict=True):
                if name not in linears:
                    _warn_of_damage(stored[name], value, model)
            del tensor, tensors
        else:
            swap = weight.outputs_first()[1]
            codes = []
            for name, _ in weight.sources:
                if name in linears:
                    codes.append(linears[name].codes(form))
                    continue
                codes.append(quantise(_outputs_first(views.pop(name), swap), form))
                largest = float(np.max(np.abs(codes[-1].scales.astype(np.float32))))
                _warn_of_damage(stored[name], largest, model)
            shares = _quantised(codes, form, division, path)
        leaf = division.assembled(shares, path)
        node = params
        for key in path[:-1]:
            node = node[key]
        if node[path[-1]].shape != leaf.shape:
            raise AssertionError(f"{path}: weight map gives {leaf.shape}")
        node[path[-1]] = take(path, leaf)
        del leaf, shares
        done += sum(
            stored[part].nbytes
            for name, _ in weight.sources
            for part in (linears[name].names if name in linears else (name,))
        )
        progress(done, total)
    logger.info("%s: %.2f GB read in %.1f s", folder, total / 1e9, time.perf_counter() - began)
    return params


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, not only the JSON files of a checkpoint."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def quantised_config(
    folder: Path,
    config: DecoderConfig,
    data: dict[str, Any] | None = None,
    *,
    rounded_activations: bool = True,
) -> DecoderConfig:
    """The architecture with the formats of the checkpoint's quantised weights.

    Args:
      folder: the checkpoint.
      config: the architecture.
      data: content of its config.json; default the file's.
      rounded_activations: whether activations may be rounded, if the checkpoint asks for it.

    Raises:
      CheckpointError: the format is not supported, or tensors do not fit it.
    """
    if data is None:
        data = read_json(folder / "config.json", required=False)
    scheme = scheme_of(data, str(folder / "config.json"))
    if scheme is None:
        return config
    stored = by_our_names(folder, config)
    config = with_stored_formats(config, stored_linears(scheme, config, stored))
    if rounded_activations:
        return config
    formats = config.formats_by_path.items()
    return config.with_formats(
        {path: dataclasses.replace(form, rounded_activations=False) for path, form in formats}
    )


def is_quantised_already(folder: Path, config: DecoderConfig) -> bool:
    """Whether a checkpoint cannot be quantised, because it is quantised already.

    If only whole parameters in MXFP4 are, such as the experts of gpt-oss, they stay as they are,
    and all else can be quantised.

    Args:
      folder: the checkpoint.
      config: the model with the formats of `quantised_config`.

    Raises:
      CheckpointError: see `quantised_config`.
    """
    linears = _stored_linears(folder, config, by_our_names(folder, config))
    weights = weight_map(config)
    rest = {name for _, path, _ in to_quantise(config) for name, _ in weights[path].sources}
    kinds = {None if linear.format is None else linear.format.kind for linear in linears.values()}
    stay = kinds == {"fp4"} and rest and rest.isdisjoint(linears)
    return bool(linears) and not stay


def _stored_linears(
    folder: Path, config: DecoderConfig, stored: dict[str, StoredTensor]
) -> dict[str, StoredLinear]:
    data = read_json(folder / "config.json", required=False)
    return stored_linears(scheme_of(data, str(folder / "config.json")), config, stored)


def _outputs_first(weight: np.ndarray, swap: bool) -> np.ndarray:
    """The weight [...,N,K] of an array, whose last axes are exchanged if `swap`."""
    return weight.swapaxes(-1, -2) if swap else weight


def _dense_of(linear: StoredLinear, swap: bool) -> np.ndarray:
    return np.ascontiguousarray(_outputs_first(linear.dense(), swap))


_in_layout = jax.jit(in_layout, static_argnames="layout")


def _dense(
    tensors: list[np.ndarray], division: Division, path: tuple[str | int, ...], dtype: str
) -> tuple[list[Array], list[float]]:
    """Fuse tensors to one parameter. Returns (parts of this process's devices, max |x| of each)."""
    shares, largest = [], []
    for rank, device in division.own:
        parts = []
        for i, tensor in enumerate(tensors):
            part = _staged(division.cut(tensor, path, i, rank))
            parts.append(jax.device_put(part, device))
        largest.append([float(_largest(part)) for part in parts])
        share = join(parts, layout=division.weight(path).layout, dtype=dtype)
        del part, parts
        # Wait for each part. Queued transfers would hold all pieces in memory at once.
        shares.append(jax.block_until_ready(share))
    return shares, np.max(largest, axis=0).tolist()


def _quantised(
    codes: list[Codes], form: WeightFormat, division: Division, path: tuple[str | int, ...]
) -> list[QTensor]:
    """Fuse the codes of linear layers to one parameter. Returns the parts of own devices."""
    (weight, _), shares = division.weight(path).outputs_first(), []
    for rank, device in division.own:
        own = [division.cut_codes(one, path, i, rank) for i, one in enumerate(codes)]
        shares.append(jax.block_until_ready(_fused(own, form, weight, device)))
    return shares


def _fused(
    codes: list[Codes], form: WeightFormat, weight: Weight, device: jax.Device | None
) -> QTensor:
    k = weight.sources[0][1][-1]
    experts = isinstance(weight.layout, PerExpert | AllExperts)

    def fused(parts: list[np.ndarray], dtype: str) -> Array:
        parts = [jax.device_put(_staged(np.ascontiguousarray(part)), device) for part in parts]
        joined = join(parts, layout=weight.layout, dtype=dtype)
        return joined if experts or joined.ndim == 3 else joined.reshape(len(joined), -1)

    words = fused([one.words for one in codes], "int32")
    scales = fused([one.scales for one in codes], form.scales)
    zeros = fused([one.zeros for one in codes], form.scales) if form.zeros else None
    shape = (k, *words.shape[1 + experts :])
    plain = QTensor(
        *(words, scales, zeros, form.kind, form.group, shape),
        rounded_activations=form.rounded_activations,
    )
    return _in_layout(plain, form.layout)


def _warn_of_dequantised(
    folder: Path, linears: Mapping[str, StoredLinear], config: DecoderConfig
) -> None:
    """Warn of quantised weights that the model will hold dequantised."""
    reasons = [
        linears[name].reason or "the layers that fuse with it have other formats"
        for path, weight in weight_map(config).items()
        if config.format_of(path) is None
        for name, _ in weight.sources
        if name in linears
    ]
    if reasons:
        warnings.warn(
            readable(
                f"{folder}: {len(reasons)} of {len(linears)} quantised weights are dequantised and "
                f"take more memory ({', '.join(sorted(set(reasons)))})"
            ),
            stacklevel=3,
        )


def by_our_names(folder: Path, config: DecoderConfig) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the names in the weight map of its model.

    Raises:
      CheckpointError: see `stored_tensors`; or a tensor that holds all experts has another shape.
    """
    weights = weight_map(config)
    stored = _with_base(stored_tensors(folder), weights)
    for pattern, replacement in renamed_tensors(config).items():
        renamed = {name: re.sub(pattern, replacement, name) for name in stored}
        # A tensor that occurs under both names keeps both. One of them is then reported as
        # unexpected.
        stored = {
            name if renamed[name] in stored else renamed[name]: t for name, t in stored.items()
        }
    for weight in weights.values():
        if weight.whole is None or weight.whole[0] not in stored:
            continue
        if not any(name in stored for name, _ in weight.sources):
            stored |= _parts(stored.pop(weight.whole[0]), weight)
    return stored


def _parts(tensor: StoredTensor, weight: Weight) -> dict[str, StoredTensor]:
    """Split a tensor that holds all sources of a weight one after another.

    Raises:
      CheckpointError: it has another shape, or is not floating point.
    """
    tensor.view(FLOATS)
    _, shape = weight.whole
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file.name}: tensor {tensor.name!r} must have shape {list(shape)} "
            f"by config.json, got {list(tensor.shape)}; config.json describes another model"
        )
    parts, start = {}, tensor.start
    for name, shape in weight.sources:
        parts[name] = dataclasses.replace(tensor, shape=shape, start=start)
        start += parts[name].nbytes
    return parts


def _with_base(stored: dict[str, StoredTensor], weights: WeightMap) -> dict[str, StoredTensor]:
    """Tensors by their names in a model with a head.

    Checkpoints such as those of GPT-2 and BLOOM were saved without the head. Their names lack the
    first part, "transformer.".
    """
    ((embedding, _),) = weights["embed",].sources
    base, _, rest = embedding.partition(".")
    if embedding in stored or rest not in stored:
        return stored
    needed = {name for weight in weights.values() for name, _ in weight.sources}
    return {name if name in needed else f"{base}.{name}": t for name, t in stored.items()}


def _check_tied(stored: dict[str, StoredTensor], name: str, embedding: str) -> None:
    head, embed = stored.get(name), stored[embedding]
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
    if named or not has_weights(folder):
        return None
    matrices = [tensor for tensor in stored_tensors(folder).values() if len(tensor.shape) > 1]
    # Integers and fp8 are codes of quantised weights; integers and booleans may be masks.
    others = "I", "U", "BOOL", "F8"
    dtypes = {tensor.dtype for tensor in matrices if not tensor.dtype.startswith(others)}
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
        if tensor.dtype not in DTYPES:  # no model uses such a tensor
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
    """Copy a piece to memory that `device_put` on a CPU can use without another copy.

    XLA's CPU client copies into memory from malloc. Freed copies leave holes between the
    parameters, up to three times the largest parameter, which the system does not get back. It does
    get back an anonymous mapping.
    """
    usable = part.ctypes.data % _ALIGNMENT_BYTES == 0 and part.flags.c_contiguous
    if usable or not part.size or jax.default_backend() != "cpu":
        return part
    private = mmap.mmap(-1, part.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    stage = np.frombuffer(private, part.dtype).reshape(part.shape)
    np.copyto(stage, part)
    return stage
