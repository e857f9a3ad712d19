"""Greedy tokens of the embedded model on 2000 prompts: `python -m benchmarks.accuracy`.

In fp32, every token must equal transformers' token. In bf16, the first difference of an answer must
be at a position where rounding decides between the two likeliest tokens: their fp32 logits differ
by less than 4 units in the last place of bf16. All implementations that run here are compared with
the same reference tokens. `--reference` makes the reference tokens with transformers in fp32, one
prompt length at a time.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdjax.system.files import output_file, write_whole

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "models" / "tiny"
REFERENCE = Path(__file__).parent / "results" / "hf_tiny_greedy.npz"
PROMPTS = 2000
NEW_TOKENS = 32
ULPS = 4
_BATCH = 64


def prompts(count: int = PROMPTS) -> list[list[int]]:
    """Token ids of distinct questions, as people would type them."""
    from fdjax.models.tiny.world import World
    from fdjax.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(CHECKPOINT)
    questions = dict.fromkeys(e.question for e, _ in World().held_out)
    for example in World().documents(seed=2):
        if len(questions) >= count:
            break
        questions[example.question] = None
    return [tokenizer.encode(q) for q in itertools.islice(questions, count)]


def transformers_tokens(ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Greedy tokens [N, NEW_TOKENS] from transformers in fp32 on the CPU, -1 after the end."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).float().eval()
    (eos,) = np.ravel(model.generation_config.eos_token_id).tolist()
    tokens = np.full((len(ids), NEW_TOKENS), -1, np.int16)
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for length, group in itertools.groupby(by_length, key=lambda i: len(ids[i])):
        # Prompts of one length need no padding, whose mask would change the sums.
        rows = list(group)
        batch = torch.tensor([ids[i] for i in rows])
        with torch.no_grad():
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=eos,
            )
        for row, new in zip(rows, out[:, length:].tolist(), strict=True):
            new = new[: new.index(eos) + 1] if eos in new else new
            tokens[row, : len(new)] = new
    return tokens


def write_reference(path: Path, ids: Sequence[Sequence[int]], tokens: np.ndarray) -> None:
    """Write prompts, tokens and a digest of the weights."""
    np.savez_compressed(
        path,
        prompts=np.concatenate([np.asarray(row, np.int16) for row in ids]),
        lengths=np.asarray([len(row) for row in ids], np.int16),
        tokens=tokens,
        weights=_digest(),
    )


def read_reference(path: Path = REFERENCE) -> tuple[list[list[int]], list[list[int]]]:
    """Read prompts, and the tokens that transformers chose.

    Raises:
      ValueError: the reference was made with other weights.
    """
    with np.load(path) as data:
        if str(data["weights"]) != _digest():
            raise ValueError(
                f"{path}: must be made with the weights in {CHECKPOINT}; run --reference"
            )
        ids = np.split(data["prompts"], np.cumsum(data["lengths"])[:-1])
        tokens = [row[row >= 0].tolist() for row in data["tokens"]]
    return [row.tolist() for row in ids], tokens


def _digest() -> str:
    return hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token at which an answer differs from the reference.

    `want` and `got` are the two tokens, None after the end. `gap_ulps` is the difference of the two
    largest fp32 logits at this position, in bf16 units in the last place of the largest.
    """

    prompt: int
    position: int
    want: int | None
    got: int | None
    gap_ulps: float


def answers(lm, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts."""
    tokens: list[list[int]] = []
    for start in range(0, len(ids), _BATCH):
        batch = ids[start : start + _BATCH]
        tokens += lm.generate(batch, max_new_tokens=NEW_TOKENS, do_sample=False).tokens
    return tokens


def differences(
    exact, ids: Sequence[Sequence[int]], want: Sequence[list[int]], got: Sequence[list[int]]
) -> Iterator[Difference]:
    """The first difference of each answer from the reference; `exact` is the model in fp32."""
    import jax
    import jax.numpy as jnp

    import fdjax

    forward = jax.jit(fdjax.forward, static_argnums=0)
    longest = max(map(len, ids)) + NEW_TOKENS
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if a == b:
            continue
        at = next(n for n, pair in enumerate(itertools.zip_longest(a, b)) if pair[0] != pair[1])
        text = [*ids[i], *a[:at]]
        padded = jnp.asarray([text + [0] * (longest - len(text))], jnp.int32)
        lengths = jnp.asarray([len(text)], jnp.int32)
        logits = forward(exact.model, exact.params, padded, lengths)[0, len(text) - 1]
        second, first = np.sort(np.asarray(logits, np.float64))[-2:]
        ulp = 2.0 ** (np.floor(np.log2(abs(first))) - 7)
        tokens = (row[at] if at < len(row) else None for row in (a, b))
        yield Difference(i, at, *tokens, gap_ulps=float((first - second) / ulp))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="use only the first N")
    parser.add_argument(
        "--implementations",
        nargs="*",
        default=("default",),
        choices=("default", "xla", "cudnn", "mosaic_gpu"),
        help="plans to compare in bf16",
    )
    parser.add_argument("--reference", action="store_true", help="make the reference and stop")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.reference:
        ids = prompts()
        write_reference(REFERENCE, ids, transformers_tokens(ids))
        return 0

    import fdjax
    from fdjax.bench.record import environment
    from fdjax.pallas_kernels.plan import Plan

    ids, want = (rows[: args.prompts] for rows in read_reference())
    exact = fdjax.load("tiny", dtype="float32", progress=False)
    rows: list[dict[str, Any]] = []
    for dtype, name in (("float32", "default"), *(("bfloat16", n) for n in args.implementations)):
        plan = Plan.for_device(implementation=None if name == "default" else name)
        lm = fdjax.load("tiny", dtype=dtype, plan=plan, progress=False)
        found = list(differences(exact, ids, want, answers(lm, ids)))
        widest = max((d.gap_ulps for d in found), default=0.0)
        ok = not found if dtype == "float32" else widest < ULPS
        rows.append(
            {
                "dtype": dtype,
                "implementation": name,
                "prompts": len(ids),
                "tokens": sum(map(len, want)),
                "answers_that_differ": len(found),
                "widest_gap_ulps": widest,
                "ok": ok,
                "differences": [dataclasses.asdict(d) for d in found],
            }
        )
        print(
            f"{dtype:9} {name:10} {len(found)} of {len(ids)} answers differ, widest gap "
            f"{widest:.2f} ulp: {'right' if ok else 'WRONG'}",
            file=sys.stderr,
            flush=True,
        )
    record = {"environment": environment(args.commit), "rows": rows}
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
