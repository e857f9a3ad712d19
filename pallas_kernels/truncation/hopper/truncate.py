"""`truncate` on Hopper: one launch, in which a cluster of blocks holds a row in registers.

For each rule of its row, a cluster finds the largest distance from the likeliest token that is
kept, two bits at a time: threads add up the weights of their tokens below three limits, and the
cluster adds up the threads (`ClusterSums`). A row pays only for the rules that it has.

It must read and write the scores, 8·B·V bytes. A rule takes 16 exchanges of a cluster, 0.5 us each,
and 96 comparisons and additions for each token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as bits

from fdjax.pallas_kernels.dispatch import Implementation, Shape, on_gpu
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import cond
from fdjax.pallas_kernels.hopper.fragments import constant, element, i32
from fdjax.pallas_kernels.truncation.hopper.cluster_sums import ClusterSums

_THREADS = 128
_WARPGROUPS = 4
_BLOCKS = 2, 4, 8  # of a cluster
_MOST_VALUES = 40  # of a thread, twice in registers
_BITS = 2  # of a digit
_DIGITS = 16  # of a positive float, which has 31 bits
_INF = 0x7F800000
_SPLAT = plgpu.Layout.WG_SPLAT
_LOAD = """{
.reg .pred inside;
setp.lt.s32 inside, $2, $3;
mov.b32 $0, 0xFF800000;
@inside ld.global.b32 $0, [$1];
}"""
_STORE = "st.global.b32 [$0], $1;"
_OF_FIRST_LANE = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xFFFFFFFF;"
_LANES = """{
.reg .pred yes;
setp.ne.b32 yes, $1, 0;
vote.sync.ballot.b32 $0, yes, 0xFFFFFFFF;
}"""


def _blocks(b: int, v: int) -> int | None:
    """Number of blocks of a row, or None if they cannot hold one.

    A row has more blocks than it needs if all rows still run at once.
    """
    of_a_block = _WARPGROUPS * _THREADS * _MOST_VALUES
    enough = [n for n in _BLOCKS if n * of_a_block >= v]
    return max((n for n in enough if n * b <= MULTIPROCESSORS), default=min(enough, default=None))


def _fits(shape: Shape) -> str | None:
    if _blocks(shape["b"], shape["v"]) is None:
        most = _BLOCKS[-1] * _WARPGROUPS * _THREADS * _MOST_VALUES
        return f"takes at most {most} tokens in a row, got {shape['v']}"
    if shape["b"] * shape["v"] >= 2**31:
        return f"takes fewer than 2^31 scores, got {shape['b']} rows of {shape['v']}"
    return None


def _run(scores, top_k, top_p, min_p, typical_p, least):
    del least  # None, because this is no feature of the kernel
    return _launch(scores, top_k, top_p, min_p, typical_p)


TRUNCATE_HOPPER = Implementation(
    "truncate",
    "mosaic_gpu",
    _run,
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
    forced=False,
)


@jax.jit  # separately, so that programs share a lowering
def _launch(scores: Array, *rules: Array) -> Array:
    b, v = scores.shape
    blocks = _blocks(b, v)
    sums = ClusterSums(blocks, _WARPGROUPS * _THREADS // 32)
    values = -(-v // (blocks * _WARPGROUPS * _THREADS))
    names = "scores", "top_k", "top_p", "min_p", "typical_p", "kept", *sums.scratch

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        sums.start(refs["barrier"])
        _Part(refs, sums, v, values).run()

    kernel.__name__ = "truncate_kernel"
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(scores.shape, scores.dtype),
        scratch_types=tuple(sums.scratch.values()),
        grid=(b,),
        grid_names=("row",),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        # All layouts are given, and threads meet where they add up.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(scores, *rules)


@dataclasses.dataclass
class _Part:
    """The tokens of a row that a warpgroup has.

    Threads of all warpgroups take turns, so a thread's tokens are 512 apart.

    Attributes:
      refs: operands and shared memory by name.
      sums: how the cluster adds up.
      v: number of tokens of the row.
      values: number of tokens of a thread.
    """

    refs: dict[str, Any]
    sums: ClusterSums
    v: int
    values: int

    def __post_init__(self):
        self.row, self.block, warpgroup = map(lax.axis_index, ("row", "block", "warpgroup"))
        self.first = self.block * (_WARPGROUPS * _THREADS * self.values) + warpgroup * _THREADS
        self.shape = (self.values * _THREADS,)
        self.layout = plgpu.Layout.WG_STRIDED(self.shape, vec_size=1)

    def run(self):
        top_k, top_p, min_p, typical_p = (
            self.refs[name][self.row] for name in ("top_k", "top_p", "min_p", "typical_p")
        )
        distances = -self._loaded()
        # `kept` is the largest distance that is kept, `used` how often the cluster has added up.
        kept, used = cond(
            top_k > 0,
            lambda: self._search(distances, None, top_k.astype(jnp.float32), jnp.int32(0)),
            lambda: (jnp.float32(jnp.inf), jnp.int32(0)),
        )

        def keep_top_p():
            weights = jnp.exp(-distances)
            total = self._sum(jnp.where(distances <= kept, weights, 0.0), used)
            found, after = self._search(distances, weights, top_p * total, used + 1)
            return jnp.minimum(found, kept), after

        kept, used = cond(top_p < 1, keep_top_p, lambda: (kept, used))
        kept = jnp.where(min_p > 0, jnp.minimum(kept, -jnp.log(min_p)), kept)

        def keep_typical():
            weights = jnp.where(distances <= kept, jnp.exp(-distances), 0.0)
            total = self._sum(weights, used)
            # Surprises differ from distances by a constant, and so do their means.
            mean = self._sum(jnp.where(weights > 0, weights * distances, 0.0), used + 1) / total
            far = jnp.where(distances <= kept, jnp.abs(distances - mean), jnp.inf)
            limit, _ = self._search(far, weights, typical_p * total, used + 2)
            # Scores are loaded again rather than kept in registers beside these.
            self._store(jnp.where((far <= limit) & (far < jnp.inf), self._loaded(), -jnp.inf))

        def keep_all():
            self._store(jnp.where(distances <= kept, -distances, -jnp.inf))

        cond(typical_p < 1, keep_typical, keep_all)

    def _search(self, distances, weights, limit, used):
        """The largest distance such that all nearer tokens weigh less than the limit.

        Returns (the distance, or infinity if all tokens weigh less; `used` afterwards). Without
        weights, each token weighs 1. The nearest token is always kept.
        """
        limit = jnp.maximum(limit, jnp.finfo(jnp.float32).tiny)

        def digit(i, last):
            # The last digit has one bit. Its other values are past the result.
            shift = jnp.maximum(31 - _BITS * (i + 1), 0)
            return self._with_digit(distances, weights, limit, last, shift, used + i)

        last = lax.fori_loop(0, _DIGITS, digit, jnp.int32(0))
        last = jnp.where((last < 0) | (last > _INF), _INF, last)
        return lax.bitcast_convert_type(last, jnp.float32), used + _DIGITS

    def _with_digit(self, distances, weights, limit, last, shift, used):
        """`last` plus the largest digit before which tokens weigh less than the limit.

        Non-negative floats have the same order as their bits. Past infinity, bits are NaN, which
        nothing is before.
        """
        arrays = (distances,) if weights is None else (distances, weights)
        count = 2**_BITS - 1

        def run(memory, block, used, limit, last, shift, distances, weights=None):
            block, used, limit, last, shift = map(_register, (block, used, limit, last, shift))
            ends = [arith.addi(last, arith.shli(constant(i + 1), shift)) for i in range(count)]
            ends = [arith.bitcast(ir.F32Type.get(), end) for end in ends]
            zero, one = (mgpu_utils.c(value, ir.F32Type.get()) for value in (0.0, 1.0))
            values = [zero] * count
            for i, register in enumerate(distances.registers.flat):
                weight = one if weights is None else element(weights.registers.flat[i], 0)
                for j, end in enumerate(ends):
                    near = arith.cmpf(arith.CmpFPredicate.OLT, element(register, 0), end)
                    values[j] = arith.select(near, arith.addf(values[j], weight), values[j])
            weight = self.sums.add(values, *memory, block, used)
            less = arith.cmpf(arith.CmpFPredicate.OLT, weight, limit)
            lanes = _of_warp(_LANES, arith.extui(i32(), less), i32())
            digit = bits.ctpop(arith.andi(lanes, constant(2**count - 1)))
            last = arith.addi(last, arith.shli(digit, shift))
            return mgpu.FragmentedArray.splat(last, (), is_signed=True)

        return self._adding(run, jnp.int32)(used, limit, last, shift, *arrays)

    def _sum(self, values, used):
        """Sum over the row."""

        def run(memory, block, used, values):
            total = functools.reduce(
                arith.addf, [element(register, 0) for register in values.registers.flat]
            )
            total = self.sums.add([total], *memory, *map(_register, (block, used)))
            total = _of_warp(_OF_FIRST_LANE, total, ir.F32Type.get())
            return mgpu.FragmentedArray.splat(total, ())

        return self._adding(run, jnp.float32)(used, values)

    def _adding(self, run, dtype):
        """`run`, which builds MLIR that adds up, as a function of scalars and arrays of tokens."""
        memory = [self.refs[name] for name in self.sums.scratch]

        def call(*operands):
            layouts = [self.layout if operand.shape else _SPLAT for operand in operands]

            @plgpu.inline_mgpu(
                arg_types=(*[plgpu.RefType()] * len(memory), _SPLAT, *layouts),
                return_type=plgpu.ShapeDtypeStruct((), dtype, layout=_SPLAT),
            )
            def inlined(_, *args):
                return run(args[: len(memory)], *args[len(memory) :])

            return inlined(*memory, self.block, *operands)

        return call

    def _loaded(self):
        """The scores, and -inf past the last token."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _SPLAT, _SPLAT),
            return_type=plgpu.ShapeDtypeStruct(self.shape, jnp.float32, layout=self.layout),
        )
        def run(_, scores, row, first):
            one, registers = ir.VectorType.get((1,), ir.F32Type.get()), []
            for pointer, token in self._tokens(scores, row, first):
                word = mgpu_utils.inline_ptx(
                    _LOAD, pointer, token, constant(self.v), result_types=i32()
                )
                registers.append(mgpu_utils.bitcast(word, one))
            return mgpu.FragmentedArray(
                _registers=np.array(registers, dtype=object),
                _layout=self.layout.to_mgpu(),
                _is_signed=None,
            )

        return run(self.refs["scores"], self.row, self.first)

    def _store(self, scores):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, _SPLAT, self.layout))
        def run(_, kept, row, first, scores):
            tokens = self._tokens(kept, row, first)
            for (pointer, token), register in zip(tokens, scores.registers.flat, strict=True):
                inside = arith.cmpi(arith.CmpIPredicate.slt, token, constant(self.v))
                word = arith.bitcast(i32(), element(register, 0))
                mgpu_utils.inline_ptx(_STORE, pointer, word, predicate=inside)

        run(self.refs["kept"], self.row, self.first, scores)

    def _tokens(self, array, row, first):
        """(pointer, token) of the thread's tokens."""
        thread = arith.remui(mgpu_utils.thread_idx(), constant(_THREADS))
        own = arith.addi(_register(first), thread)
        at = arith.addi(arith.muli(_register(row), constant(self.v)), own)
        start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(array), [at], i32())
        for i in range(self.values):
            apart = i * _WARPGROUPS * _THREADS
            pointer = mgpu_utils.getelementptr(start, [apart], i32())
            yield pointer, arith.addi(own, constant(apart))


def _register(splat):
    (register,) = splat.registers.flat
    return register


def _of_warp(code, operand, result):
    """The result of an instruction that the threads of a warp run together."""
    return mgpu_utils.inline_ptx(
        code, operand, result_types=result, has_side_effects=True, convergent=True
    )
