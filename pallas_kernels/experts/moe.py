"""Mixture of experts: each row is computed by the k experts that its router scores highest.

An expert is a gated MLP, down(act(gate(x)) * up(x)) (Shazeer et al. 2017; Jiang et al. 2024,
section 2.1), with biases or without. In the decode phase, the time is bound by reading the weights
of the chosen experts. For M rows these are at most min(X, M·k) experts. No implementation can run
faster than those bytes over the memory bandwidth.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS, PAIRED
from fdjax.pallas_kernels.dispatch import Dispatch, Features, resolve
from fdjax.pallas_kernels.experts.hopper.chosen import MOE_CHOSEN
from fdjax.pallas_kernels.experts.hopper.grouped import MOE_GROUPED
from fdjax.pallas_kernels.experts.routing import Routing
from fdjax.pallas_kernels.experts.xla import MOE_XLA
from fdjax.pallas_kernels.quantised import QTensor, WeightFormat, check

MOE = (MOE_CHOSEN, MOE_GROUPED, MOE_XLA)


def moe(
    x: Array,
    logits: Array,
    gate_up: Array | QTensor,
    down: Array | QTensor,
    *,
    routing: Routing,
    gate: str,
    bias: Array | None = None,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    live: Array | None = None,
    residual: Array | None = None,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> Array:
    """Sum of the chosen experts' results, times their weights.

    Choice and weights are computed in fp32. Each expert rounds like two `matmul`; the sum is in
    fp32 and rounded once. Weights of experts that no row chose are not read, so they may be NaN.

    Args:
      x: [M, E].
      logits: [M, X] of the router.
      gate_up: [X, E, 2, F], gate, then up; or a `QTensor` [E, 2, F] with a leading axis X.
      down: [X, F, E], or a `QTensor` [F, E] with a leading axis X.
      routing: how rows choose.
      gate: name of the activation, one of `ACTIVATIONS` or `PAIRED`.
      bias: [X], with `routing.biased`.
      gate_up_bias, down_bias: [X, 2, F] and [X, E], both or neither.
      live: [M] bool; other rows choose no expert, and their result is 0. Default all.
      residual: [M, E] in the dtype of x, added to the rounded result.
      implementation: "xla" | "mosaic_gpu"; it never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      [M, E].

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this.

    Costs 3·E·F·itemsize bytes (or the bytes of codes and scales) for each chosen expert, at most
    min(X, M·k) experts, and 6·M·k·E·F FLOPs.
    """
    biases = gate_up_bias, down_bias
    _check(x, logits, gate_up, down, bias, biases, live, residual, routing, gate)
    if not len(x):
        return x
    formats = tuple(w.format for w in (gate_up, down) if isinstance(w, QTensor))
    key = moe_key(len(x), *x.shape[1:], down.shape[-2], routing, x.dtype.itemsize, formats)
    features = moe_features(routing, gate, biases=down_bias is not None, formats=formats)
    chosen, config = resolve(MOE, plan, implementation, features, **key)
    fused = residual is not None and "residual" in chosen.can
    y = chosen.run(
        *(x, logits, gate_up, down, bias, *biases),
        routing=routing,
        gate=gate,
        live=live,
        config=config,
        batch_invariant=plan is not None and plan.batch_invariant,
        **({"residual": residual} if fused else {}),
    )
    return y if residual is None or fused else residual + y


def moe_key(
    m: int,
    width: int,
    hidden: int,
    routing: Routing,
    itemsize: int,
    formats: Sequence[WeightFormat] = (),
) -> dict[str, int]:
    """The key of `moe` for `Plan.choose`, from its M, E and F and the formats of its weights."""
    counts = {"experts": routing.experts, "chosen": routing.chosen}
    key = {"m": m, "width": width, "hidden": hidden, **counts, "itemsize": itemsize}
    for weight in reversed(formats):
        key |= weight.key
    return key


def moe_features(
    routing: Routing, gate: str, *, biases: bool, formats: Sequence[WeightFormat] = ()
) -> Features:
    """The features of `moe` for `Plan.choose`."""
    own = {"biases"} if biases else set()
    own |= {f"gate.{gate}"} & {f"gate.{name}" for name in PAIRED}
    return routing.features.union(own, *(weight.features for weight in formats))


def _check(x, logits, gate_up, down, bias, biases, live, residual, routing, gate) -> None:
    gates = *ACTIVATIONS, *PAIRED
    if not isinstance(gate, str) or gate not in gates:
        raise ValueError(f"moe: gate must be one of {', '.join(gates)}, got {gate!r}")
    shapes = [_shape(w) for w in (gate_up, down)]
    if x.ndim != 2 or len(shapes[1]) != 3:
        raise ValueError(
            f"moe: x and down must be [M,E] and [X,F,E], got {list(x.shape)}, {list(shapes[1])}"
        )
    if (bias is not None) != routing.biased:
        raise ValueError(f"moe: bias must be given if routing.biased, which is {routing.biased}")
    if live is not None and live.shape != x.shape[:1]:
        raise ValueError(f"moe: live must be {list(x.shape[:1])}, got {list(live.shape)}")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"moe: residual must be {x.dtype} {list(x.shape)} like x, got {residual.dtype} "
            f"{list(residual.shape)}"
        )
    if (biases[0] is None) != (biases[1] is None):
        raise ValueError("moe: gate_up_bias and down_bias must be given together")
    (m, width), hidden, experts = x.shape, shapes[1][1], routing.experts
    for name, got, want in (
        ("logits", logits, (m, experts)),
        ("gate_up", gate_up, (experts, width, 2, hidden)),
        ("down", down, (experts, hidden, width)),
        ("bias", bias, (experts,)),
        ("gate_up_bias", biases[0], (experts, 2, hidden)),
        ("down_bias", biases[1], (experts, width)),
    ):
        if got is not None and _shape(got) != want:
            raise ValueError(
                f"moe: {name} must be {list(want)} for {experts} experts beside x "
                f"{list(x.shape)}, got {list(_shape(got))}"
            )
    for w in (gate_up, down):
        if isinstance(w, QTensor):
            check(w, "moe", stacked=True)
    plain = [a for a in (x, gate_up, down) if not isinstance(a, QTensor)]
    dtypes = {str(jnp.dtype(a.dtype)) for a in plain}
    if len(dtypes) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "moe: x and weights must be of one floating-point dtype, "
            f"got {', '.join(sorted(dtypes))}"
        )


def _shape(w: Array | QTensor) -> tuple[int, ...]:
    return (*w.stack, *w.shape) if isinstance(w, QTensor) else w.shape
