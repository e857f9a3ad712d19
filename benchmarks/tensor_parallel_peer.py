"""Runs transformers on several GPUs; `benchmarks.tensor_parallel --peer` starts it.

Each process has a GPU. The last line that the first process prints is the JSON result.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import versions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("new_tokens", type=int)
    parser.add_argument("runs", type=int)
    parser.add_argument("points", nargs="+")
    args = parser.parse_args(argv)
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype, tp_plan="auto").eval()
    on_gpu = model.device.type == "cuda"

    def seconds(ids, count: int) -> float:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    points = {}
    for point in args.points:
        batch, prompt = map(int, point.split("x"))
        # Every process must have the same prompts.
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (batch, prompt), generator=generator)
        ids = ids.to(model.device)
        times = [(seconds(ids, 1), seconds(ids, args.new_tokens)) for _ in range(args.runs + 1)][1:]
        first = statistics.median(one for one, _ in times)
        whole = statistics.median(every for _, every in times)
        step = (whole - first) / (args.new_tokens - 1)
        points[point] = {"first_token_ms": 1e3 * first, "step_ms": 1e3 * step}
    if int(os.environ["RANK"]) == 0:
        devices = int(os.environ["WORLD_SIZE"])
        print(json.dumps({"devices": devices, "versions": versions(), "points": points}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
