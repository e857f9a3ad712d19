"""Products of many rows with quantised weights on Hopper: dequantise in a kernel, multiply by XLA.

With many rows, as of prompts, each weight is read by many tiles of the product. So it is written to
memory once, in the dtype of x. Only MXFP4 needs it. For others, `tall_gemm` was faster at all sizes
that were measured, up to 4 096 rows.
"""

import jax
from jax import lax

from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, on_gpu
from fdjax.pallas_kernels.gemm.xla import matmul_xla
from fdjax.pallas_kernels.hopper.dequantise import dequantise_bricks
from fdjax.pallas_kernels.quantised import BITS, PLAIN, WEIGHT_FEATURES

_LEAST_ROWS = 129


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    if shape["m"] < _LEAST_ROWS:
        return f"takes at least {_LEAST_ROWS} rows of quantised weights, got {shape['m']}"
    return group_misfit(shape)


def group_misfit(shape: Shape) -> str | None:
    """Why bricks cannot be dequantised with the groups of a shape of `matmul`; None if they can."""
    group = next((shape[kind] for kind in BITS if kind in shape), None)
    if group is None:
        return "needs a quantised weight"
    if group != 32 and group % 64:
        return f"takes groups of 32 or of multiples of 64, got {group}"
    return None


def _run(x, w, *, layer, config, batch_invariant, **fused):
    if layer is not None:
        w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, keepdims=False), w)
    # As in `MATMUL_XLA`, so that weights are not dequantised long before they are needed.
    x, w = lax.optimization_barrier((x, w))
    return matmul_xla(x, dequantise_bricks(w, x.dtype), **fused)


DEQUANTISED_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"})
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}"}),
    fits=_fits,
    heuristic=on_gpu,
    capabilities=((9, 0), (9, 1)),
)
