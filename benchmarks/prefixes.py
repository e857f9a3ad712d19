"""Time that the prefix cache saves, and its cost when nothing is shared: `serving --prefix`."""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.request_mix import requests
from fdjax.lm import LM
from fdjax.models import Params, describe, parse_config

_OPTIONS = {"eos_token_id": None, "do_sample": False}
# Numbers of tokens: a shared beginning, the rest of its prompt, a prompt with several samples.
_BEGINNING, _REST, _SAMPLED, _SAMPLES = 4096, 64, 2000, 16
# Rows that decode after one beginning, its tokens, and the decode steps that are timed.
_ROWS, _SHARED, _STEPS = (8, 16, 32), (1024, 2048, 4096), 32

PARTS = ("first_token", "samples", "step", "without_hits")


def measure(
    config: dict[str, Any], params: Params, args: argparse.Namespace, memory_bytes: int | None
) -> dict[str, Any]:
    """Measure the effects of the prefix cache, those of `PARTS` that `--prefix` names.

    Returns:
      `first_token_ms`: time of a prompt of 64 tokens after a beginning of 4 096 tokens, `cold` and
      `cached`. `samples_ms`: time of the first tokens of `all` 16 samples of a prompt of 2 000
      tokens, and of `one`. `without_hits`: seconds for all requests with prompts that have nothing
      in common, with the cache `on` and `off`. `step_ms`: time of a decode step of rows that share
      a beginning, by rows and tokens of it: read `together`, `apart`, or as the `plan` chooses.
      Each is a list of `--runs` measurements. `ratios`: ratios of their medians.
    """
    longest = int(args.scale * (_BEGINNING + _REST)) + 256
    context = max(parse_config(config).max_position_embeddings, longest)
    model = describe(parse_config(config | {"max_position_embeddings": context}), dtype=args.dtype)
    rows = args.max_batch[-1]
    lm = LM(model, params, max_batch=rows, memory_bytes=memory_bytes)
    found: dict[str, Any] = {"ratios": {}}
    ratios = found["ratios"]
    if "first_token" in args.prefix:
        found["first_token_ms"] = first = _first_token(lm, args)
        ratios["first_token"] = median(first["cold"]) / median(first["cached"])
    if "samples" in args.prefix:
        found["samples_ms"] = samples = _samples(lm, args)
        ratios["samples"] = median(samples["all"]) / median(samples["one"])
    if "step" in args.prefix:
        found["step_ms"], ratios["step"] = {}, {}
        for rows, tokens in itertools.product(_ROWS, _SHARED):
            if lm.max_batch is None or rows <= lm.max_batch:
                point, ms = f"{rows}x{tokens}", _steps(lm, args, rows, tokens)
                apart = median(ms["apart"])
                found["step_ms"][point] = ms
                ratios["step"][point] = {
                    kind: median(ms[kind]) / apart for kind in ("together", "plan")
                }
    lm.release()
    if "without_hits" in args.prefix:
        found["without_hits"] = hits = _without_hits(model, params, args, memory_bytes)
        ratios["without_hits"] = median(hits["on"]) / median(hits["off"])
    return found


def _ms(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def _prompt(lm: LM, tokens: float, seed: Sequence[int]) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, lm.config.vocab_size, max(1, int(tokens))).tolist()


def _first_token(lm: LM, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"cold": [], "cached": []}
    for run in range(args.runs + 1):
        beginning = _prompt(lm, args.scale * _BEGINNING, (1, run))
        for kind in found:
            ids = beginning + _prompt(lm, args.scale * _REST, (2, run, kind == "cold"))
            result: list[Any] = []
            took = _ms(lambda: result.append(lm.generate(ids, max_new_tokens=1, **_OPTIONS)))  # noqa: B023
            if run:  # the first call compiles
                found[kind].append(took)
            cached = result[0].stats.cached_tokens
    return found | {"cached_tokens": cached}


def _samples(lm: LM, args: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"one": [], "all": []}
    for run in range(args.runs + 1):
        for kind, count in (("one", 1), ("all", _SAMPLES)):
            ids = _prompt(lm, args.scale * _SAMPLED, (3, run, count))
            options = {"temperature": 1.0, "num_return_sequences": count, "eos_token_id": None}
            took = _ms(lambda: lm.generate(ids, max_new_tokens=1, **options))  # noqa: B023
            if run:
                found[kind].append(took)
    return found


def _steps(lm: LM, args: argparse.Namespace, rows: int, tokens: int) -> dict[str, list[float]]:
    find = lm.engine.shared_pages
    ways = {
        "apart": lambda pages: None,
        "together": functools.partial(lm.engine.shared_pages, together=True),
        "plan": find,
    }
    found: dict[str, list[float]] = {kind: [] for kind in ways}
    beginning = _prompt(lm, args.scale * tokens, (4, tokens))
    ids = [beginning + _prompt(lm, args.scale * _REST, (5, row)) for row in range(rows)]
    lm.generate(beginning, max_new_tokens=1, **_OPTIONS)
    try:
        for run in range(args.runs + 1):
            for kind, lm.engine.shared_pages in ways.items():
                first, all_ = (
                    _ms(lambda: lm.generate(ids, max_new_tokens=new, **_OPTIONS))  # noqa: B023
                    for new in (1, 1 + _STEPS)
                )
                if run:
                    found[kind].append((all_ - first) / _STEPS)
    finally:
        lm.engine.shared_pages = find
    return found


def _without_hits(model, params, args, memory_bytes) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"on": [], "off": []}
    for kind, seconds in found.items():
        limits = {"max_batch": args.max_batch[-1], "memory_bytes": memory_bytes}
        lm = LM(model, params, **limits, prefix_cache=kind == "on")
        for run in range(args.runs + 1):
            ids, new = requests(args.requests, model.config.vocab_size, args.scale, 50 + run)
            call = {"max_new_tokens": new, **_OPTIONS}
            took = _ms(lambda: lm.generate(ids, **call)) / 1e3  # noqa: B023
            if run:
                seconds.append(took)
        lm.release()
    return found
