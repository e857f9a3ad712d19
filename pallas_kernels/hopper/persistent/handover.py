"""Hands arrays in fp32 from one warpgroup to another, of the same block or of its cluster.

Both have the same layout, so a thread's four values of 8 columns stay together: 16 bytes in shared
memory, in the order of the threads. To another block, each 16 bytes are a packet. Packets take most
of the time, so columns that nobody needs are not sent.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.hopper.fragments import constant, element, i32
from fdjax.pallas_kernels.hopper.packets import EXPECT, MAP, MEET, PREPARE, WAIT
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT

_THREADS = 128
_COLUMNS = 8  # of a place
_BYTES = 16  # of a thread in a place
_EACH = 4
_BARRIERS = 2

_SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1, $2, $3, $4}, [$5];"

# Indices of barriers: those of products and of attention.
PRODUCTS, ATTENTION = range(_BARRIERS)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """A barrier for what the other block sends. One phase ends with each `receive`.

    Attributes:
      memory: shared memory of all barriers, see `barriers`.
      index: which of them.
    """

    memory: Any
    index: int


def barriers() -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of shared memory for all barriers."""
    return (_BARRIERS, 2), jnp.int32


def start(memory: Any) -> None:
    """Prepare all barriers. All threads of both blocks must call this before they part."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, memory):
        first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), constant(0))
        for i in range(_BARRIERS):
            at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(memory), [2 * i], i32())
            mgpu_utils.inline_ptx(PREPARE, at, predicate=first)
        for code in MEET:
            mgpu_utils.inline_ptx(code, has_side_effects=True, convergent=True)

    run(memory)


def places(arrays: int, columns: int) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of shared memory for arrays [64, columns], 8 of which divide `columns`."""
    return (arrays * columns // _COLUMNS, _THREADS, _EACH), jnp.float32


def put(memory: Any, values: Sequence[Array]) -> None:
    """Store arrays [64, M] in `LAYOUT` for a warpgroup of the same block."""
    eights = _eights(values)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[LAYOUT] * len(eights)))
    def run(_, memory, *eights):
        for i, eight in enumerate(eights):
            quad = ir.VectorType.get((_EACH,), ir.F32Type.get())
            vector.store(vector.from_elements(quad, _values(eight)), memory, _place(i))

    run(memory, *eights)


def take(memory: Any, arrays: int, columns: int) -> list[Array]:
    """Load arrays [64, columns] that were put."""
    n = columns // _COLUMNS
    made = plgpu.ShapeDtypeStruct((BRICK, columns), jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[made] * arrays)
    def run(_, memory):
        quad = ir.VectorType.get((_EACH,), ir.F32Type.get())
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        layout, results = LAYOUT.to_mgpu(), []
        for first in range(0, arrays * n, n):
            registers = []
            for i in range(first, first + n):
                found = vector.load(quad, memory, _place(i))
                found = [element(found, j) for j in range(_EACH)]
                registers += [vector.from_elements(pair, found[j : j + 2]) for j in (0, 2)]
            shape = layout.registers_shape((BRICK, columns))
            results.append(
                mgpu.FragmentedArray(
                    _registers=np.array(registers, dtype=object).reshape(shape),
                    _layout=layout,
                    _is_signed=None,
                )
            )
        return results

    return run(memory)


def send(memory: Any, values: Sequence[Array], to: Barrier, rank: Array, columns: int) -> None:
    """Store arrays [64, M] into the memory of the other block, which must call `receive`.

    Args:
      memory: this block's memory of the same name.
      values: arrays in `LAYOUT`.
      to: this block's barrier of the same name.
      rank: index of the other block in the cluster.
      columns: number of columns that are needed. What `receive` finds in the others is undefined.
    """
    needed = _needed(len(values), values[0].shape[1], columns)
    eights = _eights(values)
    eights = [eights[i] for i in needed]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.Layout.WG_SPLAT,
            *[LAYOUT] * len(eights),
        )
    )
    def run(_, memory, barriers, rank, *eights):
        (rank,) = rank.registers.flat
        place = mgpu_utils.getelementptr(
            mgpu_utils.memref_ptr(memory), [arith.muli(_thread(), constant(_EACH))], i32()
        )
        barrier = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(barriers), [2 * to.index], i32())
        place, barrier = (
            mgpu_utils.inline_ptx(MAP, pointer, rank, result_types=i32())
            for pointer in (place, barrier)
        )
        column = arith.muli(arith.remui(_thread(), constant(4)), constant(2))
        for (i, n), eight in zip(needed.items(), eights, strict=True):
            at = arith.addi(place, constant(i * _THREADS * _BYTES))
            words = [arith.bitcast(i32(), value) for value in _values(eight)]
            is_needed = arith.cmpi(arith.CmpIPredicate.slt, column, constant(n))
            mgpu_utils.inline_ptx(_SEND, at, *words, barrier, predicate=is_needed)

    run(memory, to.memory, rank, *eights)


def receive(
    memory: Any, arrays: int, width: int, at: Barrier, before: Array, columns: int
) -> list[Array]:
    """Wait for what the other block sends, and load it.

    This block, not the other one, tells the barrier how many bytes will arrive: the other one would
    have to arrive with a release for the cluster, which takes 900 cycles. Packets may come before
    that: the barrier counts them, and its phase ends only after this block has arrived.

    A barrier tells only the parity of its phases. So all threads meet here: none may still wait for
    this phase when the other block sends again.

    Args:
      memory, columns: as for `send`.
      arrays, width: arrays [64, width] are sent.
      at: this block's barrier.
      before: how often this block has received with this barrier.
    """
    # Two columns are a thread's, in each of 8 rows of 4 warps.
    packets = sum(-(-n // 2) * 32 for n in _needed(arrays, width, columns).values())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def run(_, barriers, before):
        (before,) = before.registers.flat
        barrier = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(barriers), [2 * at.index], i32())
        first = arith.cmpi(arith.CmpIPredicate.eq, _thread(), constant(0))
        mgpu_utils.inline_ptx(EXPECT, barrier, constant(packets * _BYTES), predicate=first)
        parity = arith.andi(before, constant(1))
        mgpu_utils.inline_ptx(WAIT, barrier, parity, has_side_effects=True)
        mgpu_utils.warpgroup_barrier()

    run(at.memory, before)
    return take(memory, arrays, width)


def _needed(arrays: int, width: int, columns: int) -> dict[int, int]:
    """Of each place that is sent: number of columns that are needed."""
    each = width // _COLUMNS
    left = {i: columns - i % each * _COLUMNS for i in range(each * arrays)}
    return {i: min(n, _COLUMNS) for i, n in left.items() if n > 0}


def _eights(values: Sequence[Array]) -> list[Array]:
    return [v[:, c : c + _COLUMNS] for v in values for c in range(0, v.shape[1], _COLUMNS)]


def _place(i: int) -> list[ir.Value]:
    """Indices of this thread's values in place i."""
    index = ir.IndexType.get()
    at = arith.index_cast(index, _thread())
    return [mgpu_utils.c(i, index), at, mgpu_utils.c(0, index)]


def _values(eight: mgpu.FragmentedArray) -> list[ir.Value]:
    """A thread's four values."""
    return [element(register, j) for register in eight.registers.flat for j in range(2)]


def _thread() -> ir.Value:
    """Index of the thread in its warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), constant(_THREADS))
