"""Correctness of a benchmarked result."""

from typing import Any


def verify(got: Any, want: Any, tolerance: float) -> tuple[float | None, str | None]:
    """Compares two pytrees of arrays in float64.

    The error of a leaf is the larger of `|got - want|_2 / |want|_2` and
    `max|got - want| / max|want|`: the first alone would let one wrong row among many pass.

    Args:
        got: the result under test, any dtype.
        want: the reference, of the same structure and shapes; its dtypes may be wider.
        tolerance: largest error that passes.

    Returns:
        `(error, problem)`: the largest error of all leaves, None where it cannot be computed, and
        a sentence on what is wrong, None if nothing is. A NaN or infinity never passes.
    """
    import jax
    import numpy as np

    got_leaves, got_tree = jax.tree.flatten(jax.device_get(got))
    want_leaves, want_tree = jax.tree.flatten(jax.device_get(want))
    if got_tree != want_tree:
        return None, f"structure must be {want_tree}, got {got_tree}"
    worst = 0.0
    for got_leaf, want_leaf in zip(got_leaves, want_leaves, strict=True):
        if np.shape(got_leaf) != np.shape(want_leaf):
            return None, f"shape must be {np.shape(want_leaf)}, got {np.shape(got_leaf)}"
        a, b = np.asarray(got_leaf, np.float64).ravel(), np.asarray(want_leaf, np.float64).ravel()
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None, "result and reference must be finite"
        if not a.size:
            continue
        difference = a - b
        for order in (2, np.inf):
            scale = float(np.linalg.norm(b, order)) or 1.0
            worst = max(worst, float(np.linalg.norm(difference, order)) / scale)
    if not worst <= tolerance:
        return worst, f"error {worst:.3g} above tolerance {tolerance:.3g}"
    return worst, None
