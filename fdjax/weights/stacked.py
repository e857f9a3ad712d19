"""Stacked weights: one array per kind for all layers, and each layer's weight as a view of it.

A quantised weight is a few arrays. Each of them is stacked.

A kernel that runs all layers takes the stacked arrays: few arguments, because each costs the host
about a microsecond per call. Operations of XLA take the views. XLA copies a slice before it
multiplies by it, so each view is a separate array.
"""

import ctypes
import functools
import logging
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from fdjax.models import Model, Params, random_params
from fdjax.models.name_map import ParamPath
from fdjax.pallas_kernels.quantised import QTensor, is_quantised
from fdjax.system.device_memory import free_memory_bytes, gigabytes

Weight = jax.Array | QTensor

logger = logging.getLogger("fdjax")

# On a GPU, XLA requires that the address of an argument is a multiple of this.
_ALIGNMENT = 128

_NO_ROOM = "layers are not stacked: no room for {} beside the weights"

# Stacked arrays with live views, keyed by address.
_stacks: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


class _Tensor(ctypes.Structure):
    """The first fields of `DLManagedTensor`, see dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),  # int64 values, like the strides
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.POINTER(_Tensor), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Layer:
    """One layer of a stacked array, in the form that `jax.dlpack.from_dlpack` takes.

    It exports JAX's own capsule of the whole array, narrowed to the layer. So JAX itself holds the
    memory and frees it, in any thread and at any time, without calling a Python function.
    """

    def __init__(self, stacked: jax.Array, index: int):
        self.stacked = stacked
        self.index = index

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.stacked.__dlpack_device__()

    def __dlpack__(self, **_) -> Any:
        # Without a requested version, JAX exports the form that all of its versions accept.
        capsule = self.stacked.__dlpack__()
        tensor = _capsule_pointer(capsule, b"dltensor").contents
        tensor.data += self.index * (self.stacked.nbytes // len(self.stacked))
        tensor.ndim -= 1
        tensor.shape += ctypes.sizeof(ctypes.c_int64)
        if tensor.strides:
            tensor.strides += ctypes.sizeof(ctypes.c_int64)
        return capsule


def layer_views(stacked: jax.Array) -> list[jax.Array]:
    """Views of the layers of an array, which share its memory.

    The memory lives as long as any of the views, even if the array itself is deleted.

    Args:
      stacked: [L, ...] on one device; the size of a layer is a multiple of 128 bytes.

    Returns:
      L arrays [...].

    Raises:
      ValueError: the array is deleted, is on several devices, or has layers of another size; or JAX
        cannot make views on its device.
    """
    if stacked.is_deleted():
        raise ValueError("layer_views: the array must not be deleted")
    if stacked.ndim == 0 or len(stacked.devices()) != 1:
        raise ValueError(
            "layer_views: takes an array [L, ...] on one device, got "
            f"{stacked.dtype}{[*stacked.shape]} on {len(stacked.devices())}"
        )
    if stacked.nbytes % (_ALIGNMENT * len(stacked) or 1):
        raise ValueError(
            f"layer_views: the size of a layer must be a multiple of {_ALIGNMENT} bytes, got "
            f"{stacked.dtype}{[*stacked.shape]}"
        )
    stacked.block_until_ready()  # because no stream waits for the array
    layers = [_Layer(stacked, i) for i in range(len(stacked))]
    try:
        views = [jax.dlpack.from_dlpack(layer, copy=False) for layer in layers]
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"layer_views: {error}") from None
    if any(view.devices() != stacked.devices() for view in views):
        raise ValueError(
            f"layer_views: JAX makes views only on its first CPU, not on {stacked.device}"
        )
    return views


class LayerStacks:
    """Stacked weights that are filled layer by layer during loading.

    So no weight is in memory twice, and the free memory stays in one piece for a large cache. Keep
    this object until an engine has the parameters, because the engine finds the stacked arrays only
    while they are alive.
    """

    def __init__(self, model: Model):
        """Stack the layers of a model whose plan has a kernel for them."""
        self._wanted = model.stacks_layers
        self._layers = model.config.layers
        self._stacks: dict[ParamPath, Weight] = {}

    def take(self, path: ParamPath, weight: Any) -> Any:
        """Write a weight into its stacked array.

        Args:
          path: its path in the parameters.
          weight: an array or a quantised weight.

        Returns:
          None if the weight is stacked (`views` replaces it), otherwise the weight.
        """
        is_matrix = is_quantised(weight) or (isinstance(weight, jax.Array) and weight.ndim > 1)
        if path[0] != "blocks" or not is_matrix:
            return weight
        _, layer, *kind = path
        kind = tuple(kind)
        if kind not in self._stacks:
            if not self._wanted:
                return weight
            try:
                self._stacks[kind] = _empty_stack(self._layers, weight)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self._wanted = False
                _log_once(_NO_ROOM.format(gigabytes(self._layers * _local_bytes(weight))))
                return weight
        self._stacks[kind] = _put(self._stacks[kind], weight, layer)
        return None

    def views(self, params: Params) -> Params:
        """Put views of the stacked arrays where `take` has returned None, and return `params`."""
        for kind, stacked in self._stacks.items():
            for i, view in enumerate(_views(stacked)):
                node = params["blocks"][i]
                for name in kind[:-1]:
                    node = node[name]
                node[kind[-1]] = view
        return params


def random_stacked_params(model: Model, seed: int = 0) -> tuple[Params, LayerStacks]:
    """Random parameters, see `random_params`, and their stacked arrays."""
    stacks = LayerStacks(model)
    return stacks.views(random_params(model, seed, take=stacks.take)), stacks


def stack_layers(
    model: Model, params: Params, *, memory_bytes: int | None = None
) -> dict[str, Weight] | None:
    """Stack the weights of a model's layers, if its plan has a kernel for stacked weights.

    Weights that are already views of a live stacked array are not copied again. If there is too
    little memory, nothing is stacked, and a message is logged.

    Args:
      model: the model.
      params: its parameters. The weights of the layers are replaced by views in these containers,
        except vectors.
      memory_bytes: limit for the parameters and the stacked arrays; default the free memory.

    Returns:
      Stacked arrays [L, ...], or stacks of quantised weights, by names such as
      "attention.qkv.weight"; None if nothing is stacked.
    """
    blocks = params["blocks"]
    leaves = jax.tree.leaves(blocks)
    if not (model.stacks_layers and all(isinstance(leaf, jax.Array) for leaf in leaves)):
        return None
    layers = [traverse_util.flatten_dict(blocks[i], sep=".") for i in range(len(blocks))]
    stacked = {kind: _stack_of([layer[kind] for layer in layers]) for kind in layers[0]}
    missing = [kind for kind, stack in stacked.items() if stack is None]
    needed = sum(len(layers) * _local_bytes(layers[0][kind]) for kind in missing)
    rooms = [free_memory_bytes(device) for device in leaves[0].devices()]
    rooms.append(memory_bytes and memory_bytes - model.local.weight_bytes)
    message = _NO_ROOM.format(gigabytes(needed))
    if any(room is not None and needed > room for room in rooms):
        _log_once(message)
        return None
    del leaves
    blocks.clear()
    try:
        for kind in missing:
            stacked[kind] = _stack(layers, kind)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _log_once(message)  # enough memory is free, but it is fragmented
        return None
    finally:
        blocks.update({i: _nested(layer) for i, layer in enumerate(layers)})
    return stacked


def stacked_shapes(params: Params) -> dict[str, Any]:
    """Shapes and dtypes of the arrays that `stack_layers` makes of these parameters, by name."""
    blocks = params["blocks"]

    def stack(array):
        return jax.ShapeDtypeStruct((len(blocks), *array.shape), array.dtype)

    return jax.tree.map(stack, traverse_util.flatten_dict(blocks[0], sep="."))


def layer_slices(stacked: dict[str, Weight]) -> Params:
    """The parameters of each layer as slices. Inside a trace, unused slices cost nothing.

    Args:
      stacked: what `stack_layers` returns.

    Returns:
      {layer: its parameters as nested dicts}.
    """
    layers = len(jax.tree.leaves(stacked)[0])
    slices = (jax.tree.map(operator.itemgetter(i), stacked) for i in range(layers))
    return dict(enumerate(map(_nested, slices)))


def _nested(layer: dict[str, Weight]) -> Params:
    return traverse_util.unflatten_dict(layer, sep=".")


def _stack(layers: Sequence[dict[str, Weight]], kind: str) -> Weight:
    """Stack the weights of one kind. In `layers`, they are replaced by views, except vectors.

    Donating a view overwrites it and that part of the array. Later uses of the donated weight then
    raise an error, except where `ParamPacking` has made a copy of it.
    """
    first = layers[0][kind]
    stacked = _empty_stack(len(layers), first)
    for i, layer in enumerate(layers):
        stacked = _put(stacked, layer[kind], i)
    if isinstance(first, jax.Array) and first.ndim == 1:
        return stacked
    for layer, view in zip(layers, _views(stacked), strict=True):
        layer[kind] = view
    return stacked


def _empty_stack(layers: int, weight: Weight) -> Weight:
    """Zeros [layers, ...] for weights like this one, which devices may share."""

    def zeros(array):
        sharding = array.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros((layers, *array.shape), array.dtype, device=sharding)

    return jax.tree.map(zeros, weight)


def _local(array: jax.Array) -> jax.Array:
    """The part of an array that its first device holds."""
    return array.addressable_shards[0].data


def _local_bytes(weight: Weight) -> int:
    """Bytes of a weight on its first device."""
    return sum(_local(array).nbytes for array in jax.tree.leaves(weight))


def _views(stacked: Weight) -> list[Weight]:
    """Views of the layers. `_stack_of` finds the stack by them."""
    arrays, tree = jax.tree.flatten(stacked)
    return [tree.unflatten(views) for views in zip(*map(_array_views, arrays), strict=True)]


def _array_views(stacked: jax.Array) -> list[jax.Array]:
    if len(stacked.devices()) == 1:
        views = layer_views(stacked)
    else:
        spec = tuple(stacked.sharding.spec)[1:]
        sharding = NamedSharding(stacked.sharding.mesh, PartitionSpec(*spec))
        of_devices = [layer_views(shard.data) for shard in stacked.addressable_shards]
        views = [
            jax.make_array_from_single_device_arrays(stacked.shape[1:], sharding, list(parts))
            for parts in zip(*of_devices, strict=True)
        ]
    _stacks[_local(stacked).unsafe_buffer_pointer()] = stacked
    return views


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked, weight, index):
    def put(stacked, array):
        return jax.lax.dynamic_update_index_in_dim(stacked, array, index, 0)

    return jax.tree.map(put, stacked, weight)


def _stack_of(views: Sequence[Weight]) -> Weight | None:
    """The live stack whose layers are exactly these views, in order, or None."""
    trees = list(map(jax.tree.structure, views))
    if len(set(trees)) > 1:
        return None
    stacks = list(map(_array_of, zip(*map(jax.tree.leaves, views), strict=True)))
    return None if any(stack is None for stack in stacks) else trees[0].unflatten(stacks)


def _array_of(views: Sequence[jax.Array]) -> jax.Array | None:
    first = views[0]
    address = _local(first).unsafe_buffer_pointer()
    stacked = _stacks.get(address)
    if stacked is None or stacked.is_deleted():
        return None
    lie = [_local(view).unsafe_buffer_pointer() - address for view in views]
    alike = (stacked.shape, stacked.dtype) == ((len(views), *first.shape), first.dtype)
    size = _local(first).nbytes
    return stacked if alike and lie == [i * size for i in range(len(views))] else None


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)
