"""Conditionals for kernels that lower quickly, and loops whose code stays small.

`pl.when` and `lax.cond` convert their condition to an index. For each conversion, Mosaic GPU of JAX
0.11 starts ptxas, which takes 9 ms or more. Selecting the index with `jnp.where` avoids it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


def when(condition: bool | Array) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function if the condition holds, like `pl.when`."""
    if isinstance(condition, bool):
        return pl.when(condition)
    return lambda run: cond(condition, run, lambda: None)


def cond(condition: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Run one of two functions and return its result, like `lax.cond`."""
    return lax.switch(jnp.where(condition, 1, 0), (if_false, if_true))


def stay_rolled() -> None:
    """Keep LLVM from unrolling the loop around this call, which costs nothing.

    It would copy a loop of unknown length four times, also one that mostly runs once.
    """

    @plgpu.inline_mgpu()
    def run(_):
        # LLVM does not unroll what threads must run together, unless it knows how often.
        mgpu.inline_ptx("// rolled", has_side_effects=True, convergent=True)

    run()
