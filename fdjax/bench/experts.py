"""Counts the experts that the rows of a decode step choose."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fdjax.bench.one_pass import one_pass_program
from fdjax.models import Model
from fdjax.pallas_kernels.experts import moe, route
from fdjax.pallas_kernels.experts.xla import MOE_XLA
from fdjax.pallas_kernels.plan import Plan


def chosen_experts(lm: Any, ids: np.ndarray) -> np.ndarray | None:
    """The experts that each token of texts chooses.

    Each text takes one pass without a cache. Its rounding differs from that of decoding, so a few
    tokens may choose other experts than they do there.

    Args:
      lm: the model.
      ids: [B,T] int32.

    Returns:
      [L,B,T,k] int32, L layers with experts; None if there are none, or if devices share the model.
    """
    if not any(lm.model.expert_bytes) or lm.model.ranks > 1:
        return None
    seen: list[np.ndarray] = []
    model = dataclasses.replace(lm.model, plan=_recording(lm.model.plan, seen))
    rows = []
    for row in ids:
        one_pass_program(model, lm.params, jnp.asarray(row)[None], last=1)
        jax.effects_barrier()
        rows.append(np.stack(seen)[:, : len(row)])  # without the padding
        seen.clear()
    return np.stack(rows, axis=1)


def distinct_experts(chosen: np.ndarray) -> np.ndarray:
    """Mean number, over the steps T, of distinct experts of all rows: [L,B,T,k] → [L]."""
    layers, _, steps, _ = chosen.shape
    of_step = np.sort(chosen.swapaxes(1, 2).reshape(layers, steps, -1), axis=-1)
    return 1 + np.count_nonzero(np.diff(of_step), axis=-1).mean(axis=-1)


def surplus_bytes(model: Model, rows: int, distinct: np.ndarray) -> int:
    """Bytes of experts that `Stats.decode_bytes` counts in a step, but that no row chooses.

    Args:
      model: the model.
      rows: B, the number of rows of the step.
      distinct: [L], see `distinct_experts`.
    """
    local = model.local
    every = zip(local.config.blocks, local.expert_bytes, strict=True)
    layers = [(block, size) for block, size in every if size]
    surplus = 0.0
    for (block, size), mean in zip(layers, distinct, strict=True):
        surplus += (block.experts.experts - block.idle_experts(rows) - mean) * size
    return round(surplus)


def _recording(plan: Plan, seen: list[np.ndarray]) -> Plan:
    """A plan whose op `moe` also appends the chosen experts [M,k] of each layer to a list."""

    def run(x, logits, gate_up, down, bias, *biases, routing, gate, live, **_):
        experts, _ = route(logits, routing, bias)
        # Blocks share a jitted function, so their arrays cannot be outputs of the program.
        io_callback(lambda experts: seen.append(np.asarray(experts)), None, experts, ordered=True)
        options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
        options |= {"routing": routing, "gate": gate, "live": live, "bias": bias}
        return moe(x, logits, gate_up, down, plan=plan, **options)

    recorder = dataclasses.replace(MOE_XLA, name="recorder", run=run)
    others = (choice for choice in plan.named if choice[0] != "moe")
    return dataclasses.replace(
        plan,
        implementations=(recorder, *plan.implementations),
        named=(*others, ("moe", recorder.name)),
    )
