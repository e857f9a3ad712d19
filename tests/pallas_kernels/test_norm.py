"""RMSNorm and LayerNorm against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.norm import layer_norm, rms_norm

from . import oracle
from .implementations import PLATFORMS
from .tolerance import assert_same_bits, assert_within, tolerance

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((1, 1), (5, 7), (3, 64), (2, 3, 257), (33,))


def _operands(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(jnp.dtype(dtype))
    return x, rng.normal(1, 0.2, size=shape[-1]).astype(jnp.dtype(dtype))


def _assert_norm(actual, exact, dtype, k):
    # The mean sums positive terms, and its root halves the relative error.
    bound = (tolerance(dtype, k).sum + tolerance(dtype, k).rounding) * exact.magnitude
    assert_within(actual, exact.value, bound + tolerance(dtype, 1).underflow, "rms_norm")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_oracle(platform, dtype, shape):
    x, scale = _operands(shape, dtype)
    y = platform.jit(rms_norm, eps=1e-5)(x, scale)
    assert y.dtype == x.dtype
    _assert_norm(y, oracle.rms_norm(x, scale, eps=1e-5), dtype, shape[-1])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e3])
def test_eps_counts_where_x_is_small(platform, magnitude):
    x, scale = _operands((4, 96), "float32")
    x *= np.float32(magnitude)
    y = platform.jit(rms_norm, eps=1e-6)(x, scale)
    _assert_norm(y, oracle.rms_norm(x, scale, eps=1e-6), "float32", 96)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_squares_beyond_float16_do_not_overflow(platform):
    x, scale = _operands((4, 64), "float16")
    x *= np.float16(1e4)
    y = platform.jit(rms_norm, eps=1e-5)(x, scale)
    _assert_norm(y, oracle.rms_norm(x, scale, eps=1e-5), "float16", 64)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_scale_of_another_dtype(platform):
    x, _ = _operands((4, 64), "bfloat16")
    _, scale = _operands((4, 64), "float32")
    y = platform.jit(rms_norm, eps=1e-5)(x, scale)
    assert y.dtype == x.dtype
    _assert_norm(y, oracle.rms_norm(x, scale, eps=1e-5), "bfloat16", 64)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_are_independent(platform):
    x, scale = _operands((4, 64), "bfloat16")
    norm = platform.jit(rms_norm, eps=1e-5)
    clean = norm(x, scale)
    x[1] = np.nan
    x[2] = 0
    y = norm(x, scale)
    assert_same_bits(y[[0, 3]], clean[[0, 3]])
    assert np.isnan(y[1].astype(np.float32)).all()
    assert not y[2].any()


@pytest.mark.parametrize("shape", [(63,), (1, 64), ()])
def test_scale_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"^rms_norm: scale must be \[64\], got \[.*\]$"):
        rms_norm(jnp.ones((2, 64)), jnp.ones(shape), eps=1e-5)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_against_the_oracle(platform, dtype, shape, with_bias):
    x, scale = _operands(shape, dtype)
    # A mean larger than the deviation, which the subtraction must remove.
    x = (x + np.asarray(3, x.dtype)).astype(x.dtype)
    bias = _operands(shape, dtype, seed=1)[1] if with_bias else None
    y = platform.jit(layer_norm, eps=1e-5)(x, scale, bias)
    assert y.dtype == x.dtype
    exact = oracle.layer_norm(x, scale, bias, eps=1e-5)
    # The error of the mean counts in each element, and twice more in the deviation.
    bound = (3 * tolerance("float32", shape[-1]).sum + 2**-22) * exact.magnitude
    bound = bound + tolerance(dtype, 1).rounding * np.abs(exact.value)
    assert_within(y, exact.value, bound + tolerance(dtype, 1).underflow, "layer_norm")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_layer_norm_ignores_a_constant(platform):
    x, scale = _operands((4, 64), "float32")
    norm = platform.jit(layer_norm, eps=1e-5)
    np.testing.assert_allclose(norm(x + np.float32(8), scale), norm(x, scale), atol=1e-5)


@pytest.mark.parametrize(("scale", "bias"), [((63,), (64,)), ((64,), (1, 64)), ((64,), (63,))])
def test_layer_norm_of_the_wrong_shape(scale, bias):
    with pytest.raises(ValueError, match=r"^layer_norm: (scale|bias) must be \[64\], got"):
        layer_norm(jnp.ones((2, 64)), jnp.ones(scale), jnp.ones(bias), eps=1e-5)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 64), "int32"), ((), "float32")], ids=str)
def test_what_cannot_be_normalised(norm, shape, dtype):
    with pytest.raises(ValueError, match=rf"^{norm.__name__}: x must be .* got {dtype} \["):
        norm(jnp.ones(shape, dtype), jnp.ones(64), eps=1e-5)
