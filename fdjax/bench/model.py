"""End-to-end benchmark of a model through `LM.generate`."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.experts import chosen_experts, distinct_experts, surplus_bytes
from fdjax.bench.one_pass import one_pass
from fdjax.bench.record import Measurement, Record, environment
from fdjax.bench.timing import Timing

# An `fdjax.LM`, or an object with the attributes that are used here.
LM = Any

# Largest mean difference between log-probabilities from decoding and from one pass over the whole
# text, by bytes per element.
_TOLERANCE = {2: 0.05, 4: 1e-3}
# The same if the pass rounds activations to fp8, but decoding does not: 0.25 to 0.5 with random
# weights. Wrong results of such a kernel were off by 2 and more.
_FP8_TOLERANCE = 1.0


def bench_model(
    lm: LM,
    *,
    batch: int = 1,
    prompt_tokens: int = 1024,
    new_tokens: int = 256,
    runs: int = 5,
    ceiling_bytes: int | None = None,
    commit: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Record:
    """Time the first token and the decode step of random prompts, greedy, on the host clock.

    Args:
      lm: the model, with real or random weights.
      batch: prompts per call.
      prompt_tokens, new_tokens: tokens of each prompt and of each answer.
      runs: timed calls, after a few that are not timed.
      ceiling_bytes: bytes that the bandwidth measurement reads; default 1 GiB, on a CPU 16 MiB.
      commit: commit to record if git cannot be asked.
      progress: called with a few words on the next step.

    Returns:
      A `Record` with the rows "first token" and "decode step" (one token for every prompt). They
      have no timings if decoding disagrees with one pass over the same text.

    Raises:
      ValueError: a number is too small, or prompt and new tokens exceed the model's context.
    """
    _check(lm, batch, prompt_tokens, new_tokens, runs)
    if ceiling_bytes is None:
        ceiling_bytes = 2**24 if lm.model.plan.compute_capability is None else 2**30
    config = {
        "family": lm.config.family,
        "parameters": lm.model.parameter_count,
        "dtype": lm.model.dtype,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "plan": lm.model.plan.summary(),
    }
    progress("measuring the bandwidth of the device")
    record = Record(
        environment(commit), config, {"before": measure_ceiling(ceiling_bytes, matmul_size=0)}
    )
    rows, costs = model_rows(
        lm,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        runs=runs,
        progress=progress,
    )
    record.rows += rows
    record.costs |= costs
    progress("measuring the bandwidth again")
    return record.finish(measure_ceiling(ceiling_bytes, matmul_size=0))


def model_rows(
    lm: LM,
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
    implementation: str = "fdjax",
    check: Literal["logprobs", "tokens"] = "logprobs",
    seconds: float = math.inf,
    logits: Callable[[LM, Array, int], Array] | None = None,
    experts: Callable[[LM, np.ndarray], np.ndarray | None] = chosen_experts,
    progress: Callable[[str], None] = lambda doing: None,
) -> tuple[list[Measurement], dict[str, float]]:
    """Measure the rows of `bench_model`, without the ceilings.

    Args:
      lm, batch, prompt_tokens, new_tokens, runs, progress: see `bench_model`.
      implementation: name of the implementation in the rows.
      check: "logprobs" compares the log-probabilities of decoding with those of one pass over the
        text. "tokens" compares the largest log-probabilities of that pass instead. It needs no
        decoding programs beyond the timed ones.
      seconds: limit for the warm-up calls, the first call included, and again for the timed calls.
        No further call begins after it, but at least two are timed.
      logits: function for the pass over the text, (lm, ids [1,T], n) → logits [1,n,V] of the last n
        tokens; default `one_pass`. By default, the routers of a mixture of experts are zero during
        the check.
      experts: function for the experts that texts choose, or None for the largest number that the
        rows of a step can choose; see `chosen_experts`.

    Returns:
      (rows, costs). The costs are seconds of the first call and of compiling in it, percentiles of
      the ms per step over all chunks of steps, and for a mixture of experts, the number of distinct
      experts of a step's rows, as the mean over its layers and over the steps of one call.

    Raises:
      ValueError: see `bench_model`.
    """
    _check(lm, batch, prompt_tokens, new_tokens, runs)
    rng = np.random.default_rng(0)

    def draw():
        return rng.integers(0, lm.config.vocab_size, (batch, prompt_tokens)).tolist()

    def generate(prompts, **options):
        return lm.generate(
            prompts, max_new_tokens=new_tokens, eos_token_id=None, do_sample=False, **options
        )

    progress("compiling, and checking decoding against one pass over the text")
    prompts = draw()
    with contextlib.nullcontext() if logits else _constant_routing(lm):
        began = time.perf_counter()
        first = generate(prompts)
        first_seconds = time.perf_counter() - began
        checked = generate(prompts, return_logprobs=True) if check == "logprobs" else first
        error = _decoding_error(lm, prompts[0], checked, logits or one_pass)
    tolerance = _TOLERANCE[jnp.dtype(lm.model.dtype).itemsize]
    if any(weight.rounded_activations for weight in lm.config.weight_formats):
        tolerance = _FP8_TOLERANCE
    reason = None
    if not error <= tolerance:
        reason = f"log-probabilities off by {error:.2g} on average, tolerance {tolerance:g}"
    progress(f"2 calls to warm up, {runs} to time")
    compile_seconds = first.stats.compile_seconds
    # Each call has other prompts, because the cache may hold those of earlier calls.
    for _ in _calls(2, seconds - (first_seconds - compile_seconds)):
        generate(draw())
    results = []
    for _ in _calls(runs, seconds, least=2):
        prompts = draw()
        results.append(generate(prompts))
    if reason is None and any(len(t) != new_tokens for r in results for t in r.tokens):
        reason = "rows ended early"
    stats = [r.stats for r in results]
    where = f"B{batch} P{prompt_tokens} {implementation}"
    costs = {
        f"seconds of the first call, {where}": first_seconds,
        f"seconds of compiling, {where}": compile_seconds,
    }
    step_bytes = stats[-1].decode_bytes // stats[-1].decode_steps
    if reason is None:
        progress("counting the experts of a step")
        surplus, distinct = _surplus(lm, prompts, results[-1], experts)
        step_bytes -= surplus
        costs |= {f"distinct experts per layer, {where}": distinct} if distinct else {}
    flops = 2 * lm.model.active_parameter_count * batch * prompt_tokens
    rows = []
    for case, samples, traffic, work in (
        ("first token", [1e6 * s.prefill_seconds for s in stats], 0, flops),
        ("decode step", [1e3 * s.ms_per_token for s in stats], step_bytes, 0),
    ):
        timing = Timing.from_samples([samples], "host")
        rows.append(
            Measurement(
                case=f"{case} B{batch} P{prompt_tokens}",
                implementation=implementation,
                ok=reason is None,
                error=error if math.isfinite(error) else None,
                reason=reason,
                timing=dataclasses.asdict(timing) if reason is None else None,
                bytes=traffic,
                flops=work,
            )
        )
    chunks = [ms for s in stats for ms in s.chunk_ms_per_token]
    if reason is None and chunks:
        p50, p99 = np.percentile(chunks, (50, 99)).tolist()
        costs |= {f"ms of a step, p50 of chunks, {where}": p50}
        costs |= {f"ms of a step, p99 of chunks, {where}": p99}
    return rows, costs


def summary(record: Record) -> str:
    """The result of `bench_model` in one readable line, or "" if it measured nothing."""
    median_us = {r.case.split(" B")[0]: r.timing["median_us"] for r in record.rows if r.timing}
    if not median_us.keys() >= {"first token", "decode step"}:
        return ""
    first_ms, rate = median_us["first token"] / 1e3, 1e6 / median_us["decode step"]
    rows = record.config["batch"]
    each = f" ({rate:.1f} for each of {rows} prompts)" if rows > 1 else ""
    return f"first token after {first_ms:.1f} ms, then {rows * rate:.1f} tokens/s{each}"


def _check(lm: LM, batch: int, prompt_tokens: int, new_tokens: int, runs: int) -> None:
    for name, value, least in (
        ("batch", batch, 1),
        ("prompt_tokens", prompt_tokens, 1),
        ("new_tokens", new_tokens, 2),
        ("runs", runs, 1),
    ):
        if value < least:
            raise ValueError(f"bench: {name} must be at least {least}, got {value}")
    context = lm.max_len or lm.config.max_position_embeddings
    if prompt_tokens + new_tokens > context:
        raise ValueError(
            f"bench: prompt_tokens + new_tokens is {prompt_tokens + new_tokens}, "
            f"but the context is {context}"
        )


def _calls(most: int, seconds: float, least: int = 0) -> Iterator[int]:
    """Yield 0, 1, … up to `most` of them; after `least`, only while `seconds` have not passed."""
    began = time.perf_counter()
    for i in range(most):
        if i >= least and time.perf_counter() - began >= seconds:
            return
        yield i


def _surplus(
    lm: LM, prompts: list[list[int]], result, experts: Callable
) -> tuple[int, float | None]:
    """Bytes of a step's experts that are counted but that no row chose, and the number chosen.

    Returns:
      (bytes, mean number of distinct experts of a layer), or (0, None) if nothing is known.
    """
    tokens = result.tokens
    # With more steps, not all prompts fitted into memory at once, so steps had fewer rows.
    if result.stats.decode_steps != len(tokens[0]) - 1:
        return 0, None
    ids = np.array([p + t[:-1] for p, t in zip(prompts, tokens, strict=True)], np.int32)
    if (chosen := experts(lm, ids)) is None:
        return 0, None
    # The first step reads the first new token, which comes from the pass over the prompt.
    distinct = distinct_experts(chosen[:, :, len(prompts[0]) :])
    return surplus_bytes(lm.model, len(prompts), distinct), float(distinct.mean())


@contextlib.contextmanager
def _constant_routing(lm: LM) -> Iterator[None]:
    """Let all tokens choose the same experts, if the model has any.

    Two experts with nearly the same score change places with the last bit of a product, and the
    result of the layer changes by as much as an expert contributes. With random weights, that is
    more than the errors that a check looks for.
    """
    if not any(lm.model.expert_bytes):
        yield
        return
    params = lm.params

    def constant(path, leaf):
        keys = [getattr(entry, "key", None) for entry in path[-2:]]
        return leaf * 0 if keys == ["router", "weight"] else leaf

    lm.params = jax.tree_util.tree_map_with_path(constant, params)
    try:
        yield
    finally:
        lm.params = params


def _decoding_error(lm: LM, prompt: list[int], result, logits: Callable) -> float:
    """Mean |Δ log-probability| of the first row's tokens between decoding and a single pass.

    If the result has no log-probabilities, the largest of the pass at each position is used.
    """
    tokens = result.tokens[0]
    ids = jnp.asarray([prompt + tokens[:-1]], jnp.int32)
    logprobs = np.asarray(jax.nn.log_softmax(logits(lm, ids, len(tokens))[0], axis=-1))
    chosen = logprobs[np.arange(len(tokens)), tokens]
    reported = logprobs.max(axis=-1) if result.logprobs is None else result.logprobs[0]
    return float(np.mean(np.abs(chosen - np.asarray(reported))))
