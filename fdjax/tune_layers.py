"""Whether one kernel runs all layers of a decode step faster than layer after layer.

A part of the dataflow table, see `tune`. What is timed are the layers of a step as the engine runs
them, many times in one CUDA graph, by the host's clock: what lies between two kernels counts.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fdjax.bench.check import verify
from fdjax.engine import compiler_options
from fdjax.models import Model, describe, layers_shape, random_params
from fdjax.options import GenerationConfig, per_row
from fdjax.pallas_kernels.layers import DecodeLayersConfig
from fdjax.pallas_kernels.plan import Choice, Entry, can_chain
from fdjax.state import DecodeState, init_cache, pack_progress
from fdjax.step import decode_steps, run_layers
from fdjax.table_entry import table_entry
from fdjax.views import layer_slices, stack_layers

LAYERS_ROWS = (1, 2, 4, 8)
LAYERS_SLOTS = (256, 1024, 4096)

# What measured best on an H200.
LAYERS_CANDIDATES = (DecodeLayersConfig(alone=3), DecodeLayersConfig(alone=3, ahead=3))

# Of hidden states behind all layers, in half precision.
_TOLERANCE = 5e-2


def measure_layers(
    model: Model,
    rows: Sequence[int] = LAYERS_ROWS,
    slots: Sequence[int] = LAYERS_SLOTS,
    *,
    steps: int = 16,
    runs: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Times the layers of a decode step one by one, as the model's plan has them, and as one.

    Args:
      model: what `describe` made.
      rows: values of M.
      slots: of the cache, filled but for the last 64.
      steps: of a call.
      runs: timed calls of each, twice in turn.
      report: takes a line for every row, and for every candidate that was wrong.

    Yields:
      An entry of the table for each M and number of slots, "xla" standing for one layer after the
      other. None where the kernel has no place for such layers, or the device none for it.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    if layers_shape(model.config, 1, slots[0], itemsize) is None:
        return
    if not can_chain(jax.devices()[0]):
        return
    params = random_params(model)
    shape = layers_shape(model.config, rows[0], slots[0], itemsize)
    stacked = stack_layers(_planned(model, LAYERS_CANDIDATES[0], shape), params, owned=True)
    if stacked is None:
        return
    for s, m in itertools.product(slots, rows):
        shape = layers_shape(model.config, m, s, itemsize)
        variants = {of: _planned(model, of, shape) for of in (None, *LAYERS_CANDIDATES)}
        caches = {of: init_cache(model, m, s, of is not None) for of in variants}

        def arguments(of, m=m, s=s, caches=caches):
            weights = params if of is None else params | {"blocks": stacked}
            return caches[of], weights, jnp.full((m,), s - 64, jnp.int32)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = {
                of: pool.submit(_compile, variant, of is not None, steps, arguments(of))
                for of, variant in variants.items()
            }
            functions = {of: job.result() for of, job in jobs.items()}
        if None in functions.values():
            return
        samples: dict[Any, list[float]] = {of: [] for of in functions}
        want = None
        for of in [*functions] * 2:
            cache, *others = arguments(of)
            for i in range(runs + 2):
                begin = time.perf_counter()
                cache, hidden = functions[of](cache, *others)
                hidden.block_until_ready()
                if i >= 2:
                    samples[of].append((time.perf_counter() - begin) * 1e6 / steps)
            caches[of] = cache
            want = hidden if want is None else want
            if problem := verify(hidden, want, _TOLERANCE)[1]:
                report(f"decode_layers M={m} S={s} {of}: {problem}")
                samples[of].append(math.inf)
        us = {of: float(np.median(times)) for of, times in samples.items() if math.inf not in times}
        entry = table_entry("decode_layers", shape, us)
        report(f"decode_layers M={m} S={s}: {entry['implementation']} {entry['microseconds']}")
        yield entry


def _planned(model: Model, config: DecodeLayersConfig | None, shape: dict[str, int]) -> Model:
    """The model, whose plan runs all layers so at a shape; None is one by one."""
    if config is None:
        plan = model.plan.with_xla("decode_layers")
    else:
        fields = tuple(sorted(dataclasses.asdict(config).items()))
        choice = Choice("mosaic_gpu", fields, source="table")
        entry = Entry("decode_layers", tuple(sorted(shape.items())), choice)
        plan = dataclasses.replace(model.plan, table=(entry, *model.plan.table))
    return describe(model.config, dtype=model.dtype, plan=plan)


def _compile(model: Model, stacked: bool, steps: int, args: tuple) -> jax.stages.Compiled | None:
    """(cache, weights, lengths) → (cache, hidden [B,1,E]) after so many steps, all the same one.

    None where the kernel cannot have such sizes.
    """

    def run(cache, weights, lengths):
        layers = None
        if stacked:
            layers = weights["blocks"]
            weights = weights | {"blocks": layer_slices(layers)}
        module, batch = model.module(weights), len(lengths)
        zeros = jnp.zeros((batch,), jnp.int32)
        progress = pack_progress(lengths, zeros, zeros, zeros)
        sampling = jax.tree.map(jnp.asarray, per_row([GenerationConfig()], batch))

        def step(_, carry):
            cache, _ = carry
            state = DecodeState(cache, jnp.zeros((batch, 0), jnp.int32), progress)
            hidden, cache = run_layers(module, state, sampling, model.plan, layers=layers)
            return cache, hidden

        hidden = jnp.zeros((batch, 1, model.config.width), model.dtype)
        return lax.fori_loop(0, steps, step, (cache, hidden))

    options = compiler_options(decode_steps)
    try:
        lowered = jax.jit(run, donate_argnums=0, compiler_options=options).lower(*args)
    except NotImplementedError:
        return None
    return lowered.compile()
