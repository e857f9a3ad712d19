"""Edits and truncation of logits: those of transformers, vLLM's formulas, row by row."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax import GenerationConfig
from fdjax.pallas_kernels import truncation as ops
from fdjax.sampling.options import per_row
from fdjax.sampling.processors import MAX_NGRAM, edit_logits
from fdjax.sampling.sampler import (
    ALL_FORBIDDEN,
    MAX_TOP_LOGPROBS,
    NOT_FINITE,
    Processors,
    _sample,
    next_tokens,
)

ALL = Processors(edit=True, sample=True, truncate=True, logprobs=True)
V = 61

pytestmark = pytest.mark.usefixtures("quick_compiles")

edit = jax.jit(edit_logits)


@jax.jit
def truncate(scores, sampling):
    rules = sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p
    return ops.truncate(scores, *rules)


choose = jax.jit(next_tokens, static_argnums=5)


@functools.cache
def expected():
    with np.load(Path(__file__).parents[1] / "fixtures" / "hf" / "processors.npz") as arrays:
        return dict(arrays)


def listed(table):
    return tuple(int(i) for i in table if i >= 0)


def config(i, **changes) -> GenerationConfig:
    """The options of case `i`."""
    e = expected()
    names = ("top_k", "no_repeat_ngram_size", "min_new_tokens", "temperature", "top_p", "min_p")
    names += ("typical_p", "repetition_penalty")
    values = {name: e[name][i].item() for name in names}
    return GenerationConfig(
        **values
        | {
            "do_sample": True,
            "bad_words_ids": tuple(filter(None, map(listed, e["bad_words"][i]))),
            "suppress_tokens": listed(e["suppress"][i]),
            "begin_suppress_tokens": listed(e["begin_suppress"][i]),
            "eos_token_ids": listed(e["eos"][i]),
        }
        | changes
    )


@functools.cache
def requests():
    return per_row([config(i) for i in range(len(expected()["logits"]))], len(expected()["logits"]))


def edited(index=slice(None)):
    e = expected()
    sampling = requests().rows(index)
    return np.asarray(
        edit(e["logits"][index], sampling, e["ids"][index], e["lengths"][index], e["steps"][index])
    )


def test_edits_are_those_of_transformers():
    e = expected()
    got = edited()
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(e["edited"]))
    np.testing.assert_allclose(got, e["edited"], rtol=1e-6)
    # The cases are hard enough.
    changed = (got != e["logits"]).any(axis=1)
    assert changed.mean() > 0.7


@pytest.mark.slow
def test_what_is_drawn_from_is_that_of_transformers():
    e = expected()
    temperature = e["temperature"][:, None]
    scores = (e["edited"] - e["edited"].max(axis=1, keepdims=True)) / temperature
    got = np.asarray(truncate(scores, requests()))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(e["scores"]))
    # Up to a constant, which does not change a distribution.
    kept = np.isfinite(got)
    want = e["scores"] - e["scores"].max(axis=1, keepdims=True)
    got = got - got.max(axis=1, keepdims=True)
    np.testing.assert_allclose(got[kept], want[kept], rtol=1e-5, atol=1e-5)
    assert 0.2 < kept.mean() < 0.8


@pytest.mark.parametrize("rows", [[0], [3, 1, 2], list(range(100, 140))])
def test_a_row_is_edited_the_same_alone_and_in_any_batch(rows):
    np.testing.assert_array_equal(edited(rows), edited()[rows])


def test_a_row_that_asks_for_nothing_keeps_its_bits():
    e = expected()
    rows = 20
    configs = [config(i) if i % 2 else GenerationConfig() for i in range(rows)]
    logits = e["logits"][:rows]
    got = edit(
        logits, per_row(configs, rows), e["ids"][:rows], e["lengths"][:rows], e["steps"][:rows]
    )
    np.testing.assert_array_equal(got[::2], logits[::2])


def test_what_lies_past_the_length_is_of_no_matter():
    e = expected()
    junk = np.random.default_rng(0).integers(0, V, e["ids"].shape)
    past = np.arange(junk.shape[1]) >= e["lengths"][:, None]
    ids = np.where(past, junk, e["ids"]).astype(np.int32)
    got = edit(e["logits"], requests(), ids, e["lengths"], e["steps"])
    np.testing.assert_array_equal(got, edited())


# --- vLLM's


def test_presence_frequency_and_bias_follow_their_formulas():
    rng = np.random.default_rng(1)
    rows, longest = 200, 30
    lengths = rng.integers(1, longest + 1, rows).astype(np.int32)
    steps = rng.integers(0, lengths + 1).astype(np.int32)
    ids = rng.integers(0, 12, (rows, longest)).astype(np.int32)
    logits = rng.normal(size=(rows, V)).astype(np.float32)
    configs = [
        GenerationConfig(
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
            logit_bias={int(i): rng.uniform(-100, 100) for i in rng.choice(V, 5, replace=False)},
        )
        for _ in range(rows)
    ]
    got = edit(logits, per_row(configs, rows), ids, lengths, steps)
    for row, c in enumerate(configs):
        response = ids[row, lengths[row] - steps[row] : lengths[row]]
        counts = np.bincount(response, minlength=V)
        want = logits[row].astype(np.float64)
        for token, bias in c.logit_bias:
            want[token] += bias
        want -= c.frequency_penalty * counts + c.presence_penalty * (counts > 0)
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5)


# --- n-grams, against a search


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=48), min_size=4, max_size=4),
    st.lists(st.integers(0, MAX_NGRAM), min_size=4, max_size=4),
)
@pytest.mark.slow
def test_no_ngram_comes_twice(histories, sizes):
    ids = np.zeros((4, 48), np.int32)
    for row, history in zip(ids, histories, strict=True):
        row[: len(history)] = history
    lengths = np.array(list(map(len, histories)), np.int32)
    configs = [GenerationConfig(no_repeat_ngram_size=n) for n in sizes]
    got = edit(np.zeros((4, V), np.float32), per_row(configs, 4), ids, lengths, 0 * lengths)
    for row, history, n in zip(np.asarray(got), histories, sizes, strict=True):
        for token in range(4):
            ngram = [*history[len(history) - n + 1 :], token]
            known = [history[i : i + n] for i in range(len(history) - n + 1)]
            repeats = n > 0 and len(history) + 1 >= n and ngram in known
            assert np.isneginf(row[token]) == repeats, (history, n, token)


# --- no token left, and damage


@pytest.mark.slow
def test_where_every_token_is_forbidden_there_is_none():
    logits = np.zeros((3, V), np.float32)
    logits[2, 5] = np.nan
    every = GenerationConfig(suppress_tokens=tuple(range(V)), do_sample=True)
    rows = per_row([every, GenerationConfig(do_sample=True), every], 3)
    zeros = np.zeros(3, np.int32)
    tokens, _ = choose(logits, rows, np.zeros((3, 8), np.int32), zeros, zeros, ALL)
    assert tokens[0] == ALL_FORBIDDEN
    assert 0 <= tokens[1] < V
    assert tokens[2] == NOT_FINITE


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_of_a_custom_processor_that_are_not_finite(value):
    def spoil(ids, lengths, scores):
        return scores.at[0, 3].set(value)

    processors = Processors(custom=(spoil,))
    rows = per_row([GenerationConfig()] * 2, 2)
    zeros = np.zeros(2, np.int32)
    logits = np.zeros((2, V), np.float32)
    tokens, _ = choose(logits, rows, np.zeros((2, 8), np.int32), zeros, zeros, processors)
    assert tokens.tolist() == [NOT_FINITE, 0]


# --- log-probabilities


def test_the_likeliest_tokens_and_their_logprobs():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, V)).astype(np.float32)
    logits[3, :] = 0.0  # ties: the first ids win
    configs = [GenerationConfig(return_logprobs=n) for n in (20, True, None, 5, 0, 1)]
    zeros = np.zeros(6, np.int32)
    args = logits, per_row(configs, 6), np.zeros((6, 8), np.int32), zeros, zeros
    _, logprobs = choose(*args, Processors(logprobs=True))
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(logprobs.top_ids, order)
    np.testing.assert_allclose(logprobs.top, np.take_along_axis(want, order, 1), atol=1e-5)
    np.testing.assert_allclose(logprobs.chosen, want.max(axis=1), atol=1e-5)


def test_in_a_small_vocabulary_there_are_fewer():
    rows = per_row([GenerationConfig(return_logprobs=20)], 1)
    zeros = np.zeros(1, np.int32)
    logits = np.zeros((1, 7), np.float32)
    args = logits, rows, np.zeros((1, 8), np.int32), zeros, zeros
    _, logprobs = choose(*args, Processors(logprobs=True))
    assert logprobs.top_ids.tolist() == [list(range(7))]


# --- the set of programs


def test_tiers_hold_what_is_asked_for_and_are_few():
    fields = [f.name for f in dataclasses.fields(Processors) if f.type is bool]
    tiers = set()
    for bits in range(2 ** len(fields)):
        asked = Processors(**{name: bool(bits >> i & 1) for i, name in enumerate(fields)})
        tier = asked.tier
        assert asked | tier == tier
        tiers.add(tier)
    assert len(tiers) == 5
    assert Processors(custom=(abs,)).tier.custom == (abs,)
    assert Processors(edit=True, beams=(4, 2)).tier.beams == (4, 2)


@pytest.mark.slow
def test_whatever_the_tier_the_samples_are_the_same():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(500, V)).astype(np.float32)
    config = GenerationConfig(do_sample=True, temperature=0.8)
    configs = [dataclasses.replace(config, seed=i) for i in range(500)]
    rows = jax.tree.map(jnp.asarray, per_row(configs, 500))
    zeros = np.zeros(500, np.int32)
    draws = [
        np.asarray(choose(logits, rows, np.zeros((500, 8), np.int32), zeros, zeros, p)[0])
        for p in (config.processors, Processors(sample=True, truncate=True), ALL)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], draws[2])


def test_where_no_row_asks_nothing_runs_on_the_device():
    """Every costly processor is behind a condition in the program with all processors."""
    rows = per_row([GenerationConfig()], 1)
    zeros = np.zeros(1, np.int32)
    args = np.zeros((1, V), np.float32), rows, np.zeros((1, 8), np.int32), zeros, zeros
    text = str(jax.make_jaxpr(next_tokens, static_argnums=5)(*args, ALL))
    assert text.count("cond[") == 9
    # These may become a library's kernel or a loop, which a CUDA graph cannot contain.
    assert not any(f" {op}[" in text for op in ("sort", "while", "scan", "top_k"))


@pytest.mark.slow
def test_a_vocabulary_of_real_size_is_truncated_exactly():
    rng = np.random.default_rng(4)
    v = 128_256
    logits = (3 * rng.normal(size=(4, v))).astype(np.float32)
    scores = logits - logits.max(axis=1, keepdims=True)
    configs = [GenerationConfig(do_sample=True, top_k=k) for k in (1, 50, 1000, v - 1)]
    kept = np.isfinite(truncate(scores, per_row(configs, 4)))
    assert kept.sum(axis=1).tolist() == [1, 50, 1000, v - 1]
    for row, mask in zip(scores, kept, strict=True):
        assert row[mask].min() > row[~mask].max()
    masses = (0.1, 0.5, 0.9, 0.999)
    configs = [GenerationConfig(do_sample=True, top_p=p) for p in masses]
    kept = np.isfinite(truncate(scores, per_row(configs, 4)))
    p = np.exp(scores.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    for row, mask, mass in zip(p, kept, masses, strict=True):
        # The smallest set with this probability, up to rounding of sums in fp32.
        assert row[mask].sum() >= mass - 1e-5
        assert row[mask].sum() - row[mask].min() <= mass + 1e-5


def test_a_sampled_row_is_never_given_a_forbidden_token():
    e = expected()
    scores = edited()
    rows = requests()
    tokens = jax.jit(_sample, static_argnums=(3, 4))(scores, rows, e["steps"], ALL, None)
    assert np.isfinite(e["scores"][np.arange(len(scores)), np.asarray(tokens)]).all()
