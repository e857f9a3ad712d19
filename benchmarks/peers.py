"""Times Hugging Face transformers on the same GPU, eager and compiled.

Needs torch and transformers.
"""

import gc
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PEERS = {
    "hf eager": {},
    "hf static, compiled": {"cache_implementation": "static"},
}


class Samples(NamedTuple):
    """Microseconds per run of the first token and of a decode step, or why there are none."""

    first_us: Sequence[float] = ()
    step_us: Sequence[float] = ()
    first_call_seconds: float = 0.0
    problem: str | None = None


def missing() -> str | None:
    """Why peers cannot run here, or None if they can."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def measure(
    config: Path,
    points: Sequence[tuple[int, int]],
    names: Sequence[str],
    *,
    dtype: str,
    new_tokens: int,
    runs: int,
    device: str = "cuda",
) -> Iterator[tuple[str, int, int, Samples]]:
    """Time greedy `generate` of a model with random weights in the real shapes.

    The time of the first token is that of a call for one token. The time of a decode step is what
    each further token adds.

    Args:
      config: path of a config.json.
      points: (batch, prompt tokens).
      names: keys of `PEERS`.
      dtype: dtype of the weights.
      new_tokens, runs: new tokens and timed calls at each point.
      device: device of torch.

    Yields:
      (name, batch, prompt tokens, samples) for each name and point.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    data = json.loads(config.read_text())
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data)).eval()
    torch.set_default_dtype(torch.float32)
    try:
        for name in names:
            for batch, prompt in points:
                try:
                    samples = _time(model, batch, prompt, new_tokens, runs, PEERS[name])
                except Exception as error:  # a failing peer must not lose the record of the run
                    line = f"{type(error).__name__}: {error}".splitlines()[0]
                    samples = Samples(problem=line)
                yield name, batch, prompt, samples
            torch.compiler.reset()
    finally:
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _time(model, batch: int, prompt: int, new_tokens: int, runs: int, options: dict[str, Any]):
    import torch

    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=model.device)

    def seconds(count: int) -> float:
        _wait(model)
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        _wait(model)
        if out.shape != (batch, prompt + count):
            raise RuntimeError(f"must generate {count} tokens, got {list(out.shape)}")
        return time.perf_counter() - began

    first_call = seconds(new_tokens)
    # Both lengths run before timing, so that neither compiles while it is timed.
    seconds(1), seconds(new_tokens)
    first = [seconds(1) for _ in range(runs)]
    whole = [seconds(new_tokens) for _ in range(runs)]
    start = sorted(first)[runs // 2]
    steps = [1e6 * (s - start) / (new_tokens - 1) for s in whole]
    return Samples([1e6 * s for s in first], steps, first_call)


def _wait(model) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
