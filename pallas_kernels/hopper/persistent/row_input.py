"""How a block receives the inputs of its stages in words.

All stages run the same code, so that it is short.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.persistent import words
from fdjax.pallas_kernels.hopper.persistent.block import Block, Layer
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK


class RowInput(NamedTuple):
    """The input of a stage for a block.

    Attributes:
      first: index of the first word.
      apart: words between the inputs of two tiles.
      bricks: number of bricks that a tile needs.
      exist: number of them that exist. The others stand for 0.
      in_rows: 1 if each two bricks are a row, 0 if all are parts of one row.
      tiles: number of this block's tiles.
      squares: index of the first sum of squares, or -1.
    """

    first: int | Array
    apart: int
    bricks: int
    exist: int | Array
    in_rows: int
    tiles: Array
    squares: int


def receive_x(block: Block) -> None:
    """Receive the inputs of all stages in all layers."""
    inputs = [stage.row_input(block) for stage in block.stages]
    for stage in block.stages:
        if stage.residual:
            stage.bring_residual(block)

    def of_layer(layer: Layer, loaded: Array) -> Array:
        def of_stage(at, loaded):
            chosen = RowInput(*(_choose(at, values) for values in zip(*inputs, strict=True)))
            return _receive(block, layer, chosen, loaded)

        return lax.fori_loop(0, len(inputs), of_stage, loaded)

    # Counts slots of x.
    block.for_layers(of_layer, jnp.int32(0))


def _choose(at: Array, values: tuple[int | Array, ...]) -> Array:
    """Value number `at`."""
    chosen = jnp.int32(values[0])
    for i, value in enumerate(values[1:], start=1):
        chosen = jnp.where(at == i, jnp.int32(value), chosen)
    return chosen


def _receive(block: Block, layer: Layer, x: RowInput, loaded: Array) -> Array:
    """Receive the input of a stage; `loaded` counts slots of x."""
    smem, sent = block.smem, block.gmem["words"]
    most, flag = words.BRICKS_AT_ONCE, words.flag_of(layer)
    rounds = lax.div(x.bricks + (most - 1), most)

    def receive_some(at, loaded):
        inside = lax.rem(at, rounds) * most
        first = x.first + lax.div(at, rounds) * x.apart + inside * BRICK
        count = jnp.minimum(x.bricks - inside, most)
        exist = jnp.clip(x.exist - inside, 0, count)
        steps = lax.div(count + 7, 8)
        columns = jnp.where(x.in_rows > 0, 2, count)

        def slots_of(step):
            """Number of slots that a step is the first to fill."""
            return jnp.clip(columns - step * 8, 0, 8)

        def await_slots(step, loaded):
            def await_slot(i, _):
                @when(i >= block.x_slots)
                def _():
                    plgpu.barrier_wait(smem["x_used"].at[block.x_slot(i)])

            lax.fori_loop(loaded, loaded + slots_of(step), await_slot, None)

        def put_some(step, loaded):
            def arrive(i, _):
                plgpu.barrier_arrive(smem["x_arrived"].at[block.x_slot(i)])

            # With `in_rows`, all steps fill the same two slots, which are complete after the last.
            rows_are_complete = jnp.where(step == steps - 1, 2, 0)
            after = loaded + jnp.where(x.in_rows > 0, rows_are_complete, slots_of(step))
            words.put(smem["x"], received, step, count, x.in_rows, block.x_slot(loaded))
            lax.fori_loop(loaded, after, arrive, None)
            await_slots(step + 1, after)
            return after

        # While others compute what is received.
        await_slots(0, loaded)
        received = words.receive(sent, first, exist * BRICK, flag)
        loaded = lax.fori_loop(0, steps, put_some, loaded)

        @when((at == 0) & (x.squares >= 0))
        def _():
            # All norms are of x with the same width.
            stage = next(stage for stage in block.stages if stage.norm)
            words.receive_factor(
                *(sent, x.squares, smem["factors"], stage.k, flag),
                width=stage.k * BRICK,
                eps=stage.norm.eps,
            )
            plgpu.barrier_arrive(smem["factor_arrived"])

        return loaded

    return lax.fori_loop(0, x.tiles * rounds, receive_some, loaded)
