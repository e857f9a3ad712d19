"""End-to-end benchmark of a model through `LM.generate` itself."""

import dataclasses

import numpy as np

from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import Record, Row, environment
from fdjax.bench.timing import Timing
from fdjax.lm import LM


def bench_model(
    lm: LM,
    *,
    batch: int = 1,
    prompt_tokens: int = 1024,
    new_tokens: int = 256,
    runs: int = 5,
    ceiling_bytes: int = 2**30,
    commit: str | None = None,
) -> Record:
    """Time the first token and the decode step of random prompts, greedy, on the host clock.

    Args:
      lm: the model, with real or random weights.
      batch: prompts at once.
      prompt_tokens, new_tokens: of each prompt.
      runs: timed calls, after three that are not.
      ceiling_bytes: what the bandwidth measurement reads.
      commit: to record where git cannot be asked.

    Returns:
      A `Record` with the rows "first token" and "decode step" (one token for every prompt).

    Raises:
      ValueError: nothing would be decoded.
    """
    if new_tokens < 2:
        raise ValueError(f"bench: new_tokens must be at least 2, got {new_tokens}")
    config = {
        "family": lm.config.family,
        "parameters": lm.model.parameter_count,
        "dtype": lm.model.dtype,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "plan": dataclasses.asdict(lm.model.plan) | {"table": len(lm.model.plan.table)},
    }
    record = Record(
        environment(commit), config, {"before": measure_ceiling(ceiling_bytes, matmul_size=0)}
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, lm.config.vocab_size, (batch, prompt_tokens)).tolist()

    def generate():
        return lm.generate(
            prompts,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            do_sample=False,
        )

    first = generate()
    for _ in range(2):
        generate()
    results = [generate() for _ in range(runs)]
    same = all(r.tokens == first.tokens for r in results)
    whole = all(len(t) == new_tokens for t in first.tokens)
    reason = None
    if not (same and whole):
        reason = "reruns differ" if whole else "rows ended early"
    stats = [r.stats for r in results]
    step_bytes = stats[0].decode_bytes // stats[0].decode_steps
    flops = 2 * lm.model.parameter_count * batch * prompt_tokens
    for case, samples, traffic, work in (
        ("first token", [1e6 * s.prefill_seconds for s in stats], 0, flops),
        ("decode step", [1e3 * s.ms_per_token for s in stats], step_bytes, 0),
    ):
        timing = Timing.from_samples([samples], "host")
        record.rows.append(
            Row(
                case=f"{case} B{batch} P{prompt_tokens}",
                implementation="fdjax",
                ok=reason is None,
                reason=reason,
                timing=dataclasses.asdict(timing) if reason is None else None,
                bytes=traffic,
                flops=work,
            )
        )
    return record.finish(measure_ceiling(ceiling_bytes, matmul_size=0))
