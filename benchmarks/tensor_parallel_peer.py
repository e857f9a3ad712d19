"""Runs a peer in PyTorch on several GPUs; `benchmarks.tensor_parallel` starts it.

Each process has a GPU. The last line that the first process prints is the JSON result.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers import Generate, time_calls, versions

# A peer makes the function that generates at a point from the arguments, the batch and the slots.
Peer = Callable[[argparse.Namespace], Callable[[int, int], Generate]]


def transformers(args: argparse.Namespace) -> Callable[[int, int], Generate]:
    """A checkpoint in transformers with `tp_plan="auto"`."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, tp_plan="auto").eval()

    def generate(ids, count: int):
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.no_grad():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
            )

    return lambda batch, slots: generate


def gpt_fast(args: argparse.Namespace) -> Callable[[int, int], Generate]:
    """A model with random weights in the manner of gpt-fast, from a config.json.

    Prompts run eagerly, as in gpt-fast by default, and blocks are compiled once for all: two
    processes that compile 32 layers took more than five minutes.
    """
    import torch

    from benchmarks.gpt_fast import Generator, random_model

    # The same weights in each process, so that all choose the same tokens.
    torch.manual_seed(0)
    data, ranks = json.loads(args.model.read_text()), int(os.environ["WORLD_SIZE"])
    model = random_model(data, args.dtype, args.device, ranks)

    def at(batch: int, slots: int) -> Generate:
        torch.compiler.reset()
        model.make_cache(batch, slots)
        mode = None if args.device == "cpu" else "blocks"
        return Generator(model, mode, compile_prefill=False)

    return at


PEERS: dict[str, Peer] = {"transformers": transformers, "gpt-fast": gpt_fast}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path, help="a checkpoint; a config.json for gpt-fast")
    parser.add_argument("dtype")
    parser.add_argument("new_tokens", type=int)
    parser.add_argument("runs", type=int)
    parser.add_argument("points", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    import torch

    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    first_process = os.environ["RANK"] == "0"
    at, points = PEERS[args.peer](args), {}
    if first_process:
        print(f"{args.peer}: model is loaded", file=sys.stderr, flush=True)
    for point in args.points:
        batch, prompt = map(int, point.split("x"))
        # Every process must have the same prompts. Small ids are in every vocabulary.
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 200, (batch, prompt), generator=generator).to(args.device)
        generate = at(batch, prompt + args.new_tokens)
        samples = time_calls(generate, ids, args.new_tokens, args.runs)
        if first_process:
            seconds = samples.first_call_seconds
            print(f"{args.peer}, {point}: first call {seconds:.0f} s", file=sys.stderr, flush=True)
        first, step = (statistics.median(us) for us in (samples.first_us, samples.step_us))
        points[point] = {"first_token_ms": first / 1e3, "step_ms": step / 1e3}
    if first_process:
        devices = int(os.environ["WORLD_SIZE"])
        print(json.dumps({"devices": devices, "versions": versions(), "points": points}))
    if args.device == "cuda":
        # `destroy_process_group` waits for ever while a CUDA graph holds kernels of NCCL.
        sys.stdout.flush()
        os._exit(0)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
