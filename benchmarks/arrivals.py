"""Latency of requests that arrive one by one. Part of `benchmarks.serving`."""

import contextlib
import gc
import heapq
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fdjax.lm import LM

_OPTIONS = {"eos_token_id": None, "do_sample": False}
_LARGEST = 8  # gaps and pauses that a record keeps
_TOGETHER = 0.01  # seconds between the ends of gaps with one cause


def times(count: int, rate: float, seed: int = 0) -> np.ndarray:
    """Seconds at which requests arrive: a Poisson process of `rate` per second, from 0 on."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def measure(
    lm: LM, prompts: Sequence[Sequence[int]], new: Sequence[int], *, rate: float
) -> dict[str, Any]:
    """Submit requests at their times of arrival, and measure the latencies that readers see.

    A delivery is a chunk of decode steps that reached the host.

    Returns:
      `rate`, `seconds` from the first arrival to the last answer, `new_tokens_per_s`, and
      percentiles of `first_token_ms`, from the arrival to the first token; of `ms_per_token`, the
      time between two deliveries divided by the tokens delivered; of `largest_gap_ms`, the longest
      time between two deliveries of a request. `compile_seconds` must be 0, otherwise the latencies
      include compilation. `largest_gaps` has the longest ones, with the seconds at which they end
      and the number of the request. Of gaps that end together, which have one cause, it has the
      longest. `collections_ms` has the longest pauses of Python's garbage collector.
    """
    began = time.perf_counter()
    running, arrivals = [], times(len(prompts), rate)
    with _collections() as pauses:
        for at, ids, count in zip(arrivals, prompts, new, strict=True):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            running.append(lm.submit(list(ids), max_new_tokens=count, **_OPTIONS))
        stats = [request.result().stats for request in running]
    seconds = time.perf_counter() - began
    per_token = [ms for one in stats for ms in one.chunk_ms_per_token]
    gaps = []
    for number, (at, one) in enumerate(zip(arrivals, stats, strict=True)):
        end = at + one.prefill_seconds
        for ms, steps in zip(one.chunk_ms_per_token, one.chunk_steps, strict=True):
            end += ms * steps / 1e3
            gaps.append((ms * steps, float(end), number))
    largest = _apart(gaps)
    return {
        "rate": rate,
        "seconds": seconds,
        "new_tokens_per_s": sum(new) / seconds,
        "compile_seconds": sum(one.compile_seconds for one in stats),
        "first_token_ms": _percentiles([1e3 * one.prefill_seconds for one in stats]),
        "ms_per_token": _percentiles(per_token),
        "largest_gap_ms": largest[0]["ms"] if largest else None,
        "largest_gaps": largest,
        "collections_ms": heapq.nlargest(_LARGEST, pauses),
    }


def _apart(gaps: Sequence[tuple[float, float, int]]) -> list[dict[str, Any]]:
    """The longest gaps (ms, end, request), but one of those that end together."""
    largest = []
    for ms, end, number in sorted(gaps, reverse=True):
        if all(abs(end - other["end"]) > _TOGETHER for other in largest):
            largest.append({"ms": ms, "end": end, "request": number})
        if len(largest) == _LARGEST:
            break
    return largest


@contextlib.contextmanager
def _collections() -> Iterator[list[float]]:
    """Measure the pauses of Python's garbage collector, in milliseconds."""
    pauses, began = [], [0.0]

    def watch(phase, _):
        now = time.perf_counter()
        if phase == "stop":
            pauses.append(1e3 * (now - began[0]))
        began[0] = now

    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
