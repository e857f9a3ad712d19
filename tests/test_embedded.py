"""The embedded model: it equals transformers, it knows its world, it is small.

`fixtures/hf/tiny` holds `prompts.json` and the answers of transformers. The prompts are every third
held-out question, those of the model's README, and openings of stories:

    python tests/fixtures/make_hf_fixtures.py --greedy models/tiny --n 64 \\
        --prompts tests/fixtures/hf/tiny/prompts.json --out tests/fixtures/hf/tiny/expected.npz
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fdjax
from fdjax.models.tiny.world import World
from fdjax.weights.checkpoint import locate

FIXTURE = Path(__file__).parent / "fixtures" / "hf" / "tiny"
NEW_TOKENS = 64
MAX_LEN = 128
ROWS = 64

pytestmark = pytest.mark.usefixtures("quick_compiles")

forward = jax.jit(fdjax.forward, static_argnums=0)


def load(dtype):
    return fdjax.load("tiny", dtype=dtype, max_len=MAX_LEN, compilation_cache=False, progress=False)


@pytest.fixture(scope="module")
def lm():
    """As shipped: bfloat16."""
    return load(None)


@pytest.fixture(scope="module")
def prompts():
    return json.loads((FIXTURE / "prompts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def expected():
    with np.load(FIXTURE / "expected.npz") as arrays:
        return dict(arrays)


def answers(lm, prompts):
    """(tokens, text) of every prompt, in batches of one size."""
    found = []
    rows = min(len(prompts), ROWS)
    for start in range(0, len(prompts), rows):
        part = prompts[start : start + rows]
        filled = part + part[:1] * (rows - len(part))
        result = lm.generate(filled, max_new_tokens=NEW_TOKENS)
        found += list(zip(result.tokens, result.texts, strict=True))[: len(part)]
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(12, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)],
    ids=["a twelfth", "all"],
)
def shipped_answers(request, lm, prompts):
    """{index of the prompt: (tokens, text)}."""
    indices = range(0, len(prompts), request.param)
    return dict(zip(indices, answers(lm, [prompts[i] for i in indices]), strict=True))


def cut(row, eos):
    """A run of transformers up to and including its first end of sequence."""
    ends = np.flatnonzero(row == eos)
    return row[: ends[0] + 1].tolist() if len(ends) else row.tolist()


def first_difference(ours, theirs):
    """The first step in which two runs differ, or None."""
    parted = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    return parted[0] if parted else None


def test_prompts_are_tokenised_as_by_transformers(lm, prompts, expected):
    ids = [i for prompt in prompts for i in lm.tokenizer.encode(prompt)]
    assert ids == expected["ids"].tolist()
    assert [len(lm.tokenizer.encode(p)) for p in prompts] == expected["lengths"].tolist()


@pytest.mark.soak
def test_greedy_tokens_of_transformers_in_float32(prompts, expected, full_compiles):
    lm = load("float32")
    (eos,) = lm.defaults.eos_token_ids
    # No choice is close, so every token must be equal.
    assert expected["fp32_gaps"].min() > 1e-4
    for i, (tokens, _) in enumerate(answers(lm, prompts)):
        assert tokens == cut(expected["fp32_tokens"][i], eos), prompts[i]


def test_greedy_tokens_of_transformers_in_bfloat16(lm, prompts, expected, shipped_answers):
    """Where the two runs first differ, the two best logits are within four bfloat16 steps.

    The distance is taken from transformers' own bfloat16 run, whose text is the same up to there.
    """
    (eos,) = lm.defaults.eos_token_ids
    different = 0
    for i, (tokens, _) in shipped_answers.items():
        theirs = cut(expected["bf16_tokens"][i], eos)
        step = first_difference(tokens, theirs)
        if step is None:
            assert tokens == theirs, prompts[i]
            continue
        different += 1
        ids = lm.tokenizer.encode(prompts[i]) + tokens[:step]
        row = np.array([ids + [0] * (MAX_LEN - len(ids))], np.int32)
        top = float(forward(lm.model, lm.params, row)[0, len(ids) - 1].max())
        bf16_step = 2.0 ** (np.floor(np.log2(top)) - 7)
        gap = float(expected["bf16_gaps"][i, step])
        assert gap <= 4 * bf16_step, f"{prompts[i]!r}: step {step}, gap {gap}"
    assert different <= len(shipped_answers) / 20


def exact(examples, found):
    """Share of the questions with exactly the right answer."""
    right = [
        text == f" {example.answer}" for example, (_, text) in zip(examples, found, strict=True)
    ]
    return np.mean(right)


def test_held_out_questions(prompts, shipped_answers):
    by_question = {example.question: example for example, _ in World(0).held_out}
    known = [
        (by_question[prompts[i]], a)
        for i, a in shipped_answers.items()
        if prompts[i] in by_question
    ]
    examples, found = zip(*known, strict=True)
    assert len(examples) >= 0.7 * len(shipped_answers)
    assert exact(examples, found) >= 0.9


@pytest.mark.soak
def test_all_held_out_questions(lm):
    examples = [example for example, _ in World(0).held_out]
    assert len(examples) >= 800
    assert exact(examples, answers(lm, [e.question for e in examples])) >= 0.9


def test_it_is_small():
    folder = locate("tiny")
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_its_shapes_are_those_the_kernels_like(lm):
    c = lm.config
    assert [size % 128 for size in (c.width, c.mlp_width, c.vocab_size)] == [0, 0, 0]
    assert (c.head_dim, c.group, c.tie_embeddings, c.dtype) == (64, 2, True, "bfloat16")
