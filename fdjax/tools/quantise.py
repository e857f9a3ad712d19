"""Writes a quantised checkpoint, and compares its answers with those of the original."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.engine.engine import Engine
from fdjax.engine.generation import forward
from fdjax.models import CheckpointError, DecoderConfig, Model, ignored_tensors, weight_map
from fdjax.models.name_map import AllExperts, WeightMap
from fdjax.pallas_kernels.quantised import WeightFormat, word_rows
from fdjax.system.process import transfers_allowed
from fdjax.tools.smoothing import LayerInputs, Smoothed, smoothed
from fdjax.weights.calibration import FILE as CALIBRATION
from fdjax.weights.checkpoint import checked_tensors
from fdjax.weights.formats.layer import Codes, StoredLinear
from fdjax.weights.formats.mxfp4 import GROUP as MX_GROUP
from fdjax.weights.quantise import GROUPS, quantise, to_quantise
from fdjax.weights.stored import DTYPES, FLOATS, INDEX, StoredTensor, read_json
from fdjax.weights.written import SHARD_BYTES, Planned, write_tensors

# Files of a checkpoint that are copied.
_COPIED = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt")
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def quantise_checkpoint(
    folder: Path,
    output: Path,
    config: DecoderConfig,
    *,
    bits: int,
    group: int | None = None,
    scales: str,
    activations: str | None = None,
    inputs: Sequence[Mapping[str, LayerInputs]] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a checkpoint in a format of compressed-tensors.

    The format is "pack-quantized"; with activations "int-quantized" or "float-quantized".
    Only one tensor is in memory at a time. A tensor that holds all experts of a layer stays one.
    Experts in MXFP4 are written as "mxfp4-pack-quantized", with the same codes.

    Args:
      folder: the checkpoint.
      output: folder of the new one, which is created.
      config: the model, with the formats that the checkpoint has.
      bits: 4 or 8.
      group: number of weights that share a scale; None for a whole column.
      scales: dtype of the scales, a NumPy name.
      activations: "int8" or "fp8" (e4m3), in which weights and activations then are. The weights
        have 8 bits, and one scale for each column.
      inputs: inputs of the layers from `smoothing.observe`. With them, errors that matter get
        smaller.
      shard_bytes: size of a file from which the next one begins.
      progress: called with (bytes written, bytes in all).

    Returns:
      Bytes of the tensors.

    Raises:
      CheckpointError: tensors are not what config.json describes, not floating point, or not
        finite.
      ValueError: the group does not divide the inputs of a layer, or activations do not go with the
        rest.
      OSError: a file cannot be written.
    """
    data = read_json(folder / "config.json")
    stored, linears = checked_tensors(folder, config)
    in_mxfp4 = {
        name: linear
        for name, linear in linears.items()
        if linear.format is not None and linear.format.kind == "fp4"
    }
    config = with_formats(config, bits, group, scales, activations=activations)
    weights = weight_map(config)
    changes = Smoothed() if inputs is None else smoothed(config, weights, stored, inputs)
    formats = {
        name: (form, weight.outputs_first()[1])
        for path, weight in weights.items()
        if (form := config.format_of(path)) is not None
        for name, _ in weight.sources
    }
    copied = {name for linear in in_mxfp4.values() for name in linear.names}
    # Masks of integers or booleans, which many old checkpoints have and no model needs.
    masks = {
        name
        for name, tensor in stored.items()
        if tensor.dtype not in FLOATS
        and any(re.fullmatch(pattern, name) for pattern in ignored_tensors(config))
    }
    named = [
        dataclasses.replace(tensor, name=name)
        for name, tensor in stored.items()
        if name not in copied and name not in masks
    ]
    groups = [
        (_in_bytes if activations else _packed)(tensor, *formats[tensor.name], changes)
        if tensor.name in formats
        else _kept(tensor, changes)
        for tensor in named
    ]
    groups += [_mxfp4(_module(name), linear) for name, linear in in_mxfp4.items()]
    output.mkdir(parents=True, exist_ok=True)
    written = write_tensors(output, groups, shard_bytes=shard_bytes, progress=progress)
    # Last, so that a run that is interrupted leaves an empty folder.
    _copy_files(folder, output)
    data |= {"quantization_config": _described(config, weights, bits, group, in_mxfp4, activations)}
    (output / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return written


def with_formats(
    config: DecoderConfig,
    bits: int,
    group: int | None,
    scales: str,
    *,
    activations: str | None = None,
) -> DecoderConfig:
    """The model with the formats that `quantise_checkpoint` gives its weights; see there.

    Raises:
      ValueError: the group does not divide the inputs of a layer, or activations do not go with the
        rest.
    """
    if activations not in (None, "int8", "fp8"):
        raise ValueError(f"quantize: activations must be int8 or fp8, got {activations!r}")
    if activations and (bits != 8 or group is not None):
        raise ValueError(
            f"quantize: weights beside activations in {activations} have 8 bits, and one scale for "
            "each output"
        )
    if activations and (tensors := experts_in_one(config)):
        raise ValueError(
            f"quantize: {tensors[0]} holds all experts of a layer, whose activations cannot be "
            f"in {activations}"
        )
    formats = config.formats_by_path
    for name, path, k in to_quantise(config):
        if group is not None and k % group:
            raise ValueError(f"quantize: group must divide the {k} inputs of {name}, got {group}")
        kind, rounds = activations or f"int{bits}", activations is not None
        formats[path] = WeightFormat(kind, group or k, scales=scales, rounded_activations=rounds)
    return config.with_formats(formats)


def default_group(config: DecoderConfig) -> int:
    """The largest of the usual groups that divides the inputs of all layers.

    Raises:
      ValueError: none of them does.
    """
    inputs = [(name, k) for name, _, k in to_quantise(config)]
    for group in GROUPS:
        if not any(k % group for _, k in inputs):
            return group
    name, k = next((name, k) for name, k in inputs if k % GROUPS[-1])
    *most, last = GROUPS
    raise ValueError(
        f"quantize: none of {', '.join(map(str, most))} and {last} divides the {k} inputs of "
        f"{name}; --group must"
    )


def experts_in_one(config: DecoderConfig) -> list[str]:
    """Names of the tensors that hold all experts of a layer."""
    return [
        name
        for path, weight in weight_map(config).items()
        if path[-1] in ("gate_up", "down")
        and isinstance(weight.outputs_first()[0].layout, AllExperts)
        for name, _ in weight.sources
    ]


def why_transformers_cannot(config: DecoderConfig) -> str | None:
    """Why transformers cannot load a model with these formats, or None if it can."""
    if experts_in_one(config):
        return "a tensor holds all experts of a layer"
    if any(
        path[-2:] == ("experts", "down") and form.kind == "int8" and form.rounded_activations
        for path, form in config.formats_by_path.items()
    ):
        return "it drops experts whose weights and activations are in int8"
    weights = weight_map(config)
    paths = (("blocks", 0, *linear.path, "weight") for linear in config.blocks[0].linears.values())
    if any(weights[path].outputs_first()[1] for path in paths):
        return "it only quantises nn.Linear, and these layers are Conv1D"
    return None


def _packed(tensor: StoredTensor, form: WeightFormat, swap: bool, changes: Smoothed):
    """(the tensors that store a quantised weight, [...,K,N] if `swap`; function to make them)."""
    shape, module = tensor.shape, _module(tensor.name)
    *outs, k = (*shape[:-2], shape[-1], shape[-2]) if swap else shape
    tensors = (
        Planned(f"{module}.weight_packed", "I32", (*outs, word_rows(k, form.kind))),
        Planned(f"{module}.weight_scale", _NAMES[form.scales], (*outs, k // form.group)),
        Planned(f"{module}.weight_shape", "I64", (len(shape),)),
    )

    def make():
        codes = _codes(tensor, form, swap, changes)
        return codes.words, codes.scales, np.array([*outs, k], np.int64)

    return tensors, make


def _in_bytes(tensor: StoredTensor, form: WeightFormat, swap: bool, changes: Smoothed):
    """As `_packed`, but each code is a value of its own: signed int8, or fp8."""
    n, k = reversed(tensor.shape) if swap else tensor.shape
    dtype, bias = ("F8_E4M3", 0) if form.kind == "fp8" else ("I8", 128)
    tensors = (
        Planned(tensor.name, dtype, (n, k)),
        Planned(f"{_module(tensor.name)}.weight_scale", _NAMES[form.scales], (n, 1)),
    )

    def make():
        codes = _codes(tensor, form, swap, changes)
        values = codes.words.view(np.uint8)[:, :k] ^ np.uint8(bias)
        return values.view(DTYPES[dtype]), codes.scales

    return tensors, make


def _codes(tensor: StoredTensor, form: WeightFormat, swap: bool, changes: Smoothed) -> Codes:
    weight, name = tensor.view(FLOATS), tensor.name
    codes = quantise(
        weight.swapaxes(-1, -2) if swap else weight,
        form,
        changes.importance.get(name),
        columns=changes.columns.get(name),
        rows=changes.rows.get(name),
    )
    if not np.isfinite(codes.scales.astype(np.float32)).all():
        raise CheckpointError(f"{tensor.file.name}: tensor {name!r} has values that are not finite")
    return codes


def _mxfp4(module: str, linear: StoredLinear):
    """(the tensors that store a weight in MXFP4; function that makes them)."""
    *outs, k = linear.shape
    tensors = (
        Planned(f"{module}.weight_packed", "U8", (*outs, k // 2)),
        Planned(f"{module}.weight_scale", "U8", (*outs, k // MX_GROUP)),
    )

    def make():
        codes = linear.read()
        return codes.words.view(np.uint8), codes.scales.view(np.uint8)

    return tensors, make


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _kept(tensor: StoredTensor, changes: Smoothed):
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.file.name}: tensor {tensor.name!r} has dtype {tensor.dtype}; "
            "only plain checkpoints can be quantised"
        )

    def make():
        view = tensor.view(FLOATS)
        return (changes.apply(tensor.name, view).astype(DTYPES[tensor.dtype]),)

    return (Planned(tensor.name, tensor.dtype, tensor.shape),), make


def _copy_files(folder: Path, output: Path) -> None:
    skipped = {INDEX, CALIBRATION, "config.json"}
    for pattern in _COPIED:
        for file in folder.glob(pattern):
            if file.is_file() and file.name not in skipped:
                target = output / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _described(
    config: DecoderConfig,
    weights: WeightMap,
    bits: int,
    group: int | None,
    in_mxfp4: Collection[str],
    activations: str | None,
) -> dict[str, Any]:
    """The `quantization_config` of the new checkpoint."""
    kept = [
        _module(name)
        for path, weight in weights.items()
        if path[-1] == "weight" and config.format_of(path) is None
        for name, _ in weight.sources
    ]
    in_one = [_module(name) for name in experts_in_one(config) if name not in in_mxfp4]
    strategy = "channel" if group is None else "group"
    targets = ["Linear", *in_one]
    kind = "float" if activations == "fp8" else "int"
    form = f"{kind}-quantized" if activations else "pack-quantized"
    groups = {"group_0": _config_group(form, targets, bits, kind, strategy, group)}
    if activations:
        token = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token"}
        groups["group_0"]["input_activations"] = token | {"dynamic": True}
    if in_mxfp4:
        targets = [_module(name) for name in in_mxfp4]
        fields = 4, "float", "group", MX_GROUP
        groups["group_1"] = _config_group("mxfp4-pack-quantized", targets, *fields)
        groups["group_1"]["weights"]["scale_dtype"] = "torch.uint8"
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if in_mxfp4 else form,
        "quantization_status": "compressed",
        "config_groups": groups,
        # In transformers, a head without weights of its own is a linear layer as well.
        "ignore": list(dict.fromkeys(["lm_head", *kept])),
        "kv_cache_scheme": None,
    }


def _config_group(
    form: str, targets: Sequence[str], bits: int, kind: str, strategy: str, group: int | None
) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "format": form,
        "weights": {
            "num_bits": bits,
            "type": kind,
            "symmetric": True,
            "strategy": strategy,
            "group_size": group,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """How the predictions of a model differ from those of a reference model on texts.

    Attributes:
      tokens: number of predictions.
      perplexity: perplexity of the model.
      reference_perplexity: perplexity of the reference.
      mean_kl: mean Kullback-Leibler divergence from the reference, in nats.
      p99_kl: the divergence that 1 % of the predictions exceed.
      agreement: share of predictions with the same likeliest token.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    p99_kl: float
    agreement: float

    def __str__(self) -> str:
        """A readable text of three lines."""
        return "\n".join(
            (
                f"perplexity    {self.perplexity:.4f}, of the original "
                f"{self.reference_perplexity:.4f}, over {self.tokens:,} tokens",
                f"KL            mean {self.mean_kl:.5f}, 99th percentile {self.p99_kl:.5f}",
                f"agreement     {self.agreement:.2%} of the likeliest tokens are the same",
            )
        )


@transfers_allowed()
def compare_models(
    reference: Engine, other: Engine, pieces: Sequence[Sequence[int]]
) -> ModelComparison:
    """Compare two models of one architecture on texts.

    Args:
      reference, other: engines of the models, in memory together.
      pieces: token ids of texts, each within the context.

    Raises:
      ValueError: no text has two tokens.
      FloatingPointError: logits are not finite.
    """
    width = max(map(len, pieces), default=0)
    if width < 2:
        raise ValueError("quantize: the text is too short to compare predictions")
    columns = []
    for piece in pieces:
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(piece)] = piece
        length = np.array([len(piece)], np.int32)
        models = reference.model, other.model
        values = _compare_logits(*models, reference.tree, other.tree, ids, length)
        columns.append(np.asarray(values)[:, : len(piece) - 1])
    ours, theirs, divergence, same = np.concatenate(columns, axis=1).astype(np.float64)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise FloatingPointError("quantize: logits are not finite; the weights are damaged")
    return ModelComparison(
        tokens=len(ours),
        perplexity=float(np.exp(-theirs.mean())),
        reference_perplexity=float(np.exp(-ours.mean())),
        mean_kl=float(divergence.mean()),
        p99_kl=float(np.percentile(divergence, 99)),
        agreement=float(same.mean()),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare_logits(
    reference: Model, other: Model, params: Any, other_params: Any, ids: Array, length: Array
) -> Array:
    """[4, T-1]: log-probability of the next token in each model, KL, same likeliest token."""
    p = jax.nn.log_softmax(forward(reference, params, ids, length)[0, :-1])
    q = jax.nn.log_softmax(forward(other, other_params, ids, length)[0, :-1])
    target = ids[0, 1:, None]
    chosen = [jnp.take_along_axis(a, target, axis=1)[:, 0] for a in (p, q)]
    divergence = jnp.sum(jnp.exp(p) * (p - q), axis=1)
    same = (jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)).astype(jnp.float32)
    return jnp.stack([*chosen, divergence, same])
