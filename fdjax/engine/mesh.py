"""The devices of an engine's arrays: one, or several that share the arrays."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fdjax.pallas_kernels.ranks import AXIS
from fdjax.system import platform
from fdjax.system.device_memory import free_memory_bytes
from fdjax.system.nccl import allow_in_graphs

_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices of an engine.

    Attributes:
      devices: one device, or several that share the model by tensor parallelism, in the order of
        the mesh.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, array: jax.Array) -> "Place":
        """The place where an array is."""
        if isinstance(array.sharding, NamedSharding):
            return cls(tuple(array.sharding.mesh.devices.flat))
        return cls(tuple(array.devices()))

    @classmethod
    def local(cls, ranks: int, device: jax.Device | None = None) -> "Place":
        """The place on `device`, or on the first `ranks` devices of this process.

        Raises:
          ValueError: this process has fewer devices.
          NoDeviceError: JAX cannot start its platform.
        """
        platform.default_backend()  # starts JAX, because `local_devices` would lose a Ctrl-C
        devices = (device,) if device is not None else tuple(jax.local_devices()[:ranks])
        if len(devices) < ranks:
            raise ValueError(
                f"load: tensor_parallel needs {ranks} devices, found {len(jax.local_devices())}"
            )
        return cls(devices)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices."""
        return Mesh(np.array(self.devices), (AXIS,))

    def sharding(self, spec: PartitionSpec = _WHOLE) -> Sharding:
        """The sharding for a `PartitionSpec`; by default, every device has the whole array."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """The shardings for a tree of `PartitionSpec`s."""
        return jax.tree.map(self.sharding, specs, is_leaf=is_spec)

    def put(self, tree: Any) -> Any:
        """Put whole arrays on every device."""
        return jax.device_put(tree, self.sharding())

    def zeros(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        """An array of zeros, divided among the devices as `spec` says."""
        whole = self.whole(part, spec)
        return jnp.zeros(whole.shape, whole.dtype, device=whole.sharding)

    def whole(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array of which each device has such a part."""
        shape = (
            n * (len(self.devices) if axis == AXIS else 1)
            for n, axis in itertools.zip_longest(part.shape, spec)
        )
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype, sharding=self.sharding(spec))

    def over(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function of whole arrays. Each device runs `function` with its own parts."""
        if len(self.devices) == 1:
            return function
        allow_in_graphs()
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, **specs, check_vma=False)

    def free_memory_bytes(self) -> int | None:
        """The smallest number of free bytes of any device; None if unknown."""
        free = [free_memory_bytes(device) for device in self.devices]
        return None if None in free else min(free)


def specs_of(arrays: Any) -> Any:
    """The `PartitionSpec` of each array in a tree."""
    return jax.tree.map(lambda a: getattr(a.sharding, "spec", _WHOLE), arrays)


def is_spec(leaf: Any) -> bool:
    """Whether a leaf is a `PartitionSpec`, which is a tuple."""
    return isinstance(leaf, PartitionSpec)


def stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Stack arrays that are divided alike. Each device stacks its own parts."""
    sharding = arrays[0].sharding
    if not isinstance(sharding, NamedSharding):
        return jnp.stack(arrays)
    spec = PartitionSpec(None, *sharding.spec)
    return jax.jit(jnp.stack, out_shardings=NamedSharding(sharding.mesh, spec))(arrays)
