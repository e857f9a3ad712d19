"""Measures where device time goes for several input lengths: `python -m benchmarks.runtime`.

FlashDecoding++Next, Fig. 4: the shares of attention, of products with weights and of the rest, for
a prompt and the tokens generated after it, by CUPTI. The layers run one after the other, because
one launch of all layers is a single kernel.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.arguments import read_config
from fdjax.bench.record import environment
from fdjax.system.files import output_file, write_whole

LENGTHS = (128, 512, 1024, 2048)
# Parts of the names of our kernels and those of cuDNN, XLA and cuBLAS. `chain_kernel` is
# `linear_chain`.
_ATTENTION = re.compile("attention|flash|fmha|sdpa", re.IGNORECASE)
_GEMM = re.compile("gemm|matmul|gemv|dot|linear|chain|cutlass|nvjet|cublas", re.IGNORECASE)


def part_of(kernel: str) -> str:
    """Classify a kernel by its name: "attention", "GEMM" or "other"."""
    if _ATTENTION.search(kernel):
        return "attention"
    return "GEMM" if _GEMM.search(kernel) else "other"


def by_part(kernels: Mapping[str, float]) -> dict[str, float]:
    """Sum the microseconds of kernels by part."""
    us = dict.fromkeys(("attention", "GEMM", "other"), 0.0)
    for name, time in kernels.items():
        us[part_of(name)] += time
    return us


def measure_lengths(args: argparse.Namespace) -> list[dict]:
    """One row per input length, with microseconds by part and by kernel."""
    import jax
    import numpy as np

    from fdjax.bench.timing import measure
    from fdjax.engine.generation import generate
    from fdjax.models import describe, parse_config, random_params
    from fdjax.pallas_kernels.plan import Plan
    from fdjax.sampling.options import GenerationConfig

    plan = Plan.for_device().with_xla("decode_layers")
    config = parse_config(read_config(args.config))
    model = describe(config, dtype=args.dtype, plan=plan)
    params = random_params(model)
    asked = GenerationConfig(max_new_tokens=args.new_tokens, do_sample=False)
    rng = np.random.default_rng(0)
    rows = []
    for length in args.lengths:
        print(f"measuring {length} tokens", file=sys.stderr, flush=True)
        ids = jax.numpy.asarray(rng.integers(0, config.vocab_size, (args.batch, length)), "int32")
        call = jax.jit(lambda params, ids: generate(model, params, ids, asked))
        timing = measure(call, [(params, ids)], runs=args.runs, warmup=1)
        if timing.clock != "cupti":
            raise SystemExit("runtime: takes an NVIDIA GPU, whose clock tells kernels apart")
        row = {"batch": args.batch, "prompt_tokens": length, "us": by_part(timing.kernels)}
        rows.append(row | {"kernels": timing.kernels})
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows = measure_lengths(args)
    config = {"model": args.config.name, "dtype": args.dtype, "new_tokens": args.new_tokens}
    record = {"environment": environment(args.commit), "config": config, "runtime": rows}
    for row in rows:
        total = sum(row["us"].values())
        shares = ", ".join(f"{part} {us / total:.0%}" for part, us in row["us"].items())
        print(f"{row['batch']} x {row['prompt_tokens']}: {total / 1e3:.1f} ms, {shares}")
    print(json.dumps(record))
    if args.output:
        write_whole(args.output, json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
