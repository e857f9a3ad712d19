"""One-shot all-reduce: every device writes its values into every other device's memory.

Each device then adds all values itself. Between GPUs with NVLink, the latency of one write and one
signal is most of the time, so this is the fastest way for the few rows of a decode step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.dispatch import Shape
from fdjax.pallas_kernels.ranks import AXIS

# Elements of a block: 128 threads with 4 each.
_ELEMENTS = 512
# With more bytes, a two-shot kernel would be faster, in which a device adds only its share. It does
# not exist yet.
_MOST_BYTES = 2**19


def fits(shape: Shape) -> str | None:
    """Why the kernel does not run at a shape of `all_reduce`; None if it does."""
    if shape["itemsize"] != 2:
        return "needs bfloat16 or float16"
    if shape["width"] % _ELEMENTS:
        return f"needs a width that is a multiple of {_ELEMENTS}, got {shape['width']}"
    if shape["ranks"] > 8:
        return f"needs at most 8 devices, got {shape['ranks']}"
    size = shape["m"] * shape["width"] * shape["itemsize"]
    return None if size <= _MOST_BYTES else f"needs at most {_MOST_BYTES} bytes, got {size}"


def one_shot(x: Array, bias: Array | None, residual: Array | None) -> Array:
    """See `all_reduce`."""
    ranks, width = lax.axis_size(AXIS), x.shape[-1]
    operands = {"x": x.reshape(-1), "bias": bias}
    operands["residual"] = None if residual is None else residual.reshape(-1)
    operands = {name: array for name, array in operands.items() if array is not None}
    made = plgpu.kernel(
        functools.partial(_kernel, names=tuple(operands), ranks=ranks, width=width),
        out_type=[
            jax.ShapeDtypeStruct((x.size,), x.dtype),
            # The values that the other devices write, by device.
            jax.ShapeDtypeStruct((ranks, x.size), x.dtype),
        ],
        grid=(x.size // _ELEMENTS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())
    return made[0].reshape(x.shape)


def _kernel(*refs, names: tuple[str, ...], ranks: int, width: int):
    gmem = dict(zip((*names, "y", "inbox"), refs, strict=True))
    block, me = lax.axis_index("block"), lax.axis_index(AXIS)
    blocks = gmem["x"].shape[0] // _ELEMENTS
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))).at[block]
    part = pl.ds(block * _ELEMENTS, _ELEMENTS)

    own = gmem["x"][part]
    others = [lax.rem(me + i, ranks) for i in range(1, ranks)]
    for other in others:
        # No earlier kernel still reads the inbox, because XLA synchronises the devices before a
        # kernel that writes to other devices.
        plgpu.remote_ref(gmem["inbox"], {AXIS: other})[me, part] = own
    for other in others:
        pl.semaphore_signal(arrived, device_id={AXIS: other})
    pl.semaphore_wait(arrived, ranks - 1)

    # Added in the order of the devices, so that all get the same bits.
    total = jnp.zeros((_ELEMENTS,), jnp.float32)
    for rank in range(ranks):
        theirs = gmem["inbox"][rank, part]
        total += jnp.where(me == rank, own, theirs).astype(jnp.float32)
    if "bias" in gmem:
        at = lax.rem(block, width // _ELEMENTS) * _ELEMENTS
        total += gmem["bias"][pl.ds(at, _ELEMENTS)].astype(jnp.float32)
    if "residual" in gmem:
        total += gmem["residual"][part].astype(jnp.float32)
    gmem["y"][part] = total.astype(own.dtype)
