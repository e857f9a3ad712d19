"""Sums over devices inside a persistent kernel.

Each device writes its sums of a tile into the memory of every other device, signals, and adds what
the others have written. No kernel ends in between, so an exchange takes little more than the time
of one write over NVLink.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT
from fdjax.pallas_kernels.ranks import AXIS

# Exchanges of a layer: after the output projection, and after the MLP.
ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The sum over devices of the tiles of a product.

    "inbox" [2, ranks, N/64, 64, M] fp32 holds the values that other devices have written, by round
    and device. "arrived" counts their signals. In the next layer, the inbox of a round is free
    again. Another device writes to it only after it has received this device's sums of the other
    round, and this block sends those after it has read the inbox.

    On a mesh of one device, the exchange loops back: the device sends its own values to itself in
    place of the others.

    Attributes:
      ranks: number of devices.
      round: index of this exchange among those of a layer.
    """

    ranks: int
    round: int

    def sum(self, gmem: dict[str, Any], layer: int | Array, tile: Array, value: Array) -> Array:
        """The sum of all devices' values [64, M] of a tile, in the same order on each device."""
        loops_back = lax.axis_size(AXIS) == 1
        me = jnp.int32(0) if loops_back else lax.axis_index(AXIS)
        inbox = gmem["inbox"].at[self.round]
        arrived = gmem["arrived"].at[self.round * inbox.shape[1] + tile]
        others = [lax.rem(me + i, self.ranks) for i in range(1, self.ranks)]
        for other in others:
            if loops_back:
                inbox.at[other, tile][...] = value
            else:
                plgpu.remote_ref(inbox, {AXIS: other}).at[me, tile][...] = value
        for other in others:
            pl.semaphore_signal(arrived, device_id=None if loops_back else {AXIS: other})
        pl.semaphore_wait(arrived, (layer + 1) * (self.ranks - 1), decrement=False)
        total = None
        for rank in range(self.ranks):
            theirs = plgpu.load(inbox.at[rank, tile], layout=LAYOUT, optimized=False)
            part = jnp.where(me == rank, value, theirs)
            total = part if total is None else total + part
        return total


def inbox(ranks: int, rows: int, width: int) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the inbox for a residual stream [rows, width]."""
    return (ROUNDS, ranks, width // BRICK, BRICK, rows), jnp.float32


def arrived(inbox: Any) -> Any:
    """The counters of signals, zero when the kernel starts; call it once in a kernel."""
    rounds, _, tiles, *_ = inbox.shape
    return pl.get_global(plgpu.SemaphoreType.REGULAR((rounds * tiles,)))
