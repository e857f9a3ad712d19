"""The linear layers between two attentions: output projection, gated MLP, Q, K and V of the next.

In the decode phase each of them is bound by reading its weights (see `matmul`). In one launch, the
next weights can load while one product waits for another.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS
from fdjax.pallas_kernels.dispatch import Dispatch, Implementation, resolve
from fdjax.pallas_kernels.gemm.hopper.linear_chain import CHAIN_HOPPER
from fdjax.pallas_kernels.gemm.linear import matmul
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.quantised import refuse_quantised


def linear_chain(
    o: Array,
    x: Array,
    counters: Any,
    index: Array | int,
    *,
    out: Array,
    mlp_norm: RMSNorm,
    gate_up: Array,
    down: Array,
    next_norm: RMSNorm,
    following: Array,
    gate: str,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array, Array]:
    """Compute Q, K and V of the next attention from the output of one.

    x = x + o @ out, then x = x + (gate(n @ gate_up[:, 0]) * (n @ gate_up[:, 1])) @ down with
    n = mlp_norm(x), and y = next_norm(x) @ following. Each product rounds like `matmul`.

    Args:
      o: [M, K], output of the attention heads.
      x: [M, E], the residual stream.
      counters: from `chain_counters`, shared by all chains of a step.
      index: row of `counters` for this chain, traced or static. Use each row once.
      out: [K, E].
      mlp_norm, next_norm: norms of x, scale [E].
      gate_up: [E, 2, F], gate, then up.
      down: [F, E].
      following: [E, N].
      gate: name of the activation.
      implementation: "xla" runs one `matmul` after the other, each as the plan chooses it.
        "mosaic_gpu" is one kernel for 132 multiprocessors. It never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      (x [M, E], y [M, N]).

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this, or a weight is quantised.

    Costs (K·E + 3·E·F + E·N)·itemsize bytes of weights, and 2·M FLOPs for each weight.
    """
    refuse_quantised("linear_chain", out, gate_up, down, following)
    _check(o, x, out, mlp_norm, gate_up, down, next_norm, following, gate)
    key = chain_key(len(x), *out.shape, len(down), following.shape[1], x.dtype.itemsize)
    features = {"eps_by_norm"} if mlp_norm.eps != next_norm.eps else set()
    chosen, config = resolve(LINEAR_CHAIN, plan, implementation, frozenset(features), **key)
    weights = {"out": out, "mlp_norm": mlp_norm, "gate_up": gate_up, "down": down}
    weights |= {"next_norm": next_norm, "following": following, "gate": gate}
    return chosen.run(o, x, counters, index, **weights, config=config, plan=plan)


def _run_xla(
    o, x, counters, index, *, out, mlp_norm, gate_up, down, next_norm, following, gate, config, plan
):
    x = matmul(o, out, residual=x, plan=plan)
    hidden = matmul(x, gate_up, norm=mlp_norm, gate=gate, plan=plan)
    x = matmul(hidden, down, residual=x, plan=plan)
    return x, matmul(x, following, norm=next_norm, plan=plan)


LINEAR_CHAIN = (
    CHAIN_HOPPER,
    Implementation("linear_chain", "xla", _run_xla, can=CHAIN_HOPPER.can | {"eps_by_norm"}),
)


def chain_key(m: int, k: int, width: int, hidden: int, n: int, itemsize: int) -> dict[str, int]:
    """The key of `linear_chain` for `Plan.choose`, from its M, K, E, F and N."""
    return {"m": m, "k": k, "width": width, "hidden": hidden, "n": n, "itemsize": itemsize}


def _check(o, x, out, mlp_norm, gate_up, down, next_norm, following, gate) -> None:
    if not isinstance(gate, str) or gate not in ACTIVATIONS:
        raise ValueError(
            f"linear_chain: gate must be one of {', '.join(ACTIVATIONS)}, got {gate!r}"
        )
    for name, norm in (("mlp_norm", mlp_norm), ("next_norm", next_norm)):
        if not isinstance(norm, RMSNorm):
            raise ValueError(f"linear_chain: {name} must be an RMSNorm, got {type(norm).__name__}")
    if x.ndim != 2 or o.ndim != 2:
        raise ValueError(
            f"linear_chain: o and x must be [M,K] and [M,E], got {list(o.shape)}, {list(x.shape)}"
        )
    if gate_up.ndim != 3 or following.ndim != 2:
        raise ValueError(
            "linear_chain: gate_up and following must be [E,2,F] and [E,N], "
            f"got {list(gate_up.shape)}, {list(following.shape)}"
        )
    (m, width), k = x.shape, o.shape[1]
    hidden, n = gate_up.shape[-1], following.shape[-1]
    for name, got, want in (
        ("o", o, (m, k)),
        ("out", out, (k, width)),
        ("mlp_norm.scale", mlp_norm.scale, (width,)),
        ("gate_up", gate_up, (width, 2, hidden)),
        ("down", down, (hidden, width)),
        ("next_norm.scale", next_norm.scale, (width,)),
        ("following", following, (width, n)),
    ):
        if got.shape != want:
            raise ValueError(
                f"linear_chain: {name} must be {list(want)} beside x {list(x.shape)}, "
                f"got {list(got.shape)}"
            )
    dtypes = {str(jnp.dtype(a.dtype)) for a in (o, x, out, gate_up, down, following)}
    if len(dtypes) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "linear_chain: o, x and weights must be of one floating-point dtype, "
            f"got {', '.join(sorted(dtypes))}"
        )
