"""All-reduce through a mailbox: every device writes its values into the other devices' memory.

A device reads its own mailbox until all values have come, and adds them. There is no signal after
the values and no barrier before the kernel, so a sum of few rows takes the time of one launch and
one write over NVLink, and a sum of many rows the time of its bytes.

An empty place holds a bit pattern that no value has, so a value says itself that it has come.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.dispatch import Shape
from fdjax.pallas_kernels.hopper.reduction import meet
from fdjax.pallas_kernels.ranks import AXIS

_THREADS = 128
# Elements of the smallest block: each thread has four.
_STEP = 512
# Most elements of a block. A few rows are divided among more blocks.
_MOST_ELEMENTS = 4096
_FEW_BYTES = 2**19
# Two NaNs as one word. Arithmetic makes other NaNs; where it is a value, it is replaced by one.
_EMPTY, _NAN = -1, 0x7FFF7FFF


def fits(shape: Shape) -> str | None:
    """Why the kernel does not run at a shape of `all_reduce`; None if it does."""
    if shape["itemsize"] != 2:
        return "needs bfloat16 or float16"
    if shape["width"] % _STEP:
        return f"needs a width that is a multiple of {_STEP}, got {shape['width']}"
    if shape["ranks"] > 8:
        return f"needs at most 8 devices, got {shape['ranks']}"
    size = shape["m"] * shape["width"] * shape["itemsize"]
    if shape["ranks"] > 2 and size > _FEW_BYTES:
        # Each device would send all values to each other device.
        return f"needs at most {_FEW_BYTES} bytes for more than 2 devices, got {size}"
    return None


class Mailbox(NamedTuple):
    """Places for one sum after another.

    A sum uses one half of the places, and the next sum the other half. A device writes to a half
    again only after it has the others' values of the sum in between. They have sent those after
    they have read this half and emptied it.

    Attributes:
      places: reference [2, ranks - 1, blocks, N, 128, words] int32: each thread has N registers of
        2 or 4 words of two values.
      halves: reference [blocks] int32, the half that a block uses next.
    """

    places: Any
    halves: Any

    @property
    def elements(self) -> int:
        """Elements of a block."""
        _, _, _, registers, threads, words = self.places.shape
        return 2 * registers * threads * words

    def holds(self, x: Array) -> bool:
        """Whether there is room for the sum of such arrays."""
        most = self.elements * self.halves.shape[0]
        return x.size <= most and x.shape[-1] % self.elements == 0


def open_mailbox(m: int, width: int, after: Array) -> Mailbox:
    """An empty mailbox for sums of up to `m` rows; all devices must open it together.

    It lasts as long as the program that opens it. Each mailbox of a program needs another array
    `after`. Otherwise XLA could open one for two, and copy it while devices write to it.
    """
    elements = _elements(m, width)
    words = 2 if elements % (8 * _THREADS) else 4
    blocks, others = m * width // elements, lax.axis_size(AXIS) - 1
    shape = 2, others, blocks, elements // (2 * words * _THREADS), _THREADS, words
    mailbox = Mailbox(
        jax.new_ref(jnp.full(shape, _EMPTY, jnp.int32)),
        jax.new_ref(jnp.zeros((blocks,), jnp.int32)),
    )
    # No device may write before all others have emptied their places. XLA lets the devices wait for
    # each other before a kernel that uses the memory of others, unless the kernel says otherwise.
    plgpu.kernel(
        _open,
        out_type=[],
        kernel_name="open_mailbox",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(after, *mailbox)
    return mailbox


def mailbox_bytes(m: int, width: int, ranks: int) -> int:
    """Bytes that a mailbox for [m, width] in half precision takes on each device."""
    return 2 * (ranks - 1) * m * width * 2


def _elements(m: int, width: int) -> int:
    """Elements of a block: a part of a row."""
    if 2 * m * width <= _FEW_BYTES:
        return _STEP
    return max(e for e in range(_STEP, _MOST_ELEMENTS + 1, _STEP) if width % e == 0)


def _open(after, places, halves):
    del after
    other = lax.rem(lax.axis_index(AXIS) + 1, lax.axis_size(AXIS))
    # It only reads: a write could come after the program has ended there, if there are no sums.
    empty = plgpu.remote_ref(places, {AXIS: other})[0, _place_at(other), 0, 0, 0, 0]
    halves[0] = empty - _EMPTY


def _place_at(other: Array) -> Array:
    """Index of this device's places in the mailbox of another one."""
    me = lax.axis_index(AXIS)
    return jnp.where(me < other, me, me - 1)


def sum_through(mailbox: Mailbox, x: Array, bias: Array | None, residual: Array | None) -> Array:
    """See `all_reduce`."""
    ranks, width = lax.axis_size(AXIS), x.shape[-1]
    operands = {"x": x, "bias": bias, "residual": residual}
    operands = {name: a.reshape(-1) for name, a in operands.items() if a is not None}
    (y,) = plgpu.kernel(
        functools.partial(
            _kernel,
            names=tuple(operands),
            ranks=ranks,
            width=width,
            elements=mailbox.elements,
            words=mailbox.places.shape[-1],
        ),
        out_type=[jax.ShapeDtypeStruct((x.size,), x.dtype)],
        grid=(x.size // mailbox.elements,),
        grid_names=("block",),
        kernel_name="all_reduce",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
        ),
    )(*operands.values(), *mailbox)
    return y.reshape(x.shape)


def _kernel(*refs, names: tuple[str, ...], ranks: int, width: int, elements: int, words: int):
    gmem = dict(zip((*names, "places", "halves", "y"), refs, strict=True))
    block, me = lax.axis_index("block"), lax.axis_index(AXIS)
    part = pl.ds(block * elements, elements)
    layout = plgpu.Layout.WG_STRIDED((elements,), vec_size=2 * words)

    def load(ref, part):
        return plgpu.load(ref.at[part], layout=layout, optimized=False)

    half = gmem["halves"][block]
    inbox = gmem["places"].at[half]
    own = load(gmem["x"], part)
    for other in (lax.rem(me + i, ranks) for i in range(1, ranks)):
        _send(plgpu.remote_ref(inbox, {AXIS: other}).at[_place_at(other), block], own, layout)
    added = []  # loaded while the values travel
    if "bias" in gmem:
        at = lax.rem(block, width // elements) * elements
        added.append(load(gmem["bias"], pl.ds(at, elements)))
    if "residual" in gmem:
        added.append(load(gmem["residual"], part))

    # Added in the order of the devices, so that all get the same bits.
    received = [_receive(inbox.at[i, block], own, layout) for i in range(ranks - 1)]
    total = plgpu.layout_cast(jnp.zeros((elements,), jnp.float32), layout)
    for rank in range(ranks):
        before, after = received[min(rank, ranks - 2)], received[max(rank - 1, 0)]
        theirs = jnp.where(rank < me, before, after)
        total += jnp.where(me == rank, own, theirs).astype(jnp.float32)
    for addend in added:
        total += addend.astype(jnp.float32)
    gmem["y"][part] = total.astype(own.dtype)
    meet()  # all threads have read which half it is
    gmem["halves"][block] = 1 - half


def _send(place: Any, values: Array, layout: Any) -> None:
    """Write the registers of `values` to places [N, 128, words]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def run(_, place, values):
        at, n = _places(place)
        word = ir.IntegerType.get_signless(32)
        empty, nan = (mgpu_utils.c(value, word) for value in (_EMPTY, _NAN))
        for i, register in enumerate(values.registers.flat):
            words = vector.bitcast(ir.VectorType.get((n,), word), register)
            words = [
                vector.extract(words, dynamic_position=[], static_position=[j]) for j in range(n)
            ]
            words = [
                arith.select(arith.cmpi(arith.CmpIPredicate.eq, w, empty), nan, w) for w in words
            ]
            mgpu_utils.inline_ptx(_store("relaxed.sys.", n), at(i), *words, has_side_effects=True)

    run(place, values)


def _receive(place: Any, like: Array, layout: Any) -> Array:
    """Wait until places [N, 128, words] are full, and empty them."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(like.shape, like.dtype, layout=layout),
    )
    def run(_, place):
        at, n = _places(place)
        count = ir.MemRefType(place.type).shape[0]
        word, element = ir.IntegerType.get_signless(32), mgpu_utils.dtype_to_ir_type(like.dtype)
        addresses = [at(i) for i in range(count)]
        words = mgpu_utils.inline_ptx(
            *(_poll(count, n), *addresses),
            result_types=[word] * n * count,
            has_side_effects=True,
        )
        empty = [mgpu_utils.c(_EMPTY, word)] * n
        for address in addresses:
            mgpu_utils.inline_ptx(_store("", n), address, *empty, has_side_effects=True)
        registers = [
            vector.bitcast(
                ir.VectorType.get((2 * n,), element),
                vector.from_elements(ir.VectorType.get((n,), word), words[i : i + n]),
            )
            for i in range(0, n * count, n)
        ]
        fragments = layout.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=np.array(registers, object).reshape(fragments.registers_shape(like.shape)),
            _layout=fragments,
            _is_signed=None,
        )

    return run(place)


def _places(places: ir.Value):
    """(function of i that returns the address of this thread's register i, words of it)."""
    *_, threads, words = ir.MemRefType(places.type).shape
    word = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(threads, word))
    offset = arith.muli(thread, mgpu_utils.c(words, word))
    own = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(places), [offset], word)
    return lambda i: mgpu_utils.getelementptr(own, [i * threads * words], word), words


def _store(how: str, words: int) -> str:
    """PTX that stores so many words."""
    operands = ", ".join(f"${i + 1}" for i in range(words))
    return f"st.{how}global.v{words}.b32 [$0], {{{operands}}};"


def _poll(count: int, words: int) -> str:
    """PTX that loads `count` registers of so many words until none of them is empty."""
    names = [f"word{i}" for i in range(count * words)]
    lines = [f".reg .b32 {', '.join(names)};", ".reg .pred waits;", "AGAIN:"]
    for i in range(count):
        loaded = ", ".join(names[i * words : (i + 1) * words])
        lines.append(f"ld.relaxed.sys.global.v{words}.b32 {{{loaded}}}, [${len(names) + i}];")
    for i, name in enumerate(names):
        also, then = (".or", ", waits") if i else ("", "")
        lines.append(f"setp.eq{also}.s32 waits, {name}, {_EMPTY}{then};")
    lines.append("@waits bra AGAIN;")
    lines += [f"mov.b32 ${i}, {name};" for i, name in enumerate(names)]
    return "{\n" + "\n".join(lines) + "\n}"
