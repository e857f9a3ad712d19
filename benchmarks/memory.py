"""Compares planned with measured memory: `python -m benchmarks.memory`.

A model with random weights in the real shapes answers growing batches. After each one, the
allocator reports its peak. For each chunk width of a prompt, it also compares the temporary memory
of the compiled program with the three buffers of B·T·(2E + F) values that FlashDecoding++Next (Dai
et al., section V) needs.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import read_config
from benchmarks.end_to_end import Point, parse_point, say
from fdjax.bench.record import environment
from fdjax.engine import step
from fdjax.engine.memory import longest_context, plan_memory, workspace_bytes
from fdjax.engine.schedule import CHUNKS, covered_slots, rows_of_call
from fdjax.engine.state import init_cache, start
from fdjax.lm import LM
from fdjax.models import Model, Params, describe, parse_config, random_params
from fdjax.system.device_memory import device_memory_bytes, free_memory_bytes
from fdjax.system.files import output_file, write_whole

# Largest relative difference between a planned and a measured peak.
TOLERANCE = 0.03
_LAYERS = 4


def peaks(
    model: Model, params: Params, points: Sequence[Point], new_tokens: int, memory_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """Planned and measured peak of each point. The latter is None if the device reports none."""
    for batch, prompt in points:
        total = prompt + new_tokens
        plan = plan_memory(
            model,
            batch=batch,
            max_len=total,
            prompt_tokens=prompt,
            slots=covered_slots(total),
        )
        row: dict[str, Any] = {
            "batch": batch,
            "prompt_tokens": prompt,
            "new_tokens": new_tokens,
            "weight_bytes": plan.weight_bytes,
            "cache_bytes": plan.cache_bytes,
            "workspace_bytes": plan.workspace_bytes,
            "planned_bytes": plan.total_bytes,
        }
        if memory_bytes is not None and plan.total_bytes > memory_bytes:
            yield row | {"ok": None, "reason": f"does not fit into {memory_bytes} bytes"}
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a context beyond the model's does not matter here
            lm = LM(model, params, max_len=total)
            # Plans are for rows in one piece, because a pool of pages takes all memory.
            lm.engine.paged = False
        prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt))
        out = lm.generate(prompts.tolist(), max_new_tokens=new_tokens, eos_token_id=None)
        del lm
        gc.collect()
        ok: bool | None = all(len(tokens) == new_tokens for tokens in out.tokens)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None:
            row["off"] = plan.total_bytes / peak - 1
            ok = ok and abs(row["off"]) <= TOLERANCE
        yield row | {"peak_bytes": peak, "ok": ok}


def temporaries(model: Model, max_len: int) -> Iterator[dict[str, Any]]:
    """Temporary bytes of the programs for chunks of one row, and of as many rows as fit in a call.

    A few layers are enough, because XLA reuses the buffers of one layer for the next.
    """
    c = model.config.with_attention(model.config.attention[:_LAYERS])
    model = describe(c, dtype=model.dtype, plan=model.plan)
    for width in CHUNKS:
        for batch in sorted({1, rows_of_call(width, 2**10)}):
            temp = _temp_bytes(model, batch, width, max_len)
            itemsize = jnp.dtype(model.dtype).itemsize
            paper = batch * width * (2 * c.width + c.mlp_width) * itemsize
            yield {
                "rows": batch,
                "tokens": width,
                "temp_bytes": temp,
                "planned_bytes": workspace_bytes(model, batch, width, max_len),
                "paper_bytes": paper,
                "ratio": temp / paper,
            }


def _temp_bytes(model: Model, batch: int, width: int, slots: int) -> int:
    def run(params, state, tokens, lengths, offsets):
        return step.prompt_logits(model, params, state, tokens, lengths, offsets)

    state = jax.eval_shape(lambda: start(init_cache(model, batch, slots)))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    compiled = (
        jax.jit(run, donate_argnums=1)
        .lower(
            model.abstract_params,
            state,
            jax.ShapeDtypeStruct((batch, width), jnp.int32),
            row,
            row,
        )
        .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


def table(record: dict[str, Any]) -> str:
    """Format the record as text."""
    lines = [f"{'rows x tokens':>16}{'planned GB':>14}{'peak GB':>10}{'off':>8}"]
    for r in record["peaks"]:
        where = f"{r['batch']} x {r['prompt_tokens']}+{r['new_tokens']}"
        peak = r.get("peak_bytes")
        measured = f"{peak / 1e9:10.3f}{r['off']:8.1%}" if peak else f"{'-':>10}{'-':>8}"
        lines.append(f"{where:>16}{r['planned_bytes'] / 1e9:14.3f}{measured}")
    lines.append(f"{'chunk':>16}{'temp MB':>14}{'planned':>10}{'paper':>8}{'ratio':>7}")
    for r in record["temporaries"]:
        lines.append(
            f"{r['rows']:>8} x {r['tokens']:5}{r['temp_bytes'] / 1e6:14.1f}"
            f"{r['planned_bytes'] / 1e6:10.1f}{r['paper_bytes'] / 1e6:8.1f}{r['ratio']:7.2f}"
        )
    longest = record["longest_context"]
    if longest is not None:
        lines.append(f"longest context of one row: {longest:,} tokens")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument(
        "--points",
        nargs="*",
        type=parse_point,
        default=((1, 1024), (8, 1024), (32, 1024), (1, 16384)),
        metavar="BxP",
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-temporaries", action="store_true", help="measure only peaks")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    model = describe(parse_config(read_config(args.config)), dtype=args.dtype)
    memory_bytes = free_memory_bytes()
    points = sorted(args.points, key=lambda p: _total(model, p))
    params = random_params(model)
    record: dict[str, Any] = {
        "environment": environment(args.commit),
        "config": {"model": args.config.name, "dtype": args.dtype},
        "weight_bytes": model.weight_bytes,
        "device_bytes": device_memory_bytes(),
        "longest_context": memory_bytes and longest_context(model, memory_bytes=memory_bytes),
        "peaks": [],
        "temporaries": [],
    }
    for row in peaks(model, params, points, args.new_tokens, memory_bytes):
        say(json.dumps(row))
        record["peaks"].append(row)
    if not args.no_temporaries:
        record["temporaries"] = list(temporaries(model, 2048))
    print(table(record))
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(any(row["ok"] is False for row in record["peaks"]))


def _total(model: Model, point: Point) -> int:
    return plan_memory(model, batch=point[0], max_len=point[1]).total_bytes


if __name__ == "__main__":
    sys.exit(main())
