"""Mixture of experts: each row is computed by the k experts that its router scores highest.

An expert is a gated MLP, down(act(gate(x)) * up(x)) (Shazeer et al. 2017; Jiang et al. 2024,
section 2.1). In the decode phase, this is bound by reading the weights of the chosen experts, at
most min(X, M·k) of them for M rows. No implementation can run faster than those bytes over the
memory bandwidth.
"""

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS
from fdjax.pallas_kernels.dispatch import Dispatch, resolve
from fdjax.pallas_kernels.experts.routing import Routing
from fdjax.pallas_kernels.experts.xla import MOE_XLA
from fdjax.pallas_kernels.quantised import refuse_quantised

MOE = (MOE_XLA,)


def moe(
    x: Array,
    logits: Array,
    gate_up: Array,
    down: Array,
    *,
    routing: Routing,
    gate: str,
    bias: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> Array:
    """Sum of the chosen experts' results, times their weights.

    Choice and weights are computed in fp32. Each expert rounds like two `matmul`; the sum is in
    fp32 and rounded once. Weights of experts that no row chose are not read, so they may be NaN.

    Args:
      x: [M, E].
      logits: [M, X] of the router.
      gate_up: [X, E, 2, F], gate, then up.
      down: [X, F, E].
      routing: how rows choose.
      gate: name of the activation.
      bias: [X], with `routing.biased`.
      implementation: "xla"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      [M, E].

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this, or a weight is quantised.

    Costs 3·E·F·itemsize bytes for each of the experts that are chosen, at most min(X, M·k), and
    6·M·k·E·F FLOPs.
    """
    refuse_quantised("moe", gate_up, down)
    _check(x, logits, gate_up, down, bias, routing, gate)
    key = moe_key(len(x), *x.shape[1:], down.shape[1], routing, x.dtype.itemsize)
    chosen, config = resolve(MOE, plan, implementation, routing.features, **key)
    return chosen.run(
        *(x, logits, gate_up, down, bias),
        routing=routing,
        gate=gate,
        config=config,
        batch_invariant=plan is not None and plan.batch_invariant,
    )


def moe_key(m: int, width: int, hidden: int, routing: Routing, itemsize: int) -> dict[str, int]:
    """The key of `moe` for `Plan.choose`, from its M, E and F."""
    counts = {"experts": routing.experts, "chosen": routing.chosen}
    return {"m": m, "width": width, "hidden": hidden, **counts, "itemsize": itemsize}


def _check(x, logits, gate_up, down, bias, routing, gate) -> None:
    if not isinstance(gate, str) or gate not in ACTIVATIONS:
        raise ValueError(f"moe: gate must be one of {', '.join(ACTIVATIONS)}, got {gate!r}")
    if x.ndim != 2 or down.ndim != 3:
        raise ValueError(
            f"moe: x and down must be [M,E] and [X,F,E], got {list(x.shape)}, {list(down.shape)}"
        )
    if (bias is not None) != routing.biased:
        raise ValueError(f"moe: bias must be given if routing.biased, which is {routing.biased}")
    (m, width), hidden, experts = x.shape, down.shape[1], routing.experts
    for name, got, want in (
        ("logits", logits, (m, experts)),
        ("gate_up", gate_up, (experts, width, 2, hidden)),
        ("down", down, (experts, hidden, width)),
        ("bias", bias, (experts,)),
    ):
        if got is not None and got.shape != want:
            raise ValueError(
                f"moe: {name} must be {list(want)} for {experts} experts beside x "
                f"{list(x.shape)}, got {list(got.shape)}"
            )
    dtypes = {str(jnp.dtype(a.dtype)) for a in (x, gate_up, down)}
    if len(dtypes) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "moe: x and weights must be of one floating-point dtype, "
            f"got {', '.join(sorted(dtypes))}"
        )
