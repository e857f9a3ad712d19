"""Refuses calls inside a JAX trace that must run programs."""

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state


@jax.jit
def _nothing() -> jax.Array:
    return jnp.zeros(())


# The error of each operation, which says what to do instead.
_REFUSALS = {
    "generate": "LM.generate cannot be called inside a JAX trace; use fdjax.generate there",
    "score": "LM.score cannot be called inside a JAX trace; use fdjax.forward there",
    "load": "a model cannot be loaded inside a JAX trace; load it before",
    "params": "weights cannot be assigned inside a JAX trace; pass them to fdjax.forward",
}


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="flax")


@functools.cache
def _outside_of_traces() -> Any:
    """The trace state of a new thread, in which nothing is traced."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_trace_state).result()


def refuse_trace(op: str = "generate") -> None:
    """Raise RuntimeError inside a JAX trace, where `LM` cannot run programs or take weights."""
    # Running a program takes 0.2 ms, so the trace state is compared first. `jax.grad` and
    # `jax.vmap` also change it, but they trace only operations on their own arguments.
    if _trace_state() == _outside_of_traces():
        return
    if isinstance(_nothing(), jax.core.Tracer):
        raise RuntimeError(f"{op}: {_REFUSALS[op]}") from None
