"""Where an engine's arrays are: on one device, or divided among several."""

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

_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices of an engine.

    Attributes:
      devices: one, or several that share the model by tensor parallelism, in the mesh's order.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, array: jax.Array) -> "Place":
        """The place of an array."""
        if isinstance(array.sharding, NamedSharding):
            return cls(tuple(array.sharding.mesh.devices.flat))
        return cls(tuple(array.devices()))

    @classmethod
    def local(cls, ranks: int, device: jax.Device | None = None) -> "Place":
        """A device, default the first local one, or the first local ones.

        Raises:
          ValueError: there are not as many.
          NoDeviceError: JAX cannot start its platform.
        """
        platform.default_backend()  # starts JAX, which would lose a Ctrl-C
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
        """The sharding of an array that is divided so; default whole on every device."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """`sharding` for a tree."""
        return jax.tree.map(self.sharding, specs, is_leaf=is_spec)

    def put(self, tree: Any) -> Any:
        """Put arrays on every device, as a whole."""
        return jax.device_put(tree, self.sharding())

    def zeros(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        """Zeros of this shape and dtype on each device, one array that is divided so."""
        shape = (
            n * (len(self.devices) if axis == AXIS else 1)
            for n, axis in itertools.zip_longest(part.shape, spec)
        )
        return jnp.zeros(tuple(shape), part.dtype, device=self.sharding(spec))

    def over(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function of whole arrays that runs this one on each device, with its part of each."""
        if len(self.devices) == 1:
            return function
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, **specs, check_vma=False)

    def free_memory_bytes(self) -> int | None:
        """Free bytes of the device that has the fewest; None if unknown."""
        free = [free_memory_bytes(device) for device in self.devices]
        return None if None in free else min(free)


def specs_of(arrays: Any) -> Any:
    """The `PartitionSpec` of each array in a tree."""
    return jax.tree.map(lambda a: getattr(a.sharding, "spec", _WHOLE), arrays)


def is_spec(leaf: Any) -> bool:
    """Whether a leaf is a `PartitionSpec`, which is a tuple."""
    return isinstance(leaf, PartitionSpec)


def stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Stack arrays that are divided alike, each device its own parts."""
    sharding = arrays[0].sharding
    if not isinstance(sharding, NamedSharding):
        return jnp.stack(arrays)
    spec = PartitionSpec(None, *sharding.spec)
    return jax.jit(jnp.stack, out_shardings=NamedSharding(sharding.mesh, spec))(arrays)
