"""Agreement with transformers at real layer shapes: `python -m benchmarks.hf_parity`.

It needs a GPU, torch and transformers. It builds a random Llama2-7B-shaped checkpoint in
transformers, saves it, loads it with `fdjax.load`, and compares greedy tokens and log-probabilities
for one prompt.

* 4 layers in fp32: greedy tokens must be equal, or have a top-2 gap < 1e-4 where they first differ.
* 32 layers in bf16: for the tokens of transformers, the log-probabilities of fdjax must be about as
  close to transformers in fp32 as transformers in bf16 is (at most 1.25 times its mean distance).
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fdjax.system.files import output_file, write_whole

LLAMA2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def transformers_run(folder: Path, layers: int, dtype: str, prompt: list[int], new_tokens: int):
    """Run transformers greedily and save the checkpoint to `folder`.

    Returns:
      (tokens, top-2 gaps, log-probabilities in `dtype`, log-probabilities in fp32).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA2_7B, num_hidden_layers=layers)).eval()
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="2GB")
    ids = torch.tensor([prompt], device="cuda")
    with torch.no_grad():
        sequence = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = sequence[0, len(prompt) :]

        def score():
            logits = model(sequence[:, :-1]).logits[0, -new_tokens:].float()
            logprobs = logits.log_softmax(-1)[torch.arange(new_tokens), tokens]
            top = logits.topk(2, dim=-1).values
            return logprobs.cpu().numpy(), (top[:, 0] - top[:, 1]).cpu().numpy()

        logprobs, gaps = score()
        model.float()
        exact, _ = score()
    return tokens.tolist(), gaps, logprobs, exact


def compare(layers: int, dtype: str, prompt_tokens: int, new_tokens: int) -> dict:
    """Compare one case; returns a row of the record."""
    import jax
    import jax.numpy as jnp
    import torch

    import fdjax

    prompt = np.random.default_rng(0).integers(0, LLAMA2_7B["vocab_size"], prompt_tokens).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        want, gaps, theirs, exact = transformers_run(folder, layers, dtype, prompt, new_tokens)
        gc.collect()
        torch.cuda.empty_cache()
        start = time.perf_counter()
        lm = fdjax.load(str(folder), dtype=dtype, progress=False)
        load_seconds = time.perf_counter() - start
    got = lm.generate([prompt], max_new_tokens=new_tokens, eos_token_id=None, do_sample=False)
    got = got.tokens[0]
    first = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    ids = jnp.asarray([prompt + want[:-1]], jnp.int32)
    forward = jax.jit(fdjax.forward, static_argnums=0, static_argnames="last")
    logits = forward(lm.model, lm.params, ids, last=new_tokens)
    ours = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))[np.arange(new_tokens), want]
    our_error, their_error = (float(np.abs(a - exact).mean()) for a in (ours, theirs))
    if dtype == "float32":
        ok = first is None or bool(gaps[first] < 1e-4)
        ok = ok and our_error < 1e-4
    else:
        ok = our_error <= 1.25 * their_error
    return {
        "layers": layers,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "first_differing_token": first,
        "top2_gap_there": None if first is None else float(gaps[first]),
        "mean_logprob": float(exact.mean()),
        "mean_distance_to_fp32": {"fdjax": our_error, "transformers": their_error},
        "load_seconds": round(load_seconds, 2),
        "ok": ok,
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # torch and JAX share the GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from fdjax.bench.record import environment

    rows = [
        compare(layers, dtype, args.prompt_tokens, args.new_tokens)
        for layers, dtype in ((4, "float32"), (32, "bfloat16"))
    ]
    for row in rows:
        print(row)
    import torch
    import transformers

    peers = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = {"environment": environment(args.commit), "peers": peers, "rows": rows}
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
