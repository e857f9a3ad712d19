"""Trains the embedded model: `python -m fdjax.models.tiny.train --out DIR`.

It writes a Hugging Face checkpoint and `training.json`, which holds the loss curve, the accuracy on
held-out questions by kind, and the device.
"""

import argparse
import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from safetensors.flax import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from fdjax.models import (
    Model,
    describe,
    export_tensors,
    parse_config,
    weight_map,
)
from fdjax.models.tiny.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    save_tokenizer,
    train_tokenizer,
)
from fdjax.models.tiny.world import Example, World
from fdjax.pallas_kernels.attention import split_qkv
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import apply_rope

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "do_sample": False,
}
ROW_TOKENS = CONFIG["max_position_embeddings"]
SHOWCASE = (
    "What is the largest ocean?",
    "what's the capital of France",
    "What is 7 + 5?",
    "Anna has 8 apples and loses 3. How many apples does Anna have now?",
    "Who are you?",
    "The capital of Japan is",
    "What is the capital of Blorvania?",
    "Once upon a time",
    "Tell me a story about an owl.",
)


def forward(model: Model, params: Any, ids: Array) -> Array:
    """Logits of a causal forward pass without a cache. ids [B,T] int32 → fp32 [B,T,V]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    def attend(spec, kv, qkv):
        q, k, v = split_qkv(qkv)
        q, k = (apply_rope(x, positions, spec.rope) for x in (q, k))
        return jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=True), kv

    module = model.module(params)
    hidden, _ = module(ids, [None] * model.config.layers, attend, model.plan, starts=None)
    return module.logits(hidden, model.plan)


def init_params(model: Model, seed: int) -> Any:
    """Normal weights and unit norms in fp32; out and down projections start smaller."""

    def init(path, leaf, key):
        names = [str(getattr(entry, "key", "")) for entry in path]
        if "scale" in names:
            return jnp.ones(leaf.shape, jnp.float32)
        deviation = CONFIG["initializer_range"]
        if "out" in names or "down" in names:
            deviation /= (2 * model.config.layers) ** 0.5
        return deviation * jax.random.normal(key, leaf.shape, jnp.float32)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(model.abstract_params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten(
        [init(path, leaf, key) for (path, leaf), key in zip(leaves, keys, strict=True)]
    )


class Corpus(NamedTuple):
    """Concatenated tokenised documents.

    Attributes:
      ids: [tokens] uint16.
      scored: [tokens] bool, true for tokens that the loss counts: answers and their </s>.
      lengths: [documents] int64 tokens of each document.
    """

    ids: np.ndarray
    scored: np.ndarray
    lengths: np.ndarray


def answer_text(example: Example) -> str:
    """The answer, after a space if the question does not end with one."""
    parted = not example.question or example.question[-1].isspace()
    return example.answer if parted else f" {example.answer}"


def tokenise(tokenizer: Tokenizer, examples: list[Example]) -> Corpus:
    """Tokenise documents <s>QUESTION ANSWER</s>, question and answer separately."""
    encode = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    questions = [e.ids for e in encode([example.question for example in examples])]
    answers = [e.ids for e in encode([answer_text(example) for example in examples])]
    ids, scored, lengths = [], [], []
    for question, answer in zip(questions, answers, strict=True):
        ids += [BOS_ID, *question, *answer, EOS_ID]
        scored += [False] * (1 + len(question)) + [True] * (1 + len(answer))
        lengths.append(2 + len(question) + len(answer))
    return Corpus(np.array(ids, np.uint16), np.array(scored), np.array(lengths))


def pack(corpus: Corpus, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packs whole documents into rows in the given order; rows end with padding.

    The documents of a row see each other, like the turns of a chat.

    Returns:
      (ids [R, ROW_TOKENS] uint16, scored [R, ROW_TOKENS] bool).
    """
    lengths = corpus.lengths[order]
    targets, row, used = np.empty(len(order), np.int64), 0, 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > ROW_TOKENS:
            row, used = row + 1, 0
        targets[i] = row * ROW_TOKENS + used
        used += length
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    starts = (np.cumsum(corpus.lengths) - corpus.lengths)[order]
    source = np.repeat(starts, lengths) + within
    target = np.repeat(targets, lengths) + within
    ids = np.full((row + 1) * ROW_TOKENS, PAD_ID, np.uint16)
    scored = np.zeros_like(ids, bool)
    ids[target], scored[target] = corpus.ids[source], corpus.scored[source]
    return ids.reshape(-1, ROW_TOKENS), scored.reshape(-1, ROW_TOKENS)


def batches(corpus: Corpus, rows: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of packed rows; every epoch packs the documents in another order."""
    for epoch in itertools.count():
        order = np.random.default_rng((seed, epoch)).permutation(len(corpus.lengths))
        ids, scored = pack(corpus, order)
        if len(ids) < rows:
            raise ValueError(f"train: the corpus must fill a batch of {rows} rows, got {len(ids)}")
        for start in range(0, len(ids) - rows + 1, rows):
            yield ids[start : start + rows], scored[start : start + rows]


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """AdamW with warmup and cosine decay; only matrices decay."""
    warmup = min(300, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 50)
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(model: Model, params: Any, corpus: Corpus, args: argparse.Namespace) -> tuple[Any, list]:
    """Trains the model.

    The master weights are fp32, and the forward pass runs in `model.dtype`. So with bfloat16 the
    loss already includes the rounding of the weights.

    Returns:
      (fp32 parameters, [(step, loss), ...]).
    """
    optimizer = make_optimizer(args.steps, args.learning_rate)

    def loss_of(params, ids, scored):
        rounded = jax.tree.map(lambda x: x.astype(model.dtype), params)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            forward(model, rounded, ids[:, :-1]), ids[:, 1:]
        )
        return jnp.sum(losses, where=scored[:, 1:]) / jnp.sum(scored[:, 1:])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, scored):
        loss, grads = jax.value_and_grad(loss_of)(params, ids.astype(jnp.int32), scored)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses, curve = optimizer.init(params), [], []
    progress = tqdm(range(1, args.steps + 1), mininterval=5.0, unit="step")
    for i, (ids, scored) in zip(progress, batches(corpus, args.rows, args.seed), strict=False):
        params, state, loss = step(params, state, ids, scored)
        losses.append(loss)
        if i % max(1, args.steps // 100) == 0 or i == args.steps:
            curve.append((i, float(np.mean(jax.device_get(losses)))))
            losses = []
            progress.set_postfix(loss=f"{curve[-1][1]:.4f}")
    return params, curve


def exactly_answered(model: Model, params: Any, tokenizer: Tokenizer, examples: list[Example]):
    """Whether greedy decoding gives exactly the tokens of each answer, including its </s>.

    It does if the most likely token is right after every prefix of the answer, so one forward pass
    can decide.

    Returns:
      [examples] bool.
    """
    corpus = tokenise(tokenizer, examples)
    width = -(-int(corpus.lengths.max()) // 32) * 32
    held = np.arange(width)[None] < corpus.lengths[:, None]
    ids = np.full(held.shape, PAD_ID, np.int32)
    scored = np.zeros(held.shape, bool)
    ids[held], scored[held] = corpus.ids, corpus.scored

    @jax.jit
    def right(params, ids, scored):
        best = jnp.argmax(forward(model, params, ids[:, :-1]), axis=-1)
        return jnp.all((best == ids[:, 1:]) | ~scored[:, 1:], axis=1)

    rows = 64
    extra = -len(ids) % rows
    ids, scored = (np.pad(x, ((0, extra), (0, 0))) for x in (ids, scored))
    parts = [
        right(params, ids[i : i + rows], scored[i : i + rows]) for i in range(0, len(ids), rows)
    ]
    return np.concatenate(jax.device_get(parts))[: len(examples)]


def generate(model: Model, params: Any, tokenizer: Tokenizer, prompts: list[str], tokens: int):
    """Greedy continuations without a cache, for reading. `fdjax.generate` is faster.

    Returns:
      For each prompt (text, whether it ended with </s>).
    """
    prompt_ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    lengths = np.array([len(ids) for ids in prompt_ids])
    ids = np.full((len(prompts), int(lengths.max()) + tokens), PAD_ID, np.int32)
    for row, prompt in zip(ids, prompt_ids, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def continued(params, ids, lengths):
        rows = jnp.arange(len(prompts))

        def one(i, ids):
            logits = forward(model, params, ids)
            best = jnp.argmax(logits[rows, lengths + i - 1], axis=-1)
            return ids.at[rows, lengths + i].set(best)

        return jax.lax.fori_loop(0, tokens, one, ids)

    results = []
    for row, length in zip(np.asarray(continued(params, ids, lengths)), lengths, strict=True):
        answer = row[length : length + tokens].tolist()
        ended = EOS_ID in answer
        answer = answer[: answer.index(EOS_ID)] if ended else answer
        results.append((tokenizer.decode(answer), ended))
    return results


def rates(names: list[str], right: np.ndarray) -> dict[str, dict[str, float]]:
    """Share of exact answers for each name, and for all."""
    groups = defaultdict(list)
    for name, ok in zip(names, right.tolist(), strict=True):
        groups[name].append(ok)
        groups["all"].append(ok)
    return {
        name: {"questions": len(oks), "exact": round(sum(oks) / len(oks), 4)}
        for name, oks in sorted(groups.items())
    }


def save_checkpoint(folder: Path, model: Model, params: Any, tokenizer: Tokenizer) -> None:
    """Write a checkpoint that Hugging Face transformers and fdjax load."""
    tensors = export_tensors(params, weight_map(model.config))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes files that only the owner can read
    for name, data in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, ROW_TOKENS)


def parse_args() -> argparse.Namespace:
    """Parses the command line. The defaults train the shipped model."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {ROW_TOKENS} tokens a step")
    parser.add_argument("--documents", type=int, default=500_000, help="size of the corpus")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compute", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--kinds", nargs="*", default=(), help="part of the world; for tests")
    return parser.parse_args()


def main() -> None:
    """Build the corpus and the tokenizer, train, evaluate and write the results."""
    args = parse_args()
    started = time.perf_counter()
    # The split does not depend on `args.seed`, so all runs have the same held-out questions.
    world = World(kinds=tuple(args.kinds))
    examples = list(itertools.islice(world.documents(args.seed), args.documents))
    tokenizer = train_tokenizer(
        (example.question + answer_text(example) for example in examples[:60_000]),
        CONFIG["vocab_size"],
    )
    corpus = tokenise(tokenizer, examples)
    corpus_seconds = time.perf_counter() - started
    print(f"{len(examples)} documents, {len(corpus.ids)} tokens in {corpus_seconds:.0f} s")

    config = parse_config(CONFIG)
    # Only XLA's implementations can be differentiated.
    model = describe(config, dtype=args.compute, plan=Plan())
    started = time.perf_counter()
    params, curve = train(model, init_params(model, args.seed), corpus, args)
    training_seconds = time.perf_counter() - started

    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    args.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(args.out, model, params, tokenizer)
    # From here on, the weights are rounded like the checkpoint's.
    params = jax.tree.map(lambda x: x.astype(args.compute), params)

    held_out = [example for example, _ in world.held_out]
    right = exactly_answered(model, params, tokenizer, held_out)
    by_kind = rates([example.kind for example in held_out], right)
    by_split = rates([reason for _, reason in world.held_out], right)
    trained = [e for e in examples[:2000] if e.kind != "story"]
    trained_rate = float(exactly_answered(model, params, tokenizer, trained).mean())
    wrong = [example for example, ok in zip(held_out, right.tolist(), strict=True) if not ok][:40]
    answers = generate(model, params, tokenizer, [e.question for e in wrong], 48) if wrong else []
    shown = generate(model, params, tokenizer, list(SHOWCASE), 160)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.name != "training.json")
    record = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__},
        "seed": args.seed,
        "steps": args.steps,
        "tokens_per_step": args.rows * ROW_TOKENS,
        "learning_rate": args.learning_rate,
        "compute_dtype": args.compute,
        "documents": len(examples),
        "corpus_tokens": len(corpus.ids),
        "parameters": model.parameter_count,
        "checkpoint_bytes": size,
        "corpus_seconds": round(corpus_seconds, 1),
        "training_seconds": round(training_seconds, 1),
        "held_out_by_kind": by_kind,
        "held_out_by_split": by_split,
        "trained_questions_exact": round(trained_rate, 4),
        "wrong": [
            {"question": e.question, "expected": e.answer, "got": got.strip()}
            for e, (got, _) in zip(wrong, answers, strict=True)
        ],
        "shown": [
            {"prompt": prompt, "continuation": text, "ended": ended}
            for prompt, (text, ended) in zip(SHOWCASE, shown, strict=True)
        ],
        "loss": curve,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    for name, rate in {**by_kind, **by_split}.items():
        print(f"{name:28} {rate['exact']:7.1%} of {rate['questions']}")
    for item in record["shown"]:
        print(f"{item['prompt']}|{item['continuation']}{'' if item['ended'] else ' ...'}")
    total = by_kind["all"]
    print(
        f"{total['exact']:.1%} of {total['questions']} held-out questions exact; "
        f"{model.parameter_count} parameters, {size} bytes, {training_seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
