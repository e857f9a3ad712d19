"""Linear layer: residual + act(norm(x) @ w + bias), or act(norm(x) @ w_gate) * (norm(x) @ w_up).

FlashDecoding++ (Hong et al. 2024), sections 4 and 5: in the decode phase M is the number of rows in
flight (1-64) and the product is bound by the weight, K·N·itemsize bytes. No implementation runs
faster than those bytes over the memory bandwidth; norm, bias, activation and residual are fused so
that nothing else is read or written but x and y.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.norm import RMSNorm, rms_norm
from fdjax.pallas_kernels.plan import Plan, resolve

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}

# Rows per product in batch-invariant mode: one in the decode phase, a tile of a prefill chunk.
_PREFILL_ROW_TILE = 128


def matmul(
    x: Array,
    w: Array,
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    preferred_element_type=None,
    implementation: str | None = None,
    plan: Plan | None = None,
) -> Array:
    """Linear layer with its neighbours fused.

    Accumulates in fp32; fp32 operands are multiplied in full fp32 precision (never TF32). "xla"
    rounds the product to the result's dtype once before bias, gate and residual.

    Args:
      x: [..., K]; the leading axes together are M.
      w: [K, N], or [K, 2, N] (gate, then up) with `gate`; with `layer` a stack of those, [L, ...].
      layer: index into stacked weights, traced or static.
      norm: RMSNorm applied to the rows of x first.
      bias: [N], or [2, N] with `gate`; added to the product.
      gate: activation name; the result is act(gate) * up.
      residual: [..., N], added last.
      preferred_element_type: dtype of the result, default that of x.
      implementation: "xla" | "mosaic_gpu"; it never falls back.
      plan: consulted when no implementation is named; without either, XLA.

    Returns:
      [..., N].

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this.

    Costs K·N·itemsize bytes of weight (2·K·N·itemsize with `gate`) and 2·M·K·N FLOPs (4·M·K·N).
    """
    k, n = _check(x, w, layer, norm, bias, gate, residual)
    dtype = jnp.dtype(preferred_element_type or x.dtype)
    rows = x.reshape(-1, k)
    if residual is not None:
        residual = residual.reshape(-1, n)
    choice = resolve(
        plan,
        implementation,
        "matmul",
        m=rows.shape[0],
        k=k,
        n=n * (2 if gate else 1),
        itemsize=x.dtype.itemsize,
    )
    if choice.implementation != "xla":
        raise NotImplementedError(f"matmul: no {choice.implementation!r} implementation")
    if layer is not None:
        w = lax.dynamic_index_in_dim(w, layer, keepdims=False)
    if plan is not None and plan.batch_invariant:
        y = _matmul_row_tiles(rows, w, norm, bias, gate, residual, dtype)
    else:
        y = _matmul_xla(rows, w, norm, bias, gate, residual, dtype)
    return y.reshape(*x.shape[:-1], n)


def matmul_reference(x, w, *, norm=None, bias=None, gate=None, residual=None) -> Array:
    """What `matmul` must equal: every step in fp32. x [M,K], w [K,N] or [K,2,N]; returns fp32."""
    f32 = jnp.float32
    x = x.astype(f32)
    if norm is not None:
        x = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + norm.eps)
        x = x * norm.scale.astype(f32)[None]
    y = jnp.tensordot(x, w.astype(f32), axes=1, precision="highest")
    if bias is not None:
        y = y + bias.astype(f32)[None]
    if gate is not None:
        y = ACTIVATIONS[gate](y[:, 0]) * y[:, 1]
    if residual is not None:
        y = y + residual.astype(f32)
    return y


def _matmul_xla(x, w, norm, bias, gate, residual, dtype):
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


def _matmul_row_tiles(x, w, norm, bias, gate, residual, dtype):
    """`_matmul_xla` over tiles of fixed height: a row's bits do not depend on its batch.

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
        part = _matmul_xla(rows[0], w, norm, bias, gate, rows[1] if rows[1:] else None, dtype)
        return lax.dynamic_update_index_in_dim(y, part, i, 0)

    # A single tile takes the loop too, at a count the compiler does not know: unrolled, it would be
    # fused with its neighbours and rounded otherwise.
    count = lax.optimization_barrier(jnp.int32(tiles))
    y = lax.fori_loop(0, count, product, jnp.zeros((tiles, tile, w.shape[-1]), dtype))
    return y.reshape(tiles * tile, -1)[:m]


def _check(x, w, layer, norm, bias, gate, residual) -> tuple[int, int]:
    """Validate shapes; returns (K, N)."""
    if gate is not None and gate not in ACTIVATIONS:
        raise ValueError(f"matmul: gate must be one of {', '.join(ACTIVATIONS)}, got {gate!r}")
    axes = ("L," if layer is not None else "") + ("K,2,N" if gate else "K,N")
    if x.ndim < 1:
        raise ValueError("matmul: x must be [...,K], got a scalar")
    if w.ndim != axes.count(",") + 1:
        raise ValueError(f"matmul: w must be [{axes}], got {list(w.shape)}")
    shape = w.shape[1:] if layer is not None else w.shape
    k, n = shape[0], shape[-1]
    if x.shape[-1] != k:
        raise ValueError(f"matmul: x {list(x.shape)} and w {list(w.shape)} disagree on K")
    if gate is not None and shape[1] != 2:
        raise ValueError(f"matmul: with gate, w must be [K,2,N], got {list(w.shape)}")
    if x.dtype != w.dtype:
        raise ValueError(f"matmul: x is {x.dtype} but w is {w.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"matmul: x and w must be floating point, got {x.dtype}")
    if isinstance(layer, int) and not 0 <= layer < w.shape[0]:
        raise ValueError(f"matmul: layer must be in 0..{w.shape[0] - 1}, got {layer}")
    if norm is not None and norm.scale.shape != (k,):
        raise ValueError(f"matmul: norm.scale must be [{k}], got {list(norm.scale.shape)}")
    if bias is not None and bias.shape != shape[1:]:
        raise ValueError(f"matmul: bias must be {list(shape[1:])}, got {list(bias.shape)}")
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        raise ValueError(
            f"matmul: residual must be {[*x.shape[:-1], n]}, got {list(residual.shape)}"
        )
    return k, n
