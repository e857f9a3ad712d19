"""`LM.score`: log-probabilities as in transformers, windows over long texts, few logits at once."""

import dataclasses
import functools
import gc
import math
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.engine.memory import plan_memory
from fdjax.engine.state import init_cache
from fdjax.models import describe, parse_config
from fdjax.tools import score

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
FAST = "llama3_gqa_tied"
CASES = [
    pytest.param(case, marks=() if case == FAST else pytest.mark.slow)
    for case in ("llama2_mha", FAST, "llama_bias", "llama_d64_bf16", "llama_d128_bf16")
]
LOGITS_BAR = 1e-4
PROMPTS = range(5)


@functools.cache
def load(case=FAST, **options):
    options = {"dtype": "float32", "compilation_cache": False, "progress": False} | options
    return fdjax.load(str(FIXTURES / case), **options)


@functools.cache
def expected(case=FAST):
    with np.load(FIXTURES / case / "expected.npz") as arrays:
        return dict(arrays)


def texts(case=FAST):
    """Each prompt with the continuation that transformers chose."""
    e = expected(case)
    return [np.concatenate([e[f"prompt_{i}"], e[f"tokens_{i}"]]).tolist() for i in PROMPTS]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_transformers(case):
    e = expected(case)
    result = load(case).score(texts(case))
    assert result.tokens == texts(case)
    for i in PROMPTS:
        prompt, got = e[f"prompt_{i}"], np.array(result.logprobs[i])
        bar = 2 * LOGITS_BAR * np.abs(e[f"final_logits_{i}"]).max()
        # The continuation was chosen greedily.
        np.testing.assert_allclose(got[len(prompt) - 1 :], e[f"logprobs_{i}"], rtol=0, atol=bar)
        assert all(result.likeliest[i][len(prompt) - 1 :])
        if len(prompt) == len(e[f"logits_{i}"]):
            every = log_softmax(e[f"logits_{i}"])[:-1]
            chosen = every[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(got[: len(prompt) - 1], chosen, rtol=0, atol=bar)
            likeliest = every.argmax(-1) == prompt[1:]
            assert result.likeliest[i][: len(prompt) - 1] == likeliest.tolist()


@pytest.mark.slow
@pytest.mark.slow
def test_log_probabilities_near_0_are_not_rounded_like_logits():
    lm = load()
    params = {**lm.params, "norm": {"scale": 30 * lm.params["norm"]["scale"]}}
    (text,) = texts()[:1]
    every = log_softmax(np.asarray(fdjax.forward(lm.model, params, [text]))[0, :-1])
    want = every[np.arange(len(text) - 1), text[1:]]
    got = np.array(fdjax.LM(lm.model, params).score(text).logprobs[0])
    near = want > -1e-2
    assert near.sum() > 3
    np.testing.assert_allclose(got[near], want[near], rtol=1e-3, atol=1e-7)


def test_perplexity_is_the_exponential_of_the_mean():
    result = load().score(texts()[1:3])
    for logprobs, perplexity in zip(result.logprobs, result.perplexities, strict=True):
        assert perplexity == pytest.approx(math.exp(-np.mean(logprobs)))
    assert result.perplexity == pytest.approx(math.exp(-np.mean(np.concatenate(result.logprobs))))


@pytest.mark.slow
def test_a_batch_is_each_text_alone():
    together = load().score(texts())
    for batch_size in (1, np.int64(100)):
        result = load().score(texts(), batch_size=batch_size)
        assert (result.tokens, result.likeliest) == (together.tokens, together.likeliest)
        for got, want in zip(result.logprobs, together.logprobs, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_text_gets_the_tokenizers_special_tokens_and_the_first_is_not_scored():
    lm = load()
    result = lm.score("Hello")
    assert result.tokens == [lm.tokenizer.encode("Hello")]
    assert len(result.logprobs[0]) == len(result.tokens[0]) - 1
    with_ids = lm.score(np.array(result.tokens[0], np.int32))
    assert with_ids.logprobs == result.logprobs
    assert lm.score(["Hello"]).logprobs == result.logprobs


def test_nothing_to_score_has_no_perplexity():
    result = load().score([[5], [6, 7]])
    assert [len(x) for x in result.logprobs] == [0, 1]
    assert math.isnan(result.perplexities[0]) and result.perplexities[1] > 0
    assert load().score([]) == score.ScoreResult([], [], [])
    assert math.isnan(load().score([]).perplexity)


@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(63, marks=pytest.mark.slow),
        7,
        *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 32)),
    ],
)
@pytest.mark.slow
def test_a_long_text_is_seen_through_a_window(stride):
    lm, text = load(max_len=64), texts()[3]
    assert len(text) > 64
    want = [None] * len(text)
    start = 0
    while None in want[1:]:
        part = load().score([text[start : start + 65]]).logprobs[0]
        for i, logprob in enumerate(part, start + 1):
            want[i] = logprob if want[i] is None else want[i]
        start += stride
    result = lm.score([text], stride=stride)
    np.testing.assert_allclose(result.logprobs[0], want[1:], rtol=0, atol=1e-5)
    assert len(result.likeliest[0]) == len(text) - 1


@pytest.mark.slow
def test_a_text_may_fill_the_context_and_one_token_more():
    lm = load(max_len=64)
    text = texts()[4][:66]
    want = load().score([text]).logprobs[0]
    # The last token of a text is never an input, so it needs no slot.
    np.testing.assert_allclose(lm.score([text[:65]]).logprobs[0], want[:64], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="text 1 has 66 tokens, the context is 64"):
        lm.score([text[:64], text])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([[1], []], {}, "text 1 is empty"),
        ([[1], [320]], {}, r"text 1 has id 320, the vocabulary is 0\.\.319"),
        ([[-1, 2]], {}, "text 0 has id -1"),
        ([[1.5]], {}, "id 1.5"),
        (b"abc", {}, "texts must be text or token ids, got b'abc'"),
        (np.array(5), {}, r"texts must be text or token ids, got array\(5\)"),
        ([[True, 2]], {}, "id True"),
        ([[1, 2]], {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ([[1, 2]], {"batch_size": 1.5}, "batch_size must be a positive integer, got 1.5"),
        ([[1, 2]], {"batch_size": True}, "batch_size must be a positive integer, got True"),
        ([[1, 2]], {"stride": 0}, "stride must be"),
        ([[1, 2]], {"stride": 2.5}, "stride must be .* got 2.5"),
        ([[1, 2]], {"stride": 64}, "below the context of 64, got 64"),
    ],
)
def test_what_cannot_be_scored(given, options, message):
    with pytest.raises(ValueError, match=message):
        load(max_len=64).score(given, **options)


@pytest.mark.slow
def test_the_limits_of_the_model_hold(monkeypatch):
    made = []
    monkeypatch.setattr(
        score, "init_cache", lambda *given: made.append(given[1:3]) or init_cache(*given)
    )
    free, narrow = load().score(texts()), load(max_batch=2)
    limited = narrow.score(texts())
    rows, slots = zip(*made, strict=True)
    assert rows == (8, 2, 2, 1)
    for got, want in zip(limited.logprobs, free.logprobs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    longest = max(map(len, texts())) - 1
    one, four = (
        plan_memory(narrow.model, batch=b, max_len=longest, slots=slots[0]).total_bytes
        for b in (1, 4)
    )
    monkeypatch.setattr(narrow.engine, "max_batch", None)
    monkeypatch.setattr(narrow.engine, "memory_bytes", four)
    narrow.score(texts())
    assert [b for b, _ in made[4:]] == [4, 1]
    monkeypatch.setattr(narrow.engine, "memory_bytes", one - 1)
    with pytest.raises(MemoryError, match="score: must fit into"):
        narrow.score(texts())


@pytest.mark.slow
def test_what_an_answer_leaves_is_dropped_before_another_cache_is_made(monkeypatch):
    lm = load.__wrapped__()
    lm.generate([1, 2, 3], max_new_tokens=2)
    reusable = weakref.ref(lm.engine.reusable.state.kv.k)
    left = []
    monkeypatch.setattr(
        score, "init_cache", lambda *given: left.append(reusable()) or init_cache(*given)
    )
    with pytest.raises(ValueError, match="text 0 is empty"):
        lm.score([[]])
    assert reusable() is not None
    lm.score([[1, 2, 3]])
    assert left == [None]
    assert len(lm.generate([1, 2, 3], max_new_tokens=2, eos_token_id=None).tokens[0]) == 2


def test_programs_go_with_the_model():
    lm = load.__wrapped__()
    lm = fdjax.LM(dataclasses.replace(lm.model), lm.params)  # a new model without programs
    lm.score([[1, 2, 3]])
    model, program = weakref.ref(lm), weakref.ref(lm.engine.programs["score", lm.engine.place])
    del lm
    assert model() is None  # freed with its weights, at once
    gc.collect()
    assert program() is None


def test_weights_that_are_not_finite_are_told():
    lm = load()
    params = {**lm.params, "embed": lm.params["embed"].at[5].set(jnp.nan)}
    damaged = fdjax.LM(lm.model, params, lm.tokenizer)
    with pytest.raises(FloatingPointError, match="text 0: logits are not finite"):
        damaged.score([[1, 2, 3], [4, 5, 6]])


def test_logits_exist_for_some_rows_at_a_time():
    vocab, batch, chunk = 50_021, 4, 2048
    config = parse_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": vocab,
            "torch_dtype": "float32",
        }
    )
    model = describe(config)
    ids = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(lambda: init_cache(model, batch, chunk))
    chunk_scores = jax.jit(score._score_chunk, static_argnums=0)
    lowered = chunk_scores.lower(model, model.abstract_params, cache, ids, ids, row, row, row)
    shapes = {m for m in re.findall(r"tensor<((?:\d+x)+)f32>", lowered.as_text())}
    sizes = [math.prod(map(int, shape.split("x")[:-1])) for shape in shapes if f"{vocab}x" in shape]
    assert 1 < max(sizes) <= 512 * vocab < batch * chunk * vocab
