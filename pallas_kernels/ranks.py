"""The axis of devices that share a model by tensor parallelism, and their collective operations.

Code that runs on one of them is inside a `jax.shard_map` over this axis.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import io_callback

AXIS = "tp"

Observer = Callable[[int, str], None]

_observer = contextvars.ContextVar[Observer | None]("observer", default=None)


def own_share(values: Array, ranks: int) -> Array:
    """This device's share of values [ranks·N, ...], [N, ...]."""
    if ranks == 1:
        return values
    size = len(values) // ranks
    return lax.dynamic_slice_in_dim(values, lax.axis_index(AXIS) * size, size)


def only_first(x: Array) -> Array:
    """x on the first device, zeros on the others."""
    return jnp.where(lax.axis_index(AXIS) == 0, x, jnp.zeros_like(x))


def all_sum(x: Array, name: str) -> Array:
    """The sum of the devices' arrays, on each device; `name` is for `observed`."""
    return lax.psum(announced(x, name), AXIS)


def all_mean(x: Array, name: str) -> Array:
    """The mean of the devices' arrays, on each device; see `all_sum`."""
    return lax.pmean(announced(x, name), AXIS)


def all_columns(x: Array, name: str) -> Array:
    """The devices' arrays [..., N] joined to [..., ranks·N], on each device."""
    return lax.all_gather(announced(x, name), AXIS, axis=x.ndim - 1, tiled=True)


@contextlib.contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Code traced inside this block calls `observer` before each collective operation.

    The call is on the host, with the device's index and the operation's name. None turns it off.
    """
    before = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(before)


def announced(x: Array, name: str) -> Array:
    """x, available after the observer, if any, was called with this device and `name`."""
    if (observer := _observer.get()) is None:
        return x

    def notify(rank, _):
        observer(int(rank), name)
        return np.int32(0)

    # The call needs a value of x, so it cannot come before x.
    value = lax.index_in_dim(x.reshape(-1), 0, keepdims=False)
    done = io_callback(notify, jax.ShapeDtypeStruct((), jnp.int32), lax.axis_index(AXIS), value)
    return lax.optimization_barrier((x, done))[0]
