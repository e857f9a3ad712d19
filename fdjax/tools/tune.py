"""Measures the dataflow table: the fastest implementation of linear layers for each shape.

The method is that of FlashDecoding++ (Hong et al. 2024), section 5. The linear layers of a model
have only a few shapes [K,N]. Each is measured once over M, the number of rows. From then on, the
choice between implementations is looked up in the table.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.bench.check import verify
from fdjax.bench.timing import Timing, l2_bytes, measure
from fdjax.models import (
    DecoderConfig,
    LinearShape,
    Model,
    chain_features,
    chain_shape,
    describe,
)
from fdjax.pallas_kernels.gemm import MATMUL, chain_counters, linear_chain, matmul
from fdjax.pallas_kernels.gemm.hopper.linear_chain import chain_mosaic
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import (
    KERNEL_REVISIONS,
    Plan,
    as_entry,
    can_chain,
)
from fdjax.pallas_kernels.quantised import BRICKS, QTensor, random_quantised
from fdjax.tools.tune_experts import measure_experts
from fdjax.tools.tune_layers import measure_layers
from fdjax.tools.tune_table import table_entry, table_of

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# Values of M for `linear_chain`. Its kernel takes at most 32 rows.
CHAIN_ROWS = (1, 2, 4, 8, 16, 32)

# Largest relative error of a product in half precision. It only tells right from wrong.
_TOLERANCE = 2e-2
# The same if x is rounded to fp8, which alone is an error of 3e-2, or 4e-2 with a gate.
_FP8_TOLERANCE = 8e-2


def candidates(shape: LinearShape, m: int) -> Sequence[Any]:
    """Tilings of a linear layer with M rows that are worth measuring."""
    key, features = shape.key(m, itemsize=2), shape.features
    return [c for i in MATMUL if i.supports(key, features) for c in i.candidates(key)]


def _run(*, config: Any, **operands: Any) -> jax.Array:
    """Run the linear layer with the kernel that a configuration belongs to."""
    kernel = next(i for i in MATMUL if i.config is type(config))
    return kernel.run(**operands, batch_invariant=False, config=config)


@dataclasses.dataclass(frozen=True)
class VariantMeasurement:
    """The measurement of one variant of a linear layer.

    Attributes:
      error: relative error, or None if it cannot be computed.
      problem: description of a wrong result, or None.
      timing: its times, or None after a wrong result.
    """

    error: float | None
    problem: str | None
    timing: Timing | None


def time_linear(
    shape: LinearShape,
    rows: Sequence[int],
    variants: Mapping[Any, Callable],
    *,
    reference: Callable | None = None,
    dtype: str = "bfloat16",
    runs: int = 10,
    passes: int = 2,
) -> Iterator[tuple[int, dict[Any, VariantMeasurement]]]:
    """Time variants of a linear layer on the first device, with weights that are not in its cache.

    Args:
      shape: the layer.
      rows: values of M, at least one.
      variants: functions of a mapping with the operands of `matmul`. A function that raises
        `NotImplementedError` is left out.
      reference: function with the right result; default the first variant. Variants with a wrong
        result are not timed.
      dtype: dtype of the operands.
      runs: timed calls per pass.
      passes: number of passes over all variants.

    Yields:
      (M, the measurement of each variant).
    """
    weights = _weights(shape, dtype)
    operands = [_operands(shape, max(rows), w, i, dtype) for i, w in enumerate(weights)]
    calls = {m: [(_first(m, one),) for one in operands] for m in rows}
    reference = reference or next(iter(variants.values()))
    rounded = shape.weight is not None and shape.weight.rounded_activations
    tolerance = _FP8_TOLERANCE if rounded else _TOLERANCE
    # Compiling autotunes on the device, so timing starts only when all variants are compiled.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = {
            (m, name): pool.submit(_compile, fn, calls[m][0])
            for m in rows
            for name, fn in variants.items()
        }
    want = jax.jit(reference)(operands[0])
    for m in rows:
        functions = {name: compiled[m, name].result() for name in variants}
        measured, timings = {}, {}
        for name, fn in functions.items():
            if fn is not None:
                got = fn(*calls[m][0])
                measured[name] = VariantMeasurement(*verify(got, want[:m], tolerance), None)
        for name in [n for n, one in measured.items() if one.problem is None] * passes:
            timing = measure(functions[name], calls[m], runs=runs)
            timings.setdefault(name, []).append(timing)
        for name, passed in timings.items():
            measured[name] = dataclasses.replace(measured[name], timing=Timing.merge(passed))
        yield m, measured


def _weights(shape: LinearShape, dtype: str) -> list[jax.Array | QTensor]:
    """Enough weights that the next one is never in the L2 cache."""
    axes = (shape.k, 2, shape.n // 2) if shape.gate else (shape.k, shape.n)
    if shape.weight:
        like = jax.eval_shape(lambda: shape.weight.empty(axes))
        random = jax.jit(lambda seed: random_quantised(jax.random.key(seed), like, shape.k**-0.5))
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        return [random(i) for i in range(_cold_count(nbytes))]
    count = _cold_count(shape.k * shape.n * jnp.dtype(dtype).itemsize)
    return [_normal(i, axes, dtype) * jnp.asarray(shape.k**-0.5, dtype) for i in range(count)]


def _cold_count(nbytes: int) -> int:
    """Number of weights of `nbytes` each so that the next one is never in the L2 cache."""
    return 3 * l2_bytes(jax.devices()[0]) // nbytes + 1


def _operands(shape: LinearShape, m: int, w: Any, seed: int, dtype: str) -> dict[str, Any]:
    operands = {"x": _normal(seed, (m, shape.k), dtype), "w": w}
    if shape.norm:
        operands["norm"] = RMSNorm(_normal(seed + 1, (shape.k,), dtype), 1e-5)
    if shape.residual:
        operands["residual"] = _normal(seed + 2, (m, shape.n), dtype)
    return operands


def _first(m: int, operands: dict[str, Any]) -> dict[str, Any]:
    """The operands with only their first M rows."""
    return operands | {name: operands[name][:m] for name in ("x", "residual") if name in operands}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _compile(fn, args) -> jax.stages.Compiled | None:
    try:
        return jax.jit(fn).lower(*args).compile()
    except NotImplementedError:
        return None


def measure_matmul(
    shapes: Iterable[LinearShape],
    rows: Sequence[int] = ROWS,
    *,
    dtype: str = "bfloat16",
    runs: int = 10,
    configs: Callable[[LinearShape, int], Sequence[Any]] = candidates,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Time XLA and every candidate of the kernel on the first device.

    Args:
      shapes: the linear layers.
      rows: values of M.
      dtype: dtype of the operands.
      runs: timed calls of each, in each of two passes.
      configs: function of (layer, M) that returns the tilings to try.
      report: called with a line for every entry, and for every candidate with a wrong result.

    Yields:
      An entry of the table for each layer and M. Beside the choice, it has the `microseconds` of
      "xla" and "mosaic_gpu", which is None if no candidate ran. Candidates with wrong results are
      left out.
    """
    for shape in dict.fromkeys(shapes):
        keys = {"gate": "silu" if shape.gate else None}
        result = jnp.dtype(shape.result or dtype)

        def xla(operands, keys=keys, result=result):
            return matmul(**operands, **keys, preferred_element_type=result, implementation="xla")

        def kernel(operands, config, keys=keys, result=result):
            return _run(config=config, **operands, **keys, dtype=result)

        def tilings(m, shape=shape):
            return tuple(configs(shape, m))

        for tried, some in itertools.groupby(rows, tilings):
            variants = {None: xla} | {c: functools.partial(kernel, config=c) for c in tried}
            for m, measured in time_linear(shape, list(some), variants, dtype=dtype, runs=runs):
                for config, one in measured.items():
                    if one.problem:
                        report(f"{shape} M={m} {config}: {one.problem}")
                times = {c: one.timing.median_us for c, one in measured.items() if one.timing}
                entry = table_entry("matmul", shape.key(m, jnp.dtype(dtype).itemsize), times)
                report(f"{shape} M={m}: {entry['implementation']} {entry['microseconds']}")
                yield entry


def measure_chain(
    config: DecoderConfig,
    rows: Sequence[int] = CHAIN_ROWS,
    *,
    plan: Plan | None = None,
    dtype: str = "bfloat16",
    runs: int = 10,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Time the linear layers between two attentions of a decoder, one by one and as one kernel.

    Every candidate configuration of the kernel is timed.

    Args:
      config: the decoder.
      rows: values of M.
      plan: plan for the single layers; default the plan of the first device.
      dtype: dtype of the operands.
      runs: timed calls of each, in each of two passes.
      report: called with a line for every entry, and for every candidate with a wrong result.

    Yields:
      An entry of the table for each M, where "xla" means layer by layer. Nothing, if the chain does
      not support the decoder's biases or norms, or if the kernel does not run on this device or
      with these sizes.
    """
    plan = plan or Plan.for_device()
    itemsize = jnp.dtype(dtype).itemsize
    shape = chain_shape(config, 1, itemsize)
    tried = plan.candidates("linear_chain", chain_features(config), shape)
    if not tried or not can_chain(jax.devices()[0]):
        return
    k, width, hidden, n = (shape[name] for name in ("k", "width", "hidden", "n"))
    weights = list(_chain_weights(k, width, hidden, n, dtype))

    def run(config, o, x, weights):
        operands = o, x, chain_counters(1), 0
        if config is None:
            return linear_chain(*operands, **weights, gate="silu", implementation="xla", plan=plan)
        return chain_mosaic(*operands, **weights, gate="silu", config=config)

    for m in rows:
        sets = [
            (_normal(i, (m, k), dtype), _normal(i, (m, width), dtype), w)
            for i, w in enumerate(weights)
        ]
        variants = None, *tried
        functions = {c: _compile(functools.partial(run, c), sets[0]) for c in variants}
        if None in functions.values():
            return
        want = functions[None](*sets[0])
        for config in tried:
            results = zip(functions[config](*sets[0]), want, strict=True)
            problems = [p for got, right in results if (p := verify(got, right, _TOLERANCE)[1])]
            if problems:
                report(f"linear_chain M={m} {config}: {', '.join(problems)}")
                del functions[config]
        passes = [{c: measure(fn, sets, runs=runs) for c, fn in functions.items()} for _ in "12"]
        times = {c: Timing.merge([p[c] for p in passes]).median_us for c in functions}
        entry = table_entry("linear_chain", shape | {"m": m}, times)
        report(f"linear_chain M={m}: {entry['implementation']} {entry['microseconds']}")
        yield entry


def _chain_weights(k: int, width: int, hidden: int, n: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield enough sets of operands of `linear_chain` that the next one is never in L2."""
    shapes = {
        "out": (k, width),
        "gate_up": (width, 2, hidden),
        "down": (hidden, width),
        "following": (width, n),
    }
    nbytes = sum(map(math.prod, shapes.values())) * jnp.dtype(dtype).itemsize
    for i in range(_cold_count(nbytes)):
        weights = {
            name: _normal(i, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
            for name, shape in shapes.items()
        }
        norm = RMSNorm(_normal(i, (width,), dtype), 1e-5)
        yield weights | {"mlp_norm": norm, "next_norm": norm}


def tune(
    model: Model,
    *,
    commit: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the linear layers and experts of a model on its device.

    Args:
      model: a model from `describe`. If several devices share it, a single one measures its part of
        each linear layer, and all of them whether its layers run in one launch.
      commit: commit to record if git cannot be asked.
      report: called with a line for every entry measured.

    Returns:
      A table, for `write_table` and `explain`.

    Raises:
      NotImplementedError: the kernels do not run on this device or in this dtype.
    """
    capability = model.plan.compute_capability
    if capability != (9, 0):
        raise NotImplementedError(
            "tune: the kernels need an NVIDIA GPU of compute capability 9.0 (H100, H200), "
            f"got {model.plan.device_kind!r}"
        )
    if jnp.dtype(model.dtype).itemsize != 2:
        raise NotImplementedError(
            f"tune: the kernels multiply bfloat16 or float16, got {model.dtype}"
        )
    # Weights that are not in bricks run through XLA.
    shapes = [
        shape
        for shape in model.local.config.linear_shapes.values()
        if not shape.weight or shape.weight.layout == BRICKS
    ]
    entries = list(measure_matmul(shapes, dtype=model.dtype, report=report))
    found = tuple(as_entry(row, KERNEL_REVISIONS, "tune") for row in entries)
    plan = dataclasses.replace(model.plan, table=found)
    local = model.local.config
    entries += measure_experts(local, dtype=model.dtype, report=report)
    entries += measure_chain(local, plan=plan, dtype=model.dtype, report=report)
    found = tuple(as_entry(row, KERNEL_REVISIONS, "tune") for row in entries)
    plan = dataclasses.replace(model.plan, table=found)
    planned = describe(model.config, dtype=model.dtype, plan=plan, tensor_parallel=model.ranks)
    entries += measure_layers(planned, report=report)
    return table_of(entries, commit)
