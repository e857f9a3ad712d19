"""Divides the tensors of a checkpoint among the devices that share a model.

The weight map of the model has the shapes of whole tensors. The weight map of the local model has
the shapes of a device's parts. The axis in which they differ is divided.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdjax.models import Model, Params, describe, weight_map
from fdjax.models.name_map import Layout, ParamPath, StackedRows, Weight, export_tensors, join
from fdjax.models.sharding import is_padded
from fdjax.pallas_kernels.quantised import is_quantised
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.weights.formats.layer import Codes


class Division:
    """Divides a checkpoint's tensors among devices. A single device takes them whole.

    Attributes:
      devices: the devices.
      own: (rank, device) of the devices of this process.
    """

    def __init__(self, model: Model, devices: Sequence[jax.Device | None]):
        """Prepare the division.

        Args:
          model: the model.
          devices: `model.ranks` devices; [None] means JAX's default device.
        """
        self.devices = devices
        self.own = [
            (rank, device)
            for rank, device in enumerate(devices)
            if device is None or device.process_index == jax.process_index()
        ]
        self._model = model
        self._weights = weight_map(model.config)
        local = model.local.config
        self._local = weight_map(dataclasses.replace(local, vocab_size=local.head_width))

    def weight(self, path: ParamPath) -> Weight:
        """The parts of a parameter's tensors on one device, and how to join them."""
        whole = not any(self._partitions(path))
        return (self._weights if whole else self._local)[path]

    def cut(
        self, array: np.ndarray, path: ParamPath, source: int, rank: int, *, is_codes: bool = False
    ) -> np.ndarray:
        """A device's part of a parameter's tensor, or with `is_codes` of its codes or scales.

        Raises:
          NotImplementedError: the tensor cannot be divided.
        """
        ours, own = self._weights[path], self.weight(path)
        if is_codes:
            ours, own = (weight.outputs_first()[0] for weight in (ours, own))
        (name, shape), (_, part) = ours.sources[source], own.sources[source]
        divided = [axis for axis, (n, m) in enumerate(zip(shape, part, strict=True)) if n != m]
        if not divided:
            return array
        if len(divided) > 1:
            raise NotImplementedError(f"tensor_parallel: cannot divide {name} {shape} into {part}")
        (axis,) = divided
        outs = _outs(ours.layout) or (shape[axis],), _outs(own.layout) or (part[axis],)
        starts = itertools.accumulate(outs[0], initial=0)
        pieces = []
        for start, n, m in zip(starts, *outs, strict=False):
            # Codes and scales have fewer columns than the weight, but each device's share is the
            # same.
            scaled = [size * array.shape[axis] // shape[axis] for size in (start, n, m)]
            pieces.append(_piece(array, axis, *scaled, self._index(path, n, m, rank, name)))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)

    def cut_codes(self, codes: Codes, path: ParamPath, source: int, rank: int) -> Codes:
        """A device's part of the codes of a quantised weight."""
        fields = (codes.words, codes.scales, codes.zeros)
        return Codes(
            *(a if a is None else self.cut(a, path, source, rank, is_codes=True) for a in fields)
        )

    def assembled(self, parts: Sequence[Any], path: ParamPath) -> Any:
        """Join the parts of this process's devices into one array or `QTensor` on all devices."""
        if len(self.devices) == 1:
            return parts[0]
        mesh = Mesh(np.array(self.devices), (AXIS,))
        wanted = _at(self._model.abstract_params, path)

        def whole(like, spec, *parts):
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_single_device_arrays(like.shape, sharding, list(parts))

        leaves = [jax.tree.leaves(tree) for tree in (wanted, self._specs(path), *parts)]
        made = [whole(*of_leaf) for of_leaf in zip(*leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(wanted), made)

    def _specs(self, path: ParamPath) -> Any:
        return _at(self._model.partitions, path)

    def _partitions(self, path: ParamPath) -> list[PartitionSpec]:
        return jax.tree.leaves(self._specs(path), is_leaf=lambda a: isinstance(a, PartitionSpec))

    def _index(self, path: ParamPath, whole: int, part: int, rank: int, name: str) -> int:
        """Index of a device's part of an axis."""
        ranks = len(self.devices)
        if is_padded(path):
            return rank
        count = whole // part
        if whole % part or ranks % count:
            raise NotImplementedError(
                f"tensor_parallel: cannot divide {name} among {ranks} devices"
            )
        # If there are fewer KV heads than devices, several devices have the same head.
        return rank * count // ranks


def divided(model: Model, params: Params, devices: Sequence[jax.Device]) -> Params:
    """Put parameters on the devices that share a model.

    Args:
      model: the model.
      params: its parameters on any devices, or the parameters of the same model for a single
        device.
      devices: `model.ranks` devices.

    Raises:
      ValueError: quantised weights have the layout for a single device.
    """
    mesh = Mesh(np.array(devices), (AXIS,))
    if _shapes(params) == _shapes(model.abstract_params):
        return jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), params, model.partitions
        )
    single = describe(model.config, dtype=model.dtype, plan=model.plan)
    if _shapes(params) != _shapes(single.abstract_params):
        return params  # the caller reports the wrong shapes
    if any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised))):
        raise ValueError(
            "params: quantised weights of a single device cannot be divided; use fdjax.load"
        )
    division, weights = Division(model, devices), weight_map(model.config)
    tensors = export_tensors(params, weights)
    made = jax.tree.map(lambda leaf: leaf, model.abstract_params)
    for path, weight in weights.items():
        parts = []
        for rank, device in division.own:
            own = [
                jax.device_put(division.cut(np.asarray(tensors[name]), path, i, rank), device)
                for i, (name, _) in enumerate(weight.sources)
            ]
            parts.append(join(own, layout=division.weight(path).layout, dtype=model.dtype))
        _at(made, path[:-1])[path[-1]] = division.assembled(parts, path)
    return made


def _piece(
    array: np.ndarray, axis: int, start: int, whole: int, part: int, index: int
) -> np.ndarray:
    """Part `index` of `whole` entries of an axis from `start` on, padded with zeros."""
    first, end = (start + min(i * part, whole) for i in (index, index + 1))
    piece = array[(slice(None),) * axis + (slice(first, end),)]
    if end - first == part:
        return piece
    padding = [(0, part - (end - first)) if a == axis else (0, 0) for a in range(array.ndim)]
    return np.pad(piece, padding)


def _outs(layout: Layout) -> tuple[int, ...] | None:
    """Sizes of the linear layers that a tensor holds one after another; None for one layer."""
    if isinstance(layout, StackedRows):
        return layout.outs
    return _outs(layout.layout) if hasattr(layout, "layout") else None


def _at(tree: Any, path: ParamPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _shapes(params: Params) -> Any:
    leaves, structure = jax.tree.flatten(params)
    return [leaf.shape for leaf in leaves], structure
