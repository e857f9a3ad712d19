"""Searches run beside other rows, share the pages of their prompt, and end as a whole."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.engine import engine, runner, step
from fdjax.engine.memory import beam_slots
from fdjax.engine.pages import page_count
from fdjax.engine.state import SLOT_MULTIPLE as PAGE
from fdjax.models import random_params

pytestmark = pytest.mark.usefixtures("quick_compiles")

OPTIONS = {"eos_token_id": None, "do_sample": False}
BEAMS = {**OPTIONS, "num_beams": 4, "num_return_sequences": 4}


def of_one_shape(lm: fdjax.LM) -> fdjax.LM:
    """Its states have one shape, so that few programs are compiled."""
    shape_for = lm.engine.shape_for
    lm.engine.shape_for = lambda rows: dataclasses.replace(shape_for(rows), rows=8, slots=640)
    return lm


@pytest.fixture(scope="module")
def load(two_layers):
    return lambda: of_one_shape(fdjax.load(two_layers, dtype="float32", max_batch=8))


@pytest.fixture(scope="module")
def lm(load):
    return load()


def ids(seed, length):
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def same(got, want):
    assert got.tokens == want.tokens
    assert got.sequences_scores == want.sequences_scores


@pytest.fixture
def chunks(lm, monkeypatch):
    """For each chunk of decode steps (whether its program is aligned, whether its rows are)."""
    found = []
    program, decode = engine.Engine.program, runner.Session.decode

    def with_program(self, function, **options):
        if function is step.decode_steps:
            found.append(options.get("aligned", False))
        return program(self, function, **options)

    def with_rows(self, *args):
        running = [(row, task.width) for row, task in lm.engine.runner._scheduler.running]
        widest = self._whole_state.beams.width if self._has_beams else 0
        result = decode(self, *args)
        found[-1] = found[-1], all(n == widest and row % widest == 0 for row, n in running)
        return result

    monkeypatch.setattr(engine.Engine, "program", with_program)
    monkeypatch.setattr(runner.Session, "decode", with_rows)
    return found


@pytest.mark.slow
def test_searches_and_others_have_the_answers_that_they_have_alone(lm, chunks):
    prompts = [ids(i, 5 + 2 * i) for i in range(5)]
    beams, several, new = [4, 1, 2, 1, 4], [4, 1, 2, 1, 1], [9, 20, 12, 3, 9]
    got = lm.generate(
        prompts, num_beams=beams, num_return_sequences=several, max_new_tokens=new, **OPTIONS
    )
    assert len(got) == sum(several)
    assert [score is None for score in got.sequences_scores] == [
        n == 1 for n, count in zip(beams, several, strict=True) for _ in range(count)
    ]
    start = 0
    for i, count in enumerate(several):
        one = {"num_return_sequences": count, "max_new_tokens": new[i]}
        if beams[i] == 1:  # beside another search, so that the program is the same
            beside = lm.generate([prompts[i], ids(9, 3)], num_beams=[1, 4], **one, **OPTIONS)
            assert beside.tokens[0] == got.tokens[start]
        else:
            alone = lm.generate(prompts[i], num_beams=beams[i], **one, **OPTIONS)
            assert alone.tokens == got.tokens[start : start + count]
            assert alone.sequences_scores == got.sequences_scores[start : start + count]
            assert sorted(alone.sequences_scores, reverse=True) == alone.sequences_scores
        start += count
    answers = list(
        lm.generate_iter(
            prompts, num_beams=beams, num_return_sequences=several, max_new_tokens=new, **OPTIONS
        )
    )
    order = sorted(answers, key=lambda a: (a.index, a.sample))
    assert [a.tokens for a in order] == got.tokens
    assert [a.sequences_score for a in order] == got.sequences_scores
    assert got[0].sequences_score == got.sequences_scores[0]
    assert (False, False) in chunks and (True, False) not in chunks


@pytest.mark.slow
def test_searches_of_one_width_take_the_aligned_program(lm, chunks):
    prompts = [ids(i, 5 + 2 * i) for i in range(5)]
    lm.generate(prompts, **BEAMS, max_new_tokens=[9, 3, 8, 9, 5])
    assert set(chunks) == {(True, True)}
    chunks.clear()
    # The program changes only when rows begin, so it is still the same when one search is left.
    lm.generate(prompts[:2], **OPTIONS, num_beams=[4, 2], max_new_tokens=[70, 4])
    assert set(chunks) == {(False, False), (False, True)}


@pytest.mark.slow
def test_a_search_finds_what_greedy_decoding_misses(lm):
    """The score is the sum of the log-probabilities that `score` gives."""
    prompt = ids(1, 9)
    got = lm.generate(prompt, **BEAMS, max_new_tokens=6, length_penalty=0.0)
    greedy = lm.generate(prompt, **OPTIONS, max_new_tokens=6, return_logprobs=True)
    assert got.sequences_scores[0] >= sum(greedy.logprobs[0]) - 1e-4
    for tokens, score in zip(got.tokens, got.sequences_scores, strict=True):
        logprobs = lm.score([prompt + tokens]).logprobs[0][-6:]
        assert math.isclose(sum(logprobs), score, rel_tol=1e-4)


@pytest.mark.slow
def test_what_is_in_unused_slots_does_not_matter(lm, load, monkeypatch):
    want = lm.generate(ids(2, 12), **BEAMS, max_new_tokens=8)
    other = load()

    def full_of_nan(*args):
        return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), init_pool(*args))

    init_pool = engine.init_pool
    monkeypatch.setattr(engine, "init_pool", full_of_nan)
    same(other.generate(ids(2, 12), **BEAMS, max_new_tokens=8), want)


@pytest.mark.slow
def test_a_search_is_cancelled_as_a_whole(lm):
    running = lm.submit(ids(3, 10), **BEAMS, max_new_tokens=300)
    with pytest.raises(ValueError, match="num_beams must be 1 to iterate"):
        next(running)
    beside = lm.submit(ids(4, 10), **OPTIONS, max_new_tokens=20)
    assert len(beside.result().tokens[0]) == 20
    running.cancel()
    lm.engine.runner.join(timeout=60)
    lm.engine.pool.check([])
    result = lm.submit(ids(3, 10), **BEAMS, max_new_tokens=5).result()
    same(result, lm.generate(ids(3, 10), **BEAMS, max_new_tokens=5))


@pytest.mark.slow
def test_a_search_that_fails_fails_alone(lm):
    def damaged(tokens, lengths, scores):
        return jnp.where((tokens[:, :1] == 99) & (lengths[:, None] > 6), jnp.nan, scores)

    prompts = [[99, 4, 5], [7, 4, 5], [8, 4]]
    options = {**OPTIONS, "num_beams": [4, 4, 1], "max_new_tokens": 8, "logits_processors": damaged}
    failed, other, plain = sorted(lm.generate_iter(prompts, **options), key=lambda a: a.index)
    assert isinstance(failed.error, FloatingPointError)
    assert "prompt 0: logits are not finite at token 4" in str(failed.error)
    assert (
        other.tokens == lm.generate(prompts[1], **OPTIONS, num_beams=4, max_new_tokens=8).tokens[0]
    )
    assert len(plain.tokens) == 8
    lm.engine.pool.check([])


@pytest.mark.slow
def test_fewer_answers_than_asked_for_are_an_error(lm):
    only = [i for i in range(lm.config.vocab_size) if i not in (5, 6)]
    options = {**OPTIONS, "num_beams": 4, "max_new_tokens": 1, "suppress_tokens": only}
    with pytest.raises(
        ValueError, match=r"prompt 0: the options allow only 2 of the answers, num_return"
    ):
        lm.generate([3, 4], num_return_sequences=3, **options)
    assert sorted(lm.generate([3, 4], num_return_sequences=2, **options).tokens) == [[5], [6]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_return_sequences": 5},
            r"num_return_sequences must be at most num_beams \(4\), got 5",
        ),
        ({"stop_strings": "x"}, "stop_strings cannot be combined with num_beams 4"),
        ({"stopping_criteria": bool}, "stopping_criteria cannot be combined with num_beams 4"),
        ({"return_logprobs": 3}, "return_logprobs cannot be combined with num_beams 4"),
        ({"return_reruns": True}, "return_reruns cannot be combined with num_beams 4"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 with num_beams 4"),
        ({"num_beams": 9}, "num_beams 9 must be at most the 8 rows that run at once"),
        ({"num_beams": 65}, r"num_beams must be an integer in \[1, 64\], got 65"),
        ({"early_stopping": "always"}, "early_stopping must be one of False, True, 'never'"),
        ({"early_stopping": 1}, "early_stopping must be one of False, True, 'never'"),
        ({"length_penalty": math.nan}, "length_penalty must be a number"),
    ],
)
def test_what_cannot_be(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate([[1, 2]], **{"num_beams": 4, "do_sample": False} | options)


def test_more_beams_than_tokens():
    config = {"model_type": "llama", "vocab_size": 3, "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    model = fdjax.describe(fdjax.parse_config(config), dtype="float32")
    lm = fdjax.LM(model, random_params(model))
    with pytest.raises(ValueError, match="num_beams 4 must be at most the 3 tokens of the voc"):
        lm.generate([1], num_beams=4)


@pytest.mark.slow
def test_calls_without_beams_refuse_them(lm):
    with pytest.raises(ValueError, match="stream: num_beams must be 1"):
        lm.stream([1, 2], num_beams=2)
    config = fdjax.GenerationConfig(num_beams=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="num_beams must be 1 in a jitted function"):
        fdjax.generate(lm.model, lm.params, jnp.ones((1, 2), jnp.int32), config)
    with pytest.warns(UserWarning, match="length_penalty: no effect, because num_beams is 1"):
        lm.generate([1, 2], length_penalty=2.0, max_new_tokens=1, **OPTIONS)


@pytest.mark.slow
def test_beams_that_the_checkpoint_asks_for(lm):
    files = {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True}
    files |= {"num_return_sequences": 2, "eos_token_id": 2}
    defaults = fdjax.GenerationConfig.from_files(files, {}, "generation_config.json")
    other = fdjax.LM(lm.model, lm.params, lm.tokenizer, defaults=defaults, max_batch=8)
    other = of_one_shape(other)
    got = other.generate(ids(5, 6), max_new_tokens=8)
    want = lm.generate(
        ids(5, 6),
        max_new_tokens=8,
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.5,
        early_stopping=True,
        do_sample=False,
        eos_token_id=2,
    )
    same(got, want)
    assert other.stream(ids(5, 6), max_new_tokens=3).result.sequences_scores is None


@pytest.mark.slow
def test_beams_take_no_more_pages_than_the_formula_says(lm, monkeypatch):
    """Slots in use are at most those of the paper, and 127 per search for the end of the prompt."""
    found = []
    decode = runner.Session.decode

    def checked(self, *args):
        scheduler = lm.engine.runner._scheduler
        most = 0
        for _, task in scheduler.running:
            prompt = len(task.row.request.ids)
            new = max(0, task.tokens_after(0) - prompt)
            most += beam_slots(prompt, new, beams=task.width) + PAGE - 1
            prompt_pages, each = page_count(prompt), page_count(new)
            assert len(task.pages) == prompt_pages + task.width * each
            tables = [task.row.table(task.pages, beam) for beam in range(task.width)]
            assert all(table[:prompt_pages] == tables[0][:prompt_pages] for table in tables)
            own = [page for table in tables for page in table[prompt_pages:]]
            assert len(set(own)) == len(own) == task.width * each
        found.append((scheduler.pool.used * PAGE, most))
        return decode(self, *args)

    monkeypatch.setattr(runner.Session, "decode", checked)
    prompts = [ids(i, n) for i, n in enumerate((127, 129, 300))]
    lm.generate(prompts, **BEAMS, max_new_tokens=[140, 40, 9])
    assert len(found) > 4 and all(used <= most for used, most in found)
    assert max(used for used, _ in found) > 1024
    lm.engine.pool.check([])


@pytest.mark.slow
def test_searches_that_give_up_their_pages_have_the_same_answers(lm, load, monkeypatch):
    prompts = [ids(i, 60 + 40 * i) for i in range(5)]
    options = {**OPTIONS, "max_new_tokens": [130, 132, 132, 20, 10]}
    options |= {"num_beams": [2, 4, 3, 1, 4], "num_return_sequences": [2, 3, 1, 1, 1]}
    want = lm.generate(prompts, **options)
    # Twelve pages are left of as many as before, because programs depend on their number.
    small = load()
    small.engine._open_pool(lm.engine.pool.count)
    held = small.engine.pool.take(small.engine.pool.available - 12)
    preempted = []
    preempt = runner.Runner._preempt

    def counted(self, row):
        preempted.append(self._scheduler.rows[row].width)
        preempt(self, row)

    monkeypatch.setattr(runner.Runner, "_preempt", counted)
    same(small.generate(prompts, **options), want)
    assert max(preempted) > 1
    small.engine.pool.check([held])
    with monkeypatch.context() as patch:
        patch.setattr(small.engine, "_most_pages", lambda slots: 13)
        with pytest.raises(MemoryError, match="must fit into 12 pages"):
            small.generate(prompts[0], **BEAMS, max_new_tokens=300)
    again = small.generate(prompts[4], **OPTIONS, max_new_tokens=10, num_beams=4)
    assert again.tokens == want.tokens[-1:]
