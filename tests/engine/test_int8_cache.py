"""A model with an int8 cache does everything that it does with another."""

import functools
import itertools
import json
import pickle
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.cli.main import main
from fdjax.engine import runner
from fdjax.engine.memory import longest_context, plan_memory, reads_pages
from fdjax.engine.state import (
    SLOT_MULTIPLE,
    StackedCache,
    abstract_state,
    cache_bytes,
    init_cache,
    init_pool,
    page_bytes,
)
from fdjax.engine.step import attend_prefill
from fdjax.models import describe, parse_config
from fdjax.models.tiny.stories import story
from fdjax.pallas_kernels.attention import QuantisedCache
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import rotation
from fdjax.tools.info import model_info

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
OPTIONS = {"eos_token_id": None, "do_sample": False, "return_logprobs": True}
BEGINNING = [i % 300 + 9 for i in range(150)]
PROMPTS = [[5], [7, 8, 9], BEGINNING, [*BEGINNING, 4], [*BEGINNING, 6, 7], [3] * 40]
NEW = [9, 5, 7, 3, 9, 1]


def load(**options):
    options = {"dtype": "float32", "max_batch": 4, "kv_dtype": "int8"} | options
    return fdjax.load(
        FIXTURES / "llama3_gqa_tied", compilation_cache=False, progress=False, **options
    )


@pytest.fixture(scope="module")
def lm():
    return load()


def llama(name="llama-2-7b", dtype="bfloat16", plan=H100, **options):
    data = json.loads((FIXTURES / "configs" / f"{name}.new.json").read_text(encoding="utf-8"))
    return describe(parse_config(data), dtype=dtype, plan=plan, **options)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.soak
def test_every_answer_is_bit_by_bit_that_of_its_prompt_alone(lm):
    """More prompts than rows, of one chunk and of several."""
    many = lm.generate(PROMPTS, max_new_tokens=NEW, **OPTIONS)
    for i in (0, 2, 5):
        alone = lm.generate(PROMPTS[i], max_new_tokens=NEW[i], **OPTIONS)
        assert many.tokens[i] == alone.tokens[0] and many.logprobs[i] == alone.logprobs[0]
    assert many.stats.cached_tokens == 2 * SLOT_MULTIPLE


@pytest.mark.slow
def test_the_pool_holds_int8(lm):
    result = lm.generate([[7, 8, 9], [7, 8, 9]], max_new_tokens=4, **OPTIONS)
    assert len(result.tokens[0]) == 4 and result.tokens[0] == result.tokens[1]
    slots = 2 * (4 + 5 + 6)
    weights = 3 * lm.model.weight_bytes
    assert result.stats.decode_bytes == weights + slots * cache_bytes(lm.model, 1, 1)
    kv = lm.engine.reusable.state.kv
    assert isinstance(kv.k, QuantisedCache) and kv.k.codes.dtype == np.int8
    assert nbytes(kv) == lm.engine.pool.count * page_bytes(lm.model)


@pytest.mark.slow
def test_forward_rounds_like_the_cache(lm):
    prompt = [7, 8, 9]
    result = lm.generate([prompt, prompt], max_new_tokens=4, **OPTIONS)
    tokens = np.array(result.tokens[0])
    ids = jnp.asarray([[*prompt, *tokens[:-1]]], jnp.int32)

    def logprobs(kv_dtype):
        run = jax.jit(lambda params: fdjax.forward(lm.model, params, ids, kv_dtype=kv_dtype))
        return np.asarray(jax.nn.log_softmax(run(lm.params)[0, -4:]))[np.arange(4), tokens]

    np.testing.assert_allclose(logprobs("int8"), result.logprobs[0], atol=1e-4)
    assert abs(logprobs(None) - result.logprobs[0]).max() > 1e-4
    with pytest.raises(ValueError, match=r"^forward: kv_dtype must be int8 or None, got 'int4'"):
        fdjax.forward(lm.model, lm.params, ids, kv_dtype="int4")


def close(got, want):
    """Keys that round to another code change log-probabilities by little."""
    assert got.tokens == want.tokens
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_every_way_to_an_answer_gives_the_same(lm, monkeypatch):
    want = lm.generate(PROMPTS, max_new_tokens=NEW, **OPTIONS)
    close(load(prefix_cache=False).generate(PROMPTS, max_new_tokens=NEW, **OPTIONS), want)
    whole = load()
    whole.engine.paged = False
    close(whole.generate(PROMPTS, max_new_tokens=NEW, **OPTIONS), want)
    assert isinstance(whole.engine.reusable.state.kv[0][0], QuantisedCache)
    streamed = lm.stream(PROMPTS[2], max_new_tokens=NEW[2], **OPTIONS)
    assert list(streamed) and streamed.result.tokens[0] == want.tokens[2]
    submitted = lm.submit(PROMPTS[3], max_new_tokens=NEW[3], **OPTIONS).result()
    assert submitted.tokens[0] == want.tokens[3]
    pure = jax.jit(fdjax.generate, static_argnums=(0, 3))(
        lm.model,
        lm.params,
        np.array([BEGINNING]),
        fdjax.GenerationConfig(max_new_tokens=NEW[2], do_sample=False),
    )
    assert pure[0].tolist() == want.tokens[2]
    scores = lm.score([[*BEGINNING, *want.tokens[2]]]).logprobs[0]
    np.testing.assert_allclose(scores[-NEW[2] :], want.logprobs[2], rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_beams_have_the_answers_that_they_have_alone(lm):
    options = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    asked = {**OPTIONS, **options, "return_logprobs": None}
    both = lm.generate([BEGINNING, [7, 8, 9]], **asked)
    one, other = lm.generate(BEGINNING, **asked), lm.generate([7, 8, 9], **asked)
    assert both.tokens == one.tokens + other.tokens
    assert both.sequences_scores == one.sequences_scores + other.sequences_scores


@pytest.mark.soak
def test_a_row_that_gave_up_its_pages_goes_on(monkeypatch):
    prompts = [[5 + i] * (100 + 9 * i) for i in range(4)]
    want = load().generate(prompts, max_new_tokens=60, **OPTIONS)
    small, preempted = load(), []
    small.engine._most_pages = lambda slots: 6
    preempt = runner.Runner._preempt
    monkeypatch.setattr(
        runner.Runner, "_preempt", lambda self, row: preempted.append(row) or preempt(self, row)
    )
    close(small.generate(prompts, max_new_tokens=60, **OPTIONS), want)
    assert preempted
    small.engine.pool.check([])


@pytest.mark.slow
def test_a_value_that_is_not_finite_is_an_error():
    lm = load()
    params = lm.params
    qkv = params["blocks"][0]["attention"]["qkv"]
    qkv["weight"] = qkv["weight"].at[0, 0, -1, 0].set(jnp.nan)  # values of the first KV head
    lm.params = params
    with pytest.raises(FloatingPointError, match="not finite"):
        lm.generate([1, 2, 3], max_new_tokens=2)


def test_bytes_of_a_token(lm):
    """D codes of a byte and a scale of four, for keys and for values."""
    per_token = cache_bytes(lm.model, 1, 1)
    c = lm.config
    assert per_token == 2 * c.layers * c.kv_heads * (c.head_dim + 4)
    plain = describe(c, dtype="bfloat16", plan=lm.model.plan)
    assert cache_bytes(plain, 1, 1) == 2 * c.layers * c.kv_heads * c.head_dim * 2


@pytest.mark.parametrize("stacked", [False, True])
def test_memory_is_counted_to_the_byte(stacked):
    m = llama(kv_dtype="int8")
    cache = jax.eval_shape(lambda: init_cache(m, 3, 256, stacked))
    assert nbytes(cache) == cache_bytes(m, 3, 256)
    assert plan_memory(m, batch=3, max_len=200).cache_bytes == nbytes(cache) + 4 * 3 * 256
    state = abstract_state(m, stacked)
    assert jax.tree.structure(state.kv) == jax.tree.structure(cache)
    assert nbytes(jax.eval_shape(lambda: init_pool(m, 7))) == 7 * page_bytes(m)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b"])
def test_almost_twice_as_many_tokens_fit(name):
    """A call also needs room for a layer's keys and values when they are dequantised."""
    int8, plain = (
        longest_context(llama(name, kv_dtype=kind), batch=8, memory_bytes=80 * 10**9)
        for kind in ("int8", None)
    )
    assert 1.75 < int8 / plain < 2


def test_what_runs_on_a_gpu():
    """The kernels that read a cache in bfloat16, in pages."""
    int8, plain = llama(kv_dtype="int8"), llama()
    assert plain.one_launch(1, 1024) and int8.one_launch(1, 1024)
    assert reads_pages(plain) and reads_pages(int8)
    info = model_info(int8, memory_bytes=80 * 10**9)
    assert "bytes per token in int8" in str(info) and info.kv_dtype == "int8"
    runs = {op: run for op, _, run, _ in info.choices}
    assert runs["decode_layers"] == runs["prefill_attention"] == "mosaic_gpu"


def test_devices_that_share_a_model_have_its_heads():
    m = llama(kv_dtype="int8", tensor_parallel=4)
    assert m.kv_dtype == m.local.kv_dtype == "int8"
    cache = jax.eval_shape(lambda: init_pool(m.local, 5))
    assert cache.k.codes.shape[2] == cache.k.scales.shape[2] == 8


def test_another_cache_is_another_program():
    int8, plain = llama(kv_dtype="int8"), llama()
    assert repr(int8) != repr(plain)  # of which the keys of programs on disk are made
    assert repr(llama(kv_dtype="bfloat16")) == repr(plain)


def test_models_in_use_are_shared_by_the_kind_of_cache(lm):
    again, plain = load(), load(kv_dtype="float32")
    assert again.model is lm.model
    assert plain.model is not lm.model and plain.model.kv_dtype is None
    assert plain.model is load(kv_dtype=None).model


def test_it_is_pickled(lm):
    copy = pickle.loads(pickle.dumps(lm))
    assert copy.model is lm.model
    leaves = jax.tree.leaves(StackedCache(*[QuantisedCache.abstract((1, 2), "bfloat16")] * 2))
    assert len(leaves) == 4


@pytest.mark.parametrize("wrong", ["float16", "int4", "fp8", ""])
def test_kinds_that_there_are_not(wrong):
    message = f"kv_dtype must be int8 or the dtype of the activations, float32, got {wrong!r}"
    with pytest.raises(ValueError, match=message):
        load(kv_dtype=wrong)


def test_the_command_line(capsys):
    assert main(["info", "--kv-dtype", "int8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_dtype"] == "int8"
    assert main(["info", "--dtype", "float32", "--kv-dtype", "bfloat16"]) != 0
    assert "kv_dtype must be int8 or" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "?"], ["score", "a text"]])
def test_commands_pass_it_on(command, monkeypatch, capsys):
    def loaded(*args, **options):
        raise ValueError(f"asked for {options['kv_dtype']}")

    monkeypatch.setattr(fdjax, "load", loaded)
    assert main([*command, "--kv-dtype", "int8"]) == 1
    assert "asked for int8" in capsys.readouterr().err


# Accuracy


@functools.partial(jax.jit, static_argnums=0)
def predictions(model, params, ids, lengths):
    """Log-probabilities [B,T,V] of the tokens after each of `ids` [B,T], read through the cache."""
    zeros = jnp.zeros_like(lengths)
    attend = functools.partial(
        attend_prefill,
        ends=lengths,
        offsets=zeros,
        rows=None,
        rotation_at=lambda at, rope: rotation(at, rope, prompt=lengths, limit=lengths),
        plan=model.plan,
    )
    module, cache = model.module(params), init_cache(model, *ids.shape)
    hidden, _ = module(ids, cache, attend, model.plan, starts=zeros)
    return jax.nn.log_softmax(module.logits(hidden, model.plan))


def compared(dtype, count, tokens):
    """How the embedded model's predictions over texts change with an int8 cache."""
    plain, int8 = (
        fdjax.load("tiny", dtype=dtype, kv_dtype=kind, compilation_cache=False, progress=False)
        for kind in (None, "int8")
    )
    pieces = stories(plain.tokenizer, count, tokens)
    divergences, same, ours, theirs = [], [], [], []
    for begin in range(0, len(pieces), 4):
        batch = pieces[begin : begin + 4]
        ids, lengths = np.array(batch, np.int32), np.full(4, tokens, np.int32)
        p, q = (
            np.asarray(predictions(lm.model, lm.params, ids, lengths)).astype(np.float64)
            for lm in (plain, int8)
        )
        for row, piece in enumerate(batch):
            at, a, b = (np.arange(tokens - 1), piece[1:]), p[row, :-1], q[row, :-1]
            divergences.append((np.exp(a) * (a - b)).sum(axis=-1))
            same.append(a.argmax(axis=-1) == b.argmax(axis=-1))
            ours.append(-a[at])
            theirs.append(-b[at])
    divergences, same, ours, theirs = map(np.concatenate, (divergences, same, ours, theirs))
    return {
        "texts": count,
        "tokens": tokens,
        "predictions": len(same),
        "agreement": float(same.mean()),
        "mean_kl": float(divergences.mean()),
        "p99_kl": float(np.percentile(divergences, 99)),
        "perplexity": float(np.exp(ours.mean())),
        "perplexity_int8": float(np.exp(theirs.mean())),
    }


def stories(tokenizer, count, tokens):
    """Texts of the kind that the embedded model knows, as token ids."""
    drawn = random.Random(5)
    ids = [tokenizer.encode(" ".join(story(drawn))) for _ in range(count * tokens // 50)]
    start = tokenizer.encode("")
    ids = [one[len(start) :] for one in ids]
    joined = list(itertools.chain.from_iterable(ids))
    return [start + joined[i * tokens : (i + 1) * tokens - len(start)] for i in range(count)]


@pytest.mark.parametrize(
    ("dtype", "count", "tokens"),
    [
        pytest.param("float32", 4, 256, marks=pytest.mark.slow),
        *(
            pytest.param(dtype, count, tokens, marks=pytest.mark.soak)
            for dtype in ("float32", "bfloat16")
            for count, tokens in ((512, 64), (64, 512))
        ),
    ],
)
def test_predictions_hardly_change(dtype, count, tokens):
    found = compared(dtype, count, tokens)
    print(json.dumps({"dtype": dtype} | found))
    assert found["agreement"] > 0.995
    assert 0 < found["mean_kl"] < 6e-4
    assert found["p99_kl"] < 0.02
    assert abs(np.log(found["perplexity_int8"] / found["perplexity"])) < 2e-3
