"""Models that several GPUs share give the answers of one GPU."""

import dataclasses
import functools
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import fdjax
from benchmarks.tensor_parallel import SUMS, with_sums
from fdjax.engine import runner
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.plan import Plan

pytestmark = pytest.mark.multigpu

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
PROMPTS = [[1, 2, 3, 4, 5], [7] * 150, [9, 8]]
OPTIONS = {"do_sample": False, "eos_token_id": None, "return_logprobs": True}
# Mean difference of log-probabilities in bfloat16, whose sums are rounded at other places.
BF16_BAR = 0.05


def counts():
    """2, 4, ... up to the number of GPUs."""
    most = jax.local_device_count()
    return [n for n in (2, 4, 8) if n <= most]


@functools.cache
def load(case, ranks, dtype):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_len 264 exceeds", UserWarning)
        return fdjax.load(
            FIXTURES / case, tensor_parallel=ranks, dtype=dtype, max_len=264, progress=False
        )


@pytest.fixture
def equal_ranks(monkeypatch):
    """All results that are read are the same bits on every GPU."""
    compared = []
    read = runner._numpy

    def check(results):
        for leaf in jax.tree.leaves(results):
            first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
            assert all(other == first for other in others)
            compared.append(len(others))
        return read(results)

    monkeypatch.setattr(runner, "_numpy", check)
    yield
    assert sum(compared)


@pytest.mark.parametrize("case", ["hf/llama3_gqa_tied", "hf/llama_bias", "hf/gemma3", "hf/qwen3"])
def test_tokens_in_float32(case, equal_ranks):
    expected = load(case, 1, "float32").generate(PROMPTS, max_new_tokens=32, **OPTIONS)
    for ranks in counts():
        if ranks > 4 and case != "hf/llama3_gqa_tied":
            continue  # it has four query heads
        found = load(case, ranks, "float32").generate(PROMPTS, max_new_tokens=32, **OPTIONS)
        assert found.tokens == expected.tokens
        for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_drawn_tokens_in_float32(equal_ranks):
    options = {"temperature": [0.8, 1.2, 0.0], "top_k": [20, None, None], "top_p": [0.9, 0.7, 1.0]}
    options |= {"seed": 3, "max_new_tokens": 24, "eos_token_id": None}
    case = "hf/llama3_gqa_tied"
    expected = load(case, 1, "float32").generate(PROMPTS, **options)
    for ranks in counts():
        assert load(case, ranks, "float32").generate(PROMPTS, **options).tokens == expected.tokens


@functools.cache
def large(ranks, sums=None):
    """Four layers of Llama 3 8B, with the same weights on up to 8 GPUs."""
    config = parse_config(CONFIG)
    plan = with_sums(Plan.for_device(), config, ranks, sums)
    model = describe(config, dtype="bfloat16", plan=plan, tensor_parallel=ranks)
    return LM(model, random_params(model))


@pytest.mark.parametrize("tokens", [200, 3000])
def test_scores_in_full_size(tokens):
    texts = np.random.default_rng(0).integers(0, 128000, (2, tokens)).tolist()
    expected = large(1).score(texts).logprobs
    for ranks in counts():
        found = large(ranks).score(texts).logprobs
        for ours, theirs in zip(found, expected, strict=True):
            assert np.mean(np.abs(np.subtract(ours, theirs))) < BF16_BAR


@pytest.mark.parametrize("sums", SUMS)
def test_decoding_agrees_with_scores_and_repeats(sums, equal_ranks):
    """Each chosen token has the log-probability that one pass over the text gives it."""
    for ranks in counts():
        lm = large(ranks, sums)
        assert lm.engine.stacks(1, 512) == (sums == "one launch")
        first, again = (lm.generate(PROMPTS, max_new_tokens=64, **OPTIONS) for _ in range(2))
        assert again.tokens == first.tokens
        assert again.logprobs == first.logprobs
        texts = [prompt + answer for prompt, answer in zip(PROMPTS, first.tokens, strict=True)]
        for ours, theirs in zip(first.logprobs, large(ranks).score(texts).logprobs, strict=True):
            assert np.mean(np.abs(np.subtract(ours, theirs[-len(ours) :]))) < BF16_BAR


@pytest.mark.parametrize("sums", SUMS)
def test_thousands_of_steps_end(sums, equal_ranks):
    """Collective operations in a CUDA graph have been seen to stop after many replays."""
    for ranks in counts():
        answer = large(ranks, sums).generate([1, 2, 3], max_new_tokens=4000, **OPTIONS)
        assert len(answer.tokens[0]) == 4000


def test_tokens_of_a_kv_head_are_divided(equal_ranks):
    """All GPUs have the only KV head. Scores do not divide its tokens."""
    config = parse_config(CONFIG | {"num_key_value_heads": 1})
    prompts = [*PROMPTS, np.random.default_rng(0).integers(0, 128000, 3000).tolist()]
    for ranks in counts():
        plan = dataclasses.replace(Plan.for_device(), divide_tokens=True)
        model = describe(config, dtype="bfloat16", plan=plan, tensor_parallel=ranks)
        # With cached prompts, the second call would multiply fewer rows, with other bits.
        lm = LM(model, random_params(model), prefix_cache=False)
        first, again = (lm.generate(prompts, max_new_tokens=200, **OPTIONS) for _ in range(2))
        assert lm.engine.paged and lm.engine.pool.size == 128 * ranks
        assert again.tokens == first.tokens
        texts = [prompt + answer for prompt, answer in zip(prompts, first.tokens, strict=True)]
        lm.engine.release()
        for ours, theirs in zip(first.logprobs, lm.score(texts).logprobs, strict=True):
            assert np.mean(np.abs(np.subtract(ours, theirs[-len(ours) :]))) < BF16_BAR


def test_memory_is_that_of_the_plan():
    """A GPU holds its part of the weights, and the cache leaves room for the programs."""
    for ranks in counts():
        model = large(ranks).model
        held = [0] * ranks
        for leaf in jax.tree.leaves(large(ranks).params):
            for i, shard in enumerate(leaf.addressable_shards):
                held[i] += shard.data.nbytes
        assert held == [model.local.weight_bytes] * ranks
    large(max(counts())).generate([1, 2, 3], max_new_tokens=4, **OPTIONS)
