"""The axis of devices that share a model by tensor parallelism.

Code that runs on one of them is inside a `jax.shard_map` over this axis.
"""

from jax import Array, lax

AXIS = "tp"


def own_share(values: Array, ranks: int) -> Array:
    """This device's share of values [ranks·N, ...], [N, ...]."""
    if ranks == 1:
        return values
    size = len(values) // ranks
    return lax.dynamic_slice_in_dim(values, lax.axis_index(AXIS) * size, size)
