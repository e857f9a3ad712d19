"""Writes tests/hf_fixtures/lm_eval: local tasks of lm-evaluation-harness, and transformers' scores.

    python tests/make_lm_eval_fixtures.py           # needs lm_eval[hf]
    python tests/make_lm_eval_fixtures.py fdjax     # scores through the adapter

The model is the embedded one, in float32. Of each task the fixture keeps the scores and what the
model said to every request.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "hf_fixtures" / "lm_eval"
MODEL = ROOT / "models" / "tiny"

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Japan": "Tokyo",
    "Cuba": "Havana",
    "Atlantis": "Poseidonis",
    "Ruritania": "Strelsau",
}
DOCUMENTS = [
    "What is the largest ocean? The largest ocean is the Pacific Ocean.",
    "Once upon a time there was a small owl. " * 12,
    "12345 × 67890 = ✓ — naïve « façade »",
    # Longer than the context: the harness cuts it into windows.
    " ".join(f"The capital of {country} is {city}." for country, city in CAPITALS.items()) * 6,
]


def questions() -> list[dict]:
    """Four capitals to choose from; the right one goes round."""
    cities = list(CAPITALS.values())
    made = []
    for i, (country, city) in enumerate(CAPITALS.items()):
        choices = [cities[(i + step) % len(cities)] for step in (3, 5, 8)]
        choices.insert(i % 4, city)
        made.append(
            {
                "question": f"What is the capital of {country}?",
                "choices": choices,
                "answer": choices.index(city),
                "text": f"The capital of {country} is {city}.",
            }
        )
    return made


def tasks() -> list[dict]:
    """Configurations of the tasks."""

    def task(name: str, file: str, **config) -> dict:
        return {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(FOLDER / file)}},
            "test_split": "test",
            **config,
        }

    scores = [
        {"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")
    ]
    return [
        task(
            "capitals",
            "questions.jsonl",
            output_type="multiple_choice",
            doc_to_text="{{question}} The capital is",
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            metric_list=scores,
        ),
        task(
            "documents",
            "documents.jsonl",
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": m} for m in ("word_perplexity", "bits_per_byte")],
        ),
        task(
            "answers",
            "questions.jsonl",
            output_type="generate_until",
            doc_to_text="{{question}}",
            doc_to_target="{{text}}",
            generation_kwargs={"until": ["\n", " is B"], "max_gen_toks": 24, "do_sample": False},
            filter_list=[
                {"name": "strip", "filter": [{"function": "regex", "regex_pattern": "(.*)"}]}
            ],
            metric_list=[
                {"metric": "exact_match", "aggregation": "mean", "ignore_punctuation": False}
            ],
        ),
    ]


def evaluate(model: str, **options) -> dict:
    """Scores by task, and the responses to every document."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from lm_eval import simple_evaluate

    done = simple_evaluate(
        model=model,
        model_args={"pretrained": str(MODEL), "dtype": "float32", **options},
        tasks=tasks(),
        batch_size=4,
        bootstrap_iters=0,
    )
    scores = {
        name: {k: v for k, v in result.items() if isinstance(v, float) and "stderr" not in k}
        for name, result in done["results"].items()
    }
    responses = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in done["samples"].items()
    }
    return {"scores": scores, "responses": responses}


def write_lines(name: str, rows: list[dict]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / name).write_text("".join(lines), encoding="utf-8")


def main() -> int:
    if sys.argv[1:] == ["fdjax"]:
        sys.path.insert(0, str(ROOT))
        import benchmarks.lm_eval_adapter  # noqa: F401 - registers the model

        print(json.dumps(evaluate("fdjax")["scores"], indent=1))
        return 0
    FOLDER.mkdir(exist_ok=True)
    write_lines("questions.jsonl", questions())
    write_lines("documents.jsonl", [{"text": text} for text in DOCUMENTS])
    expected = evaluate("hf", device="cpu")
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(json.dumps(expected["scores"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
