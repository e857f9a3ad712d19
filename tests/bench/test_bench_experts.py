"""Experts that the rows of a decode step choose, as benchmarks count them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fdjax
from fdjax.bench import experts
from fdjax.bench.model import model_rows
from fdjax.engine.results import step_bytes
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.experts import moe_reference, route
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu")

pytestmark = pytest.mark.usefixtures("quick_compiles")


def config_of(case, **changes):
    return parse_config(json.loads((FIXTURES / case / "config.json").read_text()) | changes)


def random_lm(config, plan=None):
    model = describe(config, dtype="float32", plan=plan or Plan(batch_invariant=True))
    return fdjax.LM(model, random_params(model))


@pytest.fixture(scope="module")
def partly():
    """A model with experts in the first and last of three layers."""
    return random_lm(config_of("qwen2_moe"))


def rms_norm(x, params, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * params["scale"]


def routes_by_hand(lm, tokens):
    """Choices of texts of one token, whose attention is their own value: [N] → [L,N,k]."""
    params, found = jax.tree.map(np.asarray, lm.params), []
    x = params["embed"][tokens]
    for i, block in enumerate(lm.config.blocks):
        own = params["blocks"][i]
        attention, mlp = own["attention"], own["mlp"]
        normed = rms_norm(x, own["attention_norm"], block.norm_eps)
        value = np.einsum("ne,ehd->nhd", normed, attention["qkv"]["weight"][:, :, -1])
        value = value.repeat(block.heads // value.shape[1], axis=1).reshape(len(x), -1)
        out = attention["out"]["weight"]
        x = x + value @ out.reshape(value.shape[1], -1)
        normed = rms_norm(x, own["mlp_norm"], block.norm_eps)
        logits = normed @ mlp["router"]["weight"]
        found.append(route(logits, block.experts)[0])
        weights = mlp["experts"]["gate_up"], mlp["experts"]["down"]
        options = {"routing": block.experts, "gate": block.activation}
        x = x + np.asarray(moe_reference(normed, logits, *weights, **options))
    return np.stack(found)


@pytest.mark.slow
def test_choices_are_those_of_the_router():
    options = {"compilation_cache": False, "progress": False}
    lm = fdjax.load(str(FIXTURES / "mixtral"), **options)
    tokens = np.arange(12, dtype=np.int32)
    got = experts.chosen_experts(lm, tokens[:, None])
    np.testing.assert_array_equal(got[:, :, 0], routes_by_hand(lm, tokens))


@pytest.mark.slow
def test_rows_that_are_the_same_choose_the_same_experts(partly):
    ids = np.random.default_rng(0).integers(0, 96, (5, 9)).astype(np.int32)
    ids[1] = ids[0]
    chosen = experts.chosen_experts(partly, ids)
    assert chosen.shape == (2, 5, 9, 3)
    np.testing.assert_array_equal(experts.distinct_experts(chosen[:, :2]), [3, 3])
    assert (experts.distinct_experts(chosen[:, 1:]) > 3).all()


def test_distinct_experts_by_hand():
    first = [[[0, 1], [2, 3]], [[1, 0], [1, 4]]]  # 2 and 4 in the two steps
    second = [[[5, 6], [5, 6]], [[5, 7], [6, 5]]]  # 3 and 2
    np.testing.assert_array_equal(experts.distinct_experts(np.array([first, second])), [3, 2.5])
    np.testing.assert_array_equal(experts.distinct_experts(np.full((1, 1, 4, 1), 3)), [1])


def measured(monkeypatch, lm, tokens, **options):
    """(decode step, costs) of calls that answer with these tokens [B,N]."""
    batch, new = len(tokens), len(tokens[0])
    steps, weights = new - 1, lm.model.weight_bytes
    read = steps * step_bytes(lm.model, weights, lm.params["embed"].nbytes, batch)
    stats = fdjax.Stats(8, 2, 1.0, 1.0, decode_bytes=read + steps * 1000, decode_steps=steps)
    result = fdjax.GenerateResult(tokens, None, ["length"] * batch, None, stats)
    monkeypatch.setattr(fdjax.LM, "generate", lambda *a, **k: result)
    # The largest log-probabilities are close to 0, whatever the answer is.
    likeliest = np.full((1, new, lm.config.vocab_size), -99, np.float32)
    likeliest[0, np.arange(new), tokens[0]] = 0
    (_, row), costs = model_rows(
        lm,
        batch=batch,
        prompt_tokens=4,
        new_tokens=new,
        runs=2,
        check="tokens",
        logits=lambda lm, ids, n: likeliest,
        **options,
    )
    assert row.ok
    return row, costs


@pytest.mark.slow
def test_bytes_of_a_step_are_those_of_the_experts_that_its_tokens_chose(monkeypatch, partly):
    """Steps read the first to the last but one of the new tokens."""
    texts = []

    def of_ids(lm, ids):
        texts.append(ids)
        return np.stack([ids, ids])[..., None]

    tokens = [[0, 1, 2, 3], [5, 1, 2, 4]]
    row, costs = measured(monkeypatch, partly, tokens, experts=of_ids)
    (ids,) = texts
    np.testing.assert_array_equal(ids[:, 4:], [[0, 1, 2], [5, 1, 2]])
    mean = (2 + 1 + 1) / 3
    assert costs["distinct experts per layer, B2 P4 fdjax"] == pytest.approx(mean)
    model = partly.model
    expert = 4 * 3 * 32 * 12
    assert model.expert_bytes == (expert, 0, expert)
    without = model.weight_bytes - partly.params["embed"].nbytes - 2 * 6 * expert
    assert row.bytes == without + round(2 * mean * expert) + 1000


@pytest.mark.slow
def test_bytes_of_rows_that_chose_alike(monkeypatch, partly):
    """A step of two rows may read all 6 experts; these read 3."""
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SameRows())
    row, costs = measured(monkeypatch, partly, [[7, 8, 9]] * 2)
    assert costs["distinct experts per layer, B2 P4 fdjax"] == 3
    one = step_bytes(partly.model, partly.model.weight_bytes, partly.params["embed"].nbytes, 1)
    assert row.bytes == one + 1000


class SameRows:
    """Random numbers whose rows are the same."""

    def integers(self, low, high, shape):
        return np.full(shape, 5)


@pytest.mark.slow
def test_nothing_is_counted_where_nothing_is_known(monkeypatch, partly):
    row, costs = measured(monkeypatch, partly, [[7, 8], [8, 7]], experts=lambda lm, ids: None)
    model = partly.model
    assert row.bytes == 1000 + step_bytes(
        model, model.weight_bytes, partly.params["embed"].nbytes, 2
    )
    assert not any(key.startswith("distinct") for key in costs)


@pytest.mark.slow
def test_a_dense_model_makes_no_pass(monkeypatch):
    lm = random_lm(config_of("llama3_gqa_tied"))
    monkeypatch.setattr(experts, "one_pass_program", None)
    row, costs = measured(monkeypatch, lm, [[7, 8], [8, 7]])
    assert row.bytes == lm.model.weight_bytes + 1000
    assert not any(key.startswith("distinct") for key in costs)
