"""`all_reduce`: the sum over devices, plus a layer's bias and residual.

Tensor parallelism needs two of them in each layer (Shoeybi et al. 2019, Megatron-LM, section 3).
"""

import math

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.all_reduce.hopper.one_shot import fits, one_shot
from fdjax.pallas_kernels.dispatch import Dispatch, Implementation, never, resolve
from fdjax.pallas_kernels.ranks import AXIS, all_sum, announced


def _xla(x: Array, bias: Array | None, residual: Array | None, name: str) -> Array:
    y = all_sum(x, name)
    for addend in (bias, residual):
        y = y if addend is None else y + jnp.broadcast_to(addend, y.shape)
    return y


def _mosaic(x: Array, bias: Array | None, residual: Array | None, name: str) -> Array:
    return one_shot(announced(x, name), bias, residual)


ALL_REDUCE = (
    Implementation(
        "all_reduce",
        "mosaic_gpu",
        _mosaic,
        fits=fits,
        heuristic=never,
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
        ranks = lax.axis_size(AXIS)
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
    key = {
        "m": math.prod(x.shape[:-1]),
        "width": x.shape[-1],
        "ranks": ranks,
        "itemsize": x.dtype.itemsize,
    }
    chosen, _ = resolve(ALL_REDUCE, plan, implementation, **key)
    return chosen.run(x, bias, residual, name)
