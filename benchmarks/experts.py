"""Mixtures of experts: `python -m benchmarks.experts` compares kernels with XLA.

Runs the op `moe` alone, from the router's logits to the sum, with random routing. The experts have
the sizes of Qwen3-30B-A3B, Mixtral 8x7B, OLMoE, and gpt-oss-20b in MXFP4. The bound is the bytes of
the distinct experts that the rows chose. Their number is in the name of a case. The table shows the
times of both kernels for each tiling, and thus the best tiling of each kernel.

More than 32 rows, as of prompts, run the grouped product beside JAX's `ragged_dot`; with quantised
experts, which XLA dequantises, or "own" a kernel.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fdjax.bench.record import Measurement, emit
from fdjax.bench.suite import Case, run_cases
from fdjax.bench.timing import compile_for
from fdjax.pallas_kernels.experts import Routing, moe, moe_reference, route
from fdjax.pallas_kernels.experts.hopper.chosen import (
    CANDIDATES,
    PACKED_CANDIDATES,
    MoeConfig,
    moe_chosen,
)
from fdjax.pallas_kernels.experts.hopper.grouped import MOE_GROUPED, GroupedConfig
from fdjax.pallas_kernels.quantised import (
    BRICKS,
    WeightFormat,
    dequantise,
    in_layout,
    random_quantised,
)
from fdjax.system.files import output_file


class Sizes(NamedTuple):
    """Sizes of a model's experts: E, F, routing, format of quantised weights, activation."""

    width: int
    hidden: int
    routing: Routing
    form: WeightFormat | None = None
    gate: str = "silu"


MODELS = {
    "Qwen3-30B-A3B": Sizes(2048, 768, Routing(128, 8, normalised=True)),
    "Mixtral 8x7B": Sizes(4096, 14336, Routing(8, 2, normalised=True)),
    "OLMoE": Sizes(2048, 1024, Routing(64, 8)),
    "gpt-oss-20b": Sizes(
        *(2880, 2880, Routing(32, 4, normalised=True)),
        form=WeightFormat("fp4", 32, scales="float8_e8m0fnu"),
        gate="clamped_swiglu",
    ),
}
ROWS = (1, 8, 16, 32)


@functools.cache
def _weights(sizes: Sizes) -> tuple[Any, Any]:
    """gate_up and down, in the layout that XLA reads if they are quantised."""
    count = sizes.routing.experts
    shapes = (sizes.width, 2, sizes.hidden), (sizes.hidden, sizes.width)

    @jax.jit
    def make():
        keys = jax.random.split(jax.random.key(0))
        if sizes.form is None:
            return tuple(
                jax.random.normal(key, (count, *shape), jnp.bfloat16) * shape[0] ** -0.5
                for key, shape in zip(keys, shapes, strict=True)
            )
        return tuple(
            random_quantised(key, sizes.form.empty(shape, (count,)), shape[0] ** -0.5)
            for key, shape in zip(keys, shapes, strict=True)
        )

    return make()


@functools.cache
def _bricks(sizes: Sizes) -> tuple[Any, Any]:
    """The weights in the layout that the kernels read."""
    return jax.jit(lambda ws: tuple(in_layout(w, BRICKS) for w in ws))(_weights(sizes))


def _rows(seed: int, m: int, width: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """x [M,E] and logits [M,X]."""
    rng = np.random.default_rng((seed, m))
    x = rng.normal(size=(m, width)).astype(jnp.bfloat16)
    return x, rng.normal(size=(m, experts)).astype(np.float32)


def distinct_experts(logits: np.ndarray, chosen: int) -> int:
    """The number of experts that rows with these logits [M,X] choose."""
    return len(np.unique(np.argsort(-logits, axis=1)[:, :chosen]))


def _ours(x, logits, gate_up, down, *, sizes: Sizes, config: MoeConfig):
    chosen = route(logits, sizes.routing)
    return moe_chosen(x, *chosen, gate_up, down, gate=sizes.gate, config=config)


def _grouped(x, logits, gate_up, down, *, sizes: Sizes, config: GroupedConfig | None = None):
    options = {"routing": sizes.routing, "gate": sizes.gate, "live": None, "config": config}
    no_bias = None, None, None
    return MOE_GROUPED.run(x, logits, gate_up, down, *no_bias, **options, batch_invariant=False)


def _ragged_dot(x, logits, gate_up, down, *, sizes: Sizes):
    """The same sum with JAX's own grouped product."""
    experts, weights = route(logits, sizes.routing)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    counts = jnp.bincount(experts.reshape(-1), length=len(down)).astype(jnp.int32)
    rows = x[order // sizes.routing.chosen]
    both = lax.ragged_dot(rows, gate_up.reshape(*gate_up.shape[:2], -1), counts)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
    hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
    parts = jnp.zeros((len(order), x.shape[1]), x.dtype)
    parts = parts.at[order].set(lax.ragged_dot(hidden, down, counts), unique_indices=True)
    parts = parts.reshape(*experts.shape, -1).astype(jnp.float32)
    return (parts * weights[:, :, None]).sum(axis=1).astype(x.dtype)


def _reference(x, logits, *weights, sizes: Sizes):
    if sizes.form is not None:
        one = functools.partial(dequantise, dtype="float32")
        weights = [jax.vmap(one)(w) for w in weights]
    return moe_reference(x, logits, *weights, routing=sizes.routing, gate=sizes.gate)


def label(config: MoeConfig) -> str:
    """Name of a tiling, such as "64x64x4 128x64x4"."""
    numbers = dataclasses.astuple(config)
    return " ".join("x".join(map(str, numbers[i : i + 3])) for i in (0, 3))


def cases(name: str, rows: Sequence[int], configs: int, sizes: Sizes) -> list[Case]:
    """The cases of a model. Their argument sets share the weights, but choose different experts."""
    (width, hidden, routing, form, gate), own = sizes, sizes.routing.experts
    run: dict[str, Callable] = {
        "xla": functools.partial(moe, routing=routing, gate=gate, implementation="xla")
    }
    ours = [
        (label(config), functools.partial(_ours, sizes=sizes, config=config))
        for config in (CANDIDATES if form is None else PACKED_CANDIDATES)[:configs]
    ]
    names = [*(name for name, _ in ours), "grouped", "grouped, own"]
    prepare = {} if form is None else dict.fromkeys(names, _with_bricks(sizes))
    leaves = jax.tree.leaves(jax.eval_shape(lambda: _weights.__wrapped__(sizes)))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def case(m: int) -> Case:
        def make_args(seed: int) -> tuple:
            return *map(jnp.asarray, _rows(seed, m, width, own)), *_weights(sizes)

        count = distinct_experts(_rows(0, m, width, own)[1], routing.chosen)
        reference, named = functools.partial(_reference, sizes=sizes), run | dict(ours)
        if m > 32:
            # The reference computes all experts of all rows.
            reference = run["xla"]
            kinds = {"grouped": _grouped}
            if form is None:
                kinds["ragged_dot"] = _ragged_dot
            else:
                kinds["grouped, own"] = functools.partial(_grouped, config=GroupedConfig(1))
            named = run | {n: functools.partial(f, sizes=sizes) for n, f in kinds.items()}
        return Case(
            name=f"{name} M={m}, {count} experts",
            make_args=make_args,
            implementations=named,
            reference=reference,
            bytes=weights * count // own + 4 * m * width,
            flops=6 * m * routing.chosen * width * hidden,
            tolerance=2e-2,
            prepare=prepare,
        )

    return [case(m) for m in rows]


def _with_bricks(sizes: Sizes) -> Callable[..., tuple]:
    return lambda x, logits, *_: (x, logits, *_bricks(sizes))


def compiled(case: Case, pool: concurrent.futures.Executor) -> Callable[[], Case]:
    """Start compiling all functions of a case. The returned case waits for them."""
    args = case.make_args(0)
    functions = {**case.implementations, "reference": case.reference}
    started = {
        name: pool.submit(compile_for, run, case.prepare.get(name, lambda *a: a)(*args))
        for name, run in functions.items()
    }

    def done(name: str) -> Callable:
        # A function that does not compile is kept: the suite records why it fails.
        return functions[name] if started[name].exception() else started[name].result()

    def wait() -> Case:
        run = {name: done(name) for name in case.implementations}
        return dataclasses.replace(case, implementations=run, reference=done("reference"))

    return wait


def summary(rows: Sequence[Measurement]) -> str:
    """One line for each measurement: µs in total and of each kernel, share of the ceiling."""
    lines = [f"{'':40}{'us':>9}{'up':>8}{'down':>8}{'ceiling':>9}{'over xla':>10}"]
    xla: dict[str, float] = {}
    for row in rows:
        title = f"{row.case}: {row.implementation}"
        if row.timing is None:
            lines.append(f"{title:40} {row.reason}")
            continue
        us = row.timing["median_us"]
        if row.implementation == "xla":
            xla[row.case] = us
        parts = "".join(
            f"{sum(t for k, t in row.timing['kernels'].items() if name in k):8.1f}"
            for name in ("up_kernel", "down_kernel")
        )
        share = row.fraction_of_ceiling
        share = f"{share:9.1%}" if share is not None else " " * 9
        ratio = f"{xla[row.case] / us:10.2f}" if row.case in xla else ""
        lines.append(f"{title:40}{us:9.1f}{parts}{share}{ratio}")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="values of M")
    parser.add_argument("--configs", type=int, default=3, help="number of tilings")
    parser.add_argument("--runs", type=int, default=10, help="timed calls per pass")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    return parser.parse_args(argv)


def main(
    argv: Sequence[str] | None = None, models: Mapping[str, Sizes] = MODELS, **options: Any
) -> int:
    """Measure, print the summary, and print the record as the last line.

    Args:
      argv: command line without the program's name; None takes the process's.
      models: sizes by name.
      options: arguments of `run_cases`.
    """
    args = parse_args(argv)
    chosen = [
        case
        for name, sizes in models.items()
        for case in cases(name, args.rows, args.configs, sizes)
    ]
    chosen = [case for case in chosen if args.only in case.name]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [compiled(case, pool) for case in chosen]
        ready = [wait() for wait in waiting]
    record = run_cases(
        ready,
        runs=args.runs,
        commit=args.commit,
        output=args.output,
        **{"matmul_size": 8192 if max(args.rows) > 1024 else 0} | options,
    )
    print(summary(record.rows))
    emit(record, args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
