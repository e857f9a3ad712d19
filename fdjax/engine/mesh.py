"""The devices of an engine's arrays: one, or several that share the arrays."""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fdjax.pallas_kernels.ranks import AXIS
from fdjax.system import platform
from fdjax.system.device_memory import free_memory_bytes
from fdjax.system.nccl import allow_in_graphs
from fdjax.system.process import transfers_allowed

_WHOLE = PartitionSpec()
# What the `repr` of a function adds to its name. It differs from process to process.
_ADDRESS = r" at 0x[0-9a-f]+"


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices of an engine.

    If they belong to several processes, each process has an equal place and makes the same calls in
    the same order.

    Attributes:
      devices: one device, or several that share the model by tensor parallelism, in the order of
        the mesh.
    """

    devices: tuple[jax.Device, ...]

    def __post_init__(self):
        if len(self.devices) > 1:
            allow_in_graphs()  # `load` makes its place before its arrays, whose sums start NCCL

    @classmethod
    def of(cls, array: jax.Array) -> "Place":
        """The place where an array is."""
        if isinstance(array.sharding, NamedSharding):
            return cls(tuple(array.sharding.mesh.devices.flat))
        return cls(tuple(array.devices()))

    @classmethod
    def for_ranks(cls, ranks: int, device: jax.Device | None = None) -> "Place":
        """The place on `device`, or on the first `ranks` devices of this process.

        If this process has fewer, all processes contribute the same number of their first devices.

        Raises:
          ValueError: there are too few devices, or processes cannot contribute the same number.
          NoDeviceError: JAX cannot start its platform.
        """
        platform.default_backend()  # starts JAX, because `local_devices` would lose a Ctrl-C
        if device is not None:
            return cls((device,))
        if ranks <= jax.local_device_count():
            return cls(tuple(jax.local_devices()[:ranks]))
        found = [jax.local_devices(i) for i in range(jax.process_count())]
        each, rest = divmod(ranks, len(found))
        counts = [len(devices) for devices in found]
        if len(found) == 1:
            raise ValueError(
                f"load: tensor_parallel needs {ranks} devices, found {counts[0]}; to share a model "
                "with other processes, call jax.distributed.initialize in each of them first"
            )
        if rest or {*counts} != {counts[0]} or each > counts[0]:
            raise ValueError(
                f"load: tensor_parallel needs {ranks} devices, the same number of each process, "
                f"found {', '.join(map(str, counts))} in {len(found)} processes"
            )
        return cls(tuple(device for devices in found for device in devices[:each]))

    @property
    def spans_processes(self) -> bool:
        """Whether the devices belong to several processes."""
        return any(d.process_index != self.devices[0].process_index for d in self.devices)

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
        sharding = self.sharding()
        if not self.spans_processes:
            return jax.device_put(tree, sharding)
        # `device_put` would compare the values of all processes, and wait for steps that run.
        return jax.tree.map(
            lambda a: jax.make_array_from_callback(a.shape, sharding, lambda _: np.asarray(a)), tree
        )

    def zeros(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        """An array of zeros, divided among the devices as `spec` says."""
        whole = self.whole(part, spec)
        return jnp.zeros(whole.shape, whole.dtype, device=whole.sharding)

    def whole(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a whole array, from those of a device's part."""
        shape = (
            n * (len(self.devices) if axis == AXIS else 1)
            for n, axis in itertools.zip_longest(part.shape, spec)
        )
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype, sharding=self.sharding(spec))

    def over(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function of whole arrays. Each device runs `function` with its own parts."""
        if len(self.devices) == 1:
            return function
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, **specs, check_vma=False)

    def free_memory_bytes(self) -> int | None:
        """The smallest number of free bytes of any device; None if unknown."""
        own = [d for d in self.devices if d.process_index == jax.process_index()]
        free = [free_memory_bytes(device) for device in own]
        return None if None in free else self.least(min(free))

    def least(self, value: int) -> int:
        """The smallest value of all processes that share the model."""
        if not self.spans_processes:
            return value
        return min(map(int.from_bytes, _of_all(value.to_bytes(8))))

    def agree(self, op: str, call: Any) -> int | None:
        """Check that all processes that share the model make the same call.

        Args:
          op: name of the operation, for the error.
          call: the arguments, whose `repr` must be complete.

        Returns:
          A random number, the same in each process; None if there is one process.

        Raises:
          ValueError: another process makes another call.
        """
        if not self.spans_processes:
            return None
        text = re.sub(_ADDRESS, "", repr((op, call)))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        calls = _of_all(digest + os.urandom(16))
        if any(other[:16] != digest for other in calls):
            raise ValueError(
                f"{op}: the processes that share a model must make the same calls with the same "
                "arguments, in the same order"
            )
        return int.from_bytes(calls[0][16:])


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


@transfers_allowed()
def _of_all(data: bytes) -> list[bytes]:
    """The data of each process, which all have the same length."""
    found = multihost_utils.process_allgather(np.frombuffer(data, np.uint8))
    return [row.tobytes() for row in found]
