"""Times a decode step with sampling options: `python -m benchmarks.option_steps [CONFIG]`.

A model with random weights answers a random prompt with each set of options. Each line of the
result is one set of options. To compare two commits, run this file with each in PYTHONPATH.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.arguments import read_config
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params

CONFIG = Path(__file__).parents[1] / "tests" / "fixtures" / "hf" / "configs" / "llama-2-7b.old.json"
OPTIONS = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.8, "seed": 0},
    "top-k and top-p": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "repetition penalty": {"do_sample": True, "top_k": 50, "repetition_penalty": 1.1},
}


def step_ms(lm: LM, prompts: list[list[int]], new_tokens: int, runs: int, **options) -> list[float]:
    """Milliseconds per token after the first, for each timed call."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        lm.generate(prompts, max_new_tokens=count, eos_token_id=None, **options)
        return time.perf_counter() - began

    for _ in range(2):  # this call compiles
        seconds(1), seconds(new_tokens)
    first = statistics.median(seconds(1) for _ in range(runs))
    return [1e3 * (seconds(new_tokens) - first) / (new_tokens - 1) for _ in range(runs)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG, help="a config.json")
    parser.add_argument("--points", nargs="+", default=["1x1024"], metavar="BxP")
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(argv)
    config = parse_config(read_config(args.config))
    model = describe(config, dtype="bfloat16")
    lm = LM(model, random_params(model))
    rng = np.random.default_rng(0)
    found = {}
    for point in args.points:
        batch, tokens = map(int, point.split("x"))
        prompts = rng.integers(3, config.vocab_size, (batch, tokens)).tolist()
        for name, options in OPTIONS.items():
            samples = step_ms(lm, prompts, args.new_tokens, args.runs, **options)
            found[f"{point}, {name}"] = [round(ms, 4) for ms in samples]
            print(point, name, f"{statistics.median(samples):.4f} ms", file=sys.stderr, flush=True)
    print(json.dumps({"ms a step": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
