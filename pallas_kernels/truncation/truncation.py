"""`truncate`: leaves the tokens that top-k, top-p, min-p and typical-p allow to be drawn."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.dispatch import Dispatch, Implementation, resolve
from fdjax.pallas_kernels.truncation.hopper.truncate import TRUNCATE_HOPPER
from fdjax.pallas_kernels.where_asked import where_asked


def _xla(scores, top_k, top_p, min_p, typical_p, least):
    def or_first(kept, scores, distance):
        if least is None:
            return kept
        ones = jnp.ones_like(scores)
        return jnp.maximum(kept, _keep_first(scores, distance, ones, least.astype(jnp.float32)))

    def keep_top_k(scores):
        limit = jnp.where(top_k > 0, top_k, scores.shape[-1]).astype(jnp.float32)
        kept = _keep_first(scores, -scores, jnp.ones_like(scores), limit)
        return or_first(kept, scores, -scores)

    def keep_top_p(scores):
        p = jnp.exp(scores)
        limit = jnp.where(top_p < 1, top_p * jnp.sum(p, axis=-1), jnp.inf)
        return or_first(_keep_first(scores, -scores, p, limit), scores, -scores)

    def keep_min_p(scores):
        kept = jnp.where(scores >= jnp.log(min_p)[:, None], scores, -jnp.inf)
        return or_first(kept, scores, -scores)

    def keep_typical(scores):
        logp = jax.nn.log_softmax(scores, axis=-1)
        p = jnp.exp(logp)
        entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1, keepdims=True)
        limit = jnp.where(typical_p < 1, typical_p, jnp.inf)
        distance = jnp.abs(logp + entropy)
        return or_first(_keep_first(scores, distance, p, limit), scores, distance)

    scores = where_asked(top_k > 0, keep_top_k, scores)
    scores = where_asked(top_p < 1, keep_top_p, scores)
    scores = where_asked(min_p > 0, keep_min_p, scores)
    return where_asked(typical_p < 1, keep_typical, scores)


def _keep_first(scores, distance, weights, limit):
    """Keep each token for which the tokens before it, by distance, weigh less than the limit.

    It finds the greatest distance that is kept, digit by digit. Sorting would take many kernels,
    and a library's sort cannot be part of a CUDA graph.

    Args:
      scores: [B, V] fp32.
      distance: [B, V] fp32, at least 0. Small distances come first. Tokens at the same distance are
        all kept or all dropped.
      weights: [B, V] fp32, at least 0.
      limit: [B] fp32. The first token is kept even if the limit is 0.

    Returns:
      [B, V] the scores, with -inf for dropped tokens.
    """
    limit = jnp.maximum(limit, jnp.finfo(jnp.float32).tiny)
    # Non-negative floats have the same order as the integers of the same 31 bits.
    keys = lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)
    last = jnp.zeros((scores.shape[0],), jnp.int32)
    for shift in range(25, -1, -5):
        digits = jnp.arange(2 ** (6 if shift == 25 else 5), dtype=jnp.int32)
        # All digits run the same kernels, and each kernel takes time to compile.
        last, shift = lax.optimization_barrier((last, jnp.int32(shift)))
        ends = last[:, None] + (digits << shift)[None]
        before = keys[:, None, :] < ends[:, :, None]
        weight = jnp.sum(jnp.where(before, weights[:, None, :], 0.0), axis=-1)
        digit = jnp.sum(weight < limit[:, None], axis=-1, dtype=jnp.int32) - 1
        last += digit << shift
    return jnp.where(keys <= last[:, None], scores, -jnp.inf)


TRUNCATE = (TRUNCATE_HOPPER, Implementation("truncate", "xla", _xla, can=frozenset(["least"])))


def truncate(
    scores: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    typical_p: Array,
    *,
    least: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> Array:
    """Set the scores of tokens that must not be drawn to -inf.

    The rules apply in the order of the arguments, each to what the one before has left. Tokens that
    tie at a limit are all kept. At least one token is kept; typical_p may drop the likeliest.

    Args:
      scores: [B, V] fp32, logits after the temperature, the largest of each row 0. -inf is allowed.
      top_k: [B] int32, keep the k likeliest tokens; 0 is off.
      top_p: [B] fp32, keep the likeliest tokens that together have this probability; 1 is off.
      min_p: [B] fp32, keep tokens of at least this multiple of the largest probability; 0 is off.
      typical_p: [B] fp32, keep the tokens with this probability in all whose surprise is nearest to
        its mean (Meister et al. 2022, Locally Typical Sampling); 1 is off.
      least: [B] int32, each rule keeps at least so many tokens; default 1.
      implementation: "xla" or "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      [B, V] fp32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.

    Must read and write the scores, 8·B·V bytes.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32:
        raise ValueError(
            f"truncate: scores must be fp32 [B,V], got {scores.dtype}{list(scores.shape)}"
        )
    b, v = scores.shape
    rules = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    if least is not None:
        rules["least"] = least
    for name, value in rules.items():
        dtype = jnp.dtype(jnp.int32 if name in ("top_k", "least") else jnp.float32)
        if value.shape != (b,) or value.dtype != dtype:
            got = f"{value.dtype}{list(value.shape)}"
            raise ValueError(f"truncate: {name} must be {dtype}[{b}], got {got}")
    features = frozenset(() if least is None else ["least"])
    chosen, _ = resolve(TRUNCATE, plan, implementation, features, b=b, v=v)
    return chosen.run(scores, top_k, top_p, min_p, typical_p, least)
