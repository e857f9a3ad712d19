"""The dataflow table: which implementation of `matmul` a device runs fastest, shape by shape.

FlashDecoding++ (Hong et al. 2024), section 5: the linear layers of a model have few [K,N], so each
is measured over M once, and the inflection points between the implementations are looked up from
then on. `measure_matmul` makes the rows, `table_of` the file that `plan.read_table` reads, and
`explain` prints it like Fig. 9(c) of the paper.
"""

import concurrent.futures
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.bench.check import verify
from fdjax.bench.record import environment
from fdjax.bench.timing import l2_bytes, measure
from fdjax.models import DecoderConfig
from fdjax.pallas_kernels.gemm import FlatGemmConfig, matmul
from fdjax.pallas_kernels.gemm.flat_gemm import matmul_flat_gemm
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import KERNEL_REVISIONS, TABLE_SCHEMA

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# (block_n, block_k, stages, split); in sweeps over all, the fastest was always one of these.
CANDIDATES = tuple(
    FlatGemmConfig(*c)
    for c in (
        *((64, 128, 3, 1), (64, 128, 5, 1), (64, 128, 8, 1), (64, 64, 8, 1)),
        *((64, 128, 2, 1), (64, 128, 4, 2), (64, 64, 8, 2)),
        *((128, 64, 3, 1), (128, 64, 4, 1), (128, 64, 6, 1), (128, 128, 2, 1), (128, 128, 3, 1)),
        *((192, 64, 4, 1), (256, 64, 3, 1), (256, 64, 4, 1)),
    )
)

# Errors of single products in half precision; what is asked is only whether they are right at all.
_TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """A weight [K,N], or with `gate` [K,2,N/2]: N counts the columns of both halves."""

    k: int
    n: int
    gate: bool = False

    def __str__(self):
        return f"[{self.k},{'2,' if self.gate else ''}{self.n // (2 if self.gate else 1)}]"


def linear_shapes(config: DecoderConfig) -> dict[str, LinearShape]:
    """The distinct linear layers of a decoder, by name."""
    width, heads = config.width, config.heads * config.head_dim
    return {
        "qkv": LinearShape(width, heads + 2 * config.kv_heads * config.head_dim),
        "out": LinearShape(heads, width),
        "gate_up": LinearShape(width, 2 * config.mlp_width, gate=True),
        "down": LinearShape(config.mlp_width, width),
        "head": LinearShape(width, config.vocab_size),
    }


def candidates(shape: LinearShape) -> list[FlatGemmConfig]:
    """Tilings of a shape with enough blocks to stream, but not more than can run at once."""
    return [config for config in CANDIDATES if _runs_at_once(shape, config)]


def _runs_at_once(shape: LinearShape, config: FlatGemmConfig) -> bool:
    parts = 2 if shape.gate else 1
    blocks = -(-shape.n // (parts * config.block_n)) * config.split
    ring_bytes = 2 * parts * config.block_n * config.block_k * config.stages
    return blocks >= 48 and ring_bytes * -(-blocks // 132) <= 200 * 1024


def measure_matmul(
    shapes: Iterable[LinearShape],
    rows: Sequence[int] = ROWS,
    *,
    dtype: str = "bfloat16",
    runs: int = 20,
    configs: Callable[[LinearShape], Sequence[FlatGemmConfig]] = candidates,
    report: Callable[[str], None] = functools.partial(print, file=sys.stderr, flush=True),
) -> Iterator[dict[str, Any]]:
    """Times XLA and every candidate on the first device, on cold weights.

    Products with a gate are timed as models run them, with the norm and the activation.

    Args:
      shapes: the weights.
      rows: values of M.
      dtype: of x and w.
      runs: timed calls of each.
      configs: the tilings tried for a shape.
      report: takes a line for every row.

    Yields:
      One entry of the table for each shape and M, with `microseconds` of "xla" and "mosaic_gpu"
      (None where no candidate ran) beside the choice. A candidate whose result is wrong is left out.
    """
    for shape in dict.fromkeys(shapes):
        weights = _weights(shape, dtype)
        calls = {
            m: [(_operands(shape, m, i, dtype), w) for i, w in enumerate(weights)] for m in rows
        }
        tried = {None: _xla} | {c: functools.partial(_mosaic, config=c) for c in configs(shape)}
        # Autotuning runs on the device, so nothing is timed while anything compiles.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = {
                (m, config): pool.submit(_compile, fn, calls[m][0])
                for m in rows
                for config, fn in tried.items()
            }
        for m in rows:
            want = compiled[m, None].result()(*calls[m][0])
            times = {}
            for config in tried:
                fn = compiled[m, config].result()
                if fn is None:
                    continue
                _, problem = verify(fn(*calls[m][0]), want, _TOLERANCE)
                if problem:
                    report(f"{shape} M={m} {config}: {problem}")
                else:
                    times[config] = measure(fn, calls[m], runs=runs).median_us
            entry = _entry(shape, m, jnp.dtype(dtype).itemsize, times)
            report(f"{shape} M={m}: {entry['implementation']} {entry['microseconds']}")
            yield entry


def _weights(shape: LinearShape, dtype: str) -> list[jax.Array]:
    """So many weights that the next one is never in L2."""
    axes = (shape.k, 2, shape.n // 2) if shape.gate else (shape.k, shape.n)
    nbytes = shape.k * shape.n * jnp.dtype(dtype).itemsize
    count = 3 * l2_bytes(jax.devices()[0]) // nbytes + 1
    return [_normal(i, axes, dtype) * jnp.asarray(shape.k**-0.5, dtype) for i in range(count)]


def _operands(shape: LinearShape, m: int, seed: int, dtype: str) -> dict[str, Any]:
    operands = {"x": _normal(seed, (m, shape.k), dtype)}
    if shape.gate:
        operands["norm"] = RMSNorm(_normal(seed + 1, (shape.k,), dtype), 1e-5)
    return operands


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _xla(operands, w):
    return matmul(**operands, w=w, gate=_gate(w), implementation="xla")


def _mosaic(operands, w, *, config):
    return matmul_flat_gemm(**operands, w=w, gate=_gate(w), dtype=w.dtype, config=config)


def _gate(w) -> str | None:
    return "silu" if w.ndim == 3 else None


def _compile(fn, args) -> jax.stages.Compiled | None:
    try:
        return jax.jit(fn).lower(*args).compile()
    except NotImplementedError:
        return None


def _entry(shape: LinearShape, m: int, itemsize: int, times: Mapping) -> dict[str, Any]:
    xla_us = times[None]
    config = min((c for c in times if c is not None), key=times.get, default=None)
    best_us = times.get(config) if config else None
    wins = best_us is not None and best_us <= xla_us
    return {
        "op": "matmul",
        "shape": {
            "m": m,
            "k": shape.k,
            "n": shape.n,
            "itemsize": itemsize,
            "gate": int(shape.gate),
        },
        "implementation": "mosaic_gpu" if wins else "xla",
        "config": dataclasses.asdict(config) if wins else None,
        "microseconds": {
            "xla": round(xla_us, 2),
            "mosaic_gpu": None if best_us is None else round(best_us, 2),
        },
    }


def table_of(entries: Iterable[Mapping[str, Any]], commit: str | None = None) -> dict[str, Any]:
    """A dataflow table of measured entries, with where they come from."""
    return {
        "schema": TABLE_SCHEMA,
        "revisions": KERNEL_REVISIONS,
        "provenance": environment(commit),
        "entries": list(entries),
    }


def write_table(table: Mapping[str, Any], path: str | Path) -> None:
    """Write a table as JSON, an entry to a line."""
    head = {key: value for key, value in table.items() if key != "entries"}
    lines = ",\n".join("  " + json.dumps(entry) for entry in table["entries"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n' + lines + "\n ]\n}\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def explain(table: Mapping[str, Any]) -> str:
    """The `matmul` entries of a table as text: a line per weight, a column per M.

    Each cell is the speed of the chosen implementation over XLA, and `xla` where that was chosen.
    """
    by_shape: dict[LinearShape, dict[int, Mapping]] = {}
    for entry in table["entries"]:
        if entry["op"] == "matmul":
            s = entry["shape"]
            shape = LinearShape(s["k"], s["n"], bool(s["gate"]))
            by_shape.setdefault(shape, {})[s["m"]] = entry
    rows = sorted({m for entries in by_shape.values() for m in entries})
    lines = [" " * 16 + "".join(f"{f'M={m}':>8}" for m in rows)]
    for shape, entries in by_shape.items():
        cells = (_cell(entries[m]) if m in entries else "-" for m in rows)
        lines.append(f"{shape!s:16}" + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any]) -> str:
    if entry["implementation"] == "xla":
        return "xla"
    times = entry["microseconds"]
    return f"{times['xla'] / times['mosaic_gpu']:.2f}x"
