"""The reference of `moe`."""

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import gated
from fdjax.pallas_kernels.experts.routing import Routing


def moe_reference(
    x,
    logits,
    gate_up,
    down,
    *,
    routing: Routing,
    gate: str,
    bias=None,
    gate_up_bias=None,
    down_bias=None,
) -> Array:
    """The reference of `moe`, every step in fp32: every expert computes every row; returns fp32."""
    f32 = jnp.float32
    x, logits, gate_up, down = (a.astype(f32) for a in (x, logits, gate_up, down))
    products = jnp.einsum("me,xegf->xmgf", x, gate_up, precision="highest")
    if gate_up_bias is not None:
        products = products + gate_up_bias.astype(f32)[:, None]
    hidden = gated(gate, products[:, :, 0], products[:, :, 1])
    results = jnp.einsum("xmf,xfe->mxe", hidden, down, precision="highest")
    if down_bias is not None:
        results = results + down_bias.astype(f32)[None]
    scores = jax.nn.sigmoid(logits) if routing.sigmoid else jax.nn.softmax(logits, axis=1)
    ranked = scores if bias is None else scores + bias.astype(f32)[None]
    if routing.groups > 1:
        grouped = ranked.reshape(len(x), routing.groups, -1)
        best = jnp.sum(jnp.sort(grouped, axis=2)[:, :, -2:], axis=2)
        kept = _rank(best) < routing.chosen_groups
        ranked = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
    is_chosen = _rank(ranked) < routing.chosen
    weights = jnp.where(is_chosen, scores, 0.0)
    if routing.normalised:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    # Selected instead of multiplied, because 0 · NaN is NaN.
    parts = jnp.where(is_chosen[:, :, None], weights[:, :, None] * results, 0.0)
    return routing.scale * jnp.sum(parts, axis=1)


def _rank(values: Array) -> Array:
    """[M,N] → the place of each value in its row, in descending order. Ties keep their order."""
    order = jnp.argsort(-values, axis=1, stable=True)
    return jnp.argsort(order, axis=1, stable=True)
