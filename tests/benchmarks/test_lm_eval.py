"""lm-evaluation-harness gives the embedded model the scores that it gives with transformers."""

import json
import sys
from pathlib import Path

import pytest

import fdjax

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "fixtures" / "hf" / "lm_eval"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
# Sums of up to about 1000 log-probabilities, from two implementations in float32.
CLOSE = {"rel": 1e-4, "abs": 1e-3}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.slow
def test_log_likelihoods_of_choices_are_those_of_transformers():
    lm = fdjax.load("tiny", dtype="float32", compilation_cache=False, progress=False)
    lines = (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    want = EXPECTED["responses"]["capitals"]
    texts, counts = [], []
    for question in map(json.loads, lines):
        begun = f"{question['question']} The capital is"
        counts.append(len(lm.tokenizer.encode(begun)))
        texts += [f"{begun} {choice}" for choice in question["choices"]]
    result = lm.score(texts)
    for i, choices in enumerate(want):
        for j, ((logprob, greedy),) in enumerate(choices):
            row = 4 * i + j
            scored = slice(counts[i] - 1, None)
            assert sum(result.logprobs[row][scored]) == pytest.approx(logprob, **CLOSE)
            assert all(result.likeliest[row][scored]) == greedy


@pytest.mark.lm_eval
@pytest.mark.filterwarnings("default")
def test_the_harness_gives_the_scores_of_transformers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "tests" / "fixtures"), *sys.path])
    from make_lm_eval_fixtures import evaluate

    import benchmarks.lm_eval_adapter  # noqa: F401 - registers the model

    got = evaluate("fdjax")
    for task, scores in EXPECTED["scores"].items():
        assert got["scores"][task].keys() == scores.keys()
        for name, score in scores.items():
            # The likeliest choice and the exact answers must not differ at all.
            exact = task != "documents"
            assert got["scores"][task][name] == (score if exact else pytest.approx(score, rel=1e-4))
    assert got["responses"]["answers"] == EXPECTED["responses"]["answers"]
    for task in ("capitals", "documents"):
        for ours, theirs in zip(got["responses"][task], EXPECTED["responses"][task], strict=True):
            assert _numbers(ours) == pytest.approx(_numbers(theirs), **CLOSE)


def _numbers(value) -> list[float]:
    if isinstance(value, list | tuple):
        return [x for v in value for x in _numbers(v)]
    return [float(value)]
