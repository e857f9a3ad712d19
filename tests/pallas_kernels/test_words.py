"""Words of one row: what the kernel of all layers sends, and where it stores what it receives.

The interpreter cannot run these parts of the kernel. So their instructions run on NumPy arrays of
the 128 threads of a warpgroup. That words arrive is tested with the kernel, in test_decode_layers.
"""

import operator
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.hopper.persistent import row_input, words
from fdjax.pallas_kernels.hopper.persistent.row_input import RowInput


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_word_is_a_value_and_the_flag_of_the_first_layer(dtype):
    x = jnp.array([0.0, -0.0, 1.5, -3.25, jnp.inf, jnp.nan], dtype)
    found = np.asarray(words.as_words(x)).view(np.uint32)
    assert (found & 0xFFFF == int(words.flag_of(0))).all()
    np.testing.assert_array_equal(found >> 16, jax.lax.bitcast_convert_type(x, jnp.uint16))


def test_a_pair_is_a_sum_and_the_flag_of_the_first_layer():
    squares = jnp.array([0.0, 2.5, jnp.nan])
    found = words.as_pairs(squares)
    np.testing.assert_array_equal(found[:, 1], words.flag_of(0))
    np.testing.assert_array_equal(found[:, 0], np.asarray(squares).view(np.int32))


def test_all_words_are_one_array_and_aligned():
    first = {"x": jnp.arange(1, 7, dtype=jnp.int32), "squares": jnp.full((3, 2), 9, jnp.int32)}
    array, starts = words.new_words(first, {"hidden": 5, "o": 4})
    # Four words are loaded at once.
    assert starts == {"x": 0, "squares": 8, "hidden": 16, "o": 24}
    assert array.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, *[9] * 6, 0, 0, *[0] * 12]


def test_no_layer_has_the_flag_of_empty_words():
    assert int(words.flag_of(0)) > 0


class Registers:
    """A `FragmentedArray`: an array [128, ...] for each register, or one number for all threads."""

    def __init__(self, *, _registers, **_):
        self.registers = np.empty(len(_registers), object)
        self.registers[:] = list(_registers)
        self.size = sum(np.size(register) for register in _registers)


def run_ptx(code, *args, predicate=True, result_types=None, **_):
    """What the PTX of `words` does."""
    if code.startswith("st."):
        (memory, at), *values = args
        halves = 2 if "shared" in code else 1  # shared memory is in halves of words
        for thread in np.flatnonzero(np.broadcast_to(predicate, 128)):
            for i, value in enumerate(values):
                word = int(np.broadcast_to(value, 128)[thread])
                for half in range(halves):
                    bits = word if halves == 1 else word >> 16 * half & 0xFFFF
                    memory[at[thread] + halves * i + half] = bits
        return None
    if code.startswith("prmt"):
        low, high = args
        return low >> 16 | high & 0xFFFF0000
    if code.startswith("{"):  # the polls: all words have come
        (memory, at), own, count, flag = args
        found = []
        for i in range(len(result_types)):
            step, j = divmod(i, 4)
            inside = own + 512 * step < count
            place = np.where(inside, at + 512 * step + j, 0)
            found.append(np.where(inside, memory[place], flag))
            assert (found[-1] & 0xFFFF == flag).all(), "this word has not been sent"
        return found
    assert code.startswith("fence")
    return None


@pytest.fixture
def on_threads(monkeypatch):
    """Run the functions of `words` on NumPy arrays."""
    arith = SimpleNamespace(
        CmpIPredicate=SimpleNamespace(slt=operator.lt, eq=operator.eq, ne=operator.ne),
        cmpi=lambda how, a, b: how(a, b),
        select=lambda condition, a, b: a if condition else b,
        andi=lambda a, b: a & b & 0xFFFFFFFF,
        shli=lambda a, b: a << b & 0xFFFFFFFF,
        bitcast=lambda _, a: np.asarray(a, np.float32).view(np.uint32).astype(np.int64),
        addi=operator.add,
        muli=operator.mul,
        remui=operator.mod,
        divui=operator.floordiv,
        xori=operator.xor,
        ori=operator.or_,
    )
    utils = SimpleNamespace(
        inline_ptx=run_ptx,
        thread_idx=lambda: np.arange(128),
        c=lambda value, _: np.int64(value),
        memref_ptr=lambda ref: ref.memory,
        getelementptr=lambda memory, index, _: (memory, np.broadcast_to(index[0], 128)),
        bitcast=lambda pair, _: pair[:, 0] | pair[:, 1] << 16,
    )
    vector = SimpleNamespace(
        from_elements=lambda _, values: np.stack(values, axis=-1),
        extract=lambda value, static_position, **_: value[..., static_position[0]],
    )

    def argument(value):
        return Registers(_registers=[np.int64(value)]) if np.shape(value) == () else value

    def inline_mgpu(**_):
        return lambda run: (
            lambda *args: run(
                None, *(a if hasattr(a, "size") and a.size > 1 else argument(a) for a in args)
            )
        )

    fakes = {"arith": arith, "mgpu_utils": utils, "vector": vector, "ir": MagicMock()}
    for name, fake in {**fakes, "mgpu": SimpleNamespace(FragmentedArray=Registers)}.items():
        monkeypatch.setattr(words, name, fake)
    monkeypatch.setattr(words.plgpu, "inline_mgpu", inline_mgpu)


def memory_of(count, **fields):
    return SimpleNamespace(memory=np.zeros(count, np.int64), size=count, **fields)


def fragments(values):
    """Half-precision bits [64, 8] in registers, as wgmma leaves its results."""
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    return Registers(
        _registers=[
            np.stack([values[row + 8 * i, column + j] for j in range(2)], axis=-1) for i in range(2)
        ]
    )


@pytest.mark.parametrize(("columns", "apart"), [(1, 0), (2, 128), (5, 128)])
def test_columns_are_sent_where_they_are_read(on_threads, columns, apart):
    values = np.random.default_rng(0).integers(0, 2**16, (64, 8))
    sent = memory_of(1024)
    words.send(sent, 100, fragments(values), 7, columns, apart)
    want = np.zeros(1024, np.int64)
    for column in range(columns):
        first = 100 + column * apart
        want[first : first + 64] = values[:, column] << 16 | 7
    np.testing.assert_array_equal(sent.memory, want)


def test_the_first_sum_of_squares_is_sent_with_its_flag(on_threads):
    sent = memory_of(16)
    register = np.tile(np.array([2.5, 9.0], np.float32), (128, 1))
    words.send_first(sent, 6, Registers(_registers=[register]), 3)
    assert sent.memory.tolist() == [0] * 6 + [int(np.float32(2.5).view(np.uint32)), 3] + [0] * 8


class Block:
    """A block of the grid whose warpgroup of products never waits, and checks what arrives."""

    def __init__(self, sent, inputs, slots=12):
        self.x_slots, self.taken, self.waited, self.stages = slots, [], [], inputs
        self.ring = memory_of(slots * 512, shape=(slots, 8, 64), dtype=np.dtype("float16"))
        names = ("x_used", "x_arrived")
        self.smem = {"x": self.ring} | {n: SimpleNamespace(at=self._barriers(n)) for n in names}
        self.gmem = {"words": sent}

    @staticmethod
    def _barriers(name):
        return type("At", (), {"__getitem__": lambda _, i: (name, int(i))})()

    def x_slot(self, at):
        return at % self.x_slots

    def wait(self, barrier):
        name, slot = barrier
        assert name == "x_used"
        self.waited.append(slot)

    def arrive(self, barrier):
        name, slot = barrier
        assert (name, slot) == ("x_arrived", self.x_slot(len(self.taken)))
        # A slot is free before something is stored there again.
        assert len(self.waited) >= len(self.taken) - self.x_slots + 1
        self.taken.append(self.ring.memory.reshape(-1, 8, 8, 8)[slot].copy())


def unswizzled(slot, rows):
    """The first rows [rows, 64] of a slot [8, 8, 8] of rows, groups of 8 values, values."""
    return np.stack([slot[row, np.arange(8) ^ row].reshape(64) for row in range(rows)])


@pytest.mark.parametrize(
    ("bricks", "exist", "in_rows", "tiles"),
    [
        *((n, n, 0, 1) for n in (1, 8, 16, 20, 32, 64, 88)),
        (88, 84, 0, 1),  # the last bricks do not exist
        (64, 64, 0, 2),
        *((2 * rows, 2 * rows, 1, 1) for rows in (3, 4, 5, 6, 8)),
        (6, 6, 1, 3),
        (64, 64, 0, 0),  # nothing to do
    ],
)
def test_a_block_receives_its_input(on_threads, monkeypatch, bricks, exist, in_rows, tiles):
    layer, first, apart = 4, 40, bricks * 64 if in_rows else 0
    values = np.random.default_rng(bricks).integers(0, 2**16, (tiles or 1) * bricks * 64)
    sent = memory_of(first + values.size)
    sent.memory[first:] = values << 16 | int(words.flag_of(layer))
    block = Block(sent, [])
    monkeypatch.setattr(row_input.plgpu, "barrier_wait", block.wait)
    monkeypatch.setattr(row_input.plgpu, "barrier_arrive", block.arrive)
    x = RowInput(first, apart, bricks, exist, in_rows, tiles, squares=-1)
    with jax.disable_jit():
        loaded = 0
        for _ in range(2):  # the second time, all slots have been in use
            before = len(block.taken)
            loaded = row_input._receive(block, layer, x, jnp.int32(loaded))
            assert int(loaded) == len(block.taken)
            taken = block.taken[before:]
            tile_values = values.reshape(-1, bricks, 64)
            if in_rows:
                want = tile_values.reshape(-1, bricks // 2, 2, 64)[:tiles].swapaxes(1, 2)
                want = want.reshape(-1, bricks // 2, 64)
                got = [unswizzled(slot, bricks // 2) for slot in taken]
            else:
                want = np.concatenate([tile_values[:1]] * tiles) if tiles else tile_values[:0]
                want = np.where(np.arange(bricks)[:, None] < exist, want, 0).reshape(-1, 1, 64)
                got = [unswizzled(slot, 1) for slot in taken]
            np.testing.assert_array_equal(np.reshape(got, want.shape), want)
    # Each slot that is filled again was waited for once, in order.
    again = max(0, len(block.taken) - block.x_slots)
    assert block.waited[:again] == [i % block.x_slots for i in range(again)]
    assert len(block.waited) == again
