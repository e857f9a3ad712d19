"""Beam search has the tokens, the order and the scores of transformers."""

from pathlib import Path

import numpy as np
import pytest

import fdjax
from beam_rows import (
    CHECKPOINTS,
    LONG,
    LONG_CHECKPOINT,
    LONG_NEW_TOKENS,
    LONG_PROMPT,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    RAGGED,
    option_sets,
    prompt,
)

# Options that change no scores.
PLAIN = {"num_beams", "num_return_sequences", "length_penalty", "early_stopping"}
PLAIN |= {"eos_token_id", "max_new_tokens"}
FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"

pytestmark = pytest.mark.usefixtures("quick_compiles")


def expected(name: str) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, or of "long"."""
    with np.load(FIXTURES / "beams.npz") as arrays:
        return {
            key.removeprefix(f"{name}."): arrays[key]
            for key in arrays.files
            if key.startswith(f"{name}.")
        }


def load(name: str, **options) -> fdjax.LM:
    return fdjax.load(
        FIXTURES / name, dtype="float32", compilation_cache=False, progress=False, **options
    )


def generate(lm: fdjax.LM, prompts, options: list[dict]) -> list[list[fdjax.Generation]]:
    """The answers to each prompt, all in one call."""
    # Otherwise the end tokens would come from the checkpoint.
    common = {"eos_token_id": (), "max_new_tokens": NEW_TOKENS, "num_return_sequences": 1}
    options = [common | {n: () if v is None else v for n, v in row.items()} for row in options]
    names = {name for row in options for name in row}
    by_name = {name: [row.get(name) for row in options] for name in names}
    result = iter(lm.generate(prompts, do_sample=False, **by_name))
    answers = [[next(result) for _ in range(row["num_return_sequences"])] for row in options]
    assert next(result, None) is None
    return answers


def check(answers, tokens, scores, asked) -> None:
    """Compare the answers to one prompt with tokens [W, R] and scores [W]."""
    assert [a.tokens for a in answers] == [
        row[row >= 0].tolist() for row in tokens[: len(answers)]
    ], asked
    found = [answer.sequences_score for answer in answers]
    np.testing.assert_allclose(found, scores[: len(answers)], rtol=1e-4, atol=1e-4, err_msg=asked)


def check_grid(name: str, every: int, *, plain: bool = False) -> None:
    """Compare every n-th search of a checkpoint, all in one call.

    With `plain`, only of the shorter prompts, and without edits, so that programs are small.
    """
    lm, want = load(name), expected(name)
    rows = [
        (prompt(int(seed), length, lm.config.vocab_size), *row)
        for p, (seed, length) in enumerate(zip(want["seeds"], PROMPT_LENGTHS, strict=True))
        for row in zip(
            option_sets(want["best"][p].tolist()),
            want["tokens"][p],
            want["scores"][p],
            strict=True,
        )
    ][::every]
    if plain:
        rows = [row for row in rows if len(row[0]) < 16 and row[1].keys() <= PLAIN]
    prompts, options, *_ = zip(*rows, strict=True)
    for (_, asked, tokens, scores), answers in zip(
        rows, generate(lm, prompts, options), strict=True
    ):
        check(answers, tokens, scores, repr(asked))


def check_ragged(name: str) -> None:
    """Compare three prompts of different lengths, which transformers ran in one batch."""
    lm, want = load(name), expected(name)
    prompts = [
        prompt(int(seed), length, lm.config.vocab_size)
        for seed, length in zip(want["seeds"], PROMPT_LENGTHS, strict=True)
    ]
    first_end = {"eos_token_id": [int(want["best"][0][0][5])]}
    options = [first_end | asked for asked in RAGGED]
    answers = generate(lm, prompts * len(options), [o for o in options for _ in prompts])
    tokens = want["ragged_tokens"].reshape(-1, *want["ragged_tokens"].shape[2:])
    scores = want["ragged_scores"].reshape(len(tokens), -1)
    for i, found in enumerate(answers):
        check(found, tokens[i], scores[i], repr(options[i // len(prompts)]))


@pytest.mark.slow
def test_some_searches():
    check_grid("llama3_gqa_tied", 2, plain=True)


@pytest.mark.soak
def test_more_searches():
    check_grid("mistral_window", 4)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_searches(name):
    check_grid(name, 1)
    check_ragged(name)


@pytest.mark.soak
def test_answers_of_several_pages():
    lm, want = load(LONG_CHECKPOINT), expected("long")
    ids = prompt(int(want["seed"]), LONG_PROMPT, lm.config.vocab_size)
    (answers,) = generate(lm, [ids], [LONG | {"max_new_tokens": LONG_NEW_TOKENS}])
    check(answers, want["tokens"][0], want["scores"][0], "long")


def test_options_change_the_searches():
    """Otherwise the test would compare the same search again and again."""
    for name in CHECKPOINTS:
        want = expected(name)
        for best, runs in zip(want["best"].tolist(), want["tokens"], strict=True):
            sets = option_sets(best)
            assert len(sets) == len(runs) == 42
            assert len({run.tobytes() for run in runs}) > 20, name
        lengths = (want["tokens"][:, :, 0] >= 0).sum(axis=-1)
        assert len(set(lengths.ravel().tolist())) > 5
