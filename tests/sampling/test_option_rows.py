"""Greedy runs with options have the same tokens as in transformers."""

from pathlib import Path

import numpy as np
import pytest

import fdjax
from option_rows import CHECKPOINTS, NEW_TOKENS, PROMPT_LENGTHS, SETS, option_sets, prompt

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"

pytestmark = pytest.mark.usefixtures("quick_compiles")


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(seeds [P], tokens [P, N, R]) of a checkpoint."""
    with np.load(FIXTURES / "options.npz") as arrays:
        return arrays[f"{name}.seeds"], arrays[f"{name}.tokens"]


def check_rows(name: str, count: int) -> None:
    """Compare the rows of the last `count` prompts of a checkpoint, all in one batch."""
    lm = fdjax.load(FIXTURES / name, dtype="float32", compilation_cache=False, progress=False)
    seeds, tokens = expected(name)
    rows = [
        (prompt(int(seed), length, lm.config.vocab_size), options, want[want >= 0].tolist())
        for seed, length, runs in list(zip(seeds, PROMPT_LENGTHS, tokens, strict=True))[-count:]
        for options, want in zip(option_sets(runs[0].tolist()), runs, strict=True)
    ]
    assert len(rows) == count * SETS
    prompts, options, wanted = zip(*rows, strict=True)
    # Otherwise the end tokens would come from the checkpoint.
    options = [{"eos_token_id": ()} | row for row in options]
    names = {name for row in options for name in row}
    by_name = {name: [row.get(name) for row in options] for name in names}
    result = lm.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False, **by_name)
    for row, want, ids, asked in zip(result, wanted, prompts, options, strict=True):
        assert row.tokens == want, (ids, asked)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama3_gqa_tied", "gemma2"])
def test_a_tenth_of_the_rows(name):
    check_rows(name, 3)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_rows(name):
    check_rows(name, len(PROMPT_LENGTHS))


def test_options_change_the_runs():
    """Otherwise the test would compare a greedy run with itself."""
    assert len(CHECKPOINTS) * len(PROMPT_LENGTHS) * SETS == 720
    for name in CHECKPOINTS:
        for greedy, *others in expected(name)[1]:
            changed = sum(not np.array_equal(greedy, run) for run in others)
            assert changed >= SETS - 2, name
