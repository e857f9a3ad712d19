"""The world of the embedded model: its split, its answers, its tokenizer."""

import itertools
import random
import re

import pytest

from fdjax.models.tiny.stories import story
from fdjax.models.tiny.tokenizer import BOS, BOS_ID, EOS_ID, PAD_ID, train_tokenizer
from fdjax.models.tiny.world import (
    HELD_OUT_FACTS,
    NUMBERS,
    UNKNOWN,
    World,
    fraction,
    normalise,
)


@pytest.fixture(scope="module")
def world():
    return World(seed=0)


@pytest.fixture(scope="module")
def documents(world):
    return list(itertools.islice(world.documents(seed=0), 12_000))


@pytest.fixture(scope="module")
def tokenizer(documents):
    texts = (f"{d.question} {d.answer}" for d in documents[:4000])
    return train_tokenizer(texts, 1024)


def test_enough_questions_are_held_out(world):
    assert len(world.held_out) >= 300
    reasons = [reason for _, reason in world.held_out]
    assert min(reasons.count(reason) for reason in ("wording", "fact", "pair")) >= 100
    assert {example.kind for example, _ in world.held_out} >= {r.kind for r in world.relations}


def test_no_held_out_question_is_trained_on(world, documents):
    held_out = {example.question for example, _ in world.held_out}
    assert not held_out & {d.question for d in documents}
    assert not world.held_out_questions & {normalise(d.question) for d in documents}


def test_held_out_sums_are_trained_in_no_wording(world, documents):
    def operands(question):
        words = re.findall(r"\d+|[a-z]+(?:-[a-z]+)?", question.lower())
        numbers = [int(w) if w.isdigit() else NUMBERS.index(w) for w in words if w in known]
        return tuple(map(str, sorted(numbers)))

    known = {*NUMBERS, *map(str, range(100))}
    sums = [d for d in documents if d.kind.startswith(("add", "subtract", "word problem"))]
    assert len(sums) > 2000
    assert all(fraction(0, operands(d.question)) >= HELD_OUT_FACTS for d in sums)


def test_held_out_wordings_are_trained_for_no_fact(world):
    for relation in world.relations:
        names = {name for name, _ in relation.wordings}
        assert names - world.held_out_wordings, f"{relation.kind}: nothing left to train on"


def test_the_same_seed_gives_the_same_world(world, documents):
    again = World(seed=0)
    assert again.held_out == world.held_out
    assert list(itertools.islice(again.documents(seed=0), 500)) == documents[:500]
    assert list(itertools.islice(again.documents(seed=1), 500)) != documents[:500]


def test_another_seed_splits_otherwise(world):
    assert World(seed=1).held_out_wordings != world.held_out_wordings


def test_a_question_has_one_answer(world, documents):
    answers = {}
    for relation in world.relations:
        # Covers every wording with some facts, and every fact with some wordings.
        for fact in relation.facts[:: max(1, len(relation.facts) // 40)]:
            for _, template in relation.wordings:
                example = relation.example(template, fact)
                assert answers.setdefault(normalise(example.question), example.answer) == (
                    example.answer
                ), example.question
    for example in itertools.chain((e for e, _ in world.held_out), documents):
        if example.kind not in ("story", "completion"):
            known = answers.setdefault(normalise(example.question), example.answer)
            assert known == example.answer, example.question


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
        ("What's the capital of France?", "The capital of France is Paris."),
        ("What is 7 + 5?", "7 + 5 = 12."),
        ("What is seven plus five?", "Seven plus five is twelve."),
        ("Is Paris the capital of France?", "Yes, the capital of France is Paris."),
        ("What is the capital of the USA?", "The capital of the United States is Washington, D.C."),
        ("What is the longest mountain range?", "The longest mountain range on land is the Andes."),
        ("Hello", "Hello! Ask me about oceans, countries or small sums."),
    ],
)
def test_what_people_ask_first_is_answered(world, question, answer):
    answers = {
        example.answer
        for relation in world.relations
        for fact in relation.facts
        if any(slot in question.lower() for slot in map(str.lower, fact))
        for _, template in relation.wordings[:60]
        if (example := relation.example(template, fact)).question == question
    }
    assert answers == {answer}


def test_sums_are_right(documents):
    for document in documents:
        if document.kind in ("add small", "add large", "subtract small", "subtract large"):
            left, right = document.answer.rstrip(".").split(" = ")
            a, sign, b = left.split()
            assert int(right) == int(a) + int(f"{sign}{b}")


def test_unknown_questions_are_a_small_part(documents):
    share = sum(d.answer == UNKNOWN for d in documents) / len(documents)
    assert 0.02 < share < 0.12


def test_a_story_is_about_what_was_asked_for():
    rng = random.Random(0)
    for _ in range(500):
        question, text = story(rng)
        assert text.lower().startswith("once upon a time")
        assert text.endswith(".") and "{" not in text
        if " about " in question:
            hero = question.lower().split(" about ")[1].rstrip("?.").split()[1]
            assert hero in text.split(".")[0].lower()


def test_the_tokenizer_encodes_anything(tokenizer, documents):
    texts = ["", " leading", "trailing \n", "naïve café 東京 🦊", "\x00\x7f", "12 + 345 = 357"]
    texts += [d.question for d in documents[:200]] + [d.answer for d in documents[:200]]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids[0] == BOS_ID
        assert tokenizer.decode(ids) == text


def test_the_tokenizer_has_its_special_tokens_and_splits_digits(tokenizer):
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.token_to_id(t) for t in ("<pad>", BOS, "</s>")] == [PAD_ID, BOS_ID, EOS_ID]
    assert tokenizer.encode("2025", add_special_tokens=False).tokens == ["2", "0", "2", "5"]


def test_a_prompt_is_tokenised_as_in_training(tokenizer, documents):
    """The answer begins with a new token, so prompt and answer can be tokenised separately."""
    for document in documents[:500]:
        if document.question and not document.question[-1].isspace():
            whole = tokenizer.encode(f"{document.question} {document.answer}").ids
            prompt = tokenizer.encode(document.question).ids
            assert whole[: len(prompt)] == prompt
