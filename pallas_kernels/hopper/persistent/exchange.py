"""Sums over devices inside a persistent kernel.

Each device writes its sums of a tile into the memory of every other device, and adds what the
others have written. No kernel ends in between. Every value travels in one 8-byte store with a flag
that says which layer it belongs to. A thread waits for the flags of its own values, so an exchange
takes the time of one write over NVLink, without fences and signals. NCCL calls this protocol LL.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT
from fdjax.pallas_kernels.ranks import AXIS

# Exchanges of a layer: after the output projection, and after the MLP.
ROUNDS = 2

_THREADS = 128
# Registers of a thread that one loop polls. Each holds two values.
_POLLED = 8

_SEND = """{
.reg .b64 first, second;
mov.b64 first, {$1, $3};
mov.b64 second, {$2, $3};
st.relaxed.sys.global.v2.b64 [$0], {first, second};
}"""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The sum over devices of the tiles of a product.

    "inbox" [2, ranks, N/64, M/4, 128, 4] int32 holds what other devices have written, by round and
    device: pairs of values of each thread, each value with its flag. It is zero when the kernel
    starts. In the next layer, the inbox of a round is free again. A thread of another device writes
    to it only after it has received this thread's sums of the other round, and this thread sends
    those after it has read the inbox.

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
        flag = jnp.int32(layer) + 1
        for other in (lax.rem(me + i, self.ranks) for i in range(1, self.ranks)):
            if loops_back:
                send(inbox.at[other, tile], [value], flag)
            else:
                send(plgpu.remote_ref(inbox, {AXIS: other}).at[me, tile], [value], flag)
        total = None
        for rank in range(self.ranks):
            # The own place stays empty: nothing is waited for there.
            expected = jnp.where(me == rank, 0, flag)
            (theirs,) = receive(inbox.at[rank, tile], 1, value.shape, expected)
            part = jnp.where(me == rank, value, theirs)
            total = part if total is None else total + part
        return total


def new_inbox(ranks: int, rows: int, width: int) -> Any:
    """A reference to an empty inbox for a residual stream [rows, width], for one launch."""
    return empty_places((ROUNDS, ranks, width // BRICK), rows)


def empty_places(shape: tuple[int, ...], rows: int) -> Any:
    """A reference to empty places [..., M/4, 128, 4], for one launch.

    A place has room for an array [64, M], or for several with M columns in all.
    """
    return jax.new_ref(jnp.zeros((*shape, BRICK * rows // (2 * _THREADS), _THREADS, 4), jnp.int32))


def send(place: Any, values: Sequence[Array], flag: Array) -> None:
    """Write arrays [64, M] in fp32 and `LAYOUT` to a place, with their flags."""
    layouts = [LAYOUT] * len(values)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *layouts))
    def run(_, inbox, flag, *values):
        at, word = _places(inbox), ir.IntegerType.get_signless(32)
        (flag,) = flag.registers.flat
        registers = [register for value in values for register in value.registers.flat]
        for i, register in enumerate(registers):
            pair = (
                arith.bitcast(
                    word, vector.extract(register, dynamic_position=[], static_position=[j])
                )
                for j in range(2)
            )
            mgpu_utils.inline_ptx(_SEND, at(i), *pair, flag, has_side_effects=True)

    run(place, flag, *values)


def receive(place: Any, count: int, shape: tuple[int, ...], flag: Array) -> list[Array]:
    """Wait for `count` arrays of a shape with this flag; 0 is the flag of an empty place."""
    made = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=[made] * count
    )
    def run(_, inbox, flag):
        at, single = _places(inbox), ir.F32Type.get()
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), single)
        (flag,) = flag.registers.flat
        pairs = ir.MemRefType(inbox.type).shape[0]
        registers = []
        for first in range(0, pairs, _POLLED):
            polled = min(_POLLED, pairs - first)
            addresses = [at(first + i) for i in range(polled)]
            words = mgpu_utils.inline_ptx(
                *(_poll(polled), *addresses, flag),
                result_types=[word] * 2 * polled,
                has_side_effects=True,
            )
            values = [arith.bitcast(single, value) for value in words]
            registers += [
                vector.from_elements(pair, values[i : i + 2]) for i in range(0, 2 * polled, 2)
            ]
        layout = mgpu.WGMMA_LAYOUT
        return [
            mgpu.FragmentedArray(
                _registers=part.reshape(layout.registers_shape(shape)),
                _layout=layout,
                _is_signed=None,
            )
            for part in np.split(np.array(registers, dtype=object), count)
        ]

    return run(place, flag)


def _poll(pairs: int) -> str:
    """PTX that loads pairs of values until all their flags are the last operand."""
    names = [f"{name}{i}" for i in range(pairs) for name in ("first", "second")]
    flag = f"${3 * pairs}"
    lines = [f".reg .b64 {', '.join(names)};", ".reg .pred waits;"]
    lines += [f".reg .b32 {', '.join(f'value_{name}, flag_{name}' for name in names)};", "AGAIN:"]
    for i in range(pairs):
        lines.append(f"ld.relaxed.sys.global.v2.b64 {{first{i}, second{i}}}, [${2 * pairs + i}];")
    for i, name in enumerate(names):
        lines.append(f"mov.b64 {{value_{name}, flag_{name}}}, {name};")
        also = ".or" if i else ""
        then = ", waits" if i else ""
        lines.append(f"setp.ne{also}.b32 waits, flag_{name}, {flag}{then};")
    lines.append("@waits bra AGAIN;")
    lines += [f"mov.b32 ${i}, value_{name};" for i, name in enumerate(names)]
    return "{\n" + "\n".join(lines) + "\n}"


def _places(inbox: ir.Value):
    """Function of the index of a pair that returns this thread's address in an inbox [n,128,4]."""
    word = ir.IntegerType.get_signless(32)
    base = mgpu_utils.memref_ptr(inbox)
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(_THREADS, word))
    own = mgpu_utils.getelementptr(base, [arith.muli(thread, mgpu_utils.c(4, word))], word)
    return lambda i: mgpu_utils.getelementptr(own, [i * 4 * _THREADS], word)
