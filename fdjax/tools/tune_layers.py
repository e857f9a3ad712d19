"""Measures whether a decode step is faster with one kernel for all layers than layer by layer.

The entries are part of the dataflow table, see `tune`. As in the engine, one CUDA graph runs the
layers of many steps. The host's clock times it, so the gaps between two kernels count as well.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from fdjax.bench.check import verify
from fdjax.engine.engine import compiler_options
from fdjax.engine.memory import plan_memory
from fdjax.engine.mesh import Place, specs_of
from fdjax.engine.state import DecodeState, StackedCache, init_cache, kv_specs, pack_progress
from fdjax.engine.step import decode_steps, run_layers
from fdjax.models import (
    Model,
    Params,
    describe,
    layers_features,
    layers_shape,
)
from fdjax.pallas_kernels.layers import DecodeLayersConfig
from fdjax.pallas_kernels.plan import Choice, Entry, can_chain
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.system.device_memory import gigabytes
from fdjax.tools.tune_table import table_entry
from fdjax.weights.stacked import layer_slices, random_stacked_params, stack_layers

# Values of M (the kernel takes at most 32) and numbers of cache slots.
LAYERS_ROWS = (1, 2, 4, 8, 16, 32)
LAYERS_SLOTS = (256, 1024, 4096)

# Largest relative error of the hidden states after this many layers, in half precision.
_TOLERANCE, _TOLERANCE_LAYERS = 5e-2, 32


def measure_layers(
    model: Model,
    rows: Sequence[int] = LAYERS_ROWS,
    slots: Sequence[int] = LAYERS_SLOTS,
    *,
    steps: int = 16,
    runs: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Time the layers of a decode step, layer by layer with the model's plan and as one kernel.

    Args:
      model: a model from `describe`. If several devices share it, the first ones run it.
      rows: values of M.
      slots: numbers of cache slots. All but the last 64 are filled.
      steps: decode steps per call.
      runs: timed calls of each, in each of two passes.
      report: called with a line for every entry, for every candidate with a wrong result, and for
        every size that does not fit into the memory.

    Yields:
      An entry of the table for each M and number of slots, where "xla" means layer by layer.
      Nothing, if the kernel does not support these layers or this device.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    local, place = model.local, Place.for_ranks(model.ranks)
    shapes = [layers_shape(local.config, m, s, itemsize) for s, m in itertools.product(slots, rows)]
    features = layers_features(local.config)
    shapes = [s for s in shapes if model.plan.candidates("decode_layers", features, s)]
    if not shapes or not all(map(can_chain, place.devices)):
        return
    memory_bytes = place.free_memory_bytes()
    if memory_bytes is not None and local.weight_bytes > memory_bytes:
        report(f"decode_layers: no room for weights of {gigabytes(local.weight_bytes)}")
        return
    first, *_ = model.plan.candidates("decode_layers", features, shapes[0])
    planned = _planned(model, first, shapes[0])
    params, _stacks = random_stacked_params(planned)
    stacked = stack_layers(planned, params)
    if stacked is None:
        report("decode_layers: no room to stack the weights")
        return
    tolerance = tolerance_of(local.config.layers)
    for shape in shapes:
        m, s = shape["m"], shape["s"]
        where = f"decode_layers M={m} S={s}"
        needed = plan_memory(local, batch=m, max_len=s, slots=s).total_bytes
        if memory_bytes is not None and needed > memory_bytes:
            report(f"{where}: no room for {gigabytes(needed)}")
            continue
        tried = model.plan.candidates("decode_layers", features, shape)
        weights = {None: params} | dict.fromkeys(tried, params | {"blocks": stacked})
        lengths = place.put(np.full((m,), s - 64, np.int32))
        functions = _compile(model, shape, weights, lengths, steps)
        if functions.keys() <= {None}:
            continue
        samples: dict[Any, list[float]] = {config: [] for config in functions}
        want = None
        for config in [*functions] * 2:
            if config not in samples:
                continue
            cache = _random_cache(model, m, s, config is not None)
            times, hidden = _time(functions[config], cache, weights[config], lengths, runs)
            del cache
            samples[config] += [us / steps for us in times]
            want = hidden if want is None else want
            if config is not None and (problem := verify(hidden, want, tolerance)[1]):
                report(f"{where} {config}: {problem}")
                del samples[config]
        us = {config: float(np.median(times)) for config, times in samples.items()}
        entry = table_entry("decode_layers", shape, us)
        report(f"{where}: {entry['implementation']} {entry['microseconds']}")
        yield entry


def tolerance_of(layers: int) -> float:
    """The largest relative error of the hidden states after so many layers.

    Roundings of different layers are independent, so their sum grows with the root of the number.
    Two right results of the 40 layers of Llama 2 13B differed by 0.054.
    """
    return _TOLERANCE * max(1.0, math.sqrt(layers / _TOLERANCE_LAYERS))


def _planned(model: Model, config: DecodeLayersConfig | None, shape: dict[str, int]) -> Model:
    """The model with a plan that runs all layers in this configuration at this shape.

    With the configuration None, the plan runs them layer by layer.
    """
    if config is None:
        plan = model.plan.with_xla("decode_layers")
    else:
        fields = tuple(sorted(dataclasses.asdict(config).items()))
        choice = Choice("mosaic_gpu", fields, source="table")
        entry = Entry("decode_layers", tuple(sorted(shape.items())), choice)
        plan = dataclasses.replace(model.plan, table=(entry, *model.plan.table))
    return describe(model.config, dtype=model.dtype, plan=plan, tensor_parallel=model.ranks)


def _compile(
    model: Model,
    shape: dict[str, int],
    weights: dict[DecodeLayersConfig | None, Params],
    lengths: Array,
    steps: int,
) -> dict[DecodeLayersConfig | None, jax.stages.Compiled]:
    """Compile `_layers` for each configuration.

    Args:
      model: the model.
      shape: sizes of the entry.
      weights: parameters by configuration; None is layer by layer.
      lengths: [M] int32 filled slots of each row.
      steps: decode steps per call.

    Returns:
      The functions by configuration, without those that the kernel does not support. If none is
      left but None, nothing is compiled, and the result is empty.
    """
    lowered, place, whole = {}, Place.for_ranks(model.ranks), PartitionSpec()
    for config, params in weights.items():
        planned, stacked = _planned(model, config, shape), config is not None
        cache = init_cache(model.local, shape["m"], shape["s"], stacked, place.whole)
        divided = kv_specs(cache)
        run = jax.jit(
            place.over(
                functools.partial(_layers, planned.local, stacked, steps),
                (divided, specs_of(params), whole),
                (divided, whole),
            ),
            donate_argnums=0,
            compiler_options=compiler_options(decode_steps, planned),
        )
        with contextlib.suppress(NotImplementedError):
            lowered[config] = run.lower(cache, params, lengths)
    if lowered.keys() <= {None}:
        return {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {config: pool.submit(one.compile) for config, one in lowered.items()}
    return {config: job.result() for config, job in jobs.items()}


def _layers(model: Model, stacked: bool, steps: int, cache: Any, weights: Params, lengths: Array):
    """Run the layers of the same decode step many times; returns (cache, hidden [B,1,E])."""
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


def _random_cache(model: Model, rows: int, slots: int, stacked: bool) -> Any:
    """A cache of random keys and values, with the same values stacked or not."""
    c, place, heads = model.local.config, Place.for_ranks(model.ranks), PartitionSpec(None, AXIS)
    shape = rows, c.kv_heads * model.ranks, slots, c.head_dim

    @functools.partial(jax.jit, out_shardings=place.sharding(heads))
    def normal(key):
        return jax.random.normal(key, shape, model.dtype)

    @functools.partial(jax.jit, out_shardings=place.sharding(PartitionSpec(None, *heads)))
    def of_layers(keys):
        return lax.map(normal, keys)

    k, v = jax.random.split(jax.random.key(0), (2, c.layers))
    if stacked:
        return StackedCache(of_layers(k), of_layers(v))
    return list(zip(map(normal, k), map(normal, v), strict=True))


def _time(
    function: Callable, cache: Any, weights: Params, lengths: Array, runs: int
) -> tuple[list[float], Array]:
    """(microseconds of each call after two for warm-up, hidden states of the last call)."""
    times = []
    for _ in range(runs + 2):
        begin = time.perf_counter()
        cache, hidden = function(cache, weights, lengths)
        hidden.block_until_ready()
        times.append((time.perf_counter() - begin) * 1e6)
    return times[2:], hidden
