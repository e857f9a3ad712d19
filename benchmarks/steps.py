"""Decode steps behind contexts without prompts: `python -m benchmarks.steps CONFIG`.

A point takes seconds, also where its prompt would take minutes. The engine's own programs run with
random weights, and with random keys and values in pages in random order. Results are not checked:
`benchmarks.end_to_end` does that. With `--layers`, a step has fewer layers, but still the head.

Random weights must not lead to scores beyond the range of the unified maximum, because attention
then runs twice. This is counted once for each plan, and noted in that row of the record, except in
one launch.
"""

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.arguments import read_config
from benchmarks.end_to_end import (
    PLANS,
    Point,
    parse_point,
    planned_model,
    read_model,
    summary,
    weight_format,
)
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import Measurement, Record, emit, environment, write
from fdjax.bench.timing import Timing
from fdjax.engine.engine import Engine
from fdjax.engine.host_arrays import HostArrays
from fdjax.engine.results import bytes_of_params, step_bytes
from fdjax.engine.schedule import slots_for
from fdjax.engine.scheduler import StateShape
from fdjax.engine.state import NOBODYS_PAGE, StackedCache, cache_bytes, pack_progress
from fdjax.engine.step import decode_steps
from fdjax.models import Model, describe, layers_shape
from fdjax.pallas_kernels.layers import DecodeLayersConfig
from fdjax.pallas_kernels.plan import Choice, Entry
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors
from fdjax.system.files import output_file
from fdjax.weights.stacked import random_stacked_params

_FIELDS = [field.name for field in dataclasses.fields(DecodeLayersConfig)]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument(
        "--points",
        nargs="+",
        type=parse_point,
        default=[(1, 1024), (1, 4096)],
        metavar="BxC",
        help="rows, and tokens that the last step of a call reads for each",
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=("fdjax",))
    parser.add_argument(
        "--one-launch",
        nargs="+",
        type=_field,
        metavar="FIELD=N",
        help=f"run all layers in one launch, with this configuration: {', '.join(_FIELDS)}",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", type=weight_format, metavar="KIND:GROUP")
    parser.add_argument("--head", type=weight_format, metavar="KIND:GROUP")
    parser.add_argument("--layers", type=int, help="use only the first N layers")
    parser.add_argument("--steps", type=int, default=33, help="decode steps of a call")
    parser.add_argument("--runs", type=int, default=8, help="timed calls")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    args.experts = None
    if args.steps < 2 or args.runs < 1:
        parser.error("--steps must be at least 2, and --runs at least 1")
    if any(context <= args.steps for _, context in args.points):
        parser.error(f"--points: a context must be longer than the {args.steps} steps of a call")
    return args


def _field(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in _FIELDS or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"must be one of {_FIELDS} with a number, got {text!r}")
    return name, int(value)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model = read_model(args)
    on_gpu = jax.default_backend() == "gpu"
    size = 2**30 if on_gpu else 2**24
    config = {"model": read_config(args.config), "layers": model.config.layers}
    config |= {"dtype": args.dtype, "weights": args.weights, "head": args.head}
    config |= {"one launch": dict(args.one_launch or ())}
    ceiling = {"before": measure_ceiling(size, matmul_size=0)}
    record = Record(environment(args.commit), config, ceiling)
    params, _stacks = random_stacked_params(model)
    for name in args.plans:
        planned, reruns = planned_model(model, name), None
        for point in args.points:
            one = with_one_launch(planned, point, args.one_launch) if args.one_launch else planned
            record.rows.append(row := measured(one, params, name, point, args.steps, args.runs))
            if reruns is None and row.timing:
                reruns = rerun_share(one, params, *point)
                row.notes.extend(notes_on(reruns))
            took = row.timing and f"{row.timing['median_us']:.1f} us"
            print(f"{row.case}, {name}: {took or row.reason}", file=sys.stderr, flush=True)
            if args.output:
                write(record.so_far(), args.output)
    print(summary(record.rows), file=sys.stderr)
    emit(record.finish(measure_ceiling(size, matmul_size=0)), args.output)
    return int(record.failed)


def with_one_launch(model: Model, point: Point, fields: Sequence[tuple[str, int]]) -> Model:
    """The model with a plan that runs all layers of these points in one launch."""
    rows, context = point
    choice = Choice("mosaic_gpu", tuple(fields), source="table")
    shape = layers_shape(
        model.local.config, rows, slots_of(context), jnp.dtype(model.dtype).itemsize
    )
    entry = Entry("decode_layers", tuple(sorted(shape.items())), choice)
    plan = dataclasses.replace(model.plan, table=(entry, *model.plan.table))
    return describe(model.config, dtype=model.dtype, plan=plan, kv_dtype=model.kv_dtype)


def slots_of(context: int) -> int:
    """The slots of a row that the engine chooses."""
    return slots_for(context, context, None)


def measured(
    model: Model, params: Any, name: str, point: Point, steps: int, runs: int
) -> Measurement:
    """Time a decode step of `rows` rows, whose last one reads `context` tokens of each."""
    rows, context = point
    case = f"decode step B{rows} P{context}"
    try:
        samples, nbytes = step_samples(model, params, rows, context, steps, runs)
    except NotImplementedError as error:
        return Measurement(case, name, None, reason=str(error).splitlines()[0])
    timing = dataclasses.asdict(Timing.from_samples([samples], "host"))
    return Measurement(case, name, True, timing=timing, bytes=nbytes)


def step_samples(
    model: Model, params: Any, rows: int, context: int, steps: int, runs: int
) -> tuple[list[float], int]:
    """(microseconds of a step in each run, the bytes that a step must read), means over a call.

    The shortest call with a single step is subtracted from each call, and with it what a call costs
    the host. The last step reads `context` tokens of each row, so a mean step reads `steps / 2`
    fewer.
    """
    engine = Engine(model, params)
    call = caller(engine, rows, context, steps)
    for _ in range(2):
        call(steps)
    single = min(call(1)[0] for _ in range(5))
    samples = [1e6 * (call(steps)[0] - single) / (steps - 1) for _ in range(runs)]
    nbytes = step_bytes(model, *bytes_of_params(params), rows)
    nbytes += rows * (2 * context - steps) * cache_bytes(model.local, 1, 1) // 2
    engine.release()
    del call
    gc.collect()  # frees the cache before the next one is allocated
    return samples, nbytes


def rerun_share(model: Model, params: Any, rows: int, context: int) -> float | None:
    """Share of the blocks of attention that run again in a step; None in one launch."""
    engine = Engine(model, params)
    if engine.stacks(rows, slots_of(context)):
        return None
    _, (*_, reruns) = caller(engine, rows, context, 1, return_reruns=True)(1)
    engine.release()
    gc.collect()
    return float(np.mean(reruns))


def notes_on(reruns: float | None) -> list[str]:
    """Reasons to doubt a time."""
    return [f"{reruns:.0%} of the blocks of attention ran again"] if (reruns or 0) > 0.001 else []


def caller(
    engine: Engine, rows: int, context: int, steps: int, **static: Any
) -> Callable[[int], tuple[float, Any]]:
    """A function (number of steps) → (seconds, results of `decode_steps` but the state) of a call.

    Its last step reads `context` tokens of each row. `static` are arguments of `decode_steps`.
    """
    slots = slots_of(context)
    count, pages = 0, None
    if engine.paged:
        each = -(-context // engine.page_tokens)
        count = rows * each + 1  # nobody's page comes first
        pages = np.full((rows, slots // engine.page_tokens), NOBODYS_PAGE, np.int32)
        own = np.random.default_rng(0).permutation(np.arange(1, count, dtype=np.int32))
        pages[:, :each] = own.reshape(rows, each)
    state = engine.take_state(StateShape(rows, slots, pages=count, most_rows=rows), may_stack=True)
    state = dataclasses.replace(state, kv=filled(state.kv))
    sampling = per_row([GenerationConfig(max_new_tokens=10 * steps)] * rows, rows)
    program = engine.program(
        decode_steps,
        stacked=isinstance(state.kv, StackedCache),
        stacked_layers=(one_launch := engine.stacks(rows, slots)),
        processors=Processors().tier,
        max_steps=steps,
        **static,
    )
    leaves, treedef = jax.tree.flatten(state)

    def call(n: int) -> tuple[float, Any]:
        nonlocal leaves
        ones = np.ones(rows, np.int32)
        progress = pack_progress((context - n) * ones, 5 * ones, ones, 0 * ones)
        state = jax.tree.unflatten(treedef, leaves)
        state = dataclasses.replace(state, progress=engine.place.put(np.asarray(progress)))
        host = engine.place.put(HostArrays.pack((sampling, np.int32(n), pages, None)))
        given = engine.params_of(one_launch), jax.tree.leaves(state), host
        jax.block_until_ready(given)
        began = time.perf_counter()
        leaves, *out = program(*given)
        jax.block_until_ready((leaves, out))
        return time.perf_counter() - began, out

    return call


@functools.partial(jax.jit, donate_argnums=0)
def filled(kv: Any) -> Any:
    """A cache of the same shape with random content; made layer by layer, as it needs memory."""

    def random(leaf: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), len(leaf))
        if leaf.dtype == jnp.int8:
            return lax.map(lambda k: jax.random.bits(k, leaf.shape[1:], "uint8").view("int8"), keys)
        scale = 1.0 if leaf.dtype.itemsize == 2 else 0.01  # fp32 are the scales of int8
        return lax.map(
            lambda k: scale * jax.random.normal(k, leaf.shape[1:], leaf.dtype), keys
        ).astype(leaf.dtype)

    return jax.tree.map(random, kv)


if __name__ == "__main__":
    sys.exit(main())
