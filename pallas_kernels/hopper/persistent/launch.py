"""A persistent kernel: stages repeated for every layer, run by several warpgroups of each block.

One warpgroup computes. One loads the results of other blocks. One loads the rest, mostly weights.
With quantised weights, others assist the first, and the two that load may be two warps of one.
These loads continue while blocks wait for each other, as long as shared memory has room.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import in_a_warp, when
from fdjax.pallas_kernels.hopper.persistent.block import Block
from fdjax.pallas_kernels.hopper.persistent.memory import Memory, Packing, with_rings
from fdjax.pallas_kernels.hopper.persistent.sizes import CLUSTERS
from fdjax.pallas_kernels.hopper.persistent.stage import Stage


def launch(
    name: str,
    operands: dict[str, Any],
    results: dict[str, tuple[tuple[int, ...], Any]],
    stages: Sequence[Stage],
    *,
    layers: int,
    memory: Memory,
    config: Any,
    registers: tuple[int, ...],
    approx_math: bool = False,
    packing: Packing | None = None,
) -> dict[str, Array]:
    """Run a kernel of 132 blocks, which must all run at once.

    Args:
      name: name of the kernel.
      operands: arrays and references by name. "x" [M,E] is the residual stream. "counters" come
        from `new_counters`, one row per layer; with "index" [1], its value is the row to use.
      results: (shape, dtype) by name.
      stages: the stages of one layer.
      layers: number of layers.
      memory: shared memory of the stages.
      config: configuration of the op, with its limits on tiles in flight.
      registers: registers per thread of each warpgroup. The first computes. Then come one that
        loads x and one that loads weights, or a single one whose warps load both. The rest, of
        which there are `packing.unpackers` - 1, assist.
      approx_math: whether the compiler may use approximate math.
      packing: how weights are quantised, if they are.

    Returns:
      The results by name.
    """
    rows = len(operands["x"])
    copies = max(stage.copies for stage in stages)
    at_start = 65536 // (128 * len(registers)) // 8 * 8
    if sum(registers) > at_start * len(registers):  # warpgroups would wait for them forever
        raise ValueError(
            f"{name}: registers must be at most {at_start} on average, got {registers}"
        )
    scratch = with_rings(memory, -(-rows // 8) * 8, operands["x"].dtype, copies, packing)

    def kernel(*refs):
        gmem = dict(zip((*operands, *results), refs, strict=True))
        pl.run_scoped(functools.partial(body, gmem), **scratch, collective_axes="warpgroup")

    def body(gmem, **smem):
        if packing:
            smem["w"], smem["words"] = smem["w"]
        block = Block(gmem, smem, stages=stages, layers=layers, config=config)
        helpers = range(1, packing.unpackers) if packing else ()
        roles = [_compute, _bring_x, _bring_weights]
        if len(registers) < len(roles) + len(helpers):
            roles = [_compute, _bring_by_warps]
        roles += [functools.partial(_assist, index=helper) for helper in helpers]
        for index, run in enumerate(roles):

            @when(lax.axis_index("warpgroup") == index)
            def _(run=run, registers=registers[index]):
                # Equally many must be asked for as well: otherwise ptxas gives the code fewer.
                action = "increase" if registers >= at_start else "decrease"
                plgpu.set_max_registers(registers, action=action)
                run(block)

    kernel.__name__ = name
    made = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results.values()],
        grid=(CLUSTERS,),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=len(registers),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands.values())
    return dict(zip(results, made, strict=True))


def _compute(block: Block) -> None:
    def run(layer, used):
        for stage in block.stages:
            used = stage.compute(block, layer, used)
        return used

    if "sums_read" in block.smem:
        plgpu.barrier_arrive(block.smem["sums_read"])
    # Counts tiles of the ring and slots of x.
    block.for_layers(run, (jnp.int32(0), jnp.int32(0)))


def _assist(block: Block, index: int) -> None:
    def run(layer, used):
        for stage in block.stages:
            used = stage.assist(block, layer, used, index)
        return used

    block.for_layers(run, (jnp.int32(0), jnp.int32(0)))


def _bring_by_warps(block: Block) -> None:
    """Load x by one warp and weights by another: a copy then has no barrier of a warpgroup."""

    @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
    def run():
        warp = lax.axis_index("warp")
        with in_a_warp():
            when(warp == 0)(lambda: _bring_weights(block))
            when(warp == 1)(lambda: _bring_x(block, by_warp=True))

    run()


def _bring_x(block: Block, *, by_warp: bool = False) -> None:
    def run(layer, loaded):
        for at, stage in enumerate(block.stages):
            block.await_stages(layer, at, by_warp=by_warp)
            loaded = stage.bring_x(block, layer, loaded)
        return loaded

    block.for_layers(run, jnp.int32(0))


def _bring_weights(block: Block) -> None:
    def run(layer, tiles):
        for at, stage in enumerate(block.stages):
            worked = block.worked_before(layer, at)
            count, tiles = stage.bring_weights(block, layer, worked, tiles)
            block.await_done(worked, count <= block.config.ahead)
        return tiles

    # Counts tiles that were requested, and tiles that were waited for.
    block.for_layers(run, (jnp.int32(0), jnp.int32(0)))
