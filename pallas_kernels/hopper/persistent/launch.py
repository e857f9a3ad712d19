"""A persistent kernel: stages repeated for every layer, run by several warpgroups of each block.

One warpgroup computes, or two with quantised weights or an int8 cache. One loads the results of
other blocks. One loads the rest, mostly weights. These loads continue while blocks wait for each
other, as long as shared memory has room.

A layer's code must fit into the instruction cache of 128 kB, or every layer reads all of it again
(benchmarks/LOG.md, 2026-11-27). So the two warpgroups that compute run the same code.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.persistent import handover
from fdjax.pallas_kernels.hopper.persistent.block import Block
from fdjax.pallas_kernels.hopper.persistent.memory import (
    Memory,
    Packing,
    computing_warpgroups,
    with_rings,
)
from fdjax.pallas_kernels.hopper.persistent.row_input import receive_x
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
    registers: tuple[int, int, int],
    approx_math: bool = False,
    packing: Packing | None = None,
    words: dict[str, int] | None = None,
    codes: bool = False,
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
      registers: registers per thread of a warpgroup that computes, of the one that loads x, and of
        the one that loads weights.
      approx_math: whether the compiler may use approximate math.
      packing: how weights are quantised, if they are.
      words: if one row is sent in words: index of a result's first word in the operand "words", by
        the name of the result. See `words`.
      codes: see `with_rings`.

    Returns:
      The results by name.
    """
    rows = len(operands["x"])
    copies = max(stage.copies for stage in stages)
    computing = computing_warpgroups(packing, codes)
    per_warpgroup = *registers[:1] * computing, *registers[1:]
    at_start = 65536 // (128 * len(per_warpgroup)) // 8 * 8
    if sum(per_warpgroup) > at_start * len(per_warpgroup):  # they would wait for them forever
        raise ValueError(
            f"{name}: registers must be at most {at_start} on average, got {per_warpgroup}"
        )
    padded = -(-rows // 8) * 8
    # `rows` may be padded.
    one_row = words or rows == 1 or (packing and packing.rows == 1)
    columns = 1 if one_row else padded
    scratch = with_rings(memory, padded, operands["x"].dtype, copies, packing, codes)

    def kernel(*refs):
        gmem = dict(zip((*operands, *results), refs, strict=True))
        pl.run_scoped(functools.partial(body, gmem), **scratch, collective_axes="warpgroup")

    def body(gmem, **smem):
        if packing or codes:
            for view in smem.pop("w"):
                smem |= view
        handover.start(smem["handover"])
        warpgroup = lax.axis_index("warpgroup")
        block = Block(
            *(gmem, smem),
            stages=stages,
            layers=layers,
            config=config,
            columns=columns,
            coding=packing and packing.coding,
            computing=computing,
            words=words,
        )
        conditions = (
            warpgroup < computing,
            warpgroup == computing,
            warpgroup == computing + 1,
        )
        roles = _compute, receive_x if words else _bring_x, _bring_weights
        for condition, run, count in zip(conditions, roles, registers, strict=True):

            @when(condition)
            def _(run=run, count=count):
                # Request the number even if it equals `at_start`. Otherwise ptxas allots fewer.
                action = "increase" if count >= at_start else "decrease"
                plgpu.set_max_registers(count, action=action)
                run(block)

    kernel.__name__ = name
    made = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results.values()],
        grid=(CLUSTERS,),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=len(per_warpgroup),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Stages let threads meet where one needs what another has stored.
            unsafe_no_auto_barriers=True,
        ),
    )(*operands.values())
    return dict(zip(results, made, strict=True))


def _compute(block: Block) -> None:
    def run(layer, used):
        for stage in block.stages:
            used = stage.compute(block, layer, used)
        return used

    if "sums_read" in block.smem:
        block.by(0, lambda: plgpu.barrier_arrive(block.smem["sums_read"]))
    # Counts tiles of the ring and slots of x.
    block.for_layers(run, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def _bring_x(block: Block) -> None:
    def run(layer, loaded):
        for at, stage in enumerate(block.stages):
            block.await_stages(layer, at)
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
