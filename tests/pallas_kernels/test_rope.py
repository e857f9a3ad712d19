"""Tests the rotary embedding against the oracle, its properties, and transformers' tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.rope import (
    Dynamic,
    LinearScaling,
    Llama3,
    LongRope,
    Rope,
    Yarn,
    apply_rope,
)

from . import oracle
from .implementations import PLATFORMS
from .tolerance import assert_same_bits, assert_within, tolerance

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

ROUNDOFF = 2.0**-24
LLAMA3 = Llama3(8.0, 1.0, 4.0, 8192)
SHORT, LONG = (tuple(np.geomspace(1, end, 24).tolist()) for end in (1.5, 60))
ROPES = {
    "plain": Rope(64, 10_000.0),
    "large theta": Rope(128, 1e6),
    "partial": Rope(32, 10_000.0),
    "one pair": Rope(2, 10_000.0),
    "linear": Rope(64, 10_000.0, LinearScaling(4.0)),
    "llama3": Rope(64, 500_000.0, LLAMA3),
    "llama3.2": Rope(64, 500_000.0, Llama3(32.0, 1.0, 4.0, 8192)),
    "yarn": Rope(128, 1e6, Yarn(4.0, 32768, 1.139)),
    "yarn, not truncated": Rope(64, 150_000.0, Yarn(32.0, 4096, 1.35, truncate=False)),
    "dynamic": Rope(64, 10_000.0, Dynamic(4.0, 2048)),
    "longrope": Rope(48, 10_000.0, LongRope(SHORT, LONG, 4096, 1.19)),
}
HEAD_DIM = {"partial": 80, "one pair": 3, "large theta": 128, "yarn": 128}
LENGTHS = [1, 2048, 2049, 4096, 4097, 100_000]


def _frequencies(rope: Rope, length: int) -> np.ndarray:
    """[dim/2] for a sequence of `length` tokens."""
    if rope.depends_on_length:
        return np.asarray(rope.inverse_frequencies(jnp.int32(length)))
    return rope.inverse_frequencies()


def _frequency_roundoffs(rope: Rope) -> float:
    """Relative error of a frequency computed in fp32, in units of the roundoff.

    The exponent e = 2i/dim is rounded, and theta ** e multiplies that error by e·ln(theta). Power,
    inverse and the product with the position add one unit each. The blend of llama3 subtracts
    numbers as large as `high_freq_factor`, and is then divided by a frequency that may be `factor`
    times smaller. The ramp of yarn is a quotient of pairs, which cancels near its ends in the same
    way. Dynamic scaling rounds a base up to 2 ** 12 times as large, and rounds its growth three
    times.
    """
    roundoffs = np.log(rope.theta) + 4
    if isinstance(rope.scaling, Llama3):
        gap = rope.scaling.high_freq_factor - rope.scaling.low_freq_factor
        blend = (roundoffs + 4) * rope.scaling.high_freq_factor / gap
        roundoffs += blend * rope.scaling.factor + 4
    if isinstance(rope.scaling, Yarn):
        roundoffs += 4 * rope.scaling.factor + 4
    if isinstance(rope.scaling, Dynamic):
        roundoffs += np.log(2.0**12) + 8
    return roundoffs + 2


def _bound(exact, positions, rope, frequencies, dtype):
    """The error of an angle is proportional to it: in fp32, 0.024 at 100 000 rad, theta = 10 000.

    So at position 100 000, a result is off by that share of a pair's length, as in any fp32 RoPE.
    """
    angles = np.abs(positions)[:, :, None, None] * frequencies
    angles = np.concatenate([angles, angles, np.zeros((*angles.shape[:3], 1))], axis=-1)
    # One column for all dimensions that are not rotated.
    index = np.minimum(np.arange(exact.value.shape[-1]), rope.dim)
    errors = _frequency_roundoffs(rope) * ROUNDOFF * angles[..., index] + tolerance(dtype, 2).sum
    return errors * exact.magnitude + tolerance(dtype, 1).rounding * np.abs(exact.value) + 2**-25


def _x(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies(name, length):
    rope = ROPES[name]
    exact = oracle.inverse_frequencies(rope.dim, rope.theta, rope.scaling, length)
    actual = _frequencies(rope, length)
    assert actual.dtype == np.float32
    assert_within(actual, exact, _frequency_roundoffs(rope) * ROUNDOFF * exact)


def test_llama3_keeps_high_and_divides_low_frequencies():
    plain = Rope(128, 500_000.0).inverse_frequencies()
    ratio = plain / Rope(128, 500_000.0, LLAMA3).inverse_frequencies()
    wavelengths = 2 * np.pi / plain
    assert (ratio[wavelengths < 8192 / 4] == 1).all()
    np.testing.assert_allclose(ratio[wavelengths > 8192], 8, rtol=1e-6)
    between = ratio[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) >= 5
    assert (np.diff(between) > 0).all()


def test_yarn_keeps_high_and_divides_low_frequencies():
    plain = Rope(128, 1e6).inverse_frequencies()
    ratio = plain / ROPES["yarn"].inverse_frequencies()
    np.testing.assert_allclose(ratio[:23], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[41:], 4, rtol=1e-6)
    assert (np.diff(ratio[23:41]) > 0).all()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in ROPES), ("llama3", "bfloat16"), ("partial", "float16")],
)
def test_against_the_oracle(platform, dtype, name):
    rope = ROPES[name]
    x = _x((2, 5, 3, HEAD_DIM.get(name, 64)), dtype)
    positions = np.array([[0, 1, 2, 3, 4], [7, 4095, 8192, 31, 99_999]], np.int32)
    # The first sequence is short, the second is long from its first token on.
    lengths = np.array([5, 100_000], np.int32)
    rotate = platform.jit(apply_rope, rope=rope)
    y = rotate(x, positions, prompt=lengths, limit=lengths)
    assert y.dtype == x.dtype
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        frequencies = oracle.inverse_frequencies(rope.dim, rope.theta, rope.scaling, length)
        exact = oracle.rope(x[one], positions[one], frequencies, rope.attention_factor)
        bound = _bound(exact, positions[one], rope, frequencies, dtype)
        assert_within(y[one], exact.value, bound)
    assert_same_bits(y[..., rope.dim :], x[..., rope.dim :], "passed through")
    if rope.attention_factor == 1:
        assert_same_bits(y[0, 0], x[0, 0], "position 0")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lengths_of_pairs_are_preserved(platform):
    x = _x((1, 64, 2, 128))
    positions = np.random.default_rng(1).integers(0, 100_000, size=(1, 64), dtype=np.int32)
    y = platform.jit(apply_rope, rope=Rope(128, 10_000.0))(x, positions)
    before = np.hypot(x[..., :64], x[..., 64:])
    assert_within(np.hypot(y[..., :64], y[..., 64:]), before, 8 * ROUNDOFF * before)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["plain", "llama3"])
def test_scores_depend_on_the_distance_only(platform, name):
    q, k = _x((1, 1, 1, 64), seed=1), _x((1, 1, 1, 64), seed=2)
    bases = np.array([0, 1, 100, 1000, 4000], np.int32)[None]
    rotate = platform.jit(apply_rope, rope=ROPES[name])
    q = rotate(np.repeat(q, 5, axis=1), bases + np.int32(13)).astype(np.float64)
    k = rotate(np.repeat(k, 5, axis=1), bases).astype(np.float64)
    scores = (q * k).sum(axis=-1)
    terms = np.hypot(q[..., :32], q[..., 32:]) * np.hypot(k[..., :32], k[..., 32:])
    # The error of a frequency counts for the distance. The error of the fp32 product of position
    # and frequency counts for both positions.
    angles = bases[..., None] * 2.0 + 13
    error = (_frequency_roundoffs(ROPES[name]) * 13 + 2 * angles + 16) * ROUNDOFF
    assert_within(scores, np.full_like(scores, scores[0, 0, 0]), 2 * (error * terms.sum(axis=-1)))


def test_positions_are_per_row():
    x = np.repeat(_x((1, 4, 2, 64)), 3, axis=0)
    positions = np.array([[0, 1, 2, 3], [9, 10, 11, 12], [0, 1, 2, 3]], np.int32)
    y = PLATFORMS[0].values[0].jit(apply_rope, rope=Rope(64, 10_000.0))(x, positions)
    assert_same_bits(y[0], y[2])
    assert not np.isclose(y[0], y[1]).all(axis=-1).any()


def test_dynamic_scaling_goes_by_the_prompt_and_then_by_the_position():
    """The prompt is rotated by its own length, each later token by its position plus one."""
    rope = ROPES["dynamic"]
    x, positions = _x((1, 4, 1, 64)), np.array([[0, 2499, 2500, 9000]], np.int32)
    rotate = PLATFORMS[0].values[0].jit(apply_rope, rope=rope)
    y = rotate(x, positions, prompt=np.array([2500], np.int32), limit=np.array([1], np.int32))
    for t, length in enumerate([2500, 2500, 2501, 9001]):
        plain = oracle.inverse_frequencies(64, 10_000.0, rope.scaling, length)
        exact = oracle.rope(x[:, t : t + 1], positions[:, t : t + 1], plain)
        bound = _bound(exact, positions[:, t : t + 1], rope, plain, "float32")
        assert_within(y[:, t : t + 1], exact.value, bound)


def test_longrope_is_one_set_of_factors_for_a_whole_sequence():
    x = np.repeat(_x((1, 2, 1, 48)), 2, axis=0)
    positions = np.array([[1, 4095]] * 2, np.int32)
    y = (
        PLATFORMS[0]
        .values[0]
        .jit(apply_rope, rope=ROPES["longrope"])(
            x, positions, prompt=np.array([2, 2], np.int32), limit=np.array([4096, 4097], np.int32)
        )
    )
    for row, factors in enumerate([SHORT, LONG]):
        rope = Rope(48, 10_000.0, LongRope(factors, factors, 1, 1.19))
        one = (
            PLATFORMS[0]
            .values[0]
            .jit(apply_rope, rope=rope)(
                x, positions, prompt=np.ones(2, np.int32), limit=np.ones(2, np.int32)
            )
        )
        assert_same_bits(y[row], one[row])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(63, 1e4), "dim must be positive and even, got 63"),
        (lambda: Rope(0, 1e4), "dim must be positive and even, got 0"),
        (lambda: Rope(-2, 1e4), "dim must be positive and even, got -2"),
        (lambda: Rope(64, 0.0), "theta must exceed 1, got 0.0"),
        (lambda: Rope(64, 1.0), "theta must exceed 1, got 1.0"),
        (lambda: Rope(64, float("nan")), "theta must exceed 1, got nan"),
        (lambda: LinearScaling(-1.0), "factor must be positive, got -1.0"),
        (lambda: Dynamic(0.0, 64), "factor must be positive, got 0.0"),
        (lambda: Dynamic(2.0, 0), "original_max_position must be positive, got 0"),
        (
            lambda: Llama3(8.0, 4.0, 4.0, 8192),
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
        (
            lambda: Yarn(8.0, 4096, 1.0, beta_fast=1.0, beta_slow=1.0),
            "beta_slow must be below beta_fast, got 1.0 and 1.0",
        ),
        (lambda: Yarn(8.0, 4096, 0.0), "attention_factor must be positive, got 0.0"),
        (
            lambda: LongRope((1.0,), (0.0,), 8, 1.0),
            "short_factors and long_factors must be positive",
        ),
        (
            lambda: Rope(64, 1e4, LongRope(SHORT, LONG, 4096, 1.0)),
            "short_factors and long_factors must have 32 values each, got 24 and 24",
        ),
        (lambda: Rope(2, 1e4, Dynamic(2.0, 64)), "dynamic scaling needs dim of at least 4, got 2"),
    ],
)
def test_descriptions_that_mean_nothing(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == f"Rope: {message}"


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_lengths_must_be_given_where_they_matter(name):
    x, positions = jnp.ones((2, 1, 1, 64)), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"^rotation: \w+ needs prompt \[2\], got None$"):
        apply_rope(x, positions, ROPES[name])
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"^rotation: \w+ needs limit \[2\], got \[1\]$"):
        apply_rope(x, positions, ROPES[name], prompt=jnp.ones(2, jnp.int32), limit=one)


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (3,), (3, 4, 1)])
def test_positions_of_the_wrong_shape(shape):
    x, positions = jnp.ones((3, 4, 2, 64)), jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=r"^apply_rope: x must be \[B,T,H,D\] and positions"):
        apply_rope(x, positions, Rope(64, 1e4))


def test_operands_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^apply_rope: rope.dim 128 exceeds the head dim 64$"):
        apply_rope(jnp.ones((1, 1, 1, 64)), jnp.zeros((1, 1), jnp.int32), Rope(128, 1e4))
    with pytest.raises(
        ValueError, match=r"^apply_rope: x must be .* got \[1, 2, 64\] and \[1, 2\]$"
    ):
        apply_rope(jnp.ones((1, 2, 64)), jnp.zeros((1, 2), jnp.int32), Rope(64, 1e4))
    with pytest.raises(ValueError, match=r"^apply_rope: x must be floating point, got int32$"):
        apply_rope(jnp.ones((1, 1, 1, 64), jnp.int32), jnp.zeros((1, 1), jnp.int32), Rope(64, 1e4))


def test_ropes_are_equal_by_value():
    assert hash(Rope(64, 1e4)) == hash(Rope(64, 1e4))
    assert Rope(64, 1e4) == Rope(64, 1e4) != Rope(64, 1e5)
