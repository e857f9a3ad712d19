"""The weights of all layers as one array for each kind, and each layer's as a view of it.

A kernel that runs all layers takes few arrays: each costs the host about a microsecond a call. What
XLA multiplies by is better an array of its own, as of a slice it makes a copy first.
"""

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fdjax.models import Model, Params
from fdjax.system.device_memory import free_memory_bytes, gigabytes

logger = logging.getLogger("fdjax")

# XLA takes no argument on a GPU whose address is not a multiple of this.
_ALIGNMENT = 128

# Those that there are views of, by address.
_stacks: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


class _Tensor(ctypes.Structure):
    """What a `DLManagedTensor` begins with, see dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),  # of int64, as the strides
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.POINTER(_Tensor), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Layer:
    """One layer of a stacked array, as `jax.dlpack.from_dlpack` takes it.

    JAX's own capsule of the whole array, narrowed to the layer: so it is JAX that holds the memory
    and lets go of it, in whatever thread and however late, and no function of Python is called.
    """

    def __init__(self, stacked: jax.Array, index: int):
        self.stacked = stacked
        self.index = index

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.stacked.__dlpack_device__()

    def __dlpack__(self, **_) -> Any:
        # Asked for no version, JAX gives what all of its versions take.
        capsule = self.stacked.__dlpack__()
        tensor = _capsule_pointer(capsule, b"dltensor").contents
        tensor.data += self.index * (self.stacked.nbytes // len(self.stacked))
        tensor.ndim -= 1
        tensor.shape += ctypes.sizeof(ctypes.c_int64)
        if tensor.strides:
            tensor.strides += ctypes.sizeof(ctypes.c_int64)
        return capsule


def layer_views(stacked: jax.Array) -> list[jax.Array]:
    """Each layer of an array, where it lies: no memory is allocated.

    The memory stays as long as any view does, whatever becomes of the array itself.

    Args:
      stacked: [L, ...], on one device; layers of a multiple of 128 bytes.

    Returns:
      L arrays [...].

    Raises:
      ValueError: there can be no views of such an array.
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
            f"layer_views: layers must be of a multiple of {_ALIGNMENT} bytes, got "
            f"{stacked.dtype}{[*stacked.shape]}"
        )
    stacked.block_until_ready()  # as no stream is told to wait for it
    layers = [_Layer(stacked, i) for i in range(len(stacked))]
    try:
        views = [jax.dlpack.from_dlpack(layer, copy=False) for layer in layers]
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"layer_views: {error}") from None
    if any(view.devices() != stacked.devices() for view in views):
        raise ValueError(f"layer_views: JAX has views on its first CPU, not on {stacked.device}")
    return views


def stack_layers(
    model: Model, params: Params, *, owned: bool = False, memory_bytes: int | None = None
) -> dict[str, jax.Array] | None:
    """Stack the weights of a model's layers, if its plan has a kernel that takes them so.

    Those that are the views of an array already, which is still held, stay as they are. Where there
    is no memory for it, nothing is stacked, and that is logged.

    Args:
      model: the model.
      params: its parameters. In these containers, those of the layers are replaced by views, but
        for vectors.
      owned: nobody else holds the parameters, so that those of a kind go before the next is
        stacked.
      memory_bytes: for the parameters and what stacking takes beside them; default what there is.

    Returns:
      Arrays [L, ...] by names such as "attention.qkv.weight", or None.
    """
    blocks = params["blocks"]
    leaves = jax.tree.leaves(blocks)
    if not (model.one_launch_possible and all(isinstance(leaf, jax.Array) for leaf in leaves)):
        return None
    layers = [traverse_util.flatten_dict(blocks[i], sep=".") for i in range(len(blocks))]
    stacked = {kind: _stack_of([layer[kind] for layer in layers]) for kind in layers[0]}
    missing = [kind for kind, array in stacked.items() if array is None]
    sizes = [len(layers) * layers[0][kind].nbytes for kind in missing]
    needed = (max if owned else sum)(sizes or [0])
    (device,) = leaves[0].devices()
    rooms = [free_memory_bytes(device), memory_bytes and memory_bytes - model.weight_bytes]
    told = f"layers are not stacked: no room for {gigabytes(needed)} beside the weights"
    if any(room is not None and needed > room for room in rooms):
        _tell_once(told)
        return None
    del leaves
    blocks.clear()
    try:
        for kind in missing:
            stacked[kind] = _stack(layers, kind)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _tell_once(told)  # there is room, but not in one piece
        return None
    finally:
        blocks.update({i: _nested(layer) for i, layer in enumerate(layers)})
    return stacked


def stacked_shapes(params: Params) -> dict[str, jax.ShapeDtypeStruct]:
    """What `stack_layers` makes of parameters, as shapes and dtypes."""
    blocks = params["blocks"]
    first = traverse_util.flatten_dict(blocks[0], sep=".")
    return {k: jax.ShapeDtypeStruct((len(blocks), *a.shape), a.dtype) for k, a in first.items()}


def layer_slices(stacked: dict[str, jax.Array]) -> Params:
    """The parameters of the layers, inside a trace, where those not used cost nothing."""
    layers = len(next(iter(stacked.values())))
    return {i: _nested({kind: a[i] for kind, a in stacked.items()}) for i in range(layers)}


def _nested(layer: dict[str, jax.Array]) -> Params:
    return traverse_util.unflatten_dict(layer, sep=".")


def _stack(layers: Sequence[dict[str, jax.Array]], kind: str) -> jax.Array:
    """The weights of one kind, which become views of it, but for vectors.

    A view that is donated is written over, and the array with it. Who uses the weights after that
    is told that they are deleted, but for those that are copied together with others of a shape.
    """
    first = layers[0][kind]
    stacked = jnp.zeros((len(layers), *first.shape), first.dtype, device=first.sharding)
    for i, layer in enumerate(layers):
        stacked = _put(stacked, layer[kind], i)
    if first.ndim == 1:
        return stacked
    for layer, view in zip(layers, layer_views(stacked), strict=True):
        layer[kind] = view
    _stacks[stacked.unsafe_buffer_pointer()] = stacked
    return stacked


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked, weight, index):
    return jax.lax.dynamic_update_index_in_dim(stacked, weight, index, 0)


def _stack_of(views: Sequence[jax.Array]) -> jax.Array | None:
    """The array of which these are all views, in order, if it still is."""
    first = views[0]
    address = first.unsafe_buffer_pointer()
    stacked = _stacks.get(address)
    if stacked is None or stacked.is_deleted():
        return None
    lie = [view.unsafe_buffer_pointer() - address for view in views]
    alike = (stacked.shape, stacked.dtype) == ((len(views), *first.shape), first.dtype)
    return stacked if alike and lie == [i * first.nbytes for i in range(len(views))] else None


@functools.cache
def _tell_once(message: str) -> None:
    logger.info(message)
