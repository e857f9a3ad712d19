"""Counters of finished tiles in global memory. All blocks wait for each other through them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_STRIDE = 32  # int32 values, so that no two layers share a cache line


def new_counters(layers: int) -> Any:
    """A reference to zeros [layers, ...] int32: one row per layer of a step, to be used once."""
    return jax.new_ref(jnp.zeros((layers, _STRIDE), jnp.int32))


def signal(counter: Any) -> None:
    """Count a tile as finished, once all threads of the warpgroup have arrived.

    The count is a release, which takes 900 cycles, although TMA has stored the results before. It
    is needed: without it, 57 of 5 000 runs differed (benchmarks/LOG.md, 2026-11-29).
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, counter):
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.memref_ptr(counter)).signal(1, memory_scope="gpu")

    run(counter)


def wait(counter: Any, tiles: int) -> None:
    """Wait until all blocks together have finished this number of tiles."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, counter):
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(counter))
        semaphore.wait(tiles, decrement=False, memory_scope="gpu")
        # TMA reads what the other blocks wrote. Without ".global", the compiler would add a fence
        # that takes hundreds of cycles.
        mgpu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    run(counter)
