"""compressed-tensors: packed int4, int8 and MXFP4; int8 and fp8 by channel, tensor or block.

A packed tensor may hold all experts of a layer, [X, ...]. compressed-tensors packs such weights one
expert after another.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdjax.models import CheckpointError, ConfigReader
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.weights.formats.layer import (
    Codes,
    Stored,
    StoredLinear,
    damaged,
    dequantised,
    group_of,
    matches,
    read_scales,
    scale_dtype,
    take,
    unpack_rows,
)
from fdjax.weights.formats.mxfp4 import GROUP as MX_GROUP
from fdjax.weights.formats.mxfp4 import read_mxfp4
from fdjax.weights.stored import StoredTensor

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mixed-precision", "mxfp4-pack-quantized"),
)
_SCALES = ("BF16", "F16", "F32", "F8_E8M0")

# How scales of activations may be divided. Ours are by token in any case.
_ACTIVATION_STRATEGIES = ("tensor", "token", "channel", "group", "tensor_group", "block")


@dataclasses.dataclass(frozen=True)
class Group:
    """A config group: the layers that it applies to, and how their weights are quantised.

    Attributes:
      targets: names of modules or classes, or regular expressions after "re:".
      kind: "int4" | "int8" | "fp8" | "fp4", which is MXFP4.
      symmetric: whether there are no zeros.
      strategy: "tensor" | "channel" | "group" | "block".
      group_size: size of a group, for "group".
      block: (rows of N, columns of K) of a block, for "block".
      rounded_activations: whether activations may be rounded to `kind`.
    """

    targets: tuple[str, ...]
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    rounded_activations: bool

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "Group | None":
        """Parse a group; None if it leaves the weights as they are."""
        reader = ConfigReader(data, source)
        weights = reader.get("weights", dict, None)
        if weights is None:
            return None
        targets = reader.get("targets", list)
        weights = ConfigReader(weights, source)
        bits, kind = weights.get("num_bits", int), weights.get("type", str, "int")
        kinds = {
            (4, "int"): "int4",
            (8, "int"): "int8",
            (4, "float"): "fp4",
            (8, "float"): "fp8",
        }
        if (bits, kind) not in kinds:
            raise CheckpointError(
                f"{source}: weights of type {kind!r} with {bits} bits are not supported; "
                "supported: int or float with 4 or 8 bits"
            )
        group_size = weights.get("group_size", int, None)
        default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        strategy = weights.get("strategy", str, default)
        if strategy not in ("tensor", "channel", "group", "block"):
            raise CheckpointError(f"{source}: strategy {strategy!r} of weights is not supported")
        if (bits, kind) == (4, "float") and (strategy, group_size) != ("group", MX_GROUP):
            raise CheckpointError(
                f"{source}: float with 4 bits must have strategy 'group' and group_size "
                f"{MX_GROUP}, as in MXFP4, got {strategy!r} and {group_size}"
            )
        block = weights.get("block_structure", list, None)
        if strategy == "block" and not is_block(block):
            raise CheckpointError(f"{source}: 'block_structure' must be two sizes, got {block!r}")
        if strategy != "block" and block is not None:
            raise CheckpointError(
                f"{source}: 'block_structure' is for strategy 'block', which is {strategy!r}"
            )
        return cls(
            tuple(map(str, targets)),
            kinds[bits, kind],
            weights.get("symmetric", bool, True),
            strategy,
            group_size,
            tuple(block) if block else None,
            _rounds(
                kinds[bits, kind], strategy, reader.get("input_activations", dict, None), source
            ),
        )


def _rounds(kind: str, strategy: str, activations: dict[str, Any] | None, source: str) -> bool:
    """Whether a group quantises activations to the kind of its weights.

    The scales of activations may be new ones, or the group holds them. int8 needs a scale for each
    column, so that sums are integers.
    """
    if activations is None:
        return False
    reader = ConfigReader(activations, source)
    wanted = reader.get("num_bits", int, 8), reader.get("type", str, "int")
    if (scales := reader.get("strategy", str, "tensor")) not in _ACTIVATION_STRATEGIES:
        raise CheckpointError(f"{source}: strategy {scales!r} of activations is not supported")
    if kind == "int8":
        return wanted == (8, "int") and strategy in ("channel", "tensor")
    return kind == "fp8" and wanted == (8, "float")


def is_block(block: Any) -> bool:
    """Whether a value is the size of a block: two positive integers."""
    sized = isinstance(block, list) and len(block) == 2
    return sized and all(type(size) is int and size > 0 for size in block)


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """A checkpoint in a format of compressed-tensors.

    Attributes:
      groups: its config groups.
      ignore: modules that are not quantised.
      source: name of config.json, for errors.
    """

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    source: str

    @classmethod
    def parse(cls, data: dict[str, Any], source: str) -> "CompressedTensors":
        """Parse a `quantization_config`.

        Raises:
          CheckpointError: the config needs an unsupported feature.
        """
        reader = ConfigReader(data, source)
        groups = reader.get("config_groups", dict)
        formats = {reader.get("format", str, None)}
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise CheckpointError(f"{source}: config group {name!r} must be an object")
            formats.add(ConfigReader(group, source).get("format", str, None))
        if wrong := sorted(formats - {None, *_FORMATS}):
            raise CheckpointError(
                f"{source}: compressed-tensors format {wrong[0]!r} is not supported; "
                f"supported: {', '.join(_FORMATS)}"
            )
        sparsity = reader.get("sparsity_config", dict, None) or {}
        if sparsity.get("format", "dense") != "dense":
            raise CheckpointError(f"{source}: sparse weights {sparsity['format']!r} not supported")
        if (reader.get("transform_config", dict, None) or {}).get("config_groups"):
            raise CheckpointError(f"{source}: 'transform_config' is not supported")
        parsed = [Group.parse(group, source) for group in groups.values()]
        ignore = reader.get("ignore", list, [])
        return cls(tuple(g for g in parsed if g), tuple(map(str, ignore)), source)

    def linear(self, module: str, shape: tuple[int, ...], stored: Stored) -> StoredLinear | None:
        """See `Scheme.linear`."""
        packed = f"{module}.weight_packed" in stored
        if len(shape) > 2 and not packed:
            return None
        weight = stored.get(f"{module}.weight")
        coded = weight is not None and weight.dtype in ("I8", "F8_E4M3")
        if not (packed or coded or f"{module}.weight_scale" in stored):
            return None
        group = self._group(module)
        if group.kind == "fp4":
            return _mxfp4(module, shape, stored, self.source)
        read = _packed if packed or group.kind == "int4" else _naive
        return read(group, module, shape, stored, self.source)

    def _group(self, module: str) -> Group:
        """The group of a module, chosen by name, else by regular expression, else by class."""
        ranks = (
            lambda target: target == module,
            lambda target: target.startswith("re:") and matches(module, [target], self.source),
            lambda target: target == "Linear",
        )
        if not matches(module, self.ignore, self.source):
            for ranked in ranks:
                for group in self.groups:
                    if any(map(ranked, group.targets)):
                        return group
        raise CheckpointError(
            f"{self.source}: no config group of 'quantization_config' is for {module!r}, "
            "whose weight is quantised"
        )


def _mxfp4(module: str, shape, stored: Stored, source: str) -> StoredLinear:
    names = f"{module}.weight_packed", f"{module}.weight_scale"
    return read_mxfp4(module, shape, stored, source, names, (*shape[:-1], shape[-1] // 2))


def _packed(group: Group, module: str, shape, stored: Stored, source: str) -> StoredLinear:
    *outs, k = shape
    if group.kind == "fp8":
        raise CheckpointError(f"{source}: {module!r} has packed integers, not float")
    if len(outs) > 1 and not (group.symmetric and group.strategy in ("group", "channel")):
        raise CheckpointError(
            f"{source}: {module!r} holds all experts of a layer, which must be symmetric, and "
            "quantised by group or channel"
        )
    bits = 4 if group.kind == "int4" else 8
    why = f" for {bits} bits"
    words = *outs, -(-k * bits // 32)
    packed = take(stored, f"{module}.weight_packed", ["I32"], words, why=why)
    size = take(stored, f"{module}.weight_shape", ["I64", "I32"], (len(shape),))
    if tuple(size.view().tolist()) != shape:
        raise damaged(size, f"must hold {list(shape)} by config.json, got {size.view().tolist()}")
    scale, columns = _scale(group, module, shape, stored, source)
    names = [packed.name, size.name, scale.name]
    zero = order = None
    if not group.symmetric:
        name = f"{module}.weight_zero_point"
        if group.strategy not in ("group", "channel"):
            raise CheckpointError(f"{source}: zero points of a {group.strategy} not supported")
        zero = take(stored, name, ["I32"], (-(-outs[0] * bits // 32), len(columns)))
        names.append(name)
    if (name := f"{module}.weight_g_idx") in stored and len(outs) == 1:
        order = take(stored, name, ["I32", "I64"], (k,))
        names.append(name)

    def read_codes():
        zeros = None
        if zero is not None:
            zeros = unpack_rows(zero.view().T, bits, outs[0]).T
        return _codes(packed.view(), scale, zeros, outs, columns)

    weight = WeightFormat(
        group.kind,
        k // len(columns),
        zero is not None,
        scale_dtype(scale),
        rounded_activations=group.rounded_activations and zero is None and len(outs) == 1,
    )
    return in_order(shape, tuple(names), weight, read_codes, order)


def in_order(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    weight: WeightFormat,
    read: Any,
    order: StoredTensor | None,
) -> StoredLinear:
    """A layer whose columns may be in any order. The tensor `order` [K] has the group of each.

    Raises:
      CheckpointError: `order` names a group that does not exist.
    """
    k = shape[-1]
    in_turn = np.arange(k) // weight.group
    groups = in_turn if order is None else np.asarray(order.view()).astype(np.int64)
    if groups.min() < 0 or groups.max() >= k // weight.group:
        raise damaged(order, f"must be in 0..{k // weight.group - 1}")
    if np.array_equal(groups, in_turn):
        return StoredLinear(shape, names, weight, read)

    def read_dense():
        return dequantised(read(), weight.kind, k, groups)

    return StoredLinear(shape, names, None, read_dense, "the order of activations")


def _naive(group: Group, module: str, shape, stored: Stored, source: str) -> StoredLinear:
    n, k = shape
    dtype = "F8_E4M3" if group.kind == "fp8" else "I8"
    weight = take(stored, f"{module}.weight", [dtype], shape)
    scale, columns = _scale(group, module, shape, stored, source)
    names = [weight.name, scale.name]
    zero = None
    if not group.symmetric:
        zero = take(stored, f"{module}.weight_zero_point", ["I8"], scale.shape)
        names.append(zero.name)

    def read():
        zeros = None
        if zero is not None:
            zeros = zero.view().astype(np.int32) + 128
            zeros = expand_scales(zeros, [n], columns, group.block)
        return _codes(words_of(weight), scale, zeros, [n], columns, group.block)

    form = WeightFormat(
        group.kind,
        k // len(columns),
        zero is not None,
        scale_dtype(scale),
        rounded_activations=group.rounded_activations and zero is None,
    )
    return StoredLinear(shape, tuple(names), form, read)


def words_of(weight: StoredTensor) -> np.ndarray:
    """Pack a weight [N,K] of signed bytes or fp8 into words [N,W]."""
    codes = np.asarray(weight.view()).view(np.uint8)
    if weight.dtype == "I8":
        codes = codes ^ np.uint8(128)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    return np.ascontiguousarray(codes).view("<i4")


def _scale(
    group: Group, module: str, shape: tuple[int, ...], stored: Stored, source: str
) -> tuple[StoredTensor, Sequence[int]]:
    """Return (the tensor of scales, the column of that tensor for each group)."""
    *outs, k = shape
    name = f"{module}.weight_scale"
    if group.strategy == "block":
        columns = block_columns(k, group.block[1])
        blocks = -(-outs[0] // group.block[0]), -(-k // group.block[1])
        return take(stored, name, _SCALES, blocks), columns
    if group.strategy == "tensor":
        return take(stored, name, _SCALES, (), (1,), (1, 1)), [0]
    if group.strategy == "channel":
        return take(stored, name, _SCALES, (*outs, 1), tuple(outs)), [0]
    count = k // group_of(group.group_size, k, source, module)
    return take(stored, name, _SCALES, (*outs, count)), range(count)


def block_columns(k: int, width: int) -> list[int]:
    """Cut K columns into equal groups that lie within blocks; returns the block of each group.

    If the width of a block does not divide K, the last block is narrower. Groups are then smaller
    than blocks.
    """
    group = k if k <= width else math.gcd(k, width)
    return [start // width for start in range(0, k, group)]


def _codes(words, scale: StoredTensor, zeros, outs, columns, block=None) -> Codes:
    scales = expand_scales(read_scales(scale), outs, columns, block)
    return Codes(words, scales, None if zeros is None else zeros.astype(scales.dtype))


def expand_scales(
    scales: np.ndarray,
    outs: Sequence[int],
    columns: Sequence[int],
    block: tuple[int, int] | None = None,
) -> np.ndarray:
    """Expand scales to [*outs,G]. They may be per tensor, channel, group or block."""
    if block:
        return np.repeat(scales, block[0], axis=0)[: outs[0], columns]
    if scales.size == 1:
        return np.full((*outs, len(columns)), scales.reshape(-1)[0])
    return scales.reshape(*outs, len(columns))
