"""`all_reduce`: the sum over devices, plus a layer's bias and residual.

Tensor parallelism needs two of them in each layer (Shoeybi et al. 2019, Megatron-LM, section 3).
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.all_reduce.hopper.mailbox import Mailbox, fits, open_mailbox, sum_through
from fdjax.pallas_kernels.dispatch import Capability, Dispatch, Implementation, Shape, resolve
from fdjax.pallas_kernels.ranks import AXIS, all_sum, announced

_mailbox = contextvars.ContextVar[Mailbox | None]("mailbox", default=None)


@contextlib.contextmanager
def mailbox(
    m: int,
    width: int,
    dtype: Any,
    *,
    after: Array,
    plan: Dispatch | None = None,
    named: str | None = None,
) -> Iterator[None]:
    """Sums of up to `m` rows, traced inside this block, need no barrier between the devices.

    They share a mailbox, which all devices open here, for as long as the program runs. Call it
    where `all_reduce` is called, outside of loops.

    Args:
      m, width, dtype: shape [m, width] and dtype of the largest sum.
      after: the mailbox opens when this array has been computed; each one needs another array.
      plan, named: `plan` and `implementation` of `all_reduce`. No mailbox opens unless they choose
        our kernel for the largest sum.
    """
    chosen, _ = resolve(ALL_REDUCE, plan, named, **sum_shape(m, width, dtype, lax.axis_size(AXIS)))
    before = _mailbox.set(open_mailbox(m, width, after) if chosen.run is _mosaic else None)
    try:
        yield
    finally:
        _mailbox.reset(before)


def sum_shape(m: int, width: int, dtype: Any, ranks: int) -> dict[str, int]:
    """The shape by which a plan chooses how devices sum [m, width]."""
    return {"m": m, "width": width, "ranks": ranks, "itemsize": jnp.dtype(dtype).itemsize}


def _xla(x: Array, bias: Array | None, residual: Array | None, name: str) -> Array:
    y = all_sum(x, name)
    for addend in (bias, residual):
        y = y if addend is None else y + jnp.broadcast_to(addend, y.shape)
    return y


def _mosaic(x: Array, bias: Array | None, residual: Array | None, name: str) -> Array:
    x, box = announced(x, name), _mailbox.get()
    if box is None or not box.holds(x):
        box = open_mailbox(math.prod(x.shape[:-1]), x.shape[-1], after=x)
    return sum_through(box, x, bias, residual)


def _two_devices(shape: Shape, capability: Capability | None) -> bool:
    # Faster than XLA from 1 to 4096 rows; more devices were not measured (benchmarks/LOG.md).
    return shape["ranks"] == 2


ALL_REDUCE = (
    Implementation(
        "all_reduce",
        "mosaic_gpu",
        _mosaic,
        fits=fits,
        heuristic=_two_devices,
        capabilities=((9, 0), (9, 1)),
        forced=False,
    ),
    Implementation("all_reduce", "xla", _xla),
)


def all_reduce(
    x: Array,
    name: str,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> Array:
    """Sum of the arrays of all devices on the axis `ranks.AXIS`, plus a bias and a residual.

    It is called on each device, inside a `jax.shard_map`. All devices get the same bits. The kernel
    adds in fp32, in the order of the devices, and rounds once. XLA rounds after each addition.

    Args:
      x: [..., E], the array of this device.
      name: name of the operation, for `ranks.observed`.
      bias: [E], equal on all devices.
      residual: like x, equal on all devices.
      implementation: "xla" or "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      Like x.

    Raises:
      ValueError: shapes or dtypes disagree, or there is no such axis.
      NotImplementedError: the named implementation cannot do this.

    Sends x to each other device, and receives as much: (ranks - 1) times its bytes each way.
    """
    try:
        key = sum_shape(math.prod(x.shape[:-1]), x.shape[-1], x.dtype, lax.axis_size(AXIS))
    except NameError:
        raise ValueError(
            f"all_reduce: call it inside a jax.shard_map over the axis {AXIS!r}"
        ) from None
    for what, addend, want in (("bias", bias, x.shape[-1:]), ("residual", residual, x.shape)):
        if addend is not None and (addend.shape != want or addend.dtype != x.dtype):
            raise ValueError(
                f"all_reduce: {what} must be {x.dtype}{list(want)}, "
                f"got {addend.dtype}{list(addend.shape)}"
            )
    chosen, _ = resolve(ALL_REDUCE, plan, implementation, **key)
    return chosen.run(x, bias, residual, name)
