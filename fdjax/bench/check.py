"""Correctness of a benchmarked result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def verify(got: Any, want: Any, tolerance: float) -> tuple[float | None, str | None]:
    """Compare two pytrees of arrays in float64, on the device of `got`.

    The error of a leaf is the larger of `|got - want|_2 / |want|_2` and
    `max|got - want| / max|want|`: the first alone would let one wrong row among many pass.

    Args:
      got: the result under test, any dtype.
      want: the reference, of the same structure and shapes; its dtypes may be wider.
      tolerance: largest error that passes.

    Returns:
      `(error, problem)`: the largest error of all leaves, or None if it cannot be computed; and a
      sentence that says what is wrong, or None. A NaN or infinity never passes.
    """
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    if got_tree != want_tree:
        return None, f"structure must be {want_tree}, got {got_tree}"
    worst = 0.0
    for got_leaf, want_leaf in zip(got_leaves, want_leaves, strict=True):
        if np.shape(got_leaf) != np.shape(want_leaf):
            return None, f"shape must be {np.shape(want_leaf)}, got {np.shape(got_leaf)}"
        if not np.size(got_leaf):
            continue
        with jax.enable_x64(True):
            want_leaf = jax.device_put(want_leaf, getattr(got_leaf, "sharding", None))
            error, finite = jax.device_get(_error(got_leaf, want_leaf))
        if not finite:
            return None, "result and reference must be finite"
        # If squares overflow, the error is NaN, which counts as the largest.
        worst = float(np.maximum(worst, error))
    if not worst <= tolerance:
        return worst, f"error {worst:.3g} above tolerance {tolerance:.3g}"
    return worst, None


@jax.jit
def _error(got, want):
    """The error of a leaf, and whether all values of both arrays are finite."""
    got, want = (jnp.asarray(a).astype(jnp.float64) for a in (got, want))
    difference = got - want

    def relative(size):
        scale = size(want)
        return size(difference) / jnp.where(scale == 0, 1, scale)

    worst = jnp.maximum(
        relative(lambda a: jnp.sqrt(jnp.sum(a * a))), relative(lambda a: jnp.max(jnp.abs(a)))
    )
    return worst, jnp.isfinite(got).all() & jnp.isfinite(want).all()
