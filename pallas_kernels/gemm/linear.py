"""Linear layer: act(norm(x) @ w + bias) + residual, or with a gate act(gate) * up + residual.

FlashDecoding++ (Hong et al. 2024), sections 4 and 5: in the decode phase M is the number of rows in
flight (1-128), and the product is bound by reading K·N·itemsize bytes of weight. No implementation
can run faster than those bytes over the memory bandwidth. Norm, bias, activation and residual are
fused, so that beside the weight only x and y (and a residual) are read or written.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS, UNGATED
from fdjax.pallas_kernels.dispatch import Dispatch, resolve
from fdjax.pallas_kernels.gemm.hopper.dequantised import DEQUANTISED_GEMM
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import FLAT_GEMM
from fdjax.pallas_kernels.gemm.hopper.fp8_gemm import FP8_GEMM
from fdjax.pallas_kernels.gemm.hopper.int8_gemm import INT8_GEMM
from fdjax.pallas_kernels.gemm.hopper.packed_gemm import PACKED_GEMM
from fdjax.pallas_kernels.gemm.hopper.prompt_gemm import PROMPT_GEMM
from fdjax.pallas_kernels.gemm.hopper.tall_gemm import TALL_GEMM
from fdjax.pallas_kernels.gemm.xla import MATMUL_XLA
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.quantised import QTensor, check

MATMUL = (
    *(PROMPT_GEMM, FLAT_GEMM, FP8_GEMM, INT8_GEMM, TALL_GEMM, PACKED_GEMM, DEQUANTISED_GEMM),
    MATMUL_XLA,
)


def matmul(
    x: Array,
    w: Array | QTensor,
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | LayerNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    transposed: bool = False,
    preferred_element_type=None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> Array:
    """Linear layer fused with norm, bias, gate or activation, and residual.

    It accumulates in fp32 and multiplies fp32 operands in full fp32 precision, never TF32. "xla"
    also rounds the product to the result's dtype before bias, gate and residual, and a quantised
    weight to the dtype of x.

    Args:
      x: [..., K]; M is the product of the leading axes.
      w: [K, N], or [K, 2, N] (gate, then up) with `gate`; with `layer` a stack of these, [L, ...].
        An array, or a `QTensor` whose arrays have these axes.
      layer: index into stacked weights, traced or static.
      norm: RMSNorm or LayerNorm, applied to the rows of x first.
      bias: [N], or [2, N] with `gate`; added to the product.
      gate: name of the activation; the result is then act(gate) * up.
      activation: name of an activation of the product and its bias, one of `UNGATED`; not with
        `gate`.
      residual: [..., N], added last.
      transposed: whether w is the transpose of an array in memory.
      preferred_element_type: dtype of the result; default the dtype of x.
      implementation: "xla" | "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      [..., N].

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this.

    Costs the bytes of the weight and 2·M·K·N FLOPs (4·M·K·N with `gate`).
    """
    k, n = _check(x, w, layer, norm, bias, gate, activation, residual)
    dtype = jnp.dtype(preferred_element_type or x.dtype)
    rows = x.reshape(-1, k)
    if residual is not None:
        residual = residual.reshape(-1, n)
    fused = {"norm": norm, "bias": bias, "gate": gate, "residual": residual}
    if activation is not None:  # implementations from outside may not know it
        fused["activation"] = activation
    used = frozenset(name for name, operand in fused.items() if operand is not None)
    if isinstance(norm, LayerNorm):
        used = used - {"norm"} | {"layer_norm"}
    features = used
    if transposed:
        fused["transposed"], features = True, used | {"transposed"}
    weight = w.format if isinstance(w, QTensor) else None
    chosen, config = resolve(
        MATMUL,
        plan,
        implementation,
        features | (weight.features if weight else frozenset()),
        m=rows.shape[0],
        k=k,
        n=n * (2 if gate else 1),
        itemsize=x.dtype.itemsize,
        gate=int(gate is not None),
        fused=int(bool(used)),
        **(weight.key if weight else {}),
    )
    y = chosen.run(
        *(rows, w),
        layer=layer,
        **fused,
        dtype=dtype,
        config=config,
        batch_invariant=plan is not None and plan.batch_invariant,
    )
    return y.reshape(*x.shape[:-1], n)


def _check(x, w, layer, norm, bias, gate, activation, residual) -> tuple[int, int]:
    """Check shapes and dtypes; returns (K, N)."""
    if gate is not None and gate not in ACTIVATIONS:
        raise ValueError(f"matmul: gate must be one of {', '.join(ACTIVATIONS)}, got {gate!r}")
    if activation is not None and (gate is not None or activation not in UNGATED):
        raise ValueError(
            f"matmul: activation must be one of {', '.join(UNGATED)}, and None with a gate, "
            f"got {activation!r}"
        )
    axes = ("L," if layer is not None else "") + ("K,2,N" if gate else "K,N")
    if x.ndim < 1:
        raise ValueError("matmul: x must be [...,K], got a scalar")
    full, quantised = w.shape, isinstance(w, QTensor)
    if quantised:
        check(w, "matmul", stacked=layer is not None)
        full = (*w.stack, *w.shape)
    if len(full) != axes.count(",") + 1:
        raise ValueError(f"matmul: w must be [{axes}], got {list(full)}")
    shape = full[1:] if layer is not None else full
    k, n = shape[0], shape[-1]
    if x.shape[-1] != k:
        raise ValueError(f"matmul: x {list(x.shape)} and w {list(full)} disagree on K")
    if not k:
        raise ValueError("matmul: K must be at least 1, got 0")
    if gate is not None and shape[1] != 2:
        raise ValueError(f"matmul: with gate, w must be [K,2,N], got {list(full)}")
    if not quantised and x.dtype != w.dtype:
        raise ValueError(f"matmul: x is {x.dtype} but w is {w.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"matmul: x and w must be floating point, got {x.dtype}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < full[0]:
        raise ValueError(f"matmul: layer must be in 0..{full[0] - 1}, got {layer}")
    if norm is not None and norm.scale.shape != (k,):
        raise ValueError(f"matmul: norm.scale must be [{k}], got {list(norm.scale.shape)}")
    shift = norm.bias if isinstance(norm, LayerNorm) else None
    if shift is not None and shift.shape != (k,):
        raise ValueError(f"matmul: norm.bias must be [{k}], got {list(shift.shape)}")
    if bias is not None and bias.shape != shape[1:]:
        raise ValueError(f"matmul: bias must be {list(shape[1:])}, got {list(bias.shape)}")
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        raise ValueError(
            f"matmul: residual must be {[*x.shape[:-1], n]}, got {list(residual.shape)}"
        )
    return k, n
