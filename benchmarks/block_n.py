"""Flat GEMM over N and B_N, like Fig. 7 of FlashDecoding++: `python -m benchmarks.block_n`.

It multiplies x [8,K] by w [K,N]. Narrow blocks are many and fill the device. Wide blocks read
longer contiguous pieces.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp

from fdjax.bench.suite import Case, main
from fdjax.pallas_kernels.gemm import FlatGemmConfig, matmul_reference
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import matmul_flat_gemm

M = 8
KS = (4096, 12288)
NS = (1024, 2048, 4096, 8192, 16384, 32768)
BLOCKS = (64, 128, 256)


def _operands(k: int, n: int, seed: int):
    x_key, w_key = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(x_key, (M, k), jnp.bfloat16)
    return x, jax.random.normal(w_key, (k, n), jnp.bfloat16)


def _kernel(x, w, *, block_n: int):
    config = FlatGemmConfig(block_n=block_n, block_k=64, stages=4)
    return matmul_flat_gemm(x, w, dtype=w.dtype, config=config)


def case(k: int, n: int) -> Case:
    return Case(
        name=f"K={k} N={n}",
        make_args=functools.partial(_operands, k, n),
        implementations={f"block_n={b}": functools.partial(_kernel, block_n=b) for b in BLOCKS},
        reference=matmul_reference,
        bytes=2 * (k * n + M * (k + n)),
        flops=2 * M * k * n,
        tolerance=2e-2,
    )


CASES = [case(k, n) for k, n in itertools.product(KS, NS)]

if __name__ == "__main__":
    sys.exit(main(CASES, matmul_size=0))
