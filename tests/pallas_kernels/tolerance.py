"""How far an op may be from the float64 oracle: one table, by dtype and reduction length.

Operands are rounded before the oracle sees them, so only the roundings inside an op remain:

* fp32 arithmetic, `Tolerance.sum`. A sum of n terms is off by at most 4·√n·2⁻²⁴ of the sum of
  absolute terms (Higham and Mary 2019: roundings are almost independent, so they grow as √n; 4
  standard deviations). exp, tanh, erf and the few operations around them add at most 16 units.
  TF32 or a bf16 accumulator would exceed this by orders of magnitude.
* Intermediate results in a narrower dtype, `Tolerance.rounding`. A normalised x, a product before
  its epilogue, P before the second product and a partial result before a merge are off by the unit
  roundoff of that dtype.
* Underflow, `Tolerance.underflow`. P below the smallest subnormal of the dtype vanishes, which
  matters for float16 only. It counts per term of the sum, relative to the largest P, which is 1.
* The result is rounded once to its own dtype.

Each is multiplied by the magnitude that the oracle gives with the exact value.
"""

import dataclasses

import numpy as np

from .oracle import Exact, ExactAttention

_FP32_ROUNDOFF = 2.0**-24

# dtype: (unit roundoff, half the smallest subnormal).
_FORMATS = {
    "float32": (_FP32_ROUNDOFF, 2.0**-150),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float16": (2.0**-11, 2.0**-25),
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    sum: float
    rounding: float
    underflow: float


def tolerance(dtype: str, length: int) -> Tolerance:
    """The tolerances for operands of `dtype` and sums of `length` terms."""
    roundoff, underflow = _FORMATS[dtype]
    return Tolerance((4 * length**0.5 + 16) * _FP32_ROUNDOFF, roundoff, length * underflow)


def assert_within(actual, value, bound, what: str = "") -> None:
    """Assert |actual - value| <= bound everywhere. Infinities must agree; NaN always fails."""
    actual, value = np.asarray(actual).astype(np.float64), np.asarray(value, np.float64)
    assert actual.shape == value.shape, f"{what}: shape {actual.shape}, expected {value.shape}"
    bound = np.broadcast_to(bound, value.shape)
    infinite = np.isinf(value)
    with np.errstate(invalid="ignore"):
        wrong = np.where(infinite, actual != value, ~(np.abs(actual - value) <= bound))
    if wrong.any():
        worst = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} wrong, first at {worst}: got {actual[worst]}, "
            f"expected {value[worst]} ± {bound[worst]:.3g}"
        )


def assert_same_bits(a, b, what: str = "") -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    different = a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")
    assert not different.any(), f"{what}: {different.sum()} of {different.size} elements differ"


def assert_matmul(
    actual,
    exact: Exact,
    *,
    dtype: str,
    result: str,
    k: int,
    normed: bool,
    fused: bool,
    quantised: bool = False,
) -> None:
    """Assert that a product is right; `dtype` is that of the operands and of the normalised x.

    Before a fused epilogue, the product may be rounded to the dtype of the result. A quantised
    weight may be rounded to `dtype`.
    """
    row, output = tolerance(dtype, k), tolerance(result, 1)
    # The norm adds one more sum over K and one more rounding to the dtype of x.
    inner = 2 * row.sum + row.rounding if normed else row.sum
    inner += row.rounding * quantised
    bound = inner * exact.magnitude + output.rounding * np.abs(exact.value)
    if fused:
        bound = bound + output.rounding * exact.product
    # Results below the normal range of float16 are off by an absolute amount.
    assert_within(actual, exact.value, bound + output.underflow, "matmul")


def attention_bounds(exact: ExactAttention, *, dtype: str, d: int, s: int, quantised: bool = False):
    """Bounds of (o, lse); `dtype` is that of P, partial results and o.

    Keys and values of a quantised cache may be rounded to `dtype`.
    """
    scores, weights = tolerance(dtype, d), tolerance(dtype, s)
    cache = weights.rounding * quantised
    # Rounding P changes numerator and denominator, and two halves may be rounded before a merge.
    o = (
        (2 * scores.sum + cache) * exact.o_per_score
        + (3 * weights.rounding + weights.sum + cache) * exact.o_magnitude
        + weights.rounding * np.abs(exact.o)
        + weights.underflow * exact.largest_value[..., None]
        + tolerance(dtype, 1).underflow
    )
    lse = (
        (2 * scores.sum + cache) * exact.lse_per_score
        + weights.rounding
        + weights.sum
        + weights.underflow
        + 4 * _FP32_ROUNDOFF * np.abs(np.where(np.isinf(exact.lse), 0, exact.lse))
    )
    return o, lse


def assert_attention(o, lse, exact: ExactAttention, **sizes) -> None:
    """Assert that both are right; `sizes` are keywords of `attention_bounds`."""
    o_bound, lse_bound = attention_bounds(exact, **sizes)
    assert_within(o, exact.o, o_bound, "o")
    assert_within(lse, exact.lse, lse_bound, "lse")
