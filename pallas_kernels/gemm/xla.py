"""`matmul` through XLA: one dot with elementwise neighbours."""

import jax.numpy as jnp
from jax import lax

from fdjax.pallas_kernels.gemm.activations import ACTIVATIONS
from fdjax.pallas_kernels.norm import rms_norm

# Rows per product in batch-invariant mode: one in the decode phase, a tile of a prefill chunk.
_PREFILL_ROW_TILE = 128


def matmul_xla(x, w, *, norm, bias, gate, residual, dtype):
    """One dot with elementwise neighbours, which XLA fuses. x [M,K], w [K,N] or [K,2,N]."""
    if norm is not None:
        x = rms_norm(x, norm.scale, eps=norm.eps)
    # The product is rounded to the result's dtype before its epilogue. On an H100 that is worth
    # 8 % of a Llama2-7B decode step over an fp32 product (benchmarks/LOG.md).
    y = lax.dot_general(
        x,
        w.reshape(w.shape[0], -1),
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32 if _is_rounded_by_term(x, w) else dtype,
    )
    y = y.astype(dtype).reshape(x.shape[0], *w.shape[1:])
    if bias is not None:
        y = y.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    if gate is not None:
        y = y.astype(jnp.float32)
        y = ACTIVATIONS[gate](y[:, 0]) * y[:, 1]
    if residual is not None:
        y = y.astype(jnp.float32) + residual.astype(jnp.float32)
    return y.astype(dtype)


def _is_rounded_by_term(x, w) -> bool:
    """Whether XLA would round every term of the sums to the dtype of the result.

    It does where it turns a small matrix-vector product, up to about 10 million weights on a GPU,
    into a multiplication and a sum.
    """
    return min(x.shape[0], w.size // w.shape[0]) == 1 and w.size < 2**24


def matmul_row_tiles(x, w, *, norm, bias, gate, residual, dtype):
    """`matmul_xla` over tiles of fixed height: a row's bits do not depend on its batch.

    XLA picks another blocking of K for another M, so the rows of one large product and of several
    small ones differ in the last bit.
    """
    m = x.shape[0]
    tile = 1 if m < _PREFILL_ROW_TILE else _PREFILL_ROW_TILE
    tiles = max(1, -(-m // tile))
    operands = [x] if residual is None else [x, residual]
    operands = [
        jnp.pad(a, ((0, tiles * tile - m), (0, 0))).reshape(tiles, tile, a.shape[1])
        for a in operands
    ]

    def product(i, y):
        rows = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in operands]
        part = matmul_xla(
            rows[0],
            w,
            norm=norm,
            bias=bias,
            gate=gate,
            residual=rows[1] if rows[1:] else None,
            dtype=dtype,
        )
        return lax.dynamic_update_index_in_dim(y, part, i, 0)

    # A single tile takes the loop too, at a count the compiler does not know: unrolled, it would be
    # fused with its neighbours and rounded otherwise.
    count = lax.optimization_barrier(jnp.int32(tiles))
    y = lax.fori_loop(0, count, product, jnp.zeros((tiles, tile, w.shape[-1]), dtype))
    return y.reshape(tiles * tile, -1)[:m]
