"""Rotary embedding against the oracle, and by its properties."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.rope import Rope, apply_rope

from . import oracle
from .implementations import PLATFORMS
from .tolerance import assert_same_bits, assert_within, tolerance

ROUNDOFF = 2.0**-24
LLAMA3 = dict(
    scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position=8192,
)  # fmt: skip
ROPES = {
    "plain": dict(dim=64, theta=10_000.0),
    "large theta": dict(dim=128, theta=1e6),
    "partial": dict(dim=32, theta=10_000.0),
    "one pair": dict(dim=2, theta=10_000.0),
    "llama3": dict(dim=64, theta=500_000.0, **LLAMA3),
    "llama3.2": dict(dim=64, theta=500_000.0, **LLAMA3 | {"factor": 32.0}),
}
HEAD_DIM = {"partial": 80, "one pair": 3, "large theta": 128}


def _frequency_roundoffs(keys: dict) -> float:
    """Relative error of a frequency that is computed in fp32, in units of the roundoff.

    The exponent e = 2i/dim is rounded, which theta ** e multiplies by e·ln(theta); power, inverse
    and product with the position add one each. The blend of llama3 subtracts numbers of the size of
    `high_freq_factor` and is then divided by a frequency that may be `factor` times smaller.
    """
    roundoffs = np.log(keys["theta"]) + 4
    if keys.get("scaling") == "llama3":
        gap = keys["high_freq_factor"] - keys["low_freq_factor"]
        blend = (roundoffs + 4) * keys["high_freq_factor"] / gap
        roundoffs += blend * keys["factor"] + 4
    return roundoffs


def _bound(exact, positions, keys, dtype):
    """An angle is off in proportion to itself: 100 000 rad by 0.024 in fp32 at theta = 10 000.

    So positions of 100 000 are good to that share of a pair's length, as in every fp32 RoPE.
    """
    frequencies = oracle.inverse_frequencies(**keys)
    angles = np.abs(positions)[:, :, None, None] * frequencies
    angles = np.concatenate([angles, angles, np.zeros((*angles.shape[:3], 1))], axis=-1)
    # One column for all that is passed through.
    index = np.minimum(np.arange(exact.value.shape[-1]), keys["dim"])
    errors = _frequency_roundoffs(keys) * ROUNDOFF * angles[..., index] + tolerance(dtype, 2).sum
    return errors * exact.magnitude + tolerance(dtype, 1).rounding * np.abs(exact.value) + 2**-25


def _x(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("name", ROPES)
def test_frequencies(name):
    keys = ROPES[name]
    exact = oracle.inverse_frequencies(**keys)
    actual = Rope(**keys).inverse_frequencies()
    assert actual.dtype == np.float32
    assert_within(actual, exact, _frequency_roundoffs(keys) * ROUNDOFF * exact)


def test_llama3_keeps_high_and_divides_low_frequencies():
    plain = Rope(dim=128, theta=500_000.0).inverse_frequencies()
    ratio = plain / Rope(dim=128, theta=500_000.0, **LLAMA3).inverse_frequencies()
    wavelengths = 2 * np.pi / plain
    assert (ratio[wavelengths < 8192 / 4] == 1).all()
    np.testing.assert_allclose(ratio[wavelengths > 8192], 8, rtol=1e-6)
    between = ratio[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) >= 5
    assert (np.diff(between) > 0).all()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in ROPES), ("llama3", "bfloat16"), ("partial", "float16")],
)
def test_against_the_oracle(platform, dtype, name):
    keys = ROPES[name]
    x = _x((2, 5, 3, HEAD_DIM.get(name, 64)), dtype)
    positions = np.array([[0, 1, 2, 3, 4], [7, 4095, 8192, 31, 99_999]], np.int32)
    y = platform.jit(apply_rope, rope=Rope(**keys))(x, positions)
    assert y.dtype == x.dtype
    exact = oracle.rope(x, positions, oracle.inverse_frequencies(**keys))
    assert_within(y, exact.value, _bound(exact, positions, keys, dtype))
    assert_same_bits(y[..., keys["dim"] :], x[..., keys["dim"] :], "passed through")
    assert_same_bits(y[0, 0], x[0, 0], "position 0")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lengths_of_pairs_are_preserved(platform):
    x = _x((1, 64, 2, 128))
    positions = np.random.default_rng(1).integers(0, 100_000, size=(1, 64), dtype=np.int32)
    y = platform.jit(apply_rope, rope=Rope(dim=128, theta=10_000.0))(x, positions)
    before = np.hypot(x[..., :64], x[..., 64:])
    assert_within(np.hypot(y[..., :64], y[..., 64:]), before, 8 * ROUNDOFF * before)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["plain", "llama3"])
def test_scores_depend_on_the_distance_only(platform, name):
    q, k = _x((1, 1, 1, 64), seed=1), _x((1, 1, 1, 64), seed=2)
    bases = np.array([0, 1, 100, 1000, 4000], np.int32)[None]
    turn = platform.jit(apply_rope, rope=Rope(**ROPES[name]))
    q = turn(np.repeat(q, 5, axis=1), bases + np.int32(13)).astype(np.float64)
    k = turn(np.repeat(k, 5, axis=1), bases).astype(np.float64)
    scores = (q * k).sum(axis=-1)
    terms = np.hypot(q[..., :32], q[..., 32:]) * np.hypot(k[..., :32], k[..., 32:])
    # Here the error of a frequency counts for the distance, and that of the fp32 product of
    # position and frequency for both positions.
    angles = bases[..., None] * 2.0 + 13
    error = (_frequency_roundoffs(ROPES[name]) * 13 + 2 * angles + 16) * ROUNDOFF
    assert_within(scores, np.full_like(scores, scores[0, 0, 0]), 2 * (error * terms.sum(axis=-1)))


def test_positions_are_per_row():
    x = np.repeat(_x((1, 4, 2, 64)), 3, axis=0)
    positions = np.array([[0, 1, 2, 3], [9, 10, 11, 12], [0, 1, 2, 3]], np.int32)
    y = PLATFORMS[0].values[0].jit(apply_rope, rope=Rope(dim=64, theta=10_000.0))(x, positions)
    assert_same_bits(y[0], y[2])
    assert not np.isclose(y[0], y[1]).all(axis=-1).any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(dim=63), "dim must be positive and even, got 63"),
        (dict(dim=0), "dim must be positive and even, got 0"),
        (dict(dim=-2), "dim must be positive and even, got -2"),
        (dict(scaling="yarn"), "scaling must be one of default, llama3, got 'yarn'"),
        (dict(theta=0.0), "theta and factor must be positive, got 0.0 and 1.0"),
        (dict(factor=-1.0), "theta and factor must be positive, got 10000.0 and -1.0"),
        (
            dict(scaling="llama3", low_freq_factor=4.0),
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_descriptions_that_mean_nothing(keys, message):
    with pytest.raises(ValueError) as error:
        Rope(**dict(dim=64, theta=10_000.0) | keys)
    assert str(error.value) == f"Rope: {message}"


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (3,), (3, 4, 1)])
def test_positions_of_the_wrong_shape(shape):
    x, positions = jnp.ones((3, 4, 2, 64)), jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=r"^apply_rope: x must be \[B,T,H,D\] and positions"):
        apply_rope(x, positions, Rope(dim=64, theta=1e4))


def test_operands_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^apply_rope: rope.dim 128 exceeds the head dim 64$"):
        apply_rope(jnp.ones((1, 1, 1, 64)), jnp.zeros((1, 1), jnp.int32), Rope(128, 1e4))
    with pytest.raises(
        ValueError, match=r"^apply_rope: x must be .* got \[1, 2, 64\] and \[1, 2\]$"
    ):
        apply_rope(jnp.ones((1, 2, 64)), jnp.zeros((1, 2), jnp.int32), Rope(64, 1e4))


def test_ropes_are_equal_by_value():
    assert hash(Rope(64, 1e4)) == hash(Rope(64, 1e4))
    assert Rope(64, 1e4) == Rope(64, 1e4) != Rope(64, 1e5)
