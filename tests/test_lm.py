"""`fdjax.load` and `LM`: valid calls, and calls that are refused."""

import collections
import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import os
import pickle
import re
import subprocess
import sys
import types
from asyncio import CancelledError
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
import fdjax.system.platform
from benchmarks.ahead import stand_ins
from fdjax.engine import memory, runner
from fdjax.engine.packed import PackedPrompts
from fdjax.engine.results import Stats
from fdjax.engine.schedule import CHUNKS
from fdjax.models import describe, random_params
from fdjax.models.decoder_block import DecoderBlock
from fdjax.text.prompts import token_array
from fdjax.text.tokenizer import MissingTokenizerError

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
CASE = FIXTURES / "llama3_gqa_tied"  # defaults: sampled, end of sequence 316 or 319; 512 positions
TEXT = "The largest ocean"
GREEDY = {"do_sample": False, "eos_token_id": None}
# All processors at once, because each set of them needs its own programs. With a temperature and
# the checkpoint's end tokens.
FULL = {"top_k": 40, "top_p": 0.95, "min_new_tokens": 1, "return_logprobs": True}

pytestmark = pytest.mark.usefixtures("quick_compiles")

forward = jax.jit(fdjax.forward, static_argnums=0)


def load(path=CASE, **options):
    return fdjax.load(str(path), **{"compilation_cache": False, "progress": False} | options)


def fresh(lm, **options):
    """Another LM with the same weights. It shares only the compiled programs."""
    options = {"tokenizer": lm.tokenizer, "defaults": lm.defaults} | options
    options = {"max_len": lm.max_len, "max_batch": lm.max_batch} | options
    return fdjax.LM(lm.model, options.pop("params", lm.params), **options)


@pytest.fixture(scope="module")
def lm():
    """With at most four rows, short and long prompts share programs."""
    return load(dtype="float32", max_batch=4)


@pytest.fixture(scope="module")
def truth():
    """Greedy runs of transformers: (prompt, 64 tokens) for prompts of 1, 7, 23, 60, 200 tokens."""
    with np.load(CASE / "expected.npz") as e:
        return [(e[f"prompt_{i}"].tolist(), e[f"tokens_{i}"].tolist()) for i in range(5)]


# --- prompts


def test_one_prompt_or_many_as_text_or_ids(lm, truth):
    ids, tokens = truth[1]
    # All forms of a prompt give the same tokens.
    for prompt in (
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint16),
        [ids],
        np.array([ids]),
    ):
        result = lm.generate(prompt, max_new_tokens=5, **GREEDY)
        assert result.tokens == [tokens[:5]]
    text = lm.generate(TEXT, max_new_tokens=5, **GREEDY)
    assert text.tokens == lm.generate(lm.tokenizer.encode(TEXT), max_new_tokens=5, **GREEDY).tokens
    assert text.text == text.texts[0] == lm.tokenizer.decode(text.tokens[0])


@pytest.mark.slow
def test_result(lm, truth):
    prompts = [TEXT, truth[2][0], truth[0][0]]
    # Drawn from one token, so the result is greedy.
    options = FULL | {"top_k": 1, "min_new_tokens": [6, 1, 1]}
    result = lm.generate(prompts, max_new_tokens=6, temperature=1.0, **options)
    assert result.tokens[1:] == [truth[2][1][:6], truth[0][1][:6]]
    assert [len(tokens) for tokens in result.tokens] == [6, 6, 6]
    assert result.texts == [lm.tokenizer.decode(tokens) for tokens in result.tokens]
    assert result.finish_reasons == ["length"] * 3
    assert [len(row) for row in result.logprobs] == [6, 6, 6]
    assert all(logprob <= 0 for row in result.logprobs for logprob in row)
    assert result.stats.prompt_tokens == len(lm.tokenizer.encode(TEXT)) + 23 + 1
    assert result.stats.decode_tokens == 18
    assert result.stats.decode_steps == 5
    stats = result.stats
    assert 0 < stats.prefill_seconds < stats.seconds
    parts = stats.prefill_seconds + stats.decode_seconds + stats.compile_seconds
    assert stats.seconds == pytest.approx(parts)
    with pytest.raises(ValueError, match="one answer"):
        _ = result.text


@pytest.mark.slow
def test_a_result_is_a_sequence(lm, truth):
    prompts = [truth[i][0] for i in (1, 2, 3)]
    result = lm.generate(prompts, max_new_tokens=4, return_logprobs=1, **GREEDY)
    assert len(result) == 3
    for i, one in enumerate(result):
        assert (one.tokens, one.text) == (result.tokens[i], result.texts[i])
        assert (one.finish_reason, one.logprobs) == ("length", result.logprobs[i])
        assert one.top_logprobs == result.top_logprobs[i]
        assert result[i] == one and result[i - 3] == one
    assert result[1:] == [result[1], result[2]]
    with pytest.raises(IndexError):
        _ = result[3]
    bare = fresh(lm, tokenizer=None).generate(prompts, max_new_tokens=1, **GREEDY)
    assert bare[0] == fdjax.Generation(truth[1][1][:1], None, "length")


def test_no_logprobs_unless_asked_for(lm, truth):
    assert lm.generate(truth[0][0], max_new_tokens=2, **GREEDY).logprobs is None


def test_no_prompts(lm):
    result = lm.generate([])
    assert (result.tokens, result.texts, result.finish_reasons) == ([], [], [])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "prompt 0 is empty"),
        ([TEXT, []], "prompt 1 is empty"),
        ([[5, 320]], "prompt 0 has id 320, the vocabulary is 0..319"),
        ([[5], [-1]], "prompt 1 has id -1"),
        ([[1.0]], "id 1.0"),
        ([[True]], "id True"),
        ([np.array([2.0])], "id .*2.0"),
        ([np.array([5, -1], np.int8)], "prompt 0 has id -1"),
        ([np.array([2**63], np.uint64)], "prompt 0 has id 9223372036854775808"),
        ([TEXT, "a\ud800"], "prompt 1 is not valid text: surrogates not allowed at character 1"),
        ([[5] * 513], "prompt 0 has 513 tokens, the model's context is 512"),
        ([[5] * 512], "prompt 0 has 512 tokens, the model's context is 512"),
    ],
)
def test_prompts_that_are_refused(lm, prompt, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(prompt, max_new_tokens=1)


@pytest.mark.parametrize(
    "prompt",
    [[1, 2.5], [True, False], [None], ["a", None], None, 7, b"abc", {"a": 1}, {1, 2}, [b"abc"]],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(lm, prompt):
    for call in (lm.generate, lm.stream, lm.score):
        with pytest.raises(ValueError, match=r"^(generate|stream|score): "):
            call(prompt)


@pytest.mark.parametrize("prompts", [None, 7, b"abc", {"a": 1}, {1, 2}], ids=repr)
def test_what_are_no_prompts_is_refused_at_the_call(lm, prompts):
    with pytest.raises(ValueError, match=r"^generate: prompts must be text or token ids"):
        lm.generate_iter(prompts)


@pytest.mark.slow
def test_ids_may_come_from_an_iterator(lm, truth):
    ids, tokens = truth[1]
    stream = lm.stream(iter(ids), max_new_tokens=4, **GREEDY)
    list(stream)
    request = lm.submit(iter(ids), max_new_tokens=4, **GREEDY)
    for result in (stream.result, request.result(timeout=120)):
        assert result.tokens == [tokens[:4]]


@pytest.mark.slow
def test_ids_may_be_arrays(lm, truth):
    ids, tokens = truth[1]
    want = [tokens[:4]]
    for array in (np.asarray(ids, np.int16), jnp.asarray(ids)):
        given = (array, array[None], [array], list(array))
        for prompt in given if isinstance(array, np.ndarray) else given[:3]:
            assert lm.generate(prompt, max_new_tokens=4, **GREEDY).tokens == want
        assert list(lm.stream(array, max_new_tokens=4, **GREEDY))
        assert lm.score(array).logprobs == lm.score([ids]).logprobs
    array = np.asarray(ids, np.int32)
    own = token_array(array, lm.tokenizer, lm.config.vocab_size, "prompt")
    assert own.tolist() == ids and not np.shares_memory(own, array)


@pytest.mark.slow
def test_64_bit_types_change_nothing(lm, truth):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        used = fdjax.LM(lm.model, lm.params, lm.tokenizer, defaults=lm.defaults)
        result = used.generate(truth[1][0], max_new_tokens=4, **GREEDY)
    assert result.tokens == [truth[1][1][:4]]


def test_max_len(lm):
    with pytest.warns(UserWarning, match="max_len 1024 exceeds .* 512"):
        load(max_len=1024)
    with pytest.raises(ValueError, match="max_len must be positive, got 0"):
        load(max_len=0)
    for name in ("max_len", "max_batch", "memory_bytes"):
        for wrong, says in ((-1, "positive"), (1.5, "an integer"), ("8", "an integer")):
            with pytest.raises(ValueError, match=f"{name} must be {says}, got {wrong!r}"):
                fresh(lm, **{name: wrong})
    small = fresh(lm, max_len=100)
    with pytest.raises(ValueError, match=r"prompt 1 has 90 tokens .* by 11, .* lower max_new"):
        small.generate([[1], [5] * 90], max_new_tokens=11)
    assert small.engine.reusable is None  # nothing was allocated
    for options in ({}, {"max_new_tokens": 1}):
        with pytest.raises(ValueError, match=r"prompt 0 has 100 tokens .* max_len 100; shorten it"):
            small.generate([5] * 100, **options)


@pytest.mark.slow
def test_without_a_number_of_new_tokens_max_len_is_filled(lm):
    small = fresh(lm, max_len=100)
    assert len(small.generate([5] * 90, eos_token_id=None).tokens[0]) == 10
    config = fdjax.GenerationConfig(max_new_tokens=128)
    with pytest.raises(ValueError, match="may grow by 128"):
        small.generate([5] * 90, config)
    filled = small.generate([5] * 90, fdjax.GenerationConfig(eos_token_ids=None))
    assert len(filled.tokens[0]) == 10


@pytest.mark.slow
def test_the_defaults_as_configuration_ask_for_no_number_of_new_tokens(lm):
    small = fresh(lm, max_len=100)
    for config in (small.defaults, dataclasses.replace(small.defaults, do_sample=False)):
        assert len(small.generate([5] * 90, config, eos_token_id=None).tokens[0]) == 10
    more = dataclasses.replace(small.defaults, max_new_tokens=11)
    with pytest.raises(ValueError, match="may grow by 11"):
        small.generate([5] * 90, more)
    with pytest.raises(ValueError, match="may grow by 128"):
        small.generate([5] * 90, small.defaults, max_new_tokens=128)


@pytest.mark.slow
def test_containers_of_weights_are_copies(lm):
    other = fresh(lm)
    before = other.generate([5, 6, 7], max_new_tokens=4, **CHECKED).logprobs
    other.params["embed"] = jnp.zeros_like(lm.params["embed"])
    assert other.generate([5, 6, 7], max_new_tokens=4, **CHECKED).logprobs == before
    assert other.score([5, 6, 7]).perplexity == lm.score([5, 6, 7]).perplexity


def test_weights_of_another_model_are_refused(lm):
    other, params = fresh(lm), lm.params
    want = re.escape("embed must be float32[320, 64], got ")
    embed = params.pop("embed")
    for wrong, message in (
        (params, want + "nothing"),
        ({**params, "embed": embed[:5]}, want + re.escape("float32[5, 64]")),
        ({**params, "embed": np.asarray(embed, np.float16)}, want + re.escape("float16[320, 64]")),
        ({**params, "embed": embed, "head": embed}, r"head must be absent, got float32\["),
        ({**params, "embed": embed, "blocks": [*params["blocks"].values()]}, "nested dicts"),
        ([], "must be .*, got nothing"),
        ({}, "must be .*, got nothing"),
        ({"embed": "weights"}, "embed must be an array of numbers, got str"),
        ({"embed": {"a": object()}}, "embed.a must be an array of numbers, got object"),
    ):
        with pytest.raises(ValueError, match=f"^params: .*{message}"):
            other.params = wrong
        with pytest.raises(ValueError, match=message):
            fresh(lm, params=wrong)
    assert other.params.keys() == lm.params.keys()
    other.params = stand_ins(lm.params)
    other.params = jax.tree.map(np.asarray, lm.params)


@pytest.mark.slow
def test_what_an_interrupt_leaves_is_not_used_again(lm, monkeypatch):
    other = fresh(lm)
    other.generate([5, 6, 7], max_new_tokens=4, **CHECKED)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fdjax.engine.runner._chunk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.generate([5, 6, 7], max_new_tokens=4, **CHECKED)
    assert other.engine.reusable is None


@pytest.mark.slow
def test_generation_ends_at_the_context(lm, truth):
    prompt = (truth[4][0] * 3)[:508]
    result = lm.generate(prompt, max_new_tokens=64, **GREEDY)
    assert (len(result.tokens[0]), result.finish_reasons) == (4, ["length"])


# --- options


def test_eos_ends_a_row(lm, truth):
    prompt, tokens = truth[3]
    stop = tokens[6]
    assert stop not in tokens[:6]
    for eos in (stop, [319, stop], (stop,)):
        result = lm.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=eos)
        assert result.tokens == [tokens[:7]]
        assert result.finish_reasons == ["stop"]
    # The end token may be the last token allowed.
    last = lm.generate(prompt, max_new_tokens=7, do_sample=False, eos_token_id=stop)
    assert (last.tokens, last.finish_reasons) == ([tokens[:7]], ["stop"])
    result = lm.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=stop)
    assert (result.tokens, result.finish_reasons) == ([tokens[:6]], ["length"])


def test_ends_have_two_names_and_one_value(lm, truth):
    prompt, tokens = truth[3]
    options = dict(max_new_tokens=7, do_sample=False)
    config = fdjax.GenerationConfig(eos_token_ids=tokens[0], **options)
    assert lm.generate(prompt, config, eos_token_ids=None).tokens == [tokens[:1]]
    assert lm.generate(prompt, config, eos_token_id=None).tokens == [tokens[:7]]
    with pytest.raises(TypeError, match="eos_token_id and eos_token_ids are one option, got both"):
        lm.generate(prompt, eos_token_id=None, eos_token_ids=tokens[0])


def test_every_number_of_the_statistics_is_documented():
    documented = re.findall(r"^ +(\w+): ", Stats.__doc__, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(Stats)]


def test_a_row_may_end_with_its_first_token(lm, truth):
    prompt, tokens = truth[1]
    result = lm.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=tokens[0])
    assert (result.tokens, result.finish_reasons) == ([tokens[:1]], ["stop"])


@pytest.mark.parametrize("count", [0, 1, 2, 32, 33, 34])
def test_max_new_tokens(lm, truth, count):
    """Numbers of tokens around the end of a chunk of decode steps."""
    result = lm.generate(truth[3][0], max_new_tokens=count, **GREEDY)
    assert result.tokens == [truth[3][1][:count]]
    assert result.finish_reasons == ["length"]


@pytest.mark.slow
def test_min_new_tokens(lm, truth):
    prompt, tokens = truth[1]
    options = {"max_new_tokens": 8, "temperature": 1.0, "eos_token_id": tokens[:2]}
    (held,) = lm.generate(prompt, **options, **FULL | {"top_k": 1, "min_new_tokens": 4}).tokens
    assert not set(held[:4]) & set(tokens[:2])
    assert len(held) > 4
    (held,) = lm.generate(prompt, **options, **FULL | {"top_k": 1, "min_new_tokens": 1}).tokens
    assert held[0] not in tokens[:2]
    # The first token now differs, and so does everything after it.
    assert len(held) == 8 or held[-1] in tokens[:2]


@pytest.mark.slow
def test_a_list_is_one_value_per_prompt(lm, truth):
    prompts = [truth[i][0] for i in (1, 2, 1)]
    result = lm.generate(
        prompts,
        temperature=[0.0, 1.0, 1.0],
        seed=[1, 2, 3],
        max_new_tokens=[8, 5, 0],
        **FULL | {"min_new_tokens": [0, 1, 0], "top_k": [0, 1, 5]},
    )
    # Row 1 draws from a single token.
    assert result.tokens == [truth[1][1][:8], truth[2][1][:5], []]
    assert result.finish_reasons == ["length"] * 3
    assert [len(row) for row in result.logprobs] == [8, 5, 0]


@pytest.mark.slow
def test_pairs_are_one_bias_for_all_prompts_or_one_for_each(lm, truth):
    prompt, (first, *_) = truth[1]

    def firsts(bias, count=2):
        result = lm.generate([prompt] * count, max_new_tokens=1, logit_bias=bias, **GREEDY)
        return [tokens[0] for tokens in result.tokens]

    to_5 = [(5, 100.0), (first, -100.0)]
    for bias in (to_5, tuple(to_5), dict(to_5), [to_5, to_5]):
        assert firsts(bias) == [5, 5]
    for bias in ([to_5, None], [to_5, []], [dict(to_5), {}], (tuple(to_5), None)):
        assert firsts(bias) == [5, first]
    assert firsts([]) == [first, first]
    for bias in ([(5, 100.0)], [[5, 100.0]]):
        assert firsts(bias, count=1) == [5]
    with pytest.raises(ValueError, match=r"logit_bias must have one value per prompt \(2\), got 1"):
        firsts([{5: 1.0}])
    with pytest.raises(ValueError, match="logit_bias"):
        firsts([5, 1.0])


def test_a_list_of_another_length_is_refused(lm):
    with pytest.raises(
        ValueError, match=r"temperature must have one value per prompt \(2\), got 3"
    ):
        lm.generate([[1], [2]], temperature=[1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ("max_tokens", "use max_new_tokens"),
        ("max_length", "use max_new_tokens"),
        ("stop", "use stop_strings"),
        ("logprobs", "use return_logprobs"),
        ("n", "use num_return_sequences"),
        ("generation_config", "pass the configuration as `config`"),
        ("streamer", "use `lm.stream`, which yields the text"),
        ("beam_size", "use num_beams"),
        ("temprature", "did you mean temperature?"),
        ("nonsense", "help(fdjax.GenerationConfig) has the options"),
    ],
)
def test_an_unknown_option_says_what_to_use(lm, unknown, hint):
    message = f"generate: unknown option '{unknown}'; {hint}"
    for call in (lm.generate, lm.stream):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            call([1], **{unknown: 3})


def test_an_option_out_of_range(lm):
    with pytest.raises(ValueError, match="top_p"):
        lm.generate([1], top_p=1.5)


def test_defaults_are_those_of_the_checkpoint(lm):
    assert (
        lm.defaults
        == fdjax.GenerationConfig(
            do_sample=True, temperature=0.6, top_p=0.9, eos_token_ids=(316, 319)
        ).filled()
    )


@pytest.mark.parametrize("defaults", [None, {"temperature": 1.0}])
def test_defaults_must_be_a_configuration(lm, defaults):
    used = fresh(lm)
    with pytest.raises(TypeError, match="defaults: must be a GenerationConfig, got "):
        used.defaults = defaults
    assert used.defaults == lm.defaults


@pytest.mark.slow
def test_what_a_configuration_does_not_give_is_the_checkpoints(lm, truth):
    """As in transformers. `fdjax.generate` has no checkpoint whose defaults it could use."""
    prompt, tokens = truth[3]
    defaults = fdjax.GenerationConfig(eos_token_ids=tokens[6], repetition_penalty=1.0)
    ending = fresh(lm, defaults=defaults)
    short = fdjax.GenerationConfig(max_new_tokens=20)
    changed = dataclasses.replace(fdjax.GenerationConfig(), max_new_tokens=20)
    for config in (short, changed, pickle.loads(pickle.dumps(short)), copy.deepcopy(short)):
        assert ending.generate(prompt, config).tokens == [tokens[:7]]
    stream = ending.stream(prompt, short)
    assert "".join(stream) and stream.result.tokens == [tokens[:7]]
    for nothing in (None, ()):
        disabled = dataclasses.replace(short, eos_token_ids=nothing)
        assert ending.generate(prompt, disabled).tokens == [tokens[:20]]
    # A value that equals the option's own default is a value, too.
    sampling = fresh(lm, defaults=dataclasses.replace(defaults, do_sample=True, temperature=1e3))
    greedy = dataclasses.replace(short, do_sample=False)
    assert sampling.generate(prompt, greedy).tokens == [tokens[:7]]
    assert sampling.generate(prompt, short, seed=0).tokens != [tokens[:7]]
    config = fdjax.GenerationConfig(max_new_tokens=8)
    generate = jax.jit(fdjax.generate, static_argnums=(0, 3))
    ours = generate(lm.model, lm.params, np.array([prompt]), config)
    assert ours.tolist() == [tokens[:8]]


# --- sampling


@pytest.mark.slow
def test_a_seed_gives_the_same_samples_alone_in_a_batch_and_streamed(lm, truth):
    options = FULL | {"temperature": 1.2, "max_new_tokens": 12}
    prompts = [TEXT, *(truth[i][0] for i in (2, 1))]
    seeds = [5, 6, 2**32 - 1]
    batch = lm.generate(prompts, seed=seeds, **options)
    for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = lm.generate(prompt, seed=seed, **options)
        assert alone.tokens[0] == batch.tokens[i]
        assert alone.logprobs[0] == batch.logprobs[i]
    assert "".join(lm.stream(TEXT, seed=5, **options)) == batch.texts[0]
    other = lm.generate(prompts, seed=[1, 2, 3], **options)
    assert other.tokens != batch.tokens


@pytest.mark.slow
def test_without_a_seed_every_row_of_every_call_differs(lm, truth):
    # The temperature is so high that no two samples are equal by chance.
    options = FULL | {"temperature": 1e3, "min_new_tokens": 12, "max_new_tokens": 12}
    calls = [lm.generate([truth[1][0]] * 3, **options).tokens for _ in range(2)]
    assert len({tuple(tokens) for tokens in itertools.chain(*calls)}) == 6
    seeded = lm.generate([truth[1][0]] * 2, seed=3, **options).tokens
    assert seeded[0] == seeded[1]


@pytest.mark.slow
def test_every_step_draws_anew(lm, truth):
    # The temperature is so high that all tokens are equally likely. A repeated draw would repeat
    # its token.
    options = FULL | {"top_k": 319, "top_p": 0.999, "temperature": 1e3, "min_new_tokens": 20}
    (tokens,) = lm.generate(truth[1][0], seed=3, max_new_tokens=20, **options).tokens
    assert len(set(tokens)) > 12


# --- streams


def test_a_stream_is_generate(lm):
    result = lm.generate(TEXT, max_new_tokens=50, **GREEDY)
    pieces = list(lm.stream(TEXT, max_new_tokens=50, **GREEDY))
    assert "".join(pieces) == result.text
    assert len(pieces) > 5
    assert list(lm.stream(TEXT, max_new_tokens=0, **GREEDY)) == []


def test_a_streams_statistics_leave_out_the_time_of_its_reader(lm, monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("fdjax.engine.results.time", clock)
    stream = lm.stream(TEXT, max_new_tokens=30, **GREEDY)
    note, chunks = stream._timer.chunk, []

    def slow(chunk):
        chunks.append(chunk)
        clock.now += 0.25
        note(chunk)

    monkeypatch.setattr(stream._timer, "chunk", slow)
    clock.now += 1000
    for _ in stream:
        clock.now += 100
    assert len(chunks) > 5
    assert stream.stats.seconds == pytest.approx(0.25 * len(chunks))


def test_leaving_a_stream_early(lm, truth):
    for _ in range(3):
        stream = lm.stream(truth[4][0], max_new_tokens=60, **GREEDY)
        next(stream)
        stream.close()
    assert lm.generate(truth[1][0], max_new_tokens=9, **GREEDY).tokens == [truth[1][1][:9]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "left = lm.stream('Once'); next(left)",
        "left = lm.generate_iter(['Once'] * 2, max_new_tokens=[1, 400]); next(left)",
        # Compiled, so that it runs at the end.
        "lm.generate('Once'); lm.submit('Once')",
        "lm.generate('Once'); "
        "threading.Thread(target=lm.generate, args=('Once',), daemon=True).start(); "
        "time.sleep(0.05)",
    ],
)
def test_what_is_left_open_ends_with_the_process(use):
    code = (
        "import threading, time, fdjax; lm = fdjax.load('tiny', compilation_cache=False); "
        f"lm.defaults = fdjax.GenerationConfig(max_new_tokens=400, eos_token_ids=()); {use}; "
        "print('end')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_loading_needs_no_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert fdjax.load("tiny", compilation_cache=False).tokenizer is not None


@pytest.mark.slow
def test_interleaved_streams(lm, truth):
    prompts = [truth[i][0] for i in (1, 3)]
    whole = [lm.generate(p, max_new_tokens=30, **GREEDY).text for p in prompts]
    streams = [lm.stream(p, max_new_tokens=30, **GREEDY) for p in prompts]
    pieces = zip(*itertools.zip_longest(*streams, fillvalue=""), strict=True)
    assert ["".join(p) for p in pieces] == whole


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([999], {}),
        ([TEXT, TEXT], {}),
        ([1.5], {}),
        (TEXT, {"top_p": 2.0}),
        (TEXT, {"temperature": [1.0, 2.0]}),
        ([5] * 600, {}),
    ],
)
def test_a_stream_refuses_at_the_call(lm, prompt, options):
    with pytest.raises(ValueError):
        lm.stream(prompt, **options)


def test_what_is_no_configuration_or_plan_is_refused(lm):
    with pytest.raises(TypeError, match="config must be a GenerationConfig"):
        lm.generate(TEXT, {"top_k": 3})
    with pytest.raises(TypeError, match="model must be a folder or a hub id, got 7"):
        fdjax.load(7)
    with pytest.raises(TypeError, match="plan must be a Plan"):
        load(plan="xla")
    for name in ("prefix_cache", "calibration", "compilation_cache", "progress"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
            fdjax.load("tiny", **{name: "no"})


@pytest.mark.parametrize(
    "returns", [lambda s: s[:, :5], lambda s: jnp.concatenate([s, s], 1), lambda s: None]
)
def test_a_logits_processor_that_returns_something_else(lm, truth, returns):
    def process(ids, lengths, scores):
        return returns(scores)

    with pytest.raises(ValueError, match=r"must return scores \[B,V\] = \[1, 320\], got .*process"):
        fresh(lm).generate(truth[1][0], max_new_tokens=4, logits_processors=process, **GREEDY)


@pytest.mark.parametrize("dtype", ["complex64", "bool"])
def test_a_logits_processor_that_returns_no_real_numbers(lm, truth, dtype):
    def process(ids, lengths, scores):
        return scores.astype(dtype)

    message = f"a logits processor must return real numbers, got {dtype} of .*process"
    with pytest.raises(ValueError, match=message):
        fresh(lm).generate(truth[1][0], max_new_tokens=4, logits_processors=process, **GREEDY)


@pytest.mark.parametrize("what", ["stopping_criteria", "logits_processors"])
@pytest.mark.parametrize("error", [StopIteration, GeneratorExit, SystemExit, CancelledError])
def test_a_function_of_the_caller_does_not_end_our_loop(lm, truth, what, error):
    def raises(*args):
        raise error

    options = {"max_new_tokens": 4, what: raises} | GREEDY
    message = f"^generate: (stopping criterion|logits processor) .*raises.* raised {error.__name__}"
    used = fresh(lm)
    for call in (used.generate, lambda *args, **options: list(used.stream(*args, **options))):
        with pytest.raises(RuntimeError, match=message):
            call(truth[1][0], **options)
    assert used.generate(truth[1][0], max_new_tokens=4, **GREEDY).tokens == [truth[1][1][:4]]


class EndsLoops:
    def __bool__(self):
        raise StopIteration


@pytest.mark.parametrize("result", [np.array([1, 2]), EndsLoops()], ids=type)
def test_a_stopping_criterion_that_is_neither_true_nor_false(lm, truth, result):
    def unclear(tokens):
        return result

    message = "^generate: stopping criterion .*unclear.* must return True or False, got "
    with pytest.raises(ValueError, match=message + type(result).__name__):
        lm.generate(truth[1][0], max_new_tokens=4, stopping_criteria=unclear, **GREEDY)


@pytest.mark.parametrize("what", ["stopping_criteria", "logits_processors"])
@pytest.mark.parametrize(
    "how", ["generate", "stream", pytest.param("submit", marks=pytest.mark.slow)]
)
def test_a_function_of_the_caller_must_not_generate(lm, truth, what, how):
    used = fresh(lm)

    def asks(*args):
        if how == "generate":
            used.generate(truth[1][0], max_new_tokens=1, **GREEDY)
        elif how == "stream":
            list(used.stream(truth[1][0], max_new_tokens=1, **GREEDY))
        else:
            used.submit(truth[1][0], max_new_tokens=1, **GREEDY).result(timeout=60)

    with pytest.raises(RuntimeError, match="must not generate with the model that calls it"):
        used.generate(truth[1][0], max_new_tokens=4, **GREEDY, **{what: asks})
    assert used.generate(truth[1][0], max_new_tokens=4, **GREEDY).tokens == [truth[1][1][:4]]


@pytest.mark.slow
def test_a_logits_processor_may_be_to_blame(lm, truth):
    def spoil(ids, lengths, scores):
        return scores * jnp.nan

    with pytest.raises(FloatingPointError, match="a logits processor makes them so, or the weig"):
        fresh(lm).generate(truth[1][0], max_new_tokens=4, logits_processors=spoil, **GREEDY)


# --- no tokenizer


@pytest.mark.parametrize("how", ["no file", "none given", "none assigned"])
def test_without_a_tokenizer_ids_work(lm, truth, how):
    bare = load(FIXTURES / "llama_bias").tokenizer if how == "no file" else None
    lm = fresh(lm, tokenizer=lm.tokenizer if how == "none assigned" else bare)
    if how == "none assigned":
        lm.tokenizer = None
    result = lm.generate(truth[1][0], max_new_tokens=5, **GREEDY)
    assert (result.tokens, result.texts) == ([truth[1][1][:5]], None)
    with pytest.raises(ValueError, match="tokenizer"):
        _ = result.text
    for refused in (lm.generate, lm.stream):
        with pytest.raises(MissingTokenizerError, match="token"):
            refused(TEXT)
    with pytest.raises(MissingTokenizerError, match="token"):
        lm.stream(truth[1][0])


# --- one LM, many calls


def test_what_a_call_leaves_behind_reaches_no_other(lm, truth):
    used = fresh(lm)
    used.generate(truth[4][0], max_new_tokens=64, **GREEDY)
    result = used.generate(truth[1][0], max_new_tokens=64, **GREEDY)
    again = fresh(lm).generate(truth[1][0], max_new_tokens=64, **GREEDY)
    assert result.tokens == again.tokens == [truth[1][1]]


def test_a_second_call_compiles_nothing(lm, truth):
    used = fresh(lm)
    used.generate(truth[1][0], max_new_tokens=40, **GREEDY)
    with compiled_programs() as names:
        used.generate(truth[1][0], max_new_tokens=40, **GREEDY)
    assert not names


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": [3, 4]}, "max_new_tokens"),
        ({"temperature": np.ones(2)}, "temperature"),
        ({"eos_token_id": [[3], [4]]}, "eos_token_ids"),
    ],
)
def test_a_warmup_for_a_server_takes_one_value_for_all_prompts(lm, options, name):
    message = f"warmup: {name} must have one value for all prompts if smaller is True"
    with pytest.raises(ValueError, match=message):
        lm.warmup(smaller=True, batch=2, **options)


@pytest.mark.parametrize("prompt_tokens", [100, 300, 500])
def test_a_warmup_has_every_size_of_call_that_a_shorter_prompt_has(lm, prompt_tokens):
    def sizes(length):
        waiting = PackedPrompts(1, on_cpu=lm.engine.short_calls)
        waiting.add({0: [0] * length}, cached={0: 0}, generated={0: 0})
        found = set()
        while waiting:
            found.add(len(waiting.take(math.inf).tokens))
        return found

    batches = lm.engine.batches_up_to(1, prompt_tokens)
    warm = {size for (length,) in batches for size in sizes(length)}
    assert warm == {size for n in range(1, prompt_tokens + 1) for size in sizes(n)}


def test_a_warmup_runs_no_more_rows_than_compile_something(lm, monkeypatch):
    class Ran(Exception):
        pass

    def ran(requests, *_):
        raise Ran(len(requests))

    monkeypatch.setattr(lm, "_run", ran)
    with pytest.raises(Ran, match=f"^{4 * lm.engine.most_rows}$"):
        lm.warmup(batch=10**30)


@pytest.mark.slow
def test_after_a_warmup_for_a_server_requests_come_and_go_and_compile_nothing(lm, monkeypatch):
    limits = {"max_len": 512, "max_batch": 3}
    used = fdjax.LM(dataclasses.replace(lm.model), lm.params, lm.tokenizer, **limits)
    pages = lm.engine._most_pages(512)  # as many as in other tests, because programs depend on them
    used.engine._most_pages = lambda slots: pages
    options = {"eos_token_id": None, "max_new_tokens": 6}
    sizes = {"batch": 3, "prompt_tokens": 500, "streamed": True, "smaller": True}
    frozen, grown, chunks = gc.get_freeze_count(), [], []
    reshape, decode = runner.Session.reshape, runner.Session.decode

    def growing(session, rows, shape):
        grown.append((len(rows), shape.rows))
        reshape(session, rows, shape)

    def decoding(session, *steps):
        result = decode(session, *steps)
        chunks.append((len(names), session._shape.rows))
        return result

    with monkeypatch.context() as patch, compiled_programs() as names:
        patch.setattr(runner.Session, "reshape", growing)
        patch.setattr(runner.Session, "decode", decoding)
        assert used.warmup(**sizes, **options) > 0
    assert gc.get_freeze_count() > frozen
    assert grown[:2] == grown[-2:] == [(1, 2), (2, 3)]
    # XLA drops CUDA graphs when it loads a program, runs the first chunk without, then makes them.
    last = collections.Counter(rows for loaded, rows in chunks if loaded == len(names))
    assert all(last[rows] > 1 for rows in (1, 2, 3)), last
    before = used.program_counts()
    rng = np.random.default_rng(3)
    running = []
    with compiled_programs() as names:
        for length in [300, *rng.integers(1, 500, 30)]:
            ids = rng.integers(3, used.config.vocab_size, length).tolist()
            running.append(used.submit(ids, **options))
            next(running[int(rng.integers(len(running)))], None)
        assert sum(one.result().stats.compile_seconds for one in running) == 0
        # They begin with pages of earlier ones: one alone, then several at once.
        cached = used.submit(ids[:1] * 300, **options).result().stats.cached_tokens
        running = [used.submit([*ids[:1] * 300, i], **options) for i in [0, *range(1, 5)]]
        cached += sum(one.result().stats.cached_tokens for one in running)
        assert cached >= 5 * 256
    assert not names
    assert used.program_counts() == before
    assert used.warmup(**sizes, **options) == 0


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_after_a_warmup_the_call_compiles_nothing(lm, truth, streamed):
    options = {"defaults": lm.defaults, "max_batch": 4}  # those of other tests
    used = fdjax.LM(dataclasses.replace(lm.model), lm.params, **options)  # no programs
    prompt, options = truth[2][0], FULL | {"max_new_tokens": 40, "temperature": 0.8}
    batch = 1 if streamed else 3
    sizes = {"batch": batch, "prompt_tokens": len(prompt), "streamed": streamed}
    assert used.warmup(**sizes, **options) > 0
    assert set(used.program_counts().values()) == {1}
    assert used.warmup(fdjax.GenerationConfig(**options, do_sample=True), **sizes) == 0
    if streamed:
        used.tokenizer = lm.tokenizer
        assert list(used.stream(prompt, **options))
    else:
        others = [prompt[::-1], prompt[1:]]
        assert used.generate([prompt, *others], **options).stats.compile_seconds == 0
    assert set(used.program_counts().values()) == {1}
    most = used.engine.max_len or used.config.max_position_embeddings
    for sizes, message in (
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"prompt_tokens": most}, f"prompt_tokens must be less than {most}, got {most}"),
    ):
        with pytest.raises(ValueError, match=f"^warmup: {message}"):
            used.warmup(**sizes)


@pytest.mark.slow
def test_a_model_runs_where_it_was_loaded(two_layers):
    code = """
import sys
import jax, fdjax
first, second = jax.devices()
for device in (second, first, None):
    lm = fdjax.load(sys.argv[1], device=device, compilation_cache=False)
    print(lm.generate("What is 7 + 5?", max_new_tokens=9).tokens, end=" ")
    used = lm.params["embed"].devices() | lm.engine.reusable.state.ids.devices()
    assert used == {device or first}, used
    print(lm.score("hi").perplexity)
"""
    command = [sys.executable, "-c", code, two_layers]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    with pytest.raises(TypeError, match=r"device must be one of jax\.devices\(\), got 'cpu'"):
        load(device="cpu")


@pytest.mark.slow
def test_blocks_that_are_alike_are_traced_once(lm, monkeypatch):
    """Tracing and lowering each take a third of a first call with cached programs."""
    traced = []

    def listening(block, *args):
        traced.append(block)
        return call(block, *args)

    call = DecoderBlock.__call__
    monkeypatch.setattr(DecoderBlock, "__call__", listening)
    layers = lm.model.config.with_attention(lm.model.config.attention[:1] * 3)
    model = describe(layers, dtype="float32")
    other = fdjax.LM(model, random_params(model), max_len=64)
    other.generate([1, 2, 3], max_new_tokens=9, **GREEDY)
    # The last block of a prompt differs, because one of its tokens is wanted.
    assert len(traced) == 3


@pytest.mark.slow
def test_what_the_host_reads_lies_in_its_memory(lm, truth, monkeypatch):
    """A copy after the program would delay the first token by 0.6 ms on a GPU."""
    kinds = set()

    def listening(results):
        arrays = (a for a in jax.tree.leaves(results) if isinstance(a, jax.Array))
        kinds.update(array.sharding.memory_kind for array in arrays)
        return numpy_of(results)

    numpy_of = runner._numpy
    monkeypatch.setattr(runner, "_numpy", listening)
    lm.generate(truth[1][0], max_new_tokens=9, return_logprobs=True, **GREEDY)
    assert kinds == {"pinned_host"}


@pytest.mark.slow
def test_a_row_of_an_earlier_call_that_is_not_used_again(lm, truth):
    used = fresh(lm)
    prompts = [prompt for prompt, _ in truth[:4]]
    used.generate(prompts, max_new_tokens=20, **GREEDY)
    state = used.engine.reusable.state
    result = used.generate(prompts[1:], max_new_tokens=9, **GREEDY)
    assert state.ids.is_deleted()  # it is the same state that continued
    assert result.tokens == [tokens[:9] for _, tokens in truth[1:4]]
    assert used.engine.reusable.state.steps.tolist() == [9, 9, 9, 0]


@pytest.mark.slow
def test_a_logits_processor_sees_no_token_of_an_earlier_call(lm, truth):
    def lowest_if_any(ids, lengths, scores):
        beyond = jnp.arange(ids.shape[1])[None] >= lengths[:, None]
        return jnp.where(jnp.any(beyond & (ids != 0)), -scores, scores)

    used = fresh(lm)
    used.generate(max((p for p, _ in truth), key=len), max_new_tokens=64, **GREEDY)
    options = dict(max_new_tokens=9, logits_processors=lowest_if_any, **GREEDY)
    assert used.generate(truth[1][0], **options).tokens == [truth[1][1][:9]]


def test_after_an_exception_inside_a_call_the_lm_still_works(lm, truth):
    class Fails:
        def __init__(self, tokenizer):
            self._tokenizer, self._calls = tokenizer, 0

        def decode(self, ids):
            self._calls += 1
            if self._calls == 4:
                raise RuntimeError("in the middle")
            return self._tokenizer.decode(ids)

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

    broken = fresh(lm, tokenizer=Fails(lm.tokenizer))
    with pytest.raises(RuntimeError, match="in the middle"):
        list(broken.stream(truth[2][0], max_new_tokens=60, **GREEDY))
    assert broken.generate(truth[1][0], max_new_tokens=9, **GREEDY).tokens == [truth[1][1][:9]]


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(33, marks=pytest.mark.soak)])
def test_a_batch_of_any_size_is_its_prompts_alone(lm, truth, count):
    if not lm.model.plan.batch_invariant:
        pytest.skip("rows of a batch are bitwise those alone only on CPU")
    prompts = [truth[i % 5][0][-(1 + 3 * i) :] for i in range(count)]
    lm = fresh(lm, max_batch=None)
    batch = lm.generate(prompts, max_new_tokens=4, **GREEDY)
    for i in range(0, count, 5):
        assert batch.tokens[i] == lm.generate(prompts[i], max_new_tokens=4, **GREEDY).tokens[0]


# --- long prompts


@pytest.fixture(scope="module")
def long_lm():
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    model = fdjax.describe(fdjax.parse_config(config), dtype="float32")
    # Ten times the usual deviation. With less, attention hardly affects the next token.
    params = jax.tree.map(lambda w: w if w.ndim == 1 else 10 * w, random_params(model))
    return fdjax.LM(model, params, max_len=2176)


# Small errors do not change the likeliest token, but its log-probability.
CHECKED = GREEDY | {"return_logprobs": True}


def check_run(lm, prompt, tokens, logprobs):
    """Compare a run with one pass over its whole sequence."""
    sequence = [*prompt, *tokens[:-1]]
    ids = np.zeros((1, 2176), np.int32)
    ids[0, : len(sequence)] = sequence
    logits = forward(lm.model, lm.params, ids, np.array([len(sequence)], np.int32))
    logits = np.asarray(logits[0, len(prompt) - 1 : len(sequence)])
    assert tokens == logits.argmax(-1).tolist(), f"{len(prompt)} tokens"
    likeliest = logits.max(-1) - np.logaddexp.reduce(logits, axis=-1)
    np.testing.assert_allclose(logprobs, likeliest, atol=1e-4, err_msg=f"{len(prompt)} tokens")


@pytest.mark.slow
def test_prompts_across_chunk_boundaries(long_lm):
    sequence = np.random.default_rng(0).integers(0, 256, 2049).tolist()
    for length in (127, 128, 129, 512, 513, 640, 2049):
        prompt = sequence[-length:]
        result = long_lm.generate(prompt, max_new_tokens=6, **CHECKED)
        check_run(long_lm, prompt, result.tokens[0], result.logprobs[0])


@pytest.mark.soak
def test_a_batch_across_chunk_boundaries(long_lm):
    """The prompts are so long that a prefill call takes half of the rows."""
    sequence = np.random.default_rng(3).integers(0, 256, 2049).tolist()
    prompts = [sequence[-length:] for length in (640, 2049, 1, 513, 129)]
    result = long_lm.generate(prompts, max_new_tokens=6, **CHECKED)
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        check_run(long_lm, prompt, tokens, logprobs)


@contextlib.contextmanager
def compiled_programs():
    """Names of the programs that XLA compiles in this block."""
    names = []

    def listen(event, seconds, **details):
        if event.endswith("backend_compile_duration"):
            names.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_prompts_of_any_length_share_a_few_programs(long_lm):
    lengths = np.random.default_rng(1).integers(1, 2049, 50).tolist()
    for length in CHUNKS:
        long_lm.generate([7] * length, max_new_tokens=2, **CHECKED)
    with compiled_programs() as names:
        for length in lengths:
            long_lm.generate([7] * length, max_new_tokens=2, **CHECKED)
    assert names == []


@pytest.mark.slow
@pytest.mark.parametrize("order", [pytest.param("drawn", marks=pytest.mark.soak), "ascending"])
def test_without_max_len_a_few_programs_are_enough_too(long_lm, order):
    # Lengths around every size that a program may be compiled for.
    lengths = [n + i for n in (*CHUNKS, 256, 2045) for i in (0, 1)]
    np.random.default_rng(1).shuffle(lengths)
    if order == "ascending":
        lengths.sort()
    lm = fdjax.LM(dataclasses.replace(long_lm.model), long_lm.params)  # without programs
    with compiled_programs() as names:
        for length in lengths:
            lm.generate([7] * length, max_new_tokens=2, **CHECKED)
    # 4 programs for prompts, 1 for first tokens, 3 for decode steps.
    assert 0 < names.count("jit(run)") <= 4 + 1 + 3


@pytest.mark.slow
def test_the_cache_can_be_filled(long_lm):
    prompt = np.random.default_rng(2).integers(0, 256, 2049).tolist()
    result = long_lm.generate(prompt, max_new_tokens=2176 - 2049, **CHECKED)
    check_run(long_lm, prompt, result.tokens[0], result.logprobs[0])
    with pytest.raises(ValueError, match="may grow by 128, more than max_len 2176"):
        long_lm.generate(prompt, max_new_tokens=128, **CHECKED)


# --- damaged weights


def with_damage(lm, token):
    """The same weights, except for the embedding of one token."""
    embed = lm.params["embed"].at[token].set(np.nan)
    return fresh(lm, params=lm.params | {"embed": embed})


@pytest.mark.slow
def test_weights_that_are_not_finite(long_lm):
    prompt = [3, 1, 4, 1, 5]
    (tokens,) = long_lm.generate(prompt, max_new_tokens=70, **CHECKED).tokens
    sequence = prompt + tokens
    # When this token is looked up, the next logits are not finite.
    steps = [i + 1 for i in range(69) if tokens[i] not in sequence[: len(prompt) + i]]
    assert steps[-1] > 32  # in a later chunk of decode steps
    for step in (0, steps[0], steps[-1]):
        damaged = with_damage(long_lm, sequence[len(prompt) + step - 1])
        message = f"prompt 0: logits are not finite at token {step};"
        with pytest.raises(FloatingPointError, match=message):
            damaged.generate(prompt, max_new_tokens=70, **CHECKED)
        # Tokens before the damage are right, and nothing remains afterwards.
        again = damaged.generate(prompt, max_new_tokens=step, **CHECKED)
        assert again.tokens == [tokens[:step]]


@pytest.mark.slow
def test_a_cache_with_values_that_are_not_finite_is_dropped(long_lm):
    """Also if the row ended, for any reason, before its damaged logits were read."""
    prompt = [3, 1, 4, 1, 5]
    (tokens,) = long_lm.generate(prompt, max_new_tokens=70, **CHECKED).tokens
    first = next(i for i in range(36, 64) if tokens[i] not in prompt + tokens[:i])
    damaged = with_damage(long_lm, tokens[first])
    damaged.engine.paged = False  # pages need not be clean

    def enough(chosen):
        return len(chosen) > 20

    ended = damaged.generate(prompt, max_new_tokens=70, stopping_criteria=enough, **CHECKED)
    assert ended.tokens == [tokens[:21]]
    kept = damaged.engine.reusable.state
    assert not all(jnp.isfinite(k).all() for k, _ in kept.kv)
    damaged.generate(prompt, max_new_tokens=2, **CHECKED)
    assert all(jnp.isfinite(k).all() for k, _ in damaged.engine.reusable.state.kv)


@pytest.mark.slow
def test_damage_is_told_by_prompt(long_lm):
    with pytest.raises(FloatingPointError, match="prompt 2: logits are not finite at token 0"):
        with_damage(long_lm, 9).generate([[1], [2], [3, 9], [4]], max_new_tokens=3, **CHECKED)


# --- what `load` does to the process


def test_a_checkpoint_loaded_anew_is_not_compiled_anew(lm):
    options = {"max_new_tokens": 3, "do_sample": False}
    tokens = lm.generate([5, 6, 7], **options).tokens
    again = load(dtype="float32", max_batch=4)
    result = again.generate([5, 6, 7], **options)
    assert result.tokens == tokens
    assert result.stats.compile_seconds == 0
    assert not any(load(dtype="bfloat16").program_counts().values())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))]
)
def test_copies_generate_without_compiling(lm, truth, copied):
    result = lm.generate(truth[0][0], max_new_tokens=3, **GREEDY)
    other = copied(lm)
    assert other.model is lm.model
    again = other.generate(truth[0][0], max_new_tokens=3, **GREEDY)
    assert again.tokens == result.tokens
    assert again.stats.compile_seconds == 0
    assert pickle.loads(pickle.dumps(result)) == result


def test_other_weights_may_be_assigned(lm):
    other = fresh(lm)
    before = other.generate([5, 6, 7], max_new_tokens=8, **CHECKED)
    score = other.score([5, 6, 7]).perplexity
    other.params = {**lm.params, "embed": -np.asarray(lm.params["embed"])}
    after = other.generate([5, 6, 7], max_new_tokens=8, **CHECKED)
    assert after.logprobs != before.logprobs and other.score([5, 6, 7]).perplexity != score
    assert after.stats.compile_seconds == 0
    other.params = lm.params
    assert other.generate([5, 6, 7], max_new_tokens=8, **CHECKED).logprobs == before.logprobs


@pytest.mark.parametrize("reusable", [False, True])
def test_a_call_in_a_traced_function_is_refused_and_leaves_nothing_behind(lm, reusable):
    other = fresh(lm)
    want = lm.generate([5, 6, 7], max_new_tokens=3, **CHECKED).tokens
    if reusable:
        other.generate([5, 6, 7], max_new_tokens=3, **CHECKED)

    @jax.jit
    def traced(x):
        return x + other.generate([5, 6, 7], max_new_tokens=3, **CHECKED).tokens[0][0]

    with pytest.raises(RuntimeError, match=r"use fdjax\.generate there"):
        traced(1)
    assert other.generate([5, 6, 7], max_new_tokens=3, **CHECKED).tokens == want


@pytest.mark.parametrize("weights", ["traced", "own"])
def test_a_traced_function_cannot_assign_weights(lm, weights):
    other = fresh(lm)
    want = lm.generate([5, 6, 7], max_new_tokens=3, **CHECKED).tokens

    @jax.jit
    def assign(params):
        other.params = params if weights == "traced" else lm.params

    with pytest.raises(RuntimeError, match=r"^params: weights cannot be assigned inside a JAX"):
        assign(lm.params)
    assert other.generate([5, 6, 7], max_new_tokens=3, **CHECKED).tokens == want


def test_weights_are_arrays_and_not_those_of_a_gradient(lm):
    def assign(scale):
        fresh(lm).params = jax.tree.map(lambda leaf: scale * leaf, lm.params)
        return scale

    with pytest.raises(ValueError, match=r"^params: blocks\.0\.\S+ must be an array of numbers"):
        jax.grad(assign)(1.0)


def test_a_traced_function_cannot_load():
    with pytest.raises(RuntimeError, match=r"^load: a model cannot be loaded inside a JAX trace"):
        jax.eval_shape(load)


@pytest.mark.slow
def test_a_transfer_guard_is_the_users(lm, truth):
    """Transfers of fdjax are allowed, but not those of the reader of a stream."""
    prompt, tokens = truth[1]
    with jax.transfer_guard("disallow"):
        guarded = load(dtype="float32")
        assert guarded.generate(prompt, max_new_tokens=4, **GREEDY).tokens == [tokens[:4]]
        stream = guarded.stream(prompt, max_new_tokens=30, **GREEDY)
        next(stream)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
            jnp.sin(np.ones(3, np.float32))
        stream.close()
        assert guarded.score(prompt).logprobs == lm.score(prompt).logprobs
        guarded.params = jax.tree.map(np.asarray, lm.params)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_so():
    """The process would wait for threads that it does not have."""
    code = """
import os, sys, warnings
import fdjax
warnings.simplefilter("ignore")  # JAX warns of the fork itself
lm = fdjax.load("tiny", compilation_cache=False)
calls = [
    lambda: lm.generate("hi"),
    lambda: next(lm.stream("hi")),
    lambda: lm.score("hi"),
    lambda: fdjax.load("tiny", compilation_cache=False),
    lambda: fdjax.forward(lm.model, lm.params, [[1]]),
]
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all("forked after fdjax had been used" in line and "'spawn'" in line for line in lines)


@pytest.mark.slow
def test_a_share_of_the_memory_is_no_limit_of_the_context(monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 10**9)
    lm = load(gpu_memory_utilization=0.5)
    limit = lm.config.max_position_embeddings
    result = lm.generate([7] * (limit - 3), max_new_tokens=128, **CHECKED)
    assert len(result.tokens[0]) == 3
    assert load(gpu_memory_utilization=0.5, max_len=64).max_len == 64


@pytest.mark.slow
def test_limits_may_be_integers_of_numpy():
    lm = load(max_batch=np.int64(4), max_len=np.int32(64))
    assert len(lm.generate([5, 6, 7], max_new_tokens=2, **CHECKED).tokens[0]) == 2
    assert type(lm.max_batch) is type(lm.max_len) is int


@pytest.mark.parametrize("name", ["max_len", "max_batch", "prefix_cache"])
def test_what_the_engine_is_made_for_cannot_be_changed(lm, name):
    with pytest.raises(AttributeError, match=f"'{name}' of 'LM' object has no setter"):
        setattr(fresh(lm), name, 1)


def test_load_takes_a_path(lm):
    assert load(CASE, dtype="float32").config == lm.config
    with pytest.raises(fdjax.CheckpointError, match="nowhere: no such folder"):
        fdjax.load(Path("nowhere"))


def test_load_turns_the_compilation_cache_on_only_if_unset(cache_setting, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load(compilation_cache=False)
    assert jax.config.jax_compilation_cache_dir is None
    load(compilation_cache=None)
    assert Path(jax.config.jax_compilation_cache_dir) == tmp_path / "fdjax" / "xla"
    assert (tmp_path / "fdjax" / "xla").is_dir()
    load(compilation_cache=False)  # other models still use it
    assert jax.config.jax_compilation_cache_dir is not None
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    load(compilation_cache=None)
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_load_warns_of_a_gpu_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(fdjax.system.platform.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(fdjax.system.platform, "nvidia_driver_present", lambda: True)
    monkeypatch.setattr(fdjax.system.platform, "_cpu_was_asked_for", lambda: False)
    with pytest.warns(UserWarning, match="NVIDIA driver .* only the CPU"):
        load()
    monkeypatch.setattr(fdjax.system.platform, "_cpu_was_asked_for", lambda: True)
    load()  # warnings are errors here
