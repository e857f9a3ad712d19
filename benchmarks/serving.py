"""Many requests of different lengths at once: `python -m benchmarks.serving [CONFIG]`.

A seeded list of prompts of random tokens, log-normal in length, each with its own number of new
tokens, through `LM.generate` with random weights. The first call compiles; the others are timed.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fdjax.bench.record import environment
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params
from fdjax.system.device_memory import free_memory_bytes
from fdjax.system.files import output_file

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
}


def requests(count: int, vocab_size: int, scale: float = 1.0) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens.

    Args:
      count: of the requests.
      vocab_size: of the tokens.
      scale: of all lengths; 1: prompts have a median of 384 tokens (σ 0.8, at most 2048), answers
        one of 160 (σ 0.7, at most 768).
    """
    rng = np.random.default_rng(0)

    def lengths(median, sigma, most):
        drawn = rng.lognormal(np.log(median), sigma, count)
        return np.clip((scale * np.minimum(drawn, most)).astype(int), 1, None).tolist()

    prompts, new = lengths(384, 0.8, 2048), lengths(160, 0.7, 768)
    return [rng.integers(0, vocab_size, n).tolist() for n in prompts], new


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json; default: Llama 2 7B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--max-batch", type=int, help="rows at once; default: as many as fit")
    parser.add_argument("--runs", type=int, default=2, help="timed calls")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    config = json.loads(args.config.read_text()) if args.config else CONFIG
    model = describe(parse_config(config), dtype=args.dtype)
    memory_bytes = free_memory_bytes()
    lm = LM(model, random_params(model), max_batch=args.max_batch, memory_bytes=memory_bytes)
    prompts, new = requests(args.requests, model.config.vocab_size, args.scale)
    calls = []
    for _ in range(args.runs + 1):
        began = time.perf_counter()
        stats = lm.generate(prompts, max_new_tokens=new, eos_token_id=None, do_sample=False).stats
        seconds = time.perf_counter() - began
        calls.append(
            {
                "seconds": seconds,
                "compile_seconds": stats.compile_seconds,
                "new_tokens_per_s": sum(new) / seconds,
                "decode_steps": stats.decode_steps,
            }
        )
        print(calls[-1], file=sys.stderr, flush=True)
    state = lm.engine.reusable.state
    record = {
        "environment": environment(args.commit),
        "config": config,
        "requests": {
            "count": args.requests,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": sum(new),
        },
        "state": {"rows": state.batch, "slots": state.slots},
        "memory_bytes": memory_bytes,
        "first_call": calls[0],
        "timed_calls": calls[1:],
    }
    if args.output:
        args.output.write_text(json.dumps(record, indent=1))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
