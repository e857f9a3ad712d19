"""Sums over all threads of a thread block cluster, which every warp gets.

Warps add up through shared memory, then blocks send their sums to each other as packets that arrive
in shared memory, so that no thread waits for anything but packets. The order of the additions
depends on the size of the cluster alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from fdjax.pallas_kernels.hopper.fragments import constant, i32
from fdjax.pallas_kernels.hopper.packets import EXPECT, MAP, MEET, PREPARE, WAIT

MOST = 8  # sums at once

_LANES = 32
_WORD = 4  # bytes
_BUFFERS = 2
_SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"


@dataclasses.dataclass(frozen=True)
class ClusterSums:
    """How a cluster adds up.

    Attributes:
      blocks: number of blocks, at most 8.
      warps: number of warps of a block.
    """

    blocks: int
    warps: int

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory of a block: sums of its warps, of all blocks, and a barrier in 16 bytes.

        The sums take turns between two places: the slowest warp may still read the last ones.
        """
        return {
            "of_warps": plgpu.SMEM((_BUFFERS, self.warps, MOST), jnp.float32),
            "of_blocks": plgpu.SMEM((_BUFFERS, self.blocks, MOST), jnp.float32),
            "barrier": plgpu.SMEM((4,), jnp.int32),
        }

    def start(self, barrier: Any) -> None:
        """Prepare the barrier. All threads of all blocks must call this first."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def run(_, barrier):
            at = mgpu_utils.memref_ptr(barrier)
            mgpu_utils.inline_ptx(PREPARE, at, predicate=_is(0))
            for code in MEET:
                mgpu_utils.inline_ptx(code, has_side_effects=True, convergent=True)

        run(barrier)

    def add(
        self,
        values: Sequence[ir.Value],
        of_warps: ir.Value,
        of_blocks: ir.Value,
        barrier: ir.Value,
        rank: ir.Value,
        before: ir.Value,
    ) -> ir.Value:
        """Add up, while MLIR is built.

        Args:
          values: up to 8 values of this thread in fp32.
          of_warps, of_blocks, barrier: the memory of `scratch`.
          rank: index of this block.
          before: how often the cluster has added up before.

        Returns:
          In lane i: the sum of value i mod 8 over all threads.
        """
        parity, barrier = arith.andi(before, constant(1)), mgpu_utils.memref_ptr(barrier)
        lane, which = _remainder(_thread(), _LANES), _remainder(_thread(), MOST)
        warp = arith.divui(_thread(), constant(_LANES))
        own = _of_a_warp([*values, *[_zero()] * (MOST - len(values))], lane)
        # Four lanes have the same sum.
        vector.store(_vector(own), of_warps, _place(parity, warp, arith.divui(lane, constant(4))))
        gpu.barrier()
        total = self._added(of_warps, parity, which, lane, self.warps)
        first = arith.cmpi(arith.CmpIPredicate.eq, warp, constant(0))
        for peer in range(0, self.blocks, _LANES // MOST):
            peer = arith.addi(arith.divui(lane, constant(MOST)), constant(peer))
            exists = arith.cmpi(arith.CmpIPredicate.ult, peer, constant(self.blocks))
            at = arith.addi(arith.muli(parity, constant(self.blocks)), rank)
            at = arith.addi(arith.muli(at, constant(MOST)), which)
            at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(of_blocks), [at], i32())
            at, there = (
                mgpu_utils.inline_ptx(MAP, pointer, peer, result_types=i32())
                for pointer in (at, barrier)
            )
            word = arith.bitcast(i32(), total)
            mgpu_utils.inline_ptx(_SEND, at, word, there, predicate=arith.andi(first, exists))
        expected = constant(self.blocks * MOST * _WORD)
        mgpu_utils.inline_ptx(EXPECT, barrier, expected, predicate=_is(0))
        mgpu_utils.inline_ptx(WAIT, barrier, parity, has_side_effects=True)
        return self._added(of_blocks, parity, which, lane, self.blocks)

    @staticmethod
    def _added(memory, parity, which, lane, count):
        """Sum of value `which` of all `count` parts. Lanes with the same value share the work."""
        total = None
        for first in range(0, count, _LANES // MOST):
            part = arith.addi(arith.divui(lane, constant(MOST)), constant(first))
            exists = arith.cmpi(arith.CmpIPredicate.ult, part, constant(count))
            part = arith.select(exists, part, constant(0))
            found = vector.load(_vector_type(), memory, _place(parity, part, which))
            found = vector.extract(found, dynamic_position=[], static_position=[0])
            found = arith.select(exists, found, _zero())
            total = found if total is None else arith.addf(total, found)
        for distance in (8, 16):
            total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
        return total


def _of_a_warp(values, lane):
    """In lane i: the sum of value i / 4 over the warp. Each exchange halves the values."""
    for distance in (16, 8, 4):
        upper = arith.andi(lane, constant(distance))
        upper = arith.cmpi(arith.CmpIPredicate.ne, upper, constant(0))
        half = len(values) // 2
        kept = []
        for low, high in zip(values[:half], values[half:], strict=True):
            sent = arith.select(upper, low, high)
            own = arith.select(upper, high, low)
            kept.append(arith.addf(own, mgpu_utils.shfl_bfly(sent, distance)))
        values = kept
    (value,) = values
    for distance in (2, 1):
        value = arith.addf(value, mgpu_utils.shfl_bfly(value, distance))
    return value


def _thread():
    return mgpu_utils.thread_idx()


def _is(thread: int):
    return arith.cmpi(arith.CmpIPredicate.eq, _thread(), constant(thread))


def _remainder(value, divisor):
    return arith.remui(value, constant(divisor))


def _zero():
    return mgpu_utils.c(0.0, ir.F32Type.get())


def _vector_type():
    return ir.VectorType.get((1,), ir.F32Type.get())


def _vector(value):
    return vector.from_elements(_vector_type(), [value])


def _place(*indices):
    return [arith.index_cast(ir.IndexType.get(), at) for at in indices]
