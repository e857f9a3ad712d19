"""Writes tests/hf_fixtures/processors.npz: random logits after the processors of transformers.

`python tests/make_processor_fixtures.py` needs torch and transformers; reading the fixture needs
neither. A row is a case: logits, a history of prompt and response, and one value per option. With
R rows, V tokens and S the longest history:

    logits         float32 [R, V]
    ids            int32   [R, S]  the history, padded at the end with 0
    lengths        int32   [R]     of it
    steps          int32   [R]     of these, tokens of the response
    OPTION         [R]             one array per option with a number
    bad_words      int32   [R, W, T], suppress, begin_suppress, eos  int32 [R, N]; padded with -1
    edited         float32 [R, V]  after the processors that are not for sampling
    scores         float32 [R, V]  after all of them

`generate.json` beside it holds greedy runs of `generate` itself on one of the checkpoints there:
options, prompt and tokens of each.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

FIXTURES = Path(__file__).parent / "hf_fixtures"
TARGET = FIXTURES / "processors.npz"
ROWS, VOCABULARY, LONGEST = 400, 61, 40
WORDS, WORD_LENGTH, IDS = 4, 5, 6


def draw(rng: np.random.Generator) -> dict:
    """One case; each option is off half of the time."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    length = int(rng.integers(1, LONGEST + 1))
    # Few different tokens, so that sequences recur.
    ids = rng.integers(0, rng.choice([3, 8, VOCABULARY]), length)
    words = [
        rng.choice(ids, rng.integers(1, WORD_LENGTH + 1)) for _ in range(rng.integers(1, WORDS + 1))
    ]
    if rng.random() < 0.7:
        # One that is about to come about.
        start = ids[-int(rng.integers(1, WORD_LENGTH)) :]
        words[0] = np.append(start, rng.integers(0, VOCABULARY))

    def some_ids():
        return rng.choice(VOCABULARY, rng.integers(1, IDS + 1), replace=False).tolist()

    return {
        "logits": (rng.choice([0.5, 2.0, 6.0]) * rng.normal(size=VOCABULARY)).astype(np.float32),
        "ids": ids,
        "steps": int(rng.integers(0, length)),
        "temperature": maybe(float(np.float32(rng.uniform(0.3, 3.0))), 1.0),
        "top_k": maybe(int(rng.integers(1, 2 * VOCABULARY)), 0),
        "top_p": maybe(float(np.float32(rng.uniform(0.05, 0.99))), 1.0),
        "min_p": maybe(float(np.float32(rng.uniform(0.001, 0.5))), 0.0),
        "typical_p": maybe(float(np.float32(rng.uniform(0.05, 0.99))), 1.0),
        "repetition_penalty": maybe(float(np.float32(rng.uniform(0.5, 2.0))), 1.0),
        "no_repeat_ngram_size": maybe(int(rng.integers(1, 6)), 0),
        "min_new_tokens": maybe(int(rng.integers(1, LONGEST)), 0),
        "bad_words": maybe([word.tolist() for word in words], []),
        "suppress": maybe(some_ids(), []),
        "begin_suppress": maybe(some_ids(), []),
        "eos": maybe(some_ids(), []),
    }


def run(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """(edited, scores) of transformers, in the order of its `generate`."""
    prompt = len(case["ids"]) - case["steps"]
    edits, warpers = LogitsProcessorList(), LogitsProcessorList()
    if case["repetition_penalty"] != 1:
        edits.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if case["no_repeat_ngram_size"]:
        edits.append(NoRepeatNGramLogitsProcessor(case["no_repeat_ngram_size"]))
    if case["bad_words"]:
        edits.append(NoBadWordsLogitsProcessor(case["bad_words"], case["eos"] or None))
    if case["min_new_tokens"] and case["eos"]:
        edits.append(MinNewTokensLengthLogitsProcessor(prompt, case["min_new_tokens"], case["eos"]))
    if case["suppress"]:
        edits.append(SuppressTokensLogitsProcessor(case["suppress"]))
    if case["begin_suppress"]:
        edits.append(SuppressTokensAtBeginLogitsProcessor(case["begin_suppress"], prompt))
    if case["temperature"] != 1:
        warpers.append(TemperatureLogitsWarper(case["temperature"]))
    if case["top_k"]:
        warpers.append(TopKLogitsWarper(case["top_k"]))
    if case["top_p"] < 1:
        warpers.append(TopPLogitsWarper(case["top_p"]))
    if case["min_p"]:
        warpers.append(MinPLogitsWarper(case["min_p"]))
    if case["typical_p"] < 1:
        warpers.append(TypicalLogitsWarper(case["typical_p"]))
    ids = torch.as_tensor(case["ids"])[None]
    edited = edits(ids, torch.as_tensor(case["logits"])[None])
    return edited[0].numpy(), warpers(ids, edited)[0].numpy()


def padded(rows: list, shape: tuple[int, ...], fill: int) -> np.ndarray:
    out = np.full((len(rows), *shape), fill, np.int32)
    for target, row in zip(out, rows, strict=True):
        if len(row):
            target[: len(row)] = row
    return out


CHECKPOINT = "llama3_gqa_tied"
NEW_TOKENS = 24
OPTIONS = (
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 9, "eos_token_id": [93, 96, 256]},
    {"begin_suppress_tokens": [248, 20, 59, 178], "suppress_tokens": [93, 156]},
    {"bad_words_ids": [[93], [39, 96], [20, 156], [156, 20, 256]]},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[248, 39]]},
    {"stop_strings": ["s", "the"]},
    {"stop_strings": "l", "repetition_penalty": 1.8},
)


def generated() -> list[dict]:
    """Runs of `generate`, each prompt alone."""
    folder = FIXTURES / CHECKPOINT
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runs = []
    with np.load(folder / "expected.npz") as expected:
        prompts = [expected[f"prompt_{i}"].tolist() for i in range(5)]
    for options in OPTIONS:
        for i, prompt in enumerate(prompts):
            ids = torch.as_tensor([prompt])
            given = {"eos_token_id": None} | options
            if "stop_strings" in options:
                given["tokenizer"] = tokenizer
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
                **given,
            )
            runs.append({"options": options, "prompt": i, "tokens": out[0, len(prompt) :].tolist()})
    return runs


def main() -> None:
    path = FIXTURES / "generate.json"
    path.write_text(json.dumps(generated()) + "\n", encoding="utf-8")
    rng = np.random.default_rng(0)
    cases = []
    while len(cases) < ROWS:
        case = draw(rng)
        edited, scores = run(case)
        # Where every token is forbidden, transformers draws from nothing.
        if np.isfinite(edited).any():
            cases.append(case | {"edited": edited, "scores": scores})
    numbers = ("steps", "top_k", "no_repeat_ngram_size", "min_new_tokens")
    reals = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
    # Right-aligned, as a word ends where its table ends.
    words = [
        [[-1] * (WORD_LENGTH + 1 - len(word)) + word for word in case["bad_words"]]
        for case in cases
    ]
    np.savez_compressed(
        TARGET,
        ids=padded([case["ids"] for case in cases], (LONGEST,), 0),
        lengths=np.array([len(case["ids"]) for case in cases], np.int32),
        bad_words=padded(words, (WORDS, WORD_LENGTH + 1), -1),
        **{
            n: padded([c[n] for c in cases], (IDS,), -1)
            for n in ("suppress", "begin_suppress", "eos")
        },
        **{n: np.array([case[n] for case in cases], np.int32) for n in numbers},
        **{n: np.array([case[n] for case in cases], np.float32) for n in reals},
        **{n: np.stack([case[n] for case in cases]) for n in ("logits", "edited", "scores")},
    )
    print(TARGET, TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
