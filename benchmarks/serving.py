"""Many requests of different lengths at once: `python -m benchmarks.serving [CONFIG]`.

`LM.generate` with random weights runs a seeded list of prompts. Prompts have random tokens and
log-normal lengths, and each has its own number of new tokens. The first call compiles. The others
are timed, and compared with `benchmarks.serving_bound`. No two calls share a prompt.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import arrivals, prefixes
from benchmarks.arguments import read_config
from benchmarks.request_mix import requests
from benchmarks.serving_bound import bound
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.record import environment
from fdjax.lm import LM
from fdjax.models import Model, describe, parse_config
from fdjax.system.device_memory import device_memory_bytes, free_memory_bytes
from fdjax.system.files import output_file, write_whole
from fdjax.weights.stacked import random_stacked_params

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
# Share of the device's memory that the bound may use.
_BOUND_SHARE = 0.9


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json; default: Llama 2 7B")
    parser.add_argument("--requests", type=int, default=256, help="0: no throughput")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument(
        "--max-batch",
        type=int,
        nargs="+",
        metavar="B",
        default=[None],
        help="rows at once, one measurement for each; default: as many as fit",
    )
    parser.add_argument(
        "--max-len", type=int, help="cache slots per row; default: by the prompts of each state"
    )
    parser.add_argument("--runs", type=int, default=2, help="timed calls; 0: no throughput")
    parser.add_argument(
        "--arrivals", type=float, nargs="+", default=[], metavar="RATE", help="requests per second"
    )
    parser.add_argument(
        "--prefix",
        nargs="*",
        choices=prefixes.PARTS,
        metavar="PART",
        help=f"measure the prefix cache: {', '.join(prefixes.PARTS)}; default: all",
    )
    parser.add_argument("--peer", action="store_true", help="run transformers as well")
    parser.add_argument(
        "--matmul-rate", type=float, metavar="TFLOPS", help="for the bound; default: measured"
    )
    parser.add_argument(
        "--read-rate", type=float, metavar="GB_PER_S", help="for the bound; default: measured"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    if args.arrivals and not args.requests:
        parser.error("--arrivals needs --requests")
    return args


def throughput(lm: LM, args: argparse.Namespace) -> dict[str, Any]:
    """Time `generate` for all requests `runs` times, after a call that compiles."""
    calls, opened = [], []
    take_state = lm.engine.take_state

    def taking(shape, **options):
        opened.append(shape)
        return take_state(shape, **options)

    lm.engine.take_state = taking
    for run in range(args.runs + 1):
        prompts, new = requests(args.requests, lm.config.vocab_size, args.scale, seed=run)
        began = time.perf_counter()
        stats = lm.generate(prompts, max_new_tokens=new, eos_token_id=None, do_sample=False).stats
        seconds = time.perf_counter() - began
        calls.append(
            {
                "seconds": seconds,
                "compile_seconds": stats.compile_seconds,
                "new_tokens_per_s": sum(new) / seconds,
                "decode_steps": stats.decode_steps,
                "cached_tokens": stats.cached_tokens,
            }
        )
        print(calls[-1], file=sys.stderr, flush=True)
    lm.engine.take_state = take_state
    return {
        "state": {name: max(getattr(s, name) for s in opened) for name in ("rows", "slots")},
        "first_call": calls[0],
        "timed_calls": calls[1:],
    }


def least_time(model: Model, args: argparse.Namespace, memory_bytes: int | None) -> dict[str, Any]:
    """The bound for all requests, and the measured ceilings that it uses."""
    rates = {"tflop_per_s": args.matmul_rate, "gb_per_s": args.read_rate}
    if None in rates.values():
        on_gpu = jax.default_backend() == "gpu"
        size = {} if on_gpu else {"total_bytes": 2**26, "matmul_size": 1024}
        ceiling = measure_ceiling(**size)
        measured = {
            "tflop_per_s": ceiling["matmul_tflop_per_s"],
            "gb_per_s": ceiling["read_gb_per_s"],
        }
        rates = {name: given or measured[name] for name, given in rates.items()}
    prompts, new = requests(args.requests, model.config.vocab_size, args.scale)
    found = bound(
        model,
        [len(ids) for ids in prompts],
        new,
        memory_bytes=_BOUND_SHARE * memory_bytes if memory_bytes else float("inf"),
        bytes_per_s=1e9 * rates["gb_per_s"],
        flop_per_s=1e12 * rates["tflop_per_s"],
    )
    return rates | dataclasses.asdict(found) | {"new_tokens_per_s": sum(new) / found.seconds}


def whole_memory_bytes() -> int | None:
    """All bytes of the first device's memory, including those that JAX does not take."""
    smi = environment("")["nvidia_smi"]
    return int(smi["memory.total"].split()[0]) * 2**20 if smi else device_memory_bytes()


def peer(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The same requests in transformers, in a process that ends before JAX takes the memory."""
    prompts, new = requests(args.requests, config["vocab_size"], args.scale)
    given = {"config": config, "dtype": args.dtype, "device": "cuda", "runs": args.runs}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.json"
        file.write_text(json.dumps(given | {"prompts": prompts, "new": new}))
        command = [sys.executable, "-m", "benchmarks.serving_peer", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"problem": f"exit code {done.returncode}"}
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"new_tokens_per_s": [sum(new) / seconds for seconds in found["seconds"]]}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    config = read_config(args.config) if args.config else CONFIG
    record: dict[str, Any] = {"peer": peer(config, args)} if args.peer else {}
    model = describe(parse_config(config), dtype=args.dtype)
    prompts, new = requests(args.requests, model.config.vocab_size, args.scale)
    record |= {
        "environment": environment(args.commit),
        "max_len": args.max_len,
        "config": config,
        "requests": {
            "count": args.requests,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": sum(new),
        },
        "memory_bytes": free_memory_bytes(),
        "throughput": [],
    }
    if args.requests and args.runs:
        record["bound"] = least_time(model, args, whole_memory_bytes())
    params, _stacks = random_stacked_params(model)
    for rows in args.max_batch if args.requests else ():
        limits = {"max_batch": rows, "max_len": args.max_len}
        lm = LM(model, params, **limits, memory_bytes=record["memory_bytes"])
        if args.runs:
            found = throughput(lm, args)
            best = min(call["seconds"] for call in found["timed_calls"])
            share = record["bound"]["seconds"] / best
            record["throughput"].append({"max_batch": rows, "share_of_bound": share} | found)
            _write(record, args.output)
        if rows is args.max_batch[-1]:
            continue
        lm.release()
    if args.arrivals:
        record["arrivals"] = []
        most = min(args.requests, lm.max_batch or args.requests)
        # The longest prompts that `requests` makes.
        length = max(1, int(2048 * args.scale))
        compiled = lm.warmup(batch=most, prompt_tokens=length, streamed=True, smaller=True)
        record["warmup"] = {"batch": most, "prompt_tokens": length, "compile_seconds": compiled}
        if args.max_len is None:
            # Then rows have different numbers of slots, and so do programs.
            few = requests(min(args.requests, 16), model.config.vocab_size, args.scale, 99)
            arrivals.measure(lm, *few, rate=10 * max(args.arrivals))
        for number, rate in enumerate(args.arrivals):
            of_rate = requests(args.requests, model.config.vocab_size, args.scale, 100 + number)
            record["arrivals"].append(arrivals.measure(lm, *of_rate, rate=rate))
            print(record["arrivals"][-1], file=sys.stderr, flush=True)
            _write(record, args.output)
    if args.requests:
        lm.release()
    if args.prefix is not None:
        args.prefix = args.prefix or prefixes.PARTS
        record["prefix"] = prefixes.measure(config, params, args, record["memory_bytes"])
        _write(record, args.output)
    print(json.dumps({"serving": record}))
    return 0


def _write(record: dict[str, Any], output: Path | None) -> None:
    """Write the results so far, so that a run that is cut off keeps them."""
    if output:
        write_whole(output, json.dumps({"serving": record}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
