"""Merge two attention results over disjoint keys by their logsumexp."""

import jax.numpy as jnp
from jax import Array


def merge_attention(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys.

    softmax over both sets = (o1 exp(lse1) + o2 exp(lse2)) / (exp(lse1) + exp(lse2)), as in the
    combination of split-KV partials (Dao et al. 2023, Flash-Decoding).

    Args:
      o1, o2: [..., D], one dtype.
      lse1, lse2: [...] fp32; -inf where a result saw no key.

    Returns:
      (o [..., D] in the dtype of o1, lse [...] fp32). Zeros and -inf where neither saw a key.

    Raises:
      ValueError: shapes disagree.
    """
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        raise ValueError(
            "merge_attention: o must be [...,D] and lse [...], got "
            f"{list(o1.shape)}, {list(lse1.shape)}, {list(o2.shape)}, {list(lse2.shape)}"
        )
    top = jnp.maximum(lse1, lse2)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    w1, w2 = jnp.exp(lse1 - safe), jnp.exp(lse2 - safe)
    total = w1 + w2
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    w1, w2 = (w1 / total)[..., None], (w2 / total)[..., None]
    o = w1 * o1.astype(jnp.float32) + w2 * o2.astype(jnp.float32)
    return o.astype(o1.dtype), jnp.where(empty, -jnp.inf, safe + jnp.log(total))
