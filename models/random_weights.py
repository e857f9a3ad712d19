"""Random parameters in the real shapes, made on the devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdjax.models.model import Model, Params
from fdjax.pallas_kernels.quantised import is_quantised, random_quantised
from fdjax.pallas_kernels.ranks import AXIS

# Function of (path of a parameter, parameter) that returns the parameter or a replacement.
Take = Callable[[tuple[str | int, ...], Any], Any]


def random_params(
    model: Model,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
    take: Take = lambda path, weight: weight,
) -> Params:
    """Random parameters for benchmarks and tests, made on the devices in the real shapes.

    Weights are normal with the standard deviation of transformers, 0.02. Norms scale by 1. Codes of
    quantised weights are uniform, with the same standard deviation of the weights. Devices with the
    same KV head get the same keys and values, unless the weights are quantised.

    Args:
      model: the model.
      seed: seed of the random numbers.
      devices: devices that share the model; default the first local ones.
      take: called with the path and the value of each parameter as it is made, unless devices share
        it. The returned tree holds its results.
    """
    key = jax.random.key(seed)
    paths, tree = jax.tree.flatten_with_path(model.abstract_params, is_leaf=is_quantised)
    shardings = [None] * len(paths)
    if model.ranks > 1:
        devices = jax.local_devices()[: model.ranks] if devices is None else devices
        mesh = Mesh(np.array(devices), (AXIS,))
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            model.partitions,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        shardings = tree.flatten_up_to(shardings)
    leaves = []
    for i, ((path, leaf), sharding) in enumerate(zip(paths, shardings, strict=True)):
        names = tuple(entry.key for entry in path)
        if names[-1].endswith("scale"):
            scale = 1 - model.config.norm_offset
            made = jnp.full(leaf.shape, scale, leaf.dtype, device=sharding)
        else:
            copies = model.ranks // model.config.kv_heads if "qkv" in names else 1
            made = _random_weight(leaf, copies, sharding)(jax.random.fold_in(key, i))
        leaves.append(take(names, made) if model.ranks == 1 else made)
        del made
    return jax.tree.unflatten(tree, leaves)


# One program for all layers. A program that makes all weights at once takes a minute to compile.
@functools.cache
def _random_weight(like: Any, copies: int, sharding: Any) -> Callable[[Array], Any]:
    """A function from a key to a weight. Each device makes its own part.

    Args:
      like: shape and dtype of the weight, or a quantised weight of these.
      copies: number of devices that have the same keys and values, if this weight has them.
      sharding: sharding of the result, or None for one device.
    """

    def make(key):
        if is_quantised(like):
            return random_quantised(key, like, 0.02)
        made = 0.02 * jax.random.normal(key, like.shape, like.dtype)
        if copies > 1:
            kv = made[..., ::copies, -2:, :].repeat(copies, axis=-3)
            made = made.at[..., -2:, :].set(kv)
        return made

    if sharding is None or copies <= 1 or is_quantised(like):
        return jax.jit(make, out_shardings=sharding)

    # Each device makes the whole weight and keeps its part. To exchange keys and values, XLA would
    # start NCCL before an engine has set NCCL's options.
    axis = sharding.spec.index(AXIS)
    part = like.shape[axis] // sharding.mesh.size

    def own_part(key):
        return lax.dynamic_slice_in_dim(make(key), lax.axis_index(AXIS) * part, part, axis)

    specs = {"in_specs": PartitionSpec(), "out_specs": sharding.spec}
    return jax.jit(jax.shard_map(own_part, mesh=sharding.mesh, **specs, check_vma=False))
