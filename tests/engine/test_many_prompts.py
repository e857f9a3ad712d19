"""Any number of prompts: each gets the answer that it gets alone."""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.engine import runner
from fdjax.engine.sequence import Request, RequestState
from fdjax.pallas_kernels.plan import Plan
from fdjax.text.tokenizer import MissingTokenizerError
from fdjax.tools import calibrate, score

pytestmark = pytest.mark.usefixtures("quick_compiles")

OPTIONS = {"eos_token_id": None, "do_sample": False, "return_logprobs": True}
NEW_3 = OPTIONS | {"max_new_tokens": 3}


@pytest.fixture(scope="module")
def growing(two_layers):
    """Load with states of 1 to 8 rows, each as long as its rows need."""
    return functools.partial(fdjax.load, two_layers, dtype="float32", max_batch=8)


@pytest.fixture(scope="module")
def load(growing):
    """Load with states of one shape, so that few programs are compiled."""

    def load(**options):
        lm = growing(**options)
        shape_for = lm.engine.shape_for
        lm.engine.shape_for = lambda rows: dataclasses.replace(shape_for(rows), rows=8, slots=640)
        return lm

    return load


@pytest.fixture(scope="module")
def lm(load):
    return load()


def prompts(count):
    """Short and long prompts, some of them of several chunks."""
    return [
        [i % 500 + 3] * (i % 37 + 1) if i % 7 else [i % 90 + 5] * (150 + i) for i in range(count)
    ]


def same(result, i, alone):
    assert result.tokens[i] == alone.tokens[0]
    assert result.logprobs[i] == alone.logprobs[0]


def every_answer_is_that_of_its_prompt_alone(lm, count):
    ids, new = prompts(count), [1 + i % 9 for i in range(count)]
    many = lm.generate(ids, max_new_tokens=new, **OPTIONS)
    assert lm.engine.reusable.state.batch < len(ids)  # some waited for a row
    for i in range(0, count, 7):
        same(many, i, lm.generate(ids[i], max_new_tokens=new[i], **OPTIONS))


@pytest.mark.slow
def test_every_answer_is_bit_by_bit_that_of_its_prompt_alone(growing):
    every_answer_is_that_of_its_prompt_alone(growing(), 20)


@pytest.mark.soak
@pytest.mark.usefixtures("full_compiles")
def test_every_answer_of_the_largest_batch_is_that_of_its_prompt_alone(two_layers):
    every_answer_is_that_of_its_prompt_alone(fdjax.load(two_layers, dtype="float32"), 40)


@pytest.mark.slow
def test_samples_and_processors_are_those_of_the_prompt_alone(lm):
    ids = prompts(20)
    # The options of other tests here, so that they share programs.
    options = {"max_new_tokens": 12, "eos_token_id": None, "return_logprobs": True}
    each = {"temperature": [0.5 + i % 3 for i in range(20)], "seed": list(range(20))}
    each |= {"repetition_penalty": [1.0 + i % 2 for i in range(20)]}
    many = lm.generate(ids, **options, **each)
    for i in range(0, 20, 5):
        alone = lm.generate(ids[i], **options, **{name: values[i] for name, values in each.items()})
        assert many.tokens[i] == alone.tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, pytest.param("int8", marks=pytest.mark.soak)])
def test_samples_share_what_is_computed_for_one(load, kv_dtype):
    """Their last page is copied. Penalties see the tokens of the whole prompt in each row."""
    lm = load(kv_dtype=kv_dtype)
    ids = [[i % 90 + 3 for i in range(200)], [7] * 256, [5, 6, 7]]
    options = {"eos_token_id": None, "return_logprobs": True, "repetition_penalty": 1.3}
    options |= {"max_new_tokens": 5, "temperature": 5.0, "seed": [1, 2, 3]}
    several = lm.generate(ids, num_return_sequences=3, **options)
    assert several.stats.cached_tokens == 2 * (128 + 128)
    apart = load(kv_dtype=kv_dtype, prefix_cache=False)
    want = apart.generate(ids, num_return_sequences=3, **options)
    assert several.tokens == want.tokens and len(set(map(tuple, several.tokens))) == 9
    for got, expected in zip(several.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_first_tokens_of_a_call_have_the_options_of_their_prompts(lm):
    ids = [[i + 5] * (20 + i) for i in range(3)]
    (best,), (first,), (last,) = lm.generate(ids, max_new_tokens=1, **OPTIONS).tokens
    options = OPTIONS | {"suppress_tokens": [[], [first], []]}
    tokens = lm.generate(ids, max_new_tokens=1, **options).tokens
    assert [tokens[0], tokens[2]] == [[best], [last]] and tokens[1] != [first]


@pytest.fixture
def reshaped(monkeypatch):
    """(rows that were kept, number of rows, slots) of each change of a state's shape."""
    found, real = [], runner.Session.reshape

    def noted(self, rows, shape):
        found.append((list(rows), shape.rows, shape.slots))
        real(self, rows, shape)

    monkeypatch.setattr(runner.Session, "reshape", noted)
    return found


@pytest.mark.slow
def test_few_that_are_left_go_on_in_fewer_rows(lm, monkeypatch, reshaped):
    """Penalties see the tokens of the moved rows, and samples their steps."""
    monkeypatch.setattr(runner, "_FEWER_ROWS", (2,))
    monkeypatch.setattr(runner, "_STEPS_OF_FEWER_ROWS", 8)
    ids, new = prompts(8), [5 + 85 * (i in (2, 7)) for i in range(8)]
    options = {"eos_token_id": None, "return_logprobs": True, "repetition_penalty": 1.5}
    options |= {"max_new_tokens": new, "temperature": 1.0, "seed": 3}
    fewer = lm.generate(ids, **options)
    assert [(rows, count) for rows, count, _ in reshaped] == [([2, 7], 2)]
    monkeypatch.setattr(runner, "_FEWER_ROWS", ())
    many = lm.generate(ids, **options)
    assert len(reshaped) == 1
    assert fewer.tokens == many.tokens and fewer.logprobs == many.logprobs


@pytest.mark.slow
def test_what_runs_goes_on_in_a_larger_state(growing, reshaped):
    """Nothing of it is computed again, and its penalties know all its tokens."""
    lm = growing()
    config = fdjax.GenerationConfig(
        max_new_tokens=40, eos_token_ids=(), return_logprobs=0, repetition_penalty=1.5
    ).filled()
    request = Request(np.array([5, 6, 7], np.int32), config)
    first, alone = (RequestState(request, lm.tokenizer) for _ in range(2))
    chunks = lm.engine.runner.run([first], 4)
    next(chunks), next(chunks)
    others = lm.generate([[9] * 400, [8] * 3, [7] * 5], max_new_tokens=4, **OPTIONS)
    assert reshaped == [([0], 4, reshaped[0][2])] and reshaped[0][2] > 400
    assert not first.ended
    for _ in chunks:
        pass
    assert first.cached_tokens == 0
    for _ in growing().engine.runner.run([alone], 4):
        pass
    assert first.tokens == alone.tokens and len(alone.tokens) == 40
    np.testing.assert_allclose(first.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
    assert others.tokens[2] == lm.generate([7] * 5, max_new_tokens=4, **OPTIONS).tokens[0]


@pytest.fixture(scope="module")
def uncached(load):
    return load(prefix_cache=False)


def close(got, want):
    assert got.tokens == want.tokens
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_beginning_is_computed_once(lm, uncached):
    beginning = [i % 400 + 3 for i in range(300)]
    lm.generate([*beginning, 7], max_new_tokens=2, **OPTIONS)
    ids = [[*beginning, 9, i] for i in range(4)] + [[5, 6]]
    got = lm.generate(ids, max_new_tokens=6, **OPTIONS)
    assert got.stats.cached_tokens == 4 * 256
    close(got, uncached.generate(ids, max_new_tokens=6, **OPTIONS))
    assert not uncached.generate(ids, max_new_tokens=6, **OPTIONS).stats.cached_tokens


@pytest.mark.slow
def test_rows_read_a_shared_beginning_together(load, uncached, monkeypatch):
    """Rows end at different times, and one shares nothing."""
    lm = load(plan=Plan())
    tiles = []
    find = lm.engine.shared_pages
    monkeypatch.setattr(
        lm.engine, "shared_pages", lambda pages: tiles.append(find(pages)) or tiles[-1]
    )
    beginning = [i % 400 + 3 for i in range(300)]
    ids, new = [[*beginning, 9, i] for i in range(6)] + [[5, 6]], [9, 2, 30, 5, 20, 7, 25]
    lm.generate([*beginning, 7], max_new_tokens=1, **OPTIONS)
    assert tiles == [None]
    got = lm.generate(ids, max_new_tokens=new, **OPTIONS)
    assert max(shared.counts.sum() for shared in tiles if shared) == 2
    close(got, uncached.generate(ids, max_new_tokens=new, **OPTIONS))


@pytest.mark.slow
def test_options_see_the_tokens_of_a_beginning_in_the_cache(lm, uncached):
    """Penalties and n-grams count the whole prompt."""
    ids = [i % 40 + 3 for i in range(290)]
    options = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "max_new_tokens": 12}
    lm.generate(ids, max_new_tokens=1, **OPTIONS)
    got = lm.generate(ids, **options, **OPTIONS)
    assert got.stats.cached_tokens == 256
    close(got, uncached.generate(ids, **options, **OPTIONS))
    plain = uncached.generate(ids, max_new_tokens=12, **OPTIONS)
    assert plain.tokens != got.tokens


def repeat_the_first_token(ids, lengths, scores):
    return jax.nn.one_hot(ids[:, 0], scores.shape[-1])


@pytest.mark.slow
def test_options_see_a_beginning_while_others_run(load, monkeypatch):
    """Decode steps of other rows come between a row's first tokens and the rest of its prompt."""
    lm = load()
    monkeypatch.setattr(runner, "_PROMPT_TOKENS_OF_STREAMS", 128)

    options = {"logits_processors": (repeat_the_first_token,), "eos_token_id": None}
    ids = [77, *range(3, 290)]
    lm.generate(ids, max_new_tokens=1, **options)
    with contextlib.closing(lm.stream([5, 6], max_new_tokens=400, **options)) as stream:
        next(stream)
        got = lm.generate([*([411 + i] * 300 for i in range(2)), ids], max_new_tokens=9, **options)
    assert got.stats.cached_tokens == 256
    assert got.tokens == [[411] * 9, [412] * 9, [77] * 9]


@pytest.mark.slow
def test_a_row_restarts_before_it_gets_pages_of_a_beginning(load, uncached, monkeypatch):
    """On the device, a cancelled request goes on until then, and would write to these pages."""
    lm = load()
    ids = [*range(3, 290), 9]
    lm.generate(ids[:-1], max_new_tokens=1, **OPTIONS)
    with contextlib.closing(lm.stream([5, 6], max_new_tokens=400, **OPTIONS)) as stream:
        next(stream)
        with contextlib.closing(lm.stream([7, 8], max_new_tokens=400, **OPTIONS)) as cancelled:
            next(cancelled)
        # Decode steps come before the rest of the prompt.
        limits, usual = iter([0, 0]), runner.Runner._most_prompt_tokens
        monkeypatch.setattr(
            runner.Runner,
            "_most_prompt_tokens",
            lambda self, starts: next(limits, usual(self, starts)),
        )
        got = lm.generate(ids, max_new_tokens=6, **OPTIONS)
    assert got.stats.cached_tokens == 256 and next(limits, None) is None
    want = uncached.generate(ids, max_new_tokens=6, **OPTIONS)
    close(got, want)
    close(lm.generate(ids, max_new_tokens=6, **OPTIONS), want)


@pytest.mark.slow
def test_options_see_a_beginning_in_a_row_without_work_so_far(load):
    """Three rows of four run when a prompt with a cached beginning takes the last one."""
    lm = load()

    options = {"logits_processors": (repeat_the_first_token,), "eos_token_id": None}
    ids = [77, *range(3, 290)]
    lm.generate(ids, max_new_tokens=1, **options)
    others = [lm.submit([i] * 300, max_new_tokens=150, **options) for i in (5, 6, 7)]
    for other in others:
        next(other)
    got = lm.submit(ids, max_new_tokens=9, **options).result()
    for other in others:
        other.cancel()
    assert got.stats.cached_tokens == 256
    assert got.tokens == [[77] * 9]


@pytest.mark.slow
def test_samples_of_a_prompt_share_its_pages(lm, uncached):
    ids = [i % 300 + 5 for i in range(260)]
    options = {"num_return_sequences": 4, "temperature": 1.5, "seed": 3, "max_new_tokens": 8}
    options |= {"eos_token_id": None}
    got = lm.generate(ids, **options)
    assert got.stats.cached_tokens == 3 * 256
    assert got.tokens == uncached.generate(ids, **options).tokens


@pytest.mark.slow
def test_a_chat_goes_on_from_its_pages(lm, uncached):
    first = [i % 250 + 7 for i in range(200)]
    answer = lm.generate(first, max_new_tokens=80, **OPTIONS).tokens[0]
    second = [*first, *answer, 4, 5, 6]
    got = lm.generate(second, max_new_tokens=5, **OPTIONS)
    assert got.stats.cached_tokens == 256
    close(got, uncached.generate(second, max_new_tokens=5, **OPTIONS))


@pytest.mark.slow
def test_other_weights_share_nothing(lm, load):
    ids = [9] * 300
    other = load()
    other.generate(ids, max_new_tokens=2, **OPTIONS)
    other.params = jax.tree.map(lambda a: jnp.flip(a, -1) if a.ndim > 1 else a, other.params)
    assert not other.generate(ids, max_new_tokens=2, **OPTIONS).stats.cached_tokens


@pytest.mark.slow
def test_release_waits_for_steps_of_what_was_cancelled(lm):
    """A thread in the background may be in the middle of steps."""
    for _ in range(8):
        request = lm.submit([3, 4, 5], max_new_tokens=60, **OPTIONS)
        next(request)
        request.cancel()
        lm.release()
    others = [lm.submit([3, 4, 5], max_new_tokens=60, **OPTIONS) for _ in range(2)]
    others[0].cancel()
    with pytest.raises(RuntimeError, match="release: requests are running"):
        lm.release()
    assert len(others[1].result().tokens[0]) == 60


@pytest.mark.slow
def test_release_frees_the_cache(lm):
    ids = [3, 4, 5] * 60
    want = lm.generate(ids, max_new_tokens=3, **OPTIONS)
    stream = lm.stream(ids, max_new_tokens=60, **OPTIONS)
    next(stream)
    with pytest.raises(RuntimeError, match="release: requests are running"):
        lm.release()
    stream.close()
    lm.release()
    assert lm.engine.pool is lm.engine.reusable is None
    again = lm.generate(ids, max_new_tokens=3, **OPTIONS)
    assert not again.stats.cached_tokens
    close(again, want)


def fails_at_the_third(tokens):
    if len(tokens) == 3:
        raise KeyError("mine")
    return False


@pytest.mark.parametrize(
    "events",
    [pytest.param(150, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)],
)
def test_any_order_of_events(growing, events):
    """Submit, advance, cancel and fail, in a pool too small for all at once."""
    lm, uncached = growing(), growing(prefix_cache=False)
    rng = np.random.default_rng(0)
    beginning = [i % 333 + 9 for i in range(400)]
    choices = [[*beginning[: 90 * (i % 5)], *([i + 5] * (17 * (i % 4) + 1))] for i in range(20)]
    options = {**OPTIONS, "repetition_penalty": 1.2}
    alone = [uncached.generate(ids, max_new_tokens=90, **options) for ids in choices]
    # Thirteen pages are left of as many as before, because programs depend on their number.
    lm.engine._open_pool(uncached.engine.pool.count)
    held = lm.engine.pool.take(lm.engine.pool.available - 13)
    streams, finished, failed = [], 0, 0
    for _ in range(events):
        event = rng.choice(["submit", "advance", "cancel", "fail"], p=[0.1, 0.8, 0.06, 0.04])
        if event in ("submit", "fail"):
            i, new = int(rng.integers(len(choices))), int(rng.choice([1, 9, 90]))
            criteria = [fails_at_the_third] if event == "fail" else None
            stream = lm.stream(
                choices[i], max_new_tokens=new, stopping_criteria=criteria, **options
            )
            streams.append((stream, i, new))
            continue
        if not streams:
            continue
        at = int(rng.integers(len(streams)))
        stream, i, new = streams[at]
        if event == "cancel":
            stream.close()
        else:
            try:
                next(stream)
                continue
            except StopIteration:
                assert len(stream.result.tokens[0]) == new
                finished += 1
            except KeyError:
                failed += 1
        del streams[at]
        got = stream.result
        n = len(got.tokens[0])
        assert got.tokens[0] == alone[i].tokens[0][:n]
        np.testing.assert_allclose(got.logprobs[0], alone[i].logprobs[0][:n], rtol=1e-5, atol=1e-5)
    for stream, *_ in streams:
        stream.close()
    assert finished > events // 50 and failed > events // 300
    lm.engine.pool.check([held])


@pytest.mark.slow
def test_rows_in_one_piece_give_the_same(lm, load):
    whole = load()
    whole.engine.paged = False
    ids = prompts(12)
    got, want = (
        model.generate(ids, max_new_tokens=[1 + i % 9 for i in range(12)], **OPTIONS)
        for model in (whole, lm)
    )
    assert whole.engine.pool is None
    close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({"do_sample": False}, marks=pytest.mark.soak), {"temperature": 2.0, "seed": 5}],
    ids=["greedy", "sampled"],
)
def test_what_is_computed_anew_goes_on_as_before(growing, options):
    """Many new prompts need a larger state. The running row then restarts in it."""
    lm = growing()
    options = {"max_new_tokens": 24, "eos_token_id": None, "return_logprobs": True} | options
    alone = lm.generate([11, 12, 13], **options)
    stream = lm.stream([11, 12, 13], **options)
    next(stream)
    assert 0 < len(stream.result.tokens[0]) < 24
    others = lm.generate(prompts(6), max_new_tokens=2, **OPTIONS)
    collections.deque(stream, maxlen=0)
    assert lm.engine.reusable.state.batch == 8  # the stream began in a state of one row
    assert stream.result.tokens == alone.tokens
    got, want = stream.result.logprobs[0], alone.logprobs[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert others.tokens[2] == lm.generate(prompts(6)[2], max_new_tokens=2, **OPTIONS).tokens[0]


@pytest.mark.slow
def test_a_cache_too_small_for_all_finishes_all(lm, monkeypatch):
    ids = prompts(11)
    many = lm.generate(ids, max_new_tokens=4, **OPTIONS)
    shape_for = lm.engine.shape_for
    monkeypatch.setattr(
        lm.engine,
        "shape_for",
        lambda rows: dataclasses.replace(s := shape_for(rows), rows=min(4, s.rows), limited=True),
    )
    few = lm.generate(ids, max_new_tokens=4, **OPTIONS)
    assert few.tokens == many.tokens and few.logprobs == many.logprobs


@pytest.mark.slow
def test_a_damaged_row_changes_no_other(lm):
    bad = 300

    def damage(ids, lengths, scores):
        return jnp.where((ids == bad).any(axis=1, keepdims=True), jnp.nan, scores)

    ids = [[i + 5, i + 6, i + 7] for i in range(6)]
    rows = [[*one, bad] if i == 4 else one for i, one in enumerate(ids)]
    config = fdjax.GenerationConfig(
        max_new_tokens=6, eos_token_ids=(), return_logprobs=0, logits_processors=(damage,)
    ).filled()
    requests = [Request(np.array(one, np.int32), config, i) for i, one in enumerate(rows)]
    rows = [RequestState(request, lm.tokenizer) for request in requests]
    for _ in lm.engine.runner.run(rows, 4):
        pass
    assert isinstance(rows[4].error, FloatingPointError) and "prompt 4" in str(rows[4].error)
    lm.engine.pool.check([])
    alone = lm.generate(ids, max_new_tokens=6, **OPTIONS)
    for i in (0, 1, 2, 3, 5):
        assert rows[i].tokens == alone.tokens[i]


@pytest.mark.slow
def test_threads_get_the_answers_of_one_by_one(lm):
    ids = prompts(12)
    alone = [lm.generate(one, max_new_tokens=5, **OPTIONS).tokens[0] for one in ids]
    found = {}

    def work(t):
        for i in range(t, 12, 4):
            found[i] = lm.generate(ids[i], max_new_tokens=5, **OPTIONS).tokens[0]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[i] for i in range(12)] == alone


@pytest.mark.slow
def test_the_state_is_given_back(lm):
    lm.generate(prompts(5), max_new_tokens=3, **OPTIONS)
    before = len(jax.live_arrays())
    for _ in range(3):
        lm.generate(prompts(5), max_new_tokens=3, **OPTIONS)
    assert len(jax.live_arrays()) <= before + 2


@pytest.mark.slow
def test_answers_come_as_they_are_finished(lm):
    ids = prompts(12)
    new = [60 if i == 0 else 2 for i in range(12)]
    whole = lm.generate(ids, max_new_tokens=new, **OPTIONS)
    answers = list(lm.generate_iter(iter(ids), max_new_tokens=new, **OPTIONS))
    assert answers[-1].index == 0 and sorted(a.index for a in answers) == list(range(12))
    for answer in answers:
        assert answer.tokens == whole.tokens[answer.index]
        assert answer.text == whole.texts[answer.index]
        assert answer.logprobs == whole.logprobs[answer.index]
        assert (answer.finish_reason, answer.error) == ("length", None)
    assert list(lm.generate_iter([])) == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupt_keeps_what_is_complete(lm, monkeypatch, after):
    ids = prompts(12)
    new = [60 if i == 1 else 1 + i for i in range(12)]
    whole = lm.generate(ids, max_new_tokens=new, **OPTIONS)
    calls = itertools.count()
    real = runner.Session.decode

    def decode(*args):
        if next(calls) == after:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner.Session, "decode", decode)
    with pytest.raises(KeyboardInterrupt) as stop:
        lm.generate(ids, max_new_tokens=new, **OPTIONS)
    assert isinstance(stop.value, fdjax.Interrupted)
    answers = stop.value.answers
    copied = pickle.loads(pickle.dumps(stop.value))
    assert (str(copied), len(copied.answers)) == (str(stop.value), len(answers))
    assert len(answers) < 12 and bool(answers) == (after > 0)
    for answer in answers:
        assert answer.tokens == whole.tokens[answer.index]
        assert (answer.finish_reason, answer.error) == ("length", None)
    assert [answer.index for answer in answers] == sorted(answer.index for answer in answers)
    monkeypatch.undo()
    lm.engine.pool.check([])
    assert lm.generate(ids[0], max_new_tokens=1, **OPTIONS).tokens == whole.tokens[:1]


@pytest.mark.slow
def test_a_prompt_that_fails_has_an_error_and_the_others_their_answers(lm):
    def refuse(tokens):
        raise KeyError("mine")

    criteria = [(refuse,) if i == 2 else () for i in range(5)]
    answers = lm.generate_iter(
        prompts(5), max_new_tokens=3, stopping_criteria=criteria, eos_token_id=None
    )
    errors = {answer.index: answer.error for answer in answers}
    assert isinstance(errors.pop(2), KeyError)
    assert set(errors.values()) == {None}
    answers = list(lm.generate_iter([[], "Hello", [10**6], [5] * 600], max_new_tokens=2))
    assert [a.index for a in answers if a.error is None] == [1]
    assert {a.index: type(a.error) for a in answers if a.error} == dict.fromkeys(
        [0, 2, 3], ValueError
    )
    with pytest.raises(ValueError, match="temperature"):
        lm.generate_iter(["Hello"], temperature=-1)


@pytest.mark.slow
def test_a_score_of_another_thread_may_drop_the_state_that_a_call_takes(lm, load, monkeypatch):
    other = load()
    open_pool = other.engine._open_pool

    def open_and_drop(pages):
        state = open_pool(pages)
        other.engine.reusable = None  # as `score` does
        return state

    monkeypatch.setattr(other.engine, "_open_pool", open_and_drop)
    assert other.generate([5, 6], **NEW_3).tokens == lm.generate([5, 6], **NEW_3).tokens


@pytest.mark.slow
def test_what_is_submitted(lm):
    text = "Once upon a time"
    expected = lm.generate(text, max_new_tokens=20, do_sample=False)
    requests = [lm.submit(text, max_new_tokens=20, do_sample=False) for _ in range(3)]
    assert "".join(requests[0]) == expected.text
    for request, timeout in zip(requests, (120, float("inf"), 10**400), strict=True):
        result = request.result(timeout)
        assert request.done and result.tokens == expected.tokens
        assert result.text == expected.text and result.stats.decode_tokens == 20
    long = lm.submit(text, max_new_tokens=400, do_sample=False, eos_token_id=None)
    for timeout in (0, -(10**400)):
        with pytest.raises(TimeoutError):
            long.result(timeout)
    for timeout in ("1", float("nan"), True):
        with pytest.raises(ValueError, match=f"must be a number of seconds, got {timeout!r}"):
            long.result(timeout=timeout)
    next(long)
    long.cancel()
    assert long.done and 0 < len(long.result().tokens[0]) < 400
    with pytest.raises(ValueError, match="takes one prompt"):
        lm.submit([text, text])


@pytest.mark.slow
def test_the_text_of_a_submitted_request_needs_a_tokenizer(lm):
    request = fdjax.LM(lm.model, lm.params).submit([5, 6], max_new_tokens=2)
    with pytest.raises(MissingTokenizerError, match="no tokenizer"):
        next(request)
    assert len(request.result(timeout=120).tokens[0]) == 2


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError, KeyError), (KeyboardInterrupt, RuntimeError)]
)
def test_the_error_of_a_submitted_request_is_raised_where_it_is_waited_for(lm, error, raised):
    def refuse(tokens):
        raise error("mine")

    request = lm.submit([5, 6], max_new_tokens=5, stopping_criteria=(refuse,))
    # In the background thread, a KeyboardInterrupt is no Ctrl-C.
    lm.engine.runner.join(timeout=60)
    assert request.done
    with pytest.raises(raised):
        request.result(timeout=120)
    with pytest.raises(raised):
        collections.deque(request, maxlen=0)
    assert len(lm.generate([5, 6], max_new_tokens=2).tokens[0]) == 2


def bytes_of_arrays():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_a_kept_error_keeps_no_cache(lm, monkeypatch):
    def failing(ids, lengths, scores):
        raise KeyError("mine")

    def interrupted(*args):
        raise KeyboardInterrupt

    lm.release()
    before, kept = bytes_of_arrays(), []
    with pytest.raises(KeyError) as error:
        lm.generate([5, 6], max_new_tokens=3, logits_processors=[failing])
    kept.append(error.value)
    monkeypatch.setattr(runner.Session, "decode", interrupted)
    with pytest.raises(fdjax.Interrupted) as stop:
        lm.generate([5, 6], **NEW_3)
    kept.append(stop.value)
    for module, name, broken, call in (
        (score, "_program", lambda engine: interrupted, lambda: lm.score([5, 6])),
        (
            calibrate,
            "_observe_chunk",
            interrupted,
            lambda: calibrate.gather(lm.engine, lm.tokenizer, ["Once"]),
        ),
    ):
        monkeypatch.setattr(module, name, broken)
        with pytest.raises(KeyboardInterrupt) as stop:
            call()
        kept.append(stop.value)
    monkeypatch.undo()
    lm.release()
    assert bytes_of_arrays() < before + 2**16
    same(lm.generate([5, 6], **NEW_3), 0, lm.generate([5, 6], **NEW_3))


@pytest.mark.slow
def test_a_result_does_not_change(lm):
    stream = lm.stream("Once", max_new_tokens=30, **OPTIONS)
    next(stream)
    early = stream.result
    count = len(early.tokens[0])
    list(stream)
    assert len(early.tokens[0]) == len(early.logprobs[0]) == count < 30
    assert early.texts == [lm.tokenizer.decode(early.tokens[0])]
    assert repr(stream) == "TextStream(30 tokens)"


@pytest.mark.slow
def test_a_criterion_reads_its_own_request(lm):
    found = []

    def reading(tokens):
        if len(tokens) == 4:
            found.append(next(request))
        return False

    start = threading.Event()
    criteria = [lambda tokens: start.wait(10) and False, reading]
    request = lm.submit("Once", max_new_tokens=9, stopping_criteria=criteria, **OPTIONS)
    start.set()
    result = request.result(60)
    assert len(result.tokens[0]) == 9 and result.text.startswith(found[0])
    assert repr(request) == "RunningRequest(ended, 9 tokens)"


@pytest.mark.slow
def test_a_call_inside_a_trace_leaves_others_alone(lm):
    whole = lm.generate("Once", max_new_tokens=30, **OPTIONS)
    stream = lm.stream("Once", max_new_tokens=30, **OPTIONS)
    text = next(stream)
    for call in (lambda: lm.generate([5, 6], max_new_tokens=3), lambda: lm.score([5, 6])):
        with pytest.raises(RuntimeError, match="inside a JAX trace"):
            jax.jit(lambda x, call=call: call() and x)(1.0)
    assert text + "".join(stream) == whole.text
    assert stream.result.logprobs == whole.logprobs


def test_an_error_does_not_grow(lm):
    def failing(tokens):
        raise KeyError("mine")

    request, depths = lm.submit([5, 6], max_new_tokens=3, stopping_criteria=[failing]), []
    for _ in range(3):
        with pytest.raises(KeyError) as error:
            request.result(60)
        depths.append(len(traceback.extract_tb(error.value.__traceback__)))
    assert depths[0] == depths[1] == depths[2]
    assert repr(request) == "RunningRequest(failed, 1 tokens)"


def test_options_are_checked_without_prompts(lm):
    assert list(lm.generate_iter([])) == []
    with pytest.raises(TypeError, match="bogus"):
        lm.generate_iter([], bogus=1)
