"""Activations as pairs of int8 digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, pack_bricks
from fdjax.pallas_kernels.hopper.digits import DIGIT_WORDS, as_digits, place, places, put_digits
from fdjax.pallas_kernels.hopper.tiles import LAYOUT
from fdjax.pallas_kernels.quantised import BITS


def _parts(digits, rows):
    """Digits [M, K/64, 2, 64] in the order of memory, and scales [M, K/64]."""
    at = np.array([[place(row), place(row) + 1] for row in range(rows)])
    chosen = np.asarray(digits)[:, at].swapaxes(0, 1)
    values = chosen[..., :16].copy().view(np.int8)
    return values.astype(np.int64), chosen[:, :, 0, 16].copy().view(np.float32)


def _values(digits, rows):
    """The values [M, K] that digits stand for."""
    (high, low), scales = np.moveaxis((parts := _parts(digits, rows))[0], 2, 0), parts[1]
    made = (128 * high + low) * scales.astype(np.float64)[..., None]
    order = np.argsort([2 * t + i for t in range(4) for i in (0, 8, 1, 9)])
    return made.reshape(rows, -1, 4, 16)[..., order].reshape(rows, -1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
def test_the_error_is_less_than_that_of_rounding_the_largest(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 5 * BRICK)).astype(np.float32)
    x[0, 70] *= 1000
    x[-1, 130:140] = 1e30
    digits = as_digits(jnp.asarray(x))
    assert digits.shape == (5, places(rows), DIGIT_WORDS) and digits.dtype == jnp.int32
    assert places(rows) % 8 == 0 and place(rows - 1) + 1 < places(rows)
    got = _values(digits, rows)
    largest = np.abs(x).reshape(rows, 5, BRICK).max(axis=2)
    error = np.abs(got - x).reshape(rows, 5, BRICK).max(axis=2)
    assert (error <= 0.501 * largest / (127 * 128)).all()
    # bfloat16 has 8 bits: its error is up to 2^-9 of a value.
    assert (error < 2.0**-14 * largest).all()


@pytest.mark.slow
def test_rows_without_values_and_without_numbers():
    x = np.zeros((4, 2 * BRICK), np.float32)
    x[1, 3] = 1e-38  # counts as 0
    x[2, 5], x[2, 64] = np.nan, 2.0
    x[3] = np.arange(2 * BRICK) - 40
    got = _values(as_digits(jnp.asarray(x)), 4)
    assert (got[:2] == 0).all()
    assert np.isnan(got[2, :BRICK]).all() and (np.abs(got[2, BRICK:]) <= 2).all()
    np.testing.assert_allclose(got[3], x[3], atol=0.003)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.slow
def test_digits_are_in_the_order_of_bricks(kind):
    """Products of bytes as the tensor cores form them: four of a word with four of another."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2 ** BITS[kind], (BRICK, BRICK))
    x = rng.standard_normal((1, BRICK)).astype(np.float32)
    words = np.asarray(pack_bricks(jnp.asarray(codes), kind)).reshape(-1).view(np.uint32)
    if kind == "int4":
        # Of a word of a thread, the low nibbles of all bytes are one column, the high ones another.
        words = words.reshape(128, 4)
        lefts = np.stack([words << 4, words], axis=-1) & 0xF0F0F0F0 ^ 0x80808080
        factor, lefts = 1 / 16, lefts.astype(np.uint32).view(np.int8).reshape(128, 4, 2, 4)
    else:
        # Two words have bytes of the same two columns in turn.
        bytes_ = words.reshape(2, 128, 4).swapaxes(0, 1).reshape(128, 4, 2).view(np.uint8)
        bytes_ = (bytes_ ^ 0x80).view(np.int8).reshape(128, 4, 2, 2, 2)  # .., word, pair, column
        factor, lefts = 1, bytes_.transpose(0, 1, 4, 3, 2).reshape(128, 4, 2, 4)
    (digits,), (scales,) = _parts(as_digits(jnp.asarray(x)), 1)
    high, low = digits[0].reshape(2, 4, 4, 4)  # instruction, thread of four, byte
    want = x[0].astype(np.float64) @ (codes - 2 ** (BITS[kind] - 1))
    got = np.zeros(BRICK)
    for thread in range(128):
        warp, row, quarter = thread // 32, thread % 32 // 4, thread % 4
        for column in range(2):
            left = lefts[thread, :, column].astype(np.int64)
            sums = [(left * digit[:, quarter]).sum() for digit in (high, low)]
            got[16 * warp + row + 8 * column] += factor * scales[0] * (128 * sums[0] + sums[1])
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


@pytest.mark.slow
def test_one_program_makes_the_same_digits():
    x = jax.random.normal(jax.random.key(0), (3, 2 * BRICK), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(as_digits)(x), as_digits(x))


def _put(x):
    """Digits [2, places, 20] that a kernel makes of x [2, 64, M]."""
    bricks, _, rows = x.shape
    memory = plgpu.SMEM((4 * bricks * rows,), jnp.float32)

    def kernel(x, y, digits, memory):
        values = [plgpu.load(x.at[i], layout=LAYOUT, optimized=False) for i in range(bricks)]
        put_digits([digits.at[i] for i in range(bricks)], values, memory)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(digits, y)
        plgpu.wait_smem_to_gmem(0)

    shape = bricks, places(rows), DIGIT_WORDS
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.int32),
        scratch_types=(plgpu.SMEM(shape, jnp.int32), memory),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
    )(x)


@pytest.mark.deviceless
def test_compiles():
    from deviceless import compile_for

    compile_for("h100", _put, jax.ShapeDtypeStruct((2, BRICK, 16), jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16])
def test_a_kernel_makes_digits_of_the_same_values(rows):
    x = np.random.default_rng(0).standard_normal((rows, 2 * BRICK)).astype(np.float32)
    x[3] = 0
    x[4, 7] *= 1e4
    made = _put(jnp.asarray(x.reshape(rows, 2, BRICK).transpose(1, 2, 0)))
    step = np.abs(x).reshape(rows, 2, BRICK).max(axis=2) / (127 * 128)
    error = np.abs(_values(made, rows) - x).reshape(rows, 2, BRICK).max(axis=2)
    assert (error <= 0.52 * step).all()
