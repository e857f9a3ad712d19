"""Quantised weights in NumPy float64, written from the docstrings of `pallas_kernels.quantised`."""

import numpy as np


def e4m3_values() -> np.ndarray:
    """[256] the value of each code: 4 bits of exponent with bias 7, no infinities."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    values = np.where(exponent == 0, 2.0**-6 * mantissa / 8, normal)
    values = np.where((codes & 127) == 127, np.nan, values)
    return np.where(codes >> 7, -values, values)


# OCP Microscaling Formats 1.0, section 5.3.3.
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)])


def codes_of(words, bits: int, k: int) -> np.ndarray:
    """Words [W, ...] int32 → codes [K, ...]."""
    words = np.asarray(words).view(np.uint32).astype(np.uint64)
    row = np.arange(k)
    shift = (row % (32 // bits) * bits).astype(np.uint64).reshape(-1, *[1] * (words.ndim - 1))
    return (words[row // (32 // bits)] >> shift & np.uint64(2**bits - 1)).astype(np.int64)


def dequantised(q) -> np.ndarray:
    """The exact weight of a `QTensor`, float64."""
    k = q.shape[0]
    bits = 4 if q.kind in ("int4", "fp4") else 8
    codes = codes_of(q.words, bits, k)
    if q.kind == "fp8":
        values = e4m3_values()[codes]
    elif q.kind == "fp4":
        values = E2M1_VALUES[codes]
    elif q.zeros is None:
        values = codes - 2.0 ** (bits - 1)
    else:
        values = codes - np.repeat(np.asarray(q.zeros).astype(np.float64), q.group, axis=0)
    return values * np.repeat(np.asarray(q.scales).astype(np.float64), q.group, axis=0)
