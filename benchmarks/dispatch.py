"""Host time to dispatch a decode chunk: `python -m benchmarks.dispatch [CONFIG]`.

The chunk has no step to run. So the time is the host's cost of passing parameters and state and of
one launch. The clock stops when the call returns. The device is idle before the call.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import read_config
from fdjax.bench.record import environment
from fdjax.bench.timing import Timing
from fdjax.engine.engine import Engine
from fdjax.engine.host_arrays import HostArrays
from fdjax.engine.state import init_cache, start
from fdjax.engine.step import decode_steps
from fdjax.models import describe, parse_config
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors
from fdjax.system.files import output_file, write_whole
from fdjax.weights.stacked import random_stacked_params

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_hidden_layers": 32,
}
SLOTS = 1024


def time_calls(call, runs: int) -> Timing:
    """Host time until a call returns, measured with an idle device."""
    samples = []
    for _ in range(runs + 5):
        begin = time.perf_counter()
        out = call()
        samples.append((time.perf_counter() - begin) * 1e6)
        jax.block_until_ready(out)
    return Timing.from_samples([samples[5:]], "host")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="a config.json; default: 32 tiny layers")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    config = read_config(Path(args.config)) if args.config else CONFIG
    model = describe(parse_config(config), dtype="bfloat16")
    params, _stacks = random_stacked_params(model)
    engine = Engine(model, params)
    none = np.int32(0)
    sampling = per_row([GenerationConfig(max_new_tokens=9)], 1)
    host = jax.device_put(HostArrays.pack((sampling, none)))
    stacked = engine.stacks(1, SLOTS)
    params = engine.stacked_params if stacked else engine.params
    state = start(init_cache(model, 1, SLOTS, stacked))
    leaves = jax.tree.leaves(state)
    decode = engine.program(
        decode_steps, stacked=stacked, one_launch=stacked, processors=Processors(), max_steps=1
    )
    nothing, one = jax.jit(lambda n: n + 1), jnp.int32(1)

    def chunk():
        nonlocal leaves
        leaves, *out = decode(params, leaves, host)
        return out

    rows = {
        "decode chunk, nothing to do": time_calls(chunk, args.runs),
        "jitted call of one scalar": time_calls(lambda: nothing(one), args.runs),
    }
    for name, timing in rows.items():
        print(f"{name:28} median {timing.median_us:.0f} us, min {timing.min_us:.0f} us")
    record = {
        "environment": environment(args.commit),
        "config": config,
        "arrays": {"parameters": len(params), "state": len(leaves)},
        "rows": {name: dataclasses.asdict(t) | {"samples_us": None} for name, t in rows.items()},
    }
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
