"""Attention sinks: a logit for each head that takes a share of the softmax and has no value.

With l = logsumexp of a query's scores, a sink s changes softmax(scores) V to
o · exp(l) / (exp(l) + exp(s)) (gpt-oss, OpenAI 2025; Xiao et al. 2023). So sinks can be applied
after any implementation that returns l.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.row_tiles import in_row_tiles

# Rows of a tile if bits must not depend on the batch. A CPU uses different code for the
# exponentials of whole vectors and of the remainder of an array. With this tile there is no
# remainder.
_TILE = 16


def apply_sinks(
    o: Array, lse: Array, sinks: Array, *, batch_invariant: bool = False
) -> tuple[Array, Array]:
    """Add sinks to the result of an attention without sinks.

    Args:
      o: [B, T, H, D].
      lse: [B, T, H] fp32.
      sinks: [H] floating point.
      batch_invariant: whether the bits of a row must not depend on B and T.

    Returns:
      (o in its dtype, lse including the sinks). A query that sees no slot has o = 0 and lse = its
      sink.
    """
    sinks = sinks.astype(jnp.float32)[None]

    def apply(o, lse):
        # Without a slot, both may be -inf, whose difference is NaN.
        share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
        o = (o.astype(jnp.float32) * share[..., None]).astype(o.dtype)
        return o, jnp.logaddexp(lse, sinks)

    rows = o.reshape(-1, *o.shape[2:]), lse.reshape(-1, lse.shape[2])
    o_rows, lse_rows = in_row_tiles(apply, *rows, tile=_TILE) if batch_invariant else apply(*rows)
    return o_rows.reshape(o.shape), lse_rows.reshape(lse.shape)
