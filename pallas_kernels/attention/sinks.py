"""Attention sinks: a logit for each head that takes a share of the softmax and has no value.

With l = logsumexp of a query's scores, a sink s changes softmax(scores) V to
o · exp(l) / (exp(l) + exp(s)) (gpt-oss, OpenAI 2025; Xiao et al. 2023). So it is applied after any
implementation that returns l.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.row_tiles import in_row_tiles


def apply_sinks(
    o: Array, lse: Array, sinks: Array, *, batch_invariant: bool = False
) -> tuple[Array, Array]:
    """Add sinks to the result of an attention without them.

    Args:
      o: [B, T, H, D].
      lse: [B, T, H] fp32.
      sinks: [H] floating point.
      batch_invariant: bits of a row do not depend on B and T.

    Returns:
      (o in its dtype, lse with the sinks). Where a query sees no slot, they are 0 and the sinks.
    """
    sinks = sinks.astype(jnp.float32)[None]

    def apply(o, lse):
        share = jax.nn.sigmoid(lse - sinks)
        o = (o.astype(jnp.float32) * share[..., None]).astype(o.dtype)
        return o, jnp.logaddexp(lse, sinks)

    run = (lambda *rows: in_row_tiles(apply, *rows)) if batch_invariant else apply
    o_rows, lse_rows = run(o.reshape(-1, *o.shape[2:]), lse.reshape(-1, lse.shape[2]))
    return o_rows.reshape(o.shape), lse_rows.reshape(lse.shape)
