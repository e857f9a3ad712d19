"""Runs requests through continuous batching in transformers: `benchmarks.serving --peer` starts it.

It is a separate process, because JAX and PyTorch both take most of the GPU's memory. The last line
of its output is the JSON result.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import random_transformer, versions

# Enough to load all kernels. CUDA graphs are captured in each run, before its clock starts.
_WARM_UP_REQUESTS = 16


def run(model: Any, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> float:
    """Seconds for all requests, each with its own number of new tokens and no end token.

    Args:
      model: a model of transformers.
      prompts, new: token ids of each prompt, and its number of new tokens.

    Raises:
      RuntimeError: an answer is missing, or has another number of tokens.
    """
    from transformers import GenerationConfig

    options = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    # transformers captures its CUDA graphs before the clock starts.
    with model.continuous_batching_context_manager(generation_config=options) as manager:
        began = time.perf_counter()
        wanted = {
            manager.add_request(list(ids), max_new_tokens=count, eos_token_id=-1): count
            for ids, count in zip(prompts, new, strict=True)
        }
        while wanted:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(f"{len(wanted)} requests have no answer")
            elif result.is_finished():
                count = wanted.pop(result.request_id)
                if len(result.generated_tokens) != count:
                    got = len(result.generated_tokens)
                    raise RuntimeError(f"must generate {count} tokens, got {got}: {result.error}")
        return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON: config, dtype, device, prompts, new, runs")
    given = json.loads(parser.parse_args(argv).file.read_text())
    model = random_transformer(given["config"], given["dtype"], given["device"])
    few = (given[name][:_WARM_UP_REQUESTS] for name in ("prompts", "new"))
    found: dict[str, Any] = {"versions": versions(), "warm_up_seconds": run(model, *few)}
    found["seconds"] = [run(model, given["prompts"], given["new"]) for _ in range(given["runs"])]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
