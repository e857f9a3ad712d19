"""Merge attention results over disjoint keys by their logsumexp."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def merge_attention(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys, see `merge_parts`.

    Args:
      o1, o2: [..., D], one dtype.
      lse1, lse2: [...] fp32; -inf where a result saw no key.

    Raises:
      ValueError: shapes disagree.
    """
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        raise ValueError(
            "merge_attention: o must be [...,D] and lse [...], got "
            f"{list(o1.shape)}, {list(lse1.shape)}, {list(o2.shape)}, {list(lse2.shape)}"
        )
    return merge_parts((o1, o2), (lse1, lse2))


def merge_parts(o: Sequence[Array], lse: Sequence[Array]) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys.

    softmax over all sets = Σ o_i exp(lse_i) / Σ exp(lse_i), as in the combination of split-KV
    partials (Dao et al. 2023, Flash-Decoding). The parts are added in their order.

    Args:
      o: for each set [..., D], one dtype.
      lse: for each set [...] fp32; -inf where it has no key that is seen.

    Returns:
      (o [..., D] in the dtype of o, lse [...] fp32). Zeros and -inf where no key is seen.
    """
    top = functools.reduce(jnp.maximum, lse)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    weights = [jnp.exp(part - safe) for part in lse]
    total = sum(weights[1:], weights[0])
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    parts = [
        (w / total)[..., None] * part.astype(jnp.float32)
        for w, part in zip(weights, o, strict=True)
    ]
    merged = sum(parts[1:], parts[0])
    return merged.astype(o[0].dtype), jnp.where(empty, -jnp.inf, safe + jnp.log(total))
