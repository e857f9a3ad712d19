"""Activations as float16 with a power of two for each brick."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, brick_words, pack_bricks
from fdjax.pallas_kernels.hopper.halves import (
    HALF_WORDS,
    as_halves,
    half_places,
    multiplied_halves,
    put_halves,
)
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, load


def _parts(words, rows):
    """Halves [M, K/64, 64] as float64, and powers [M, K/64]."""
    chosen = np.asarray(words)[:, :rows].swapaxes(0, 1)
    halves = chosen[..., : BRICK // 2].copy().view(np.float16).astype(np.float64)
    return halves, chosen[..., BRICK // 2].copy().view(np.float32).astype(np.float64)


def _values(words, rows):
    """The values [M, K] that words stand for."""
    halves, powers = _parts(words, rows)
    return (halves * powers[..., None]).reshape(rows, -1)


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_bfloat16_keeps_its_bits(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 5 * BRICK))
    x[0, 70] *= 1000
    x[-1, 130:140] = 1e30
    x[-1, 200:250] = 0
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    words = as_halves(jnp.asarray(x))
    assert words.shape == (5, half_places(rows), HALF_WORDS) and words.dtype == jnp.int32
    got = _values(words, rows)
    largest = np.abs(x).reshape(rows, 5, BRICK).max(axis=2, keepdims=True)
    near = np.abs(x).reshape(rows, 5, BRICK) >= 2.0**-14 * largest
    error = np.abs(got - x).reshape(rows, 5, BRICK)
    assert (error[near] == 0).all() and (error <= 2.0**-24 * largest).all()


def test_rows_without_values_and_without_numbers():
    x = np.zeros((4, 2 * BRICK), np.float32)
    x[1, 3] = 1e-38
    x[2, 5], x[2, 64] = np.nan, 2.0
    x[3, 0], x[3, 64] = np.inf, 3.0
    got = _values(as_halves(jnp.asarray(x)), 4)
    assert (got[0] == 0).all() and got[1, 3] == pytest.approx(1e-38, rel=1e-3)
    assert np.isnan(got[2, 5]) and got[2, 64] == 2.0
    assert not np.isfinite(got[3, 0]) and got[3, 64] == 3.0


def _codes(rng):
    values = rng.standard_normal((BRICK, BRICK)).astype(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64), values.view(np.uint8)


def test_halves_are_in_the_order_of_bricks():
    """Products as the tensor cores form them, of what each thread holds."""
    rng = np.random.default_rng(0)
    weight, codes = _codes(rng)
    x = rng.standard_normal((1, BRICK)).astype(np.float32)
    words = np.asarray(pack_bricks(jnp.asarray(codes), "fp8")).reshape(2, 128, 4).swapaxes(0, 1)
    bytes_ = words.reshape(128, 4, 2).copy().view(np.uint8).reshape(128, 4, 2, 4)
    # Bytes 0 and 2 make one register, 1 and 3 the other.
    lefts = bytes_[..., [0, 2, 1, 3]].reshape(128, 4, 2, 2, 2).copy()
    lefts = lefts.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    halves, powers = _parts(as_halves(jnp.asarray(x)), 1)
    got = np.zeros(BRICK)
    for thread in range(128):
        warp, row, quarter = thread // 32, thread % 32 // 4, thread % 4
        for instruction in range(4):
            for half in range(2):
                first = 16 * instruction + 8 * half + 2 * quarter
                right = halves[0, 0, first : first + 2]
                for column in range(2):
                    left = lefts[thread, instruction, half, column]
                    got[16 * warp + row + 8 * column] += powers[0, 0] * (left @ right)
    want = x[0].astype(np.float64) @ weight
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


def _multiplied(words, x, scales):
    """The product [64, M] of a brick with x [64, M], as a kernel codes and multiplies it."""
    rows = x.shape[1]
    scratch = {
        "words": plgpu.SMEM((1, *brick_words("fp8")), jnp.int32),
        "x": plgpu.SMEM((half_places(rows), HALF_WORDS), jnp.int32),
        "memory": plgpu.SMEM((4 * rows,), jnp.float32),
        "arrived": plgpu.Barrier(),
    }

    def kernel(words, x, scales, y, coded, *refs):
        smem = dict(zip(scratch, refs, strict=True))
        plgpu.copy_gmem_to_smem(words, smem["words"], smem["arrived"])
        values = plgpu.load(x, layout=LAYOUT, optimized=False)
        put_halves([smem["x"]], [values], smem["memory"])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["x"], coded)
        plgpu.barrier_wait(smem["arrived"])
        blank = plgpu.layout_cast(jnp.zeros((BRICK, rows), jnp.float32), LAYOUT)
        scale = load(scales, LAYOUT.reduce(1))
        (total,) = multiplied_halves([blank], [smem["words"]], smem["x"], "fp8", [scale])
        y[...] = total
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((BRICK, rows), jnp.float32),
            jax.ShapeDtypeStruct((half_places(rows), HALF_WORDS), jnp.int32),
        ),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(words, x, scales)


@pytest.mark.deviceless
def test_compiles():
    from deviceless import compile_for

    specs = ((1, *brick_words("fp8")), jnp.int32), ((BRICK, 16), jnp.float32)
    specs = *specs, ((BRICK,), jnp.float32)
    compile_for("h100", _multiplied, *(jax.ShapeDtypeStruct(*spec) for spec in specs))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16])
def test_a_kernel_codes_and_multiplies(rows):
    rng = np.random.default_rng(0)
    weight, codes = _codes(rng)
    words = pack_bricks(jnp.asarray(codes), "fp8").reshape(1, *brick_words("fp8"))
    x = rng.standard_normal((BRICK, rows)).astype(np.float32)
    x[:, 3] = 0
    x[7, 4] *= 1e4
    scales = rng.uniform(1, 2, BRICK).astype(np.float32)
    y, coded = _multiplied(words, jnp.asarray(x), jnp.asarray(scales))
    np.testing.assert_array_equal(coded[:, :33], as_halves(jnp.asarray(x.T))[0, :, :33])
    want = (weight.T @ _values(np.asarray(coded)[None], rows).T) * scales[:, None]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
