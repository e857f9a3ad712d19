"""Measures time on the device and on the host.

On one GPU the clock is CUPTI: the sum of end minus start over a call's kernels. It leaves out gaps
between kernels, counts overlaps twice, and does not see copies and fills, which are not kernels. So
a `Timing` also has the host's time per call and the bytes of copies found in the compiled module.
Elsewhere the clock is the host's.
"""

import collections
import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# JAX does not report the size of L2. A guess that is too large wastes memory; one that is too small
# leaves data in L2 and falsifies the timing.
_L2_MIB = {"A100": 40, "H100": 50, "H200": 50}
_L2_MIB_OTHER_GPU = 128
_CUPTI_LOCK = threading.Lock()  # Mosaic keeps one profiler state per process.


@dataclasses.dataclass(frozen=True)
class Timing:
    """Statistics of repeated calls, all times in microseconds.

    Attributes:
      clock: `"cupti"` (device time) or `"host"`.
      wall_us: host time per call when calls are queued back to back; None if not measured.
      cold_l2: whether the rotated data exceeded three times L2; None if not rotated.
      uncounted_copy_bytes: bytes of the module's device copies, which the CUPTI clock does not
        see, each counted once; 0 on the host clock, which sees them.
      kernels: kernel name → median time per call; empty on the host clock.
      samples_us: every sample, one list per pass.
    """

    median_us: float
    min_us: float
    max_us: float
    p10_us: float
    p90_us: float
    spread_us: float  # the larger of p90 - p10 and the distance between the passes' medians
    runs: int
    clock: str
    wall_us: float | None
    cold_l2: bool | None
    uncounted_copy_bytes: int
    kernels: dict[str, float]
    samples_us: list[list[float]]

    @classmethod
    def from_samples(
        cls,
        passes: Sequence[Sequence[float]],
        clock: str,
        *,
        wall_us: float | None = None,
        cold_l2: bool | None = None,
        uncounted_copy_bytes: int = 0,
        kernels: dict[str, float] | None = None,
    ) -> "Timing":
        """Build the statistics from samples in microseconds, one sequence per pass."""
        samples = np.concatenate([np.asarray(p, np.float64) for p in passes])
        if not samples.size or not np.isfinite(samples).all() or samples.min() <= 0:
            raise ValueError(f"Timing: samples must be positive and finite, got {samples}")
        p10, median, p90 = np.percentile(samples, (10, 50, 90)).tolist()
        return cls(
            median_us=median,
            min_us=float(samples.min()),
            max_us=float(samples.max()),
            p10_us=p10,
            p90_us=p90,
            spread_us=max(p90 - p10, float(np.ptp([np.median(p) for p in passes]))),
            runs=samples.size,
            clock=clock,
            wall_us=wall_us,
            cold_l2=cold_l2,
            uncounted_copy_bytes=uncounted_copy_bytes,
            kernels=kernels or {},
            samples_us=[[round(float(s), 3) for s in p] for p in passes],
        )

    @classmethod
    def merge(cls, timings: Sequence["Timing"]) -> "Timing":
        """Joins passes over the same function. `kernels` come from the last pass."""
        last = timings[-1]
        walls = [t.wall_us for t in timings if t.wall_us is not None]
        return cls.from_samples(
            [p for t in timings for p in t.samples_us],
            last.clock,
            wall_us=float(np.median(walls)) if walls else None,
            cold_l2=last.cold_l2,
            uncounted_copy_bytes=last.uncounted_copy_bytes,
            kernels=last.kernels,
        )


def l2_bytes(device: jax.Device) -> int:
    """Return the size of the device's L2 in bytes, or an upper bound if it is unknown."""
    if device.platform != "gpu":
        return 2**20
    known = (mib for name, mib in _L2_MIB.items() if name in device.device_kind)
    return next(known, _L2_MIB_OTHER_GPU) * 2**20


def _arrays(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _devices(args: tuple) -> list[jax.Device]:
    return list({d for leaf in _arrays(args) for d in leaf.devices()} or {jax.devices()[0]})


def cold_sets(
    make_args: Callable[[int], tuple], bytes_per_set: int | None = None, *, limit: int = 256
) -> list[tuple]:
    """Build argument tuples to rotate through, enough to exceed three times L2.

    Args:
      make_args: seed → argument tuple of random data. Sets may share arrays if each set makes a
        call read a different part of them.
      bytes_per_set: bytes that one call touches, if fewer than the arguments have.
      limit: largest number of sets to build. If more are needed, data stays warm, and `measure`
        reports it.
    """
    first = make_args(0)
    touched = _touched_bytes(first, bytes_per_set)
    count = 3 * l2_bytes(_devices(first)[0]) // max(touched, 1) + 1
    return [first] + [make_args(seed) for seed in range(1, min(count, limit))]


def _touched_bytes(args: tuple, bytes_per_set: int | None) -> int:
    size = sum(leaf.nbytes for leaf in _arrays(args))
    return size if bytes_per_set is None else min(size, bytes_per_set)


def compile_for(fn: Callable, args: tuple) -> jax.stages.Compiled:
    """Compiles a function, jitted or not, for `args`. A compiled function is returned as it is."""
    if isinstance(fn, jax.stages.Compiled):
        return fn
    return (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args).compile()


def _copied_bytes(hlo: str) -> int:
    """Sums the bytes of a compiled module's copies that run as memory copies, not in a kernel."""
    fused, computation, total = set(re.findall(r"calls=%([\w.-]+)", hlo)), "", 0
    for line in hlo.splitlines():
        if start := re.match(r"(?:ENTRY )?%([\w.-]+) ", line):
            computation = start[1]
        elif computation not in fused and (
            copy := re.search(r"= (?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]\S* copy\(", line)
        ):
            total += math.prod(map(int, filter(None, copy[2].split(",")))) * int(copy[1] or 8) // 8
    return total


class _Rotation(jax.stages.Wrapped):
    """A jitted function without arguments, which uses the next argument set at each call.

    The profiler repeats a call with the same arguments, which would then be in L2. The profiler
    would also jit a function that is not a `Wrapped`. A call waits for its result, because queued
    kernels with programmatic dependent launch would start before the previous one has ended.
    """

    def __init__(self, compiled: Callable, sets: Sequence[tuple]):
        self._compiled, self._sets, self._next = compiled, sets, 0

    def queue(self) -> Any:
        args = self._sets[self._next % len(self._sets)]
        self._next += 1
        return self._compiled(*args)

    def __call__(self) -> None:
        jax.block_until_ready(self.queue())


def _cupti_samples(call: _Rotation, runs: int) -> list[list[tuple[str, float]]]:
    """Return the (name, milliseconds) of each kernel, for each run."""
    from jax.experimental.mosaic.gpu import profiler

    def session(iterations: int) -> Any:
        kernels = profiler.measure(call, aggregate=False, iterations=iterations)()[1]
        if not kernels:
            raise RuntimeError("measure: CUPTI must see a kernel, got none")
        return kernels

    with _CUPTI_LOCK:
        if runs > 1:
            try:
                return session(runs)
            except RuntimeError as error:
                # Kernels on several streams are not always recorded in the same order. Then runs
                # can be told apart only by giving each its own session.
                if "iterations" not in str(error):
                    raise
        return [session(1) for _ in range(runs)]


def _host_samples(call: Callable[[], Any], runs: int) -> list[float]:
    samples = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        jax.block_until_ready(call())
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return samples


def measure(
    fn: Callable,
    args_sets: Sequence[tuple],
    *,
    runs: int = 20,
    warmup: int = 3,
    bytes_per_set: int | None = None,
    clock: str | None = None,
) -> Timing:
    """Time calls of `fn`, each with the next of `args_sets`.

    Args:
      fn: function of arrays: plain, jitted or compiled. It must not donate its arguments.
      args_sets: argument tuples of equal shapes, from `cold_sets`.
      runs: timed calls.
      warmup: calls before them.
      bytes_per_set: bytes that one call touches, if fewer than the arguments have.
      clock: `"cupti"` or `"host"`; None takes CUPTI if the arguments are on one GPU.

    Raises:
      ValueError: `runs` is below 1 or there are no sets.
      RuntimeError: CUPTI saw no kernel.
    """
    if runs < 1 or not args_sets:
        raise ValueError(f"measure: needs runs and sets, got {runs=}, {len(args_sets)} sets")
    compiled = compile_for(fn, args_sets[0])
    devices = _devices(args_sets[0])
    if clock is None:
        clock = "cupti" if len(devices) == 1 and devices[0].platform == "gpu" else "host"
    distinct = len({tuple(map(id, jax.tree.leaves(args))) for args in args_sets})
    rotated_bytes = distinct * _touched_bytes(args_sets[0], bytes_per_set)
    call = _Rotation(compiled, args_sets)
    for _ in range(warmup):
        call()
    cold_l2 = rotated_bytes > 3 * l2_bytes(devices[0])
    if clock == "host":
        return Timing.from_samples([_host_samples(call, runs)], clock, cold_l2=cold_l2)

    start = time.perf_counter_ns()
    for _ in range(runs):
        last = call.queue()
    jax.block_until_ready(last)
    wall_us = (time.perf_counter_ns() - start) / 1e3 / runs

    per_run = []
    for kernels in _cupti_samples(call, runs):
        by_name: dict[str, float] = collections.defaultdict(float)
        for name, milliseconds in kernels:
            by_name[name[:120]] += milliseconds * 1e3  # mangled names may have kilobytes
        per_run.append(by_name)
    names = dict.fromkeys(name for by_name in per_run for name in by_name)
    return Timing.from_samples(
        [[sum(by_name.values()) for by_name in per_run]],
        clock,
        wall_us=wall_us,
        cold_l2=cold_l2,
        uncounted_copy_bytes=_copied_bytes(compiled.as_text()),
        kernels={n: float(np.median([r.get(n, 0.0) for r in per_run])) for n in names},
    )


def wall(fn: Callable, *args: Any, runs: int = 10, warmup: int = 3) -> Timing:
    """Time whole calls of `fn(*args)` by the host's clock, dispatch and waiting included.

    Use it for programs of Python and JAX code, such as `generate`. `fn` is not jitted, and each
    call waits for its result. The first calls compile and capture CUDA graphs, so keep `warmup` at
    3 or more.
    """
    for _ in range(warmup):
        jax.block_until_ready(fn(*args))
    return Timing.from_samples([_host_samples(lambda: fn(*args), runs)], "host")
