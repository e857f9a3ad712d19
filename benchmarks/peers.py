"""Times peers in PyTorch on the same GPU: transformers, and a model in the manner of gpt-fast.

Needs torch, and transformers for the peers that use it. `run_apart` measures them in a separate
process, because JAX and PyTorch both take most of the GPU's memory.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Peer → options of `generate` in transformers.
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "hf eager": {},
    "hf static, compiled": {"cache_implementation": "static"},
}
# Peer → mode of torch.compile in `benchmarks.gpt_fast`.
_INT4 = "gpt-fast, int4"
_GPT_FAST = {
    "gpt-fast": "reduce-overhead",
    "gpt-fast, by block": "blocks",
    "gpt-fast, max-autotune": "max-autotune",
    _INT4: "max-autotune",
}
PEERS = (*_TRANSFORMERS, *_GPT_FAST)

# Prefix of the output lines that are results.
_RESULT = "peer: "

# (ids [B,P], new tokens) → tokens [B, P + new tokens]; torch tensors.
Generate = Callable[[Any, int], Any]


class Samples(NamedTuple):
    """Microseconds of each run for the first token and for a decode step, or why there are none."""

    first_us: Sequence[float] = ()
    step_us: Sequence[float] = ()
    first_call_seconds: float = 0.0
    problem: str | None = None


def missing(names: Sequence[str] = PEERS) -> str | None:
    """Why these peers cannot run here, or None if they can."""
    needed = ["torch", *(["transformers"] if set(names) & set(_TRANSFORMERS) else [])]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def versions() -> dict[str, str]:
    """Versions of the installed libraries that peers use."""
    found = {}
    for name in ("torch", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run_apart(
    config: Path, points: Sequence[tuple[int, int]], names: Sequence[str], **options
) -> Iterator[tuple[str, int, int, Samples]]:
    """`measure` in a separate process, which must run before JAX takes the GPU's memory."""
    given = {"config": str(config), "points": points, "names": names, **options}
    command = [sys.executable, "-m", __spec__.name, json.dumps(given)]
    missing = [(name, *point) for name in names for point in points]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith(_RESULT):
                name, batch, prompt, samples = json.loads(line.removeprefix(_RESULT))
                missing.remove((name, batch, prompt))
                yield name, batch, prompt, Samples(*samples)
            else:
                print(line, end="", file=sys.stderr)
    if process.returncode:
        problem = Samples(problem=f"the process of the peers ended with {process.returncode}")
        for case in missing:
            yield *case, problem


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
    """Time greedy generation of a model with random weights in the real shapes.

    The time of the first token is the time of a call for one token. The time of a decode step is
    the additional time of each further token.

    Args:
      config: path of a config.json.
      points: (batch, prompt tokens).
      names: some of `PEERS`.
      dtype: dtype of the weights.
      new_tokens, runs: new tokens and timed calls at each point.
      device: device of torch.

    Yields:
      (name, batch, prompt tokens, samples) for each name and point.
    """
    import torch

    torch.manual_seed(0)
    data = json.loads(config.read_text())
    for group, load in ((_TRANSFORMERS, random_transformer), (_GPT_FAST, _gpt_fast)):
        # Quantising replaces the weights, so it comes last.
        chosen = sorted((name for name in names if name in group), key=_INT4.__eq__)
        if not chosen:
            continue
        try:
            model = load(data, dtype, device)
        except Exception as error:
            for name, (batch, prompt) in itertools.product(chosen, points):
                yield name, batch, prompt, Samples(problem=_problem(error))
            continue
        try:
            for name in chosen:
                for batch, prompt in points:
                    ids = torch.randint(data["vocab_size"], (batch, prompt), device=device)
                    try:
                        # No variable holds this function: it would keep the model alive.
                        samples = time_calls(
                            _generate(model, name, batch, prompt + new_tokens),
                            ids,
                            new_tokens,
                            runs,
                        )
                    except Exception as error:  # a failing peer must not lose the record of the run
                        samples = Samples(problem=_problem(error))
                    torch.compiler.reset()
                    yield name, batch, prompt, samples
        finally:
            del model
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def random_transformer(data: dict[str, Any], dtype: str, device: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data)).eval()
    torch.set_default_dtype(torch.float32)
    return model


def _gpt_fast(data: dict[str, Any], dtype: str, device: str):
    from benchmarks.gpt_fast import random_model

    return random_model(data, dtype, device)


def _generate(model, name: str, batch: int, slots: int) -> Generate:
    """The function that generates like the named peer."""
    import torch

    if name in _GPT_FAST:
        from benchmarks.gpt_fast import Generator, quantise

        if name == _INT4:
            quantise(model)
        model.make_cache(batch, slots)
        return Generator(model, _GPT_FAST[name])

    def generate(ids, count):
        with torch.no_grad():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **_TRANSFORMERS[name],
            )

    return generate


def time_calls(generate: Generate, ids, new_tokens: int, runs: int) -> Samples:
    """Time calls for one token and for `new_tokens`; see `measure`."""

    def seconds(count: int) -> float:
        _wait(ids)
        began = time.perf_counter()
        out = generate(ids, count)
        _wait(ids)
        if out.shape != (ids.shape[0], ids.shape[1] + count):
            raise RuntimeError(f"must generate {count} tokens, got {list(out.shape)}")
        return time.perf_counter() - began

    first_call = seconds(new_tokens)
    # Both lengths, so that neither compiles while it is timed.
    seconds(1), seconds(new_tokens)
    first = [seconds(1) for _ in range(runs)]
    whole = [seconds(new_tokens) for _ in range(runs)]
    start = sorted(first)[runs // 2]
    steps = [1e6 * (s - start) / (new_tokens - 1) for s in whole]
    return Samples([1e6 * s for s in first], steps, first_call)


def _wait(ids) -> None:
    import torch

    if ids.device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process of `run_apart`: its argument is a JSON object, its results are lines."""
    (text,) = sys.argv[1:] if argv is None else argv
    given = json.loads(text)
    if problem := missing(given["names"]):
        print(f"no peers: {problem}")
        return 0
    config, points, names = Path(given.pop("config")), given.pop("points"), given.pop("names")
    for found in measure(config, points, names, **given):
        print(f"{_RESULT}{json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
