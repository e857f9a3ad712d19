"""The measured ceiling of a device: streaming-read bandwidth and matrix-multiply rate."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.bench.timing import Timing, measure

# Below this GB/s, about 88 % of the data sheet, something else used or slowed the device.
_LEAST_GB_PER_S = {"NVIDIA H100 80GB HBM3": 2950.0, "NVIDIA H200": 4200.0}


def _normal(shape: tuple[int, ...], dtype: jnp.dtype, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# name → (function of a matrix and a matching vector, dtype, length of the vector)
_READS: dict[str, tuple[Callable, jnp.dtype, int]] = {
    "vector_matrix_bf16": (lambda w, v: v @ w, jnp.bfloat16, 4096),
    "matrix_vector_bf16": (lambda w, v: v @ w.T, jnp.bfloat16, 4096),
    "row_sum_bf16": (lambda x, _: x.sum(axis=1, dtype=jnp.float32), jnp.bfloat16, 4096),
    "row_sum_f32": (lambda x, _: x.sum(axis=1), jnp.float32, 4096),
    "row_max_f32": (lambda x, _: x.max(axis=1), jnp.float32, 8192),
}


def _time_read(name: str, total_bytes: int, runs: int) -> tuple[float, Timing]:
    function, dtype, length = _READS[name]
    length = min(length, total_bytes // 256)
    other = total_bytes // jnp.dtype(dtype).itemsize // length
    shape = (length, other) if name == "vector_matrix_bf16" else (other, length)
    x = _normal(shape, dtype)
    timing = measure(function, [(x, _normal((1, length), dtype, 1))], runs=runs)
    return x.nbytes / timing.median_us / 1e3, timing


def matmul_ceiling(size: int = 8192, *, runs: int = 10) -> float:
    """Measure the TFLOP/s (1e12 per second) of a bf16 matrix product with M = N = K = `size`."""
    a, b = (_normal((size, size), jnp.bfloat16, seed) for seed in (0, 1))
    return 2 * size**3 / measure(jnp.matmul, [(a, b)], runs=runs).median_us / 1e6


def measure_ceiling(
    total_bytes: int = 2**30,
    *,
    matmul_size: int = 8192,
    kernels: Sequence[str] = tuple(_READS),
    runs: int = 20,
) -> dict[str, Any]:
    """Measure the best rates of the first device, and whether to trust them.

    Args:
      total_bytes: bytes that each read kernel reads. Outside tests use 1 GiB or more, so that a
        buffer evicts itself from L2.
      matmul_size: M = N = K of the matrix product; 0 skips it.
      kernels: read kernels to try. The one with the fastest median is the ceiling.
      runs: timed calls of each.

    Returns:
      `device_kind`, `clock`, `bytes`, `reads` (1e9 bytes per second by kernel), `read_kernel`
      and `read_gb_per_s` (the fastest), `matmul_tflop_per_s` (None if skipped), `trusted` (False
      if CUPTI did not measure it or the device is known to be faster, None if no expectation is
      known), and `reason`.
    """
    kind, reads, clock = jax.devices()[0].device_kind, {}, ""
    for name in kernels:
        reads[name], timing = _time_read(name, total_bytes, runs)
        clock = timing.clock
    best = max(reads, key=reads.__getitem__)
    least, reason = _LEAST_GB_PER_S.get(kind), None
    if least is None:
        reason = f"no expectation for {kind}"
    elif clock != "cupti":
        reason = f"clock must be cupti, got {clock}"
    elif reads[best] < least:
        reason = f"read bandwidth must reach {least:.0f} GB/s, got {reads[best]:.0f}"
    return {
        "device_kind": kind,
        "clock": clock,
        "bytes": total_bytes,
        "reads": reads,
        "read_kernel": best,
        "read_gb_per_s": reads[best],
        "matmul_tflop_per_s": matmul_ceiling(matmul_size) if matmul_size else None,
        "trusted": None if least is None else reason is None,
        "reason": reason,
    }
