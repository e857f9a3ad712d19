"""Measures mixtures of experts in a decode step, with XLA and with kernels for the chosen experts.

The entries are part of the dataflow table, see `tune`. Routing is random, because the number of
distinct experts changes from step to step.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.bench.check import verify
from fdjax.bench.timing import Timing, cold_sets, measure
from fdjax.models import BlockSpec, DecoderConfig
from fdjax.pallas_kernels.experts import moe_features, moe_key
from fdjax.pallas_kernels.experts.hopper.chosen import MOE_CHOSEN
from fdjax.pallas_kernels.experts.xla import MOE_XLA
from fdjax.pallas_kernels.quantised import (
    BRICKS,
    PLAIN,
    QTensor,
    WeightFormat,
    in_layout,
    no_bricks,
    random_quantised,
)
from fdjax.tools.tune_table import table_entry

# Values of M; the kernels take at most 32 rows.
EXPERTS_ROWS = (1, 2, 4, 8, 16, 32)

# Largest relative error of the result in half precision. It only tells right from wrong.
_TOLERANCE = 2e-2


def measure_experts(
    config: DecoderConfig,
    rows: Sequence[int] = EXPERTS_ROWS,
    *,
    dtype: str = "bfloat16",
    runs: int = 10,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Time XLA and every candidate of the kernels for the experts of a model, on the first device.

    Args:
      config: the decoder.
      rows: values of M.
      dtype: dtype of activations.
      runs: timed calls of each, in each of two passes.
      report: called with a line for every entry, and for every candidate with a wrong result.

    Yields:
      An entry of the table for each kind of experts and each M that the kernels can run.
    """
    alike = {_sizes(block): block for block in config.blocks if block.experts is not None}
    for block in alike.values():
        weights = None
        for m in rows:
            key, features = _lookup(block, m, dtype, BRICKS)
            if MOE_CHOSEN.refusal(key, features) or (
                block.formats and no_bricks((block.width, block.mlp_width))
            ):
                continue
            weights = weights or _weights(block, dtype)
            yield _measured(block, m, key, weights, dtype, runs, report)


def _sizes(block: BlockSpec) -> Any:
    return block.width, block.mlp_width, block.experts, block.activation, _formats(block, PLAIN)


def _formats(block: BlockSpec, layout: str) -> tuple[tuple[str, WeightFormat], ...]:
    """The formats of gate_up and down that are quantised, as (name, format) pairs."""
    own = dict(block.formats)
    return tuple(
        (name, dataclasses.replace(own[f"experts.{name}"], layout=layout))
        for name in ("gate_up", "down")
        if f"experts.{name}" in own
    )


def _lookup(block: BlockSpec, m: int, dtype: str, layout: str) -> tuple[dict, frozenset]:
    """The key and features of `moe` for a plan."""
    formats = [form for _, form in _formats(block, layout)]
    itemsize = jnp.dtype(dtype).itemsize
    key = moe_key(m, block.width, block.mlp_width, block.experts, itemsize, formats)
    biases = block.expert_bias
    return key, moe_features(block.experts, block.activation, biases=biases, formats=formats)


def _weights(block: BlockSpec, dtype: str) -> dict[str, Array | QTensor]:
    """Random operands of `moe` by name, without rows and logits, in XLA's layout."""
    count, formats = block.experts.experts, dict(_formats(block, PLAIN))
    shapes = {
        "gate_up": (block.width, 2, block.mlp_width),
        "down": (block.mlp_width, block.width),
    }

    @jax.jit
    def make():
        keys = iter(jax.random.split(jax.random.key(0), 5))
        made: dict[str, Array | QTensor] = {}
        for name, shape in shapes.items():
            deviation = shape[0] ** -0.5
            if name in formats:
                empty = formats[name].empty(shape, (count,))
                made[name] = random_quantised(next(keys), empty, deviation)
            else:
                values = jax.random.normal(next(keys), (count, *shape), dtype)
                made[name] = values * jnp.asarray(deviation, dtype)
            if block.expert_bias:
                made[f"{name}_bias"] = jax.random.normal(next(keys), (count, *shape[1:]), dtype)
        if block.experts.biased:
            made["bias"] = 0.01 * jax.random.normal(next(keys), (count,))
        return made

    return make()


def _run(operands: dict[str, Any], implementation: Any, block: BlockSpec, config: Any) -> Array:
    names = "x", "logits", "gate_up", "down", "bias", "gate_up_bias", "down_bias"
    return implementation.run(
        *(operands.get(name) for name in names),
        routing=block.experts,
        gate=block.activation,
        live=None,
        config=config,
        batch_invariant=False,
    )


def _measured(block, m, key, weights, dtype, runs, report) -> dict[str, Any]:
    """The entry of the table for one M."""
    bricks = weights | {
        name: jax.jit(functools.partial(in_layout, layout=BRICKS))(weights[name])
        for name, _ in _formats(block, PLAIN)
    }
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    used = min(block.experts.experts, m * block.experts.chosen) / block.experts.experts

    def sets(own):
        def make(seed):
            x, logits = jax.random.split(jax.random.key(seed))
            logits = jax.random.normal(logits, (m, block.experts.experts))
            return (own | {"x": jax.random.normal(x, (m, block.width), dtype), "logits": logits},)

        # Each set chooses other experts, so that they are not in the L2 cache.
        return cold_sets(make, max(1, int(used * nbytes / 2)))

    operands = {None: sets(weights)} | dict.fromkeys(MOE_CHOSEN.candidates(key), sets(bricks))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        functions = {
            config: pool.submit(_compile, block, config, own[0]) for config, own in operands.items()
        }
    functions = {c: fn.result() for c, fn in functions.items() if fn.result() is not None}
    want, label = functions[None](*operands[None][0]), f"moe {_text(key)}"
    for config in [c for c in functions if c is not None]:
        if problem := verify(functions[config](*operands[config][0]), want, _TOLERANCE)[1]:
            report(f"{label} {config}: {problem}")
            del functions[config]
    passes = [
        {c: measure(fn, operands[c], runs=runs) for c, fn in functions.items()} for _ in range(2)
    ]
    times = {c: Timing.merge([one[c] for one in passes]).median_us for c in functions}
    entry = table_entry("moe", key, times)
    report(f"{label}: {entry['implementation']} {entry['microseconds']}")
    return entry


def _compile(block: BlockSpec, config: Any, args: tuple) -> jax.stages.Compiled | None:
    implementation = MOE_XLA if config is None else MOE_CHOSEN
    run = functools.partial(_run, implementation=implementation, block=block, config=config)
    try:
        return jax.jit(run).lower(*args).compile()
    except NotImplementedError:
        return None


def _text(key: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in key.items())
