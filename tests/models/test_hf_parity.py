"""Compares logits, greedy tokens and log-probabilities with fixtures from transformers."""

import functools
import json
import shutil
import warnings
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import fdjax
from fdjax.pallas_kernels.plan import Plan
from marks import slow_unless_fast

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
# Every folder of make_hf_fixtures.py is a case, so a new family is found.
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/expected.npz") if p.parent.name != "tiny")
BF16_CASES = [case for case in CASES if case.endswith("_bf16")]
# Cases whose rotary frequencies depend on the length of a sequence.
BY_LENGTH = {"llama_dynamic", "phi3_longrope"}
# Cases for tests of the engine, which no family changes. Slow tests run the other cases.
FAST = {"llama3_gqa_tied", "llama_bias", "gemma3", "phi3_longrope"}
# A case in which each row has its own rotary embedding.
FAST_BATCH = {"phi3_longrope"}
# Each row has its own rotary embedding.
FULL_BATCH = {"phi3_longrope"}
# One case per family that kernels run. Others are tested in one ragged batch.
FAMILIES = {"llama3_gqa_tied", "mistral_window", "qwen2_mixed", "qwen3"}
FAMILIES |= {"gemma2", "gemma3", "phi3_longrope"}
BY_XLA = [
    case
    for case in CASES
    if case.endswith("_moe") or not case.startswith(("llama", *(f.split("_")[0] for f in FAMILIES)))
]
# Experts in some layers.
SOME_BY_XLA = {"qwen2_moe"}
# The cheapest.
FAST_GREEDY = {"llama3_gqa_tied"}
# Other sizes and rotary embeddings of a family, whose logits are compared.
SOAK_GREEDY = {"llama_d128_bf16", "llama_d64_bf16", "llama_linear", "llama_yarn", "llama_dynamic"}
SOAK_GREEDY |= {"llama_bias", "llama2_mha", "qwen3_d128_bf16"}
# Their windows, norms of heads and biases are in Gemma too, or in their logits.
SOAK_GREEDY |= {"mistral_window", "qwen2_mixed", "qwen3"}
# Every kind of layer and of rotary embedding, but not every size.
FAST_LOGITS = set(CASES) - {"llama_linear", "llama_d64_bf16", "qwen3_d128_bf16"}
FAST_LOGITS -= {"llama_d128_bf16", "llama2_mha", "llama_bias", "opt_350m", "qwen3_moe"}
# Families that are made of what others are made of.
FAST_LOGITS -= {
    "ministral",
    "granitemoe",
    "mistral_window",
    "gpt_neox",
    "glm",
    "olmo2",
    "starcoder2",
    "olmoe",
    "mixtral",
    "cohere2",
    "granite",
    "smollm3",
    "gemma3",
    "llama_yarn",
    "olmo3",
    "qwen2_mixed",
    "qwen2_moe",
    "glm4",
    "phi",
    "gpt2",
}

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROMPTS = range(5)
NEW_TOKENS = 64
MAX_LEN = 264  # tokens of the longest prompt and its continuation
# Allowed error relative to the largest logit. In the fixtures, the gap of every chosen token is
# more than twice this.
LOGITS_BAR = 1e-4

GREEDY = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "eos_token_id": None,
    "return_logprobs": True,
}

forward = jax.jit(fdjax.forward, static_argnums=0)


@functools.cache
def load(case, dtype="float32", compiled="quick", implementation=None):
    """One LM, with one set of programs, for each way to compile them."""
    plan = implementation and Plan.for_device(implementation=implementation)
    with warnings.catch_warnings(), mock.patch("fdjax.lm._loaded", {}):
        # Dynamic scaling needs sequences longer than the model's context.
        warnings.filterwarnings("ignore", "max_len 264 exceeds the model's", UserWarning)
        return fdjax.load(
            str(FIXTURES / case),
            dtype=dtype,
            max_len=MAX_LEN,
            plan=plan,
            compilation_cache=False,
            progress=False,
        )


@functools.cache
def expected(case):
    with np.load(FIXTURES / case / "expected.npz") as arrays:
        return dict(arrays)


@functools.cache
def same_in_a_batch():
    """For each case, the prompts that transformers continues alike alone and in a ragged batch."""
    return json.loads((FIXTURES / "ragged.json").read_text(encoding="utf-8"))


def prompt(case, i):
    return expected(case)[f"prompt_{i}"].tolist()


@functools.cache
def alone(case, i, compiled="quick"):
    return load(case, compiled=compiled).generate(prompt(case, i), **GREEDY)


@functools.cache
def teacher_forced(case, dtype, implementation=None):
    """Logits at every position of each prompt and its expected continuation, [len, V] each."""
    e = expected(case)
    sequences = [np.concatenate([e[f"prompt_{i}"], e[f"tokens_{i}"][:-1]]) for i in PROMPTS]
    lengths = np.array([len(s) for s in sequences], np.int32)
    ids = np.zeros((len(sequences), MAX_LEN), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    lm = load(case, dtype, implementation=implementation)
    logits = np.asarray(forward(lm.model, lm.params, ids, lengths))
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def assert_within_bar(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS_BAR * np.abs(want).max())


@pytest.mark.parametrize(
    "case", slow_unless_fast([c for c in CASES if c not in BY_LENGTH], FAST_LOGITS)
)
def test_logits(case):
    for i, logits in zip(PROMPTS, teacher_forced(case, "float32"), strict=True):
        length = len(prompt(case, i))
        kept = expected(case)[f"logits_{i}"]
        assert_within_bar(logits[length - len(kept) : length], kept)
        assert_within_bar(logits[-1], expected(case)[f"final_logits_{i}"])


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(BY_LENGTH))
def test_logits_of_prompts_whose_length_decides(case):
    """Compares only the prompt: prompt and continuation differ from a prompt of that length."""
    lm = load(case)
    ids = np.zeros((len(PROMPTS), MAX_LEN), np.int32)
    for i in PROMPTS:
        ids[i, : len(prompt(case, i))] = prompt(case, i)
    lengths = np.array([len(prompt(case, i)) for i in PROMPTS], np.int32)
    logits = np.asarray(forward(lm.model, lm.params, ids, lengths))
    for i in PROMPTS:
        kept = expected(case)[f"logits_{i}"]
        assert_within_bar(logits[i, lengths[i] - len(kept) : lengths[i]], kept)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.soak) for case in sorted({*BY_XLA, *SOAK_GREEDY})]
    + slow_unless_fast(sorted({*CASES} - {*BY_XLA} - SOAK_GREEDY), FAST_GREEDY),
)
def test_greedy_tokens_and_logprobs(case):
    for i in PROMPTS:
        result = alone(case, i)
        assert result.tokens == [expected(case)[f"tokens_{i}"].tolist()], f"prompt {i}"
        # The chosen logit and the logsumexp may each be off by the bar.
        bar = 2 * LOGITS_BAR * np.abs(expected(case)[f"final_logits_{i}"]).max()
        np.testing.assert_allclose(
            result.logprobs[0], expected(case)[f"logprobs_{i}"], rtol=0, atol=bar
        )


def assert_batch_is_each_alone(case, order, compiled):
    lm = load(case, compiled=compiled)
    if not lm.model.plan.batch_invariant:
        pytest.skip("rows of a batch are bitwise those alone only on CPU")
    batch = lm.generate([prompt(case, i) for i in order], **GREEDY)
    each = [alone(case, i, compiled) for i in order]
    assert batch.tokens == [one.tokens[0] for one in each]
    assert batch.logprobs == [one.logprobs[0] for one in each]
    # Also equal to transformers, for rows whose result does not depend on padding there.
    for i, tokens in zip(order, batch.tokens, strict=True):
        if i in same_in_a_batch()[case]:
            assert tokens == expected(case)[f"tokens_{i}"].tolist(), f"prompt {i}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.slow if c in SOME_BY_XLA else pytest.mark.soak)
        for c in BY_XLA
    ],
)
def test_a_ragged_batch_has_the_tokens_of_transformers(case):
    batch = load(case).generate([prompt(case, i) for i in PROMPTS], **GREEDY)
    for i in same_in_a_batch()[case]:
        assert batch.tokens[i] == expected(case)[f"tokens_{i}"].tolist(), f"prompt {i}"


@pytest.mark.parametrize(
    "case",
    [pytest.param("gpt2", marks=pytest.mark.soak), pytest.param("opt", marks=pytest.mark.slow)],
)
def test_learned_positions_go_on_after_a_beginning_from_the_cache(case):
    whole = prompt(case, 4)
    load(case).generate(whole[:150], max_new_tokens=1)
    result = load(case).generate(whole, **GREEDY)
    assert result.stats.cached_tokens > 0
    assert result.tokens == [expected(case)["tokens_4"].tolist()]


@pytest.mark.soak
@pytest.mark.parametrize("case", sorted(FAST_BATCH))
def test_a_ragged_batch_is_each_prompt_alone_bitwise(case):
    assert_batch_is_each_alone(case, (4, 0, 3, 1), "quick")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in FULL_BATCH else pytest.mark.soak)
        for case in CASES
    ],
)
def test_a_ragged_batch_is_each_prompt_alone_bitwise_as_users_compile(case, full_compiles):
    assert_batch_is_each_alone(case, (1, 3, 0, 2, 4), "full")


def test_a_ragged_batch_of_transformers_is_each_prompt_alone_but_for_ropes_by_length():
    assert set(same_in_a_batch()) == set(CASES)
    for case, same in same_in_a_batch().items():
        assert (same == list(PROMPTS)) == (case not in BY_LENGTH)


@pytest.mark.parametrize("case", slow_unless_fast(CASES, FAST))
def test_both_generations_of_the_config_load_to_the_same(case, tmp_path):
    folder = shutil.copytree(FIXTURES / case, tmp_path / case)
    (folder / "config.alternate.json").replace(folder / "config.json")
    other = fdjax.load(str(folder), dtype="float32", compilation_cache=False, progress=False)
    assert other.config == load(case).config
    jax.tree.map(np.testing.assert_array_equal, other.params, load(case).params)


def rms(a):
    return float(np.sqrt(np.mean(np.square(a, dtype=np.float64))))


def bf16_error(case):
    """Root mean square error of a logit that bfloat16 causes in transformers."""
    e = expected(case)
    return rms(np.concatenate([e[f"bf16_logits_{i}"] - e[f"logits_{i}"] for i in PROMPTS]))


# With the plan of the device, and with all kernels.
PLANNED = pytest.mark.parametrize(
    "implementation", [None, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)


@PLANNED
@pytest.mark.parametrize("case", slow_unless_fast(BF16_CASES, FAST))
def test_bfloat16_logits_are_as_close_as_those_of_transformers(case, implementation):
    errors = []
    forced = teacher_forced(case, "bfloat16", implementation)
    for i, logits in zip(PROMPTS, forced, strict=True):
        kept, length = expected(case)[f"logits_{i}"], len(prompt(case, i))
        errors.append(logits[length - len(kept) : length] - kept)
    # Another order of rounding gives errors of the same size, not the same errors.
    assert rms(np.concatenate(errors)) <= 1.25 * bf16_error(case)


@PLANNED
@pytest.mark.soak
@pytest.mark.parametrize("case", BF16_CASES)
def test_bfloat16_greedy_tokens_differ_only_in_close_calls(case, implementation):
    """Compares with the float32 tokens, which bfloat16 approximates.

    A token may differ if the gap between the two best float32 logits is below four standard
    deviations of a difference of two bfloat16 logits, which is sqrt(2) times the error of one.
    After its first difference a run is another text, so runs are compared only up to there. Every
    token is also compared after the expected prefix.
    """
    lm = load(case, "bfloat16", implementation=implementation)
    result = lm.generate([prompt(case, i) for i in PROMPTS], **GREEDY | {"return_logprobs": False})
    bar = 4 * 2**0.5 * bf16_error(case)
    close_calls = []
    logits_of_prompts = teacher_forced(case, "bfloat16", implementation)
    for i, logits in zip(PROMPTS, logits_of_prompts, strict=True):
        tokens, gaps = expected(case)[f"tokens_{i}"], expected(case)[f"gaps_{i}"]
        run = np.flatnonzero(np.array(result.tokens[i]) != tokens)[:1]
        forced = np.flatnonzero(logits[-NEW_TOKENS:].argmax(-1) != tokens)
        for steps in (run, forced):
            assert (gaps[steps] <= bar).all(), f"prompt {i}: steps {steps}, gaps {gaps[steps]}"
        close_calls.append(gaps <= bar)
    # Most choices are not close, so close ones cannot hide a wrong engine.
    assert np.mean(close_calls) < 1 / 3
