"""`matmul` through XLA: one dot, with elementwise operations before and after it."""

import jax
import jax.numpy as jnp
from jax import lax

from fdjax.pallas_kernels.activations import UNGATED, gated
from fdjax.pallas_kernels.dispatch import Implementation
from fdjax.pallas_kernels.norm import normalised
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES, QTensor, dequantise
from fdjax.pallas_kernels.row_tiles import in_row_tiles

# Terms that a CPU adds one after the other, the largest number of rows for which that is fast, and
# of sums of blocks, which exist at the same time: 64 MB.
_CPU_BLOCK, _CPU_ROWS, _CPU_SUMS = 32, 32, 2**24


def matmul_xla(x, w, *, norm, bias, gate, residual, dtype, activation=None, transposed=False):
    """One dot and elementwise operations that XLA may fuse. x [M,K], w [K,N] or [K,2,N].

    `transposed` says that the memory of w is [N,K].
    """
    if norm is not None:
        x = normalised(x, norm)
    # The product is rounded to the result's dtype before the epilogue. On an H100, this makes a
    # decode step of Llama 2 7B 8 % faster than an fp32 product (benchmarks/LOG.md).
    result = jnp.float32 if _is_rounded_by_term(x, w) else dtype
    y = _product(x, w.reshape(w.shape[0], -1), result, transposed)
    y = y.astype(dtype).reshape(x.shape[0], *w.shape[1:])
    if bias is not None:
        y = y.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    if gate is not None:
        y = y.astype(jnp.float32)
        y = gated(gate, y[:, 0], y[:, 1])
    if activation is not None:
        y = UNGATED[activation](y.astype(jnp.float32))
    if residual is not None:
        # Without conversions, XLA can add it within the product, and then rounds only once.
        wide = y.dtype if y.dtype == residual.dtype else jnp.float32
        y = y.astype(wide) + residual.astype(wide)
    return y.astype(dtype)


def _product(x, w, dtype, transposed):
    """The dot of x [M,K] and w [K,N], in `dtype`.

    A CPU adds the K terms of an fp32 product one after the other. For a few rows, sums of blocks
    have a quarter of that error and take less time.
    """
    options = {"preferred_element_type": dtype}
    if x.dtype == jnp.float32:
        options["precision"] = lax.Precision.HIGHEST

    def dot(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), **options)

    def in_blocks(x, w):
        count = len(w) // _CPU_BLOCK
        x, w = x.reshape(len(x), count, _CPU_BLOCK), w.reshape(count, _CPU_BLOCK, -1)
        return jnp.sum(lax.dot_general(x, w, (((2,), (1,)), ((1,), (0,))), **options), axis=0)

    def by_column(x, w):
        return lax.dot_general(w.T, x, (((1,), (1,)), ((), ())), **options).T

    full = x.dtype == w.dtype == dtype == jnp.float32
    if transposed:
        on_cpu = by_column if full and len(x) == 1 else dot
    else:
        few = len(x) <= _CPU_ROWS and len(x) * w.size <= _CPU_SUMS * _CPU_BLOCK
        on_cpu = in_blocks if full and few and not len(w) % _CPU_BLOCK else dot
    return dot(x, w) if on_cpu is dot else lax.platform_dependent(x, w, cpu=on_cpu, default=dot)


def _is_rounded_by_term(x, w) -> bool:
    """Whether XLA may round every term of the sums to the dtype of the result.

    It does so when it turns a small matrix-vector product into a multiplication and a sum, on a GPU
    up to about 10 million weights.
    """
    return min(x.shape[0], w.size // w.shape[0]) == 1 and w.size < 2**24


def matmul_row_tiles(x, w, *, residual, **fused):
    """`matmul_xla` over tiles of fixed height, so that a row's bits do not depend on its batch."""

    def product(x, residual=None):
        return matmul_xla(x, w, residual=residual, **fused)

    return in_row_tiles(product, x) if residual is None else in_row_tiles(product, x, residual)


def _run(x, w, *, layer, config, batch_invariant, **fused):
    if layer is not None:
        w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, keepdims=False), w)
    if isinstance(w, QTensor):
        # Without the barrier, XLA would dequantise the weights of all layers before a decode loop
        # and hold them in memory.
        x, w = lax.optimization_barrier((x, w))
        w = dequantise(w, x.dtype)
    return (matmul_row_tiles if batch_invariant else matmul_xla)(x, w, **fused)


MATMUL_XLA = Implementation(
    "matmul",
    "xla",
    _run,
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual", "transposed"})
    | WEIGHT_FEATURES,
)
