"""Sends the results of one row in words that carry a flag, so that readers need no barrier.

A barrier of all blocks takes four trips to memory: results are stored, counted, the count is read,
and the results are loaded. Each trip waits behind the weights in flight. One row is small, so each
value can travel in a word of its own: 16 bits of the value, and 16 bits of a flag that says which
layer it belongs to. A reader loads the words until all have the flag. Only one trip is left.
(`exchange` does the same with values of 32 bits.)

In the next layer, the words of a stage are free again. A block writes to them only after it has
received what depends on the results of all blocks that read them.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, transforms_of

_THREADS = 128
_EACH = 4  # words that a thread loads at once
_STEP = _THREADS * _EACH  # words that a warpgroup loads at once
_SPLAT = plgpu.Layout.WG_SPLAT
# Most bricks of one row that are received at once.
BRICKS_AT_ONCE = 32

_SEND = "st.relaxed.gpu.global.b32 [$0], $1;"
_SEND_PAIR = "st.relaxed.gpu.global.v2.b32 [$0], {$1, $2};"


def flag_of(layer: int | Array) -> Array:
    """The flag of the results that a layer reads. 0 is that of empty words."""
    return jnp.int32(layer) + 1


# Outside of the kernel


def new_words(first: dict[str, Array], empty: dict[str, int]) -> tuple[Array, dict[str, int]]:
    """Words of all stages in one array, which XLA fills in one go.

    Args:
      first: words that the first layer reads, by name.
      empty: numbers of other words, by name.

    Returns:
      (words [N] int32, index of the first one by name).
    """
    parts, starts, at = [], {}, 0
    zeros = {name: jnp.zeros((count,), jnp.int32) for name, count in empty.items()}
    for name, words in (first | zeros).items():
        starts[name] = at
        parts.append(jnp.pad(words.reshape(-1), (0, -words.size % _EACH)))
        at += parts[-1].size
    return jnp.concatenate(parts), starts


def as_words(x: Array) -> Array:
    """Words of x in half precision for the first layer."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits | flag_of(0).astype(jnp.uint32), jnp.int32)


def as_pairs(squares: Array) -> Array:
    """Pairs of words of sums of squares in fp32 for the first layer."""
    bits = lax.bitcast_convert_type(squares, jnp.int32)
    return jnp.stack([bits, jnp.full_like(bits, flag_of(0))], axis=-1)


# Warpgroups that compute


def send(
    words: Any, first: Array, values: Array, flag: Array, columns: int = 1, apart: int = 0
) -> None:
    """Write the first columns of values [64, 8], in half precision, to words.

    Args:
      words: reference to the words of a result.
      first: index of the first word of the first column.
      values: values in `LAYOUT`.
      flag: see `flag_of`.
      columns: number of columns.
      apart: distance between two columns in words.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, LAYOUT, _SPLAT))
    def run(_, words, first, values, flag):
        thread = _thread()
        lane = arith.remui(thread, _word(32))
        row = arith.addi(_scaled(arith.divui(thread, _word(32)), 16), _divided(lane, 4))
        column = _scaled(arith.remui(lane, _word(4)), 2)
        at = arith.addi(arith.addi(_register(first), row), _scaled(column, apart))
        for i, register in enumerate(values.registers.flat):
            pair = mgpu_utils.bitcast(register, _i32())
            for j in range(min(columns, 2)):
                inside = arith.cmpi(
                    arith.CmpIPredicate.slt, arith.addi(column, _word(j)), _word(columns)
                )
                bits = arith.shli(pair, _word(16)) if j == 0 else arith.andi(pair, _word(-65536))
                target = _pointer(words, arith.addi(at, _word(8 * i + j * apart)))
                word = arith.ori(bits, _register(flag))
                mgpu_utils.inline_ptx(_SEND, target, word, predicate=inside)

    run(words, first, values, flag)


def send_first(words: Any, at: Array, values: Array, flag: Array) -> None:
    """Write the first of values [8] in fp32 and `LAYOUT.reduce(0)` to a pair of words."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, LAYOUT.reduce(0), _SPLAT))
    def run(_, words, at, values, flag):
        first, *_ = values.registers.flat
        value = vector.extract(first, dynamic_position=[], static_position=[0])
        mgpu_utils.inline_ptx(
            _SEND_PAIR,
            _pointer(words, _register(at)),
            arith.bitcast(_i32(), value),
            _register(flag),
            predicate=arith.cmpi(arith.CmpIPredicate.eq, _thread(), _word(0)),
        )

    run(words, at, values, flag)


# Warpgroups that load x


def receive(words: Any, first: Array, count: Array, flag: Array) -> Array:
    """Wait for words with this flag.

    Args:
      words: reference to words.
      first: index of the first one, a multiple of 4.
      count: number of words to wait for, a multiple of 4, at most 32 bricks.
      flag: see `flag_of`.

    Returns:
      int32 for `put`. Words past the first `count` stand for 0.
    """
    steps = BRICKS_AT_ONCE * BRICK // _STEP
    layout = plgpu.Layout.WG_STRIDED((steps * _STEP,), vec_size=_EACH)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((steps * _STEP,), jnp.int32, layout=layout),
    )
    def run(_, words, first, count, flag):
        own = _scaled(_thread(), _EACH)
        found = mgpu_utils.inline_ptx(
            _poll(steps),
            _pointer(words, arith.addi(_register(first), own)),
            own,
            _register(count),
            _register(flag),
            result_types=[_i32()] * _EACH * steps,
            has_side_effects=True,
        )
        quad = ir.VectorType.get((_EACH,), _i32())
        registers = [
            vector.from_elements(quad, found[i : i + _EACH]) for i in range(0, len(found), _EACH)
        ]
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object),
            _layout=layout.to_mgpu(),
            _is_signed=True,
        )

    return run(words, first, count, flag)


def put(x: Any, words: Array, step: Array, count: Array, in_rows: Array, slot: Array) -> None:
    """Store 8 bricks in the ring of x.

    Args:
      x: the ring [slots, 8, 64].
      words: result of `receive`.
      step: which 8 bricks of `words`.
      count: number of bricks that exist, of all in `words`.
      in_rows: whether each two bricks are a row of two slots. Otherwise each is the first row of a
        slot of its own; nobody reads the other rows.
      slot: slot of the first brick, of all if `in_rows`, else of these 8.
    """
    (slots, *_), steps = x.shape, words.size // _STEP

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(transforms_of(BRICK, x.dtype.itemsize)),
            plgpu.Layout.WG_STRIDED((words.size,), vec_size=_EACH),
            *(_SPLAT,) * 4,
        )
    )
    def run(_, x, words, step, count, in_rows, slot):
        step, own = _register(step), _scaled(_thread(), _EACH)
        mine = _divided(own, BRICK)
        brick = arith.addi(_scaled(step, 8), mine)
        inside = arith.cmpi(arith.CmpIPredicate.slt, brick, _register(count))
        in_rows = arith.cmpi(arith.CmpIPredicate.ne, _register(in_rows), _word(0))
        row = arith.select(in_rows, _divided(brick, 2), _word(0))
        after = arith.select(in_rows, arith.remui(brick, _word(2)), mine)
        at = arith.remui(arith.addi(_register(slot), after), _word(slots))
        # The swizzle of 128 bytes exchanges groups of 8 values of a row.
        column = arith.remui(own, _word(BRICK))
        group = arith.xori(_divided(column, 8), row)
        column = arith.addi(_scaled(group, 8), arith.remui(column, _word(8)))
        offset = arith.addi(_scaled(at, 8 * BRICK), arith.addi(_scaled(row, BRICK), column))
        chosen = words.registers.flat[0]
        for i in range(1, steps):
            is_this = arith.cmpi(arith.CmpIPredicate.eq, step, _word(i))
            chosen = arith.select(is_this, words.registers.flat[i], chosen)
        parts = [
            vector.extract(chosen, dynamic_position=[], static_position=[i]) for i in range(_EACH)
        ]
        pairs = [
            mgpu_utils.inline_ptx(
                "prmt.b32 $0, $1, $2, 0x7632;", *parts[i : i + 2], result_types=_i32()
            )
            for i in (0, 2)
        ]
        half = ir.IntegerType.get_signless(16)
        target = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(x), [offset], half)
        mgpu_utils.inline_ptx("st.shared.v2.b32 [$0], {$1, $2};", target, *pairs, predicate=inside)
        # The tensor cores see it once this thread has arrived at a barrier.
        mgpu_utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    run(x, words, step, count, in_rows, slot)


def receive_factor(
    words: Any, first: Array, factors: Any, count: int, flag: Array, width: int, eps: float
) -> None:
    """Wait for sums of squares, and store the factor of RMS norm as the first of `factors`.

    Args:
      words: reference to words.
      first: index of the first sum.
      factors: shared memory [8] fp32.
      count: number of sums. Each warp adds up all of them, in the same order.
      flag: see `flag_of`.
      width: number of squares in all.
      eps: added to their mean.
    """
    loads = -(-count // 32)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, plgpu.RefType(), _SPLAT))
    def run(_, words, first, factors, flag):
        lane, single = arith.remui(_thread(), _word(32)), ir.F32Type.get()
        found = mgpu_utils.inline_ptx(
            _poll_pairs(loads),
            _pointer(words, arith.addi(_register(first), _scaled(lane, 2))),
            lane,
            _word(count),
            _register(flag),
            result_types=[_i32()] * loads if loads > 1 else _i32(),
            has_side_effects=True,
        )
        found = [found] if loads == 1 else found
        total = functools.reduce(arith.addf, [arith.bitcast(single, one) for one in found])
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
        mean = arith.mulf(total, mgpu_utils.c(1.0 / width, single))
        factor = mgpu_utils.inline_ptx(
            "rsqrt.approx.f32 $0, $1;",
            arith.addf(mean, mgpu_utils.c(eps, single)),
            result_types=single,
        )
        mgpu_utils.inline_ptx(
            "st.shared.f32 [$0], $1;",
            mgpu_utils.memref_ptr(factors),
            factor,
            predicate=arith.cmpi(arith.CmpIPredicate.eq, _thread(), _word(0)),
        )

    run(words, first, factors, flag)


def _poll(steps: int) -> str:
    """PTX that loads words until all have the flag.

    Operands: the words, the address of the first, its index, the number of words, the flag.
    """
    address, index, count, flag = (f"${_EACH * steps + i}" for i in range(4))
    names = [[f"word{i}_{j}" for j in range(_EACH)] for i in range(steps)]
    words = [name for step in names for name in step]
    lines = [f".reg .b32 {', '.join(words)}, at, other;", ".reg .pred waits;"]
    lines += [f".reg .pred {', '.join(f'inside{i}' for i in range(steps))};"]
    for i in range(steps):
        lines += [f"add.s32 at, {index}, {i * _STEP};"]
        lines += [f"setp.lt.s32 inside{i}, at, {count};"]
    lines += [f"mov.b32 {word}, {flag};" for word in words] + ["AGAIN:"]
    for i, step in enumerate(names):
        load = f"ld.relaxed.gpu.global.v4.b32 {{{', '.join(step)}}}"
        lines.append(f"@inside{i} {load}, [{address}+{4 * i * _STEP}];")
    lines.append("mov.b32 other, 0;")
    # other |= word ^ flag
    lines += [f"lop3.b32 other, {word}, {flag}, other, 0xBE;" for word in words]
    lines += ["and.b32 other, other, 0xFFFF;", "setp.ne.b32 waits, other, 0;", "@waits bra AGAIN;"]
    lines += [f"mov.b32 ${i}, {word};" for i, word in enumerate(words)]
    return "{\n" + "\n".join(lines) + "\n}"


def _poll_pairs(loads: int) -> str:
    """PTX that loads pairs of a value and a flag until all flags are right.

    Operands: the values, the address of the first pair, its index, the number of pairs, the flag.
    Pairs that do not exist have the value 0.
    """
    address, index, count, flag = (f"${loads + i}" for i in range(4))
    lines = [".reg .b32 at, other;", ".reg .pred waits;"]
    for i in range(loads):
        lines += [f".reg .b32 value{i}, flag{i};", f".reg .pred inside{i};"]
        lines += [f"mov.b32 value{i}, 0;", f"mov.b32 flag{i}, {flag};"]
        lines += [f"add.s32 at, {index}, {32 * i};", f"setp.lt.s32 inside{i}, at, {count};"]
    lines.append("AGAIN:")
    for i in range(loads):
        load = f"ld.relaxed.gpu.global.v2.b32 {{value{i}, flag{i}}}"
        lines.append(f"@inside{i} {load}, [{address}+{8 * 32 * i}];")
    lines.append("mov.b32 other, 0;")
    lines += [f"lop3.b32 other, flag{i}, {flag}, other, 0xBE;" for i in range(loads)]
    lines += ["setp.ne.b32 waits, other, 0;", "@waits bra AGAIN;"]
    lines += [f"mov.b32 ${i}, value{i};" for i in range(loads)]
    return "{\n" + "\n".join(lines) + "\n}"


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _word(value: int) -> ir.Value:
    return mgpu_utils.c(value, _i32())


def _scaled(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, _word(factor))


def _divided(value: ir.Value, by: int) -> ir.Value:
    return arith.divui(value, _word(by))


def _thread() -> ir.Value:
    """Index of the thread in its warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), _word(_THREADS))


def _register(splat: mgpu.FragmentedArray) -> ir.Value:
    (value,) = splat.registers.flat
    return value


def _pointer(ref: ir.Value, index: ir.Value) -> ir.Value:
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [index], _i32())
