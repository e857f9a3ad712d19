"""Options of `LM.generate` and `LM.stream`, end to end."""

import contextlib
import dataclasses
import functools
import json
import random
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fdjax
from fdjax.engine.engine import Programs
from fdjax.engine.sequence import GrowingText
from fdjax.models import describe, random_params
from fdjax.pallas_kernels.attention import append_decode_attention
from fdjax.sampling.per_prompt import per_prompt
from fdjax.text.tokenizer import MissingTokenizerError, Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASE = FIXTURES / "llama3_gqa_tied"
GREEDY = {"do_sample": False, "eos_token_id": None}
TEXT = "The largest ocean"
WIDE = 500  # a window wider than all texts here

pytestmark = pytest.mark.usefixtures("quick_compiles")

forward = jax.jit(fdjax.forward, static_argnums=0)


@pytest.fixture(scope="module")
def lm():
    """With at most four rows, short and long prompts share programs."""
    options = {"compilation_cache": False, "progress": False, "max_batch": 4}
    return fdjax.load(str(CASE), dtype="float32", **options)


@functools.cache
def prompts() -> list[list[int]]:
    with np.load(CASE / "expected.npz") as arrays:
        return [arrays[f"prompt_{i}"].tolist() for i in range(5)]


# --- transformers' own generate


@functools.cache
def runs():
    return json.loads((FIXTURES / "generate.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_runs_are_those_of_transformers_alone_and_in_a_batch(lm):
    for run in runs():
        options = GREEDY | {"max_new_tokens": 24} | run["options"]
        alone = lm.generate(prompts()[run["prompt"]], **options)
        assert alone.tokens == [run["tokens"]], run["options"]
    for start in range(0, len(runs()), 5):
        # Four of the five prompts, with the longest: this and all batches below have four rows.
        some = runs()[start + 1 : start + 5]
        options = GREEDY | {"max_new_tokens": 24} | some[0]["options"]
        batch = lm.generate([prompts()[run["prompt"]] for run in some], **options)
        assert batch.tokens == [run["tokens"] for run in some]


@pytest.mark.slow
def test_a_batch_of_different_options_is_each_alone(lm):
    some = [run for run in runs() if not {"stop_strings", "eos_token_id"} & set(run["options"])]
    some = random.Random(0).sample(some, 16)
    for start in range(0, 16, 4):
        rows = some[start : start + 4]
        names = {name for run in rows for name in run["options"]}
        options = {name: [run["options"].get(name) for run in rows] for name in names}
        batch = lm.generate(
            [prompts()[run["prompt"]] for run in rows], max_new_tokens=24, **GREEDY | options
        )
        assert batch.tokens == [run["tokens"] for run in rows]


# --- history


@pytest.mark.slow
def test_the_history_of_a_prompt_in_several_chunks_is_whole():
    """Compare with processors applied to logits of passes without a cache."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    model = fdjax.describe(fdjax.parse_config(config), dtype="float32")
    params = jax.tree.map(lambda w: w if w.ndim == 1 else 10 * w, random_params(model))
    lm = fdjax.LM(model, params, max_len=768, max_batch=4)
    rng = np.random.default_rng(0)
    lengths = (1, 127, 640)
    # Half of the vocabulary, so that some tokens are not in the prompt.
    texts = [rng.integers(0, 32, n).tolist() for n in lengths]
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3}
    batch = lm.generate(texts, max_new_tokens=8, return_logprobs=True, **GREEDY | options)
    for prompt, tokens in zip(texts, batch.tokens, strict=True):
        ids = np.zeros((1, 768), np.int32)
        ids[0, : len(prompt) + 8] = prompt + tokens
        logits = np.asarray(forward(model, params, ids, np.array([len(prompt) + 8], np.int32))[0])
        for step, token in enumerate(tokens):
            scores = logits[len(prompt) + step - 1].copy()
            seen = sorted({*prompt, *tokens[:step]})
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * 1.4, scores[seen] / 1.4)
            counts = np.bincount(tokens[:step], minlength=64)
            scores -= 0.3 * counts + 0.7 * (counts > 0)
            assert scores[token] >= scores.max() - 1e-3, (len(prompt), step)


# --- several samples


SAMPLED = {"temperature": 1.2, "top_k": 40, "max_new_tokens": 8, "eos_token_id": None}


@pytest.mark.slow
def test_none_in_a_list_is_as_if_not_given(lm):
    texts = [prompts()[1]] * 2
    usual = lm.generate(texts[0], max_new_tokens=8, **GREEDY).tokens[0]
    sequences = ["suppress_tokens", "bad_words_ids", "stop_strings", "stopping_criteria"]
    names = [*sequences, "logits_processors", "logit_bias", "temperature"]
    nothing = {name: [None, None] for name in names}
    given = GREEDY | {"do_sample": None} | nothing
    config = fdjax.GenerationConfig(do_sample=False)
    assert lm.generate(texts, config, max_new_tokens=8, **given).tokens == [usual] * 2
    # Options of one prompt do not affect the other.
    given |= {"suppress_tokens": (None, usual[0]), "do_sample": [None, True], "top_k": [None, 1]}
    one, other = lm.generate(texts, config, max_new_tokens=8, **given).tokens
    assert one == usual
    assert usual[0] not in other


@pytest.mark.slow
def test_a_seed_for_some_leaves_the_others_their_own(lm):
    options = SAMPLED | {"seed": [7, None, None], "temperature": 1e3}
    _, one, other = lm.generate([prompts()[1]] * 3, **options).tokens
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.soak), "float64"])
def test_a_processor_may_return_another_dtype(lm, dtype):
    def processor(ids, lengths, scores):
        return scores.astype(dtype)

    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
        lm.generate(prompts()[1], seed=1, logits_processors=processor, **SAMPLED)


@pytest.mark.slow
def test_samples_of_a_prompt_come_side_by_side(lm):
    several = lm.generate(prompts()[1:3], num_return_sequences=[1, 3], seed=[7, 8], **SAMPLED)
    assert len(several.tokens) == len(several.texts) == len(several.finish_reasons) == 4
    assert len({tuple(tokens) for tokens in several.tokens}) == 4
    one = [lm.generate(prompts()[i], seed=6 + i, **SAMPLED) for i in (1, 2)]
    assert [result.tokens[0] for result in one] == several.tokens[:2]
    again = lm.generate(prompts()[2], num_return_sequences=4, seed=8, **SAMPLED)
    assert again.tokens[:3] == several.tokens[1:]
    assert several.stats.decode_tokens == 32


def test_several_samples_need_sampling(lm):
    for options in ({"do_sample": False}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="num_return_sequences must be 1 if nothing is"):
            lm.generate([5], num_return_sequences=2, **options)
    with pytest.raises(ValueError, match="stream: num_return_sequences must be 1"):
        lm.stream([5], num_return_sequences=2, temperature=1.0)


EVERYTHING = {
    "max_new_tokens": 14,
    "temperature": 1.3,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.001,
    "typical_p": 0.97,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [7, 8]],
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3],
    "logit_bias": {9: 2.0, 10: -100.0},
    "min_new_tokens": 2,
    "return_logprobs": 3,
}


@pytest.mark.slow
def test_samples_are_the_same_alone_in_a_batch_and_streamed(lm):
    texts = [TEXT, *prompts()[1:4]]
    seeds = [5, 6, 0, 2**32 - 1]
    batch = lm.generate(texts, seed=seeds, **EVERYTHING)
    for i, (prompt, seed) in enumerate(zip(texts, seeds, strict=True)):
        alone = lm.generate(prompt, seed=seed, **EVERYTHING)
        assert alone.tokens[0] == batch.tokens[i]
        assert alone.logprobs[0] == batch.logprobs[i]
        assert alone.top_logprobs[0] == batch.top_logprobs[i]
        stream = lm.stream(prompt, seed=seed, **EVERYTHING)
        assert "".join(stream) == batch.texts[i]
        assert stream.result.tokens[0] == batch.tokens[i]
        assert stream.result.logprobs[0] == batch.logprobs[i]
    # Beside rows without options, and if only one row samples.
    temperatures = [0.0, 1.3, 0.0, 0.0]
    mixed = lm.generate(texts, seed=seeds, max_new_tokens=14, temperature=temperatures, top_p=0.95)
    one = lm.generate(texts[1], seed=6, max_new_tokens=14, temperature=1.3, top_p=0.95)
    assert mixed.tokens[1] == one.tokens[0]


# --- log-probabilities


@pytest.mark.slow
def test_return_reruns(lm, monkeypatch):
    """For each layer, the mean over the decode steps of all chunks."""
    options = GREEDY | {"max_new_tokens": 40}
    plain = lm.generate(TEXT, **options)
    assert plain.stats.reruns is None
    none_ran_again = (0.0,) * lm.config.layers
    assert lm.generate(TEXT, return_reruns=True, **options).stats.reruns == none_ran_again

    def counted(*args, return_reruns, spec, **kwargs):
        assert return_reruns
        share = jnp.float32((spec.window - WIDE) / 8)
        return *append_decode_attention(*args, spec=spec, **kwargs), share

    monkeypatch.setattr("fdjax.engine.step.append_decode_attention", counted)
    # The layers differ only in their windows, which hide nothing.
    layers = enumerate(lm.config.attention)
    attention = tuple(dataclasses.replace(spec, window=WIDE + i) for i, spec in layers)
    model = describe(lm.config.with_attention(attention), dtype="float32")
    counting = type(lm)(model, lm.params, lm.tokenizer)
    result = counting.generate([TEXT, TEXT], return_reruns=[True, False], **options)
    assert result.tokens == plain.tokens * 2
    assert result.stats.reruns == tuple(i / 8 for i in range(lm.config.layers))
    stream = counting.stream(TEXT, return_reruns=True, **options)
    assert "".join(stream) == plain.texts[0]
    assert stream.stats.reruns == result.stats.reruns


@pytest.mark.slow
def test_return_logprobs(lm):
    prompt = prompts()[2]
    assert lm.generate(prompt, max_new_tokens=3, **GREEDY).logprobs is None
    for asked in (True, 0):
        own = lm.generate(prompt, max_new_tokens=3, return_logprobs=asked, **GREEDY)
        assert [len(row) for row in own.logprobs] == [3] and own.top_logprobs is None
    top = lm.generate(prompt, max_new_tokens=40, return_logprobs=4, **GREEDY)
    assert top.logprobs[0][:3] == own.logprobs[0]
    for token, logprob, likeliest in zip(
        top.tokens[0], top.logprobs[0], top.top_logprobs[0], strict=True
    ):
        assert len(likeliest) == 4
        assert next(iter(likeliest.items())) == (token, logprob)
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
    asked = [None, 1, None, None]
    mixed = lm.generate([prompt] * 4, max_new_tokens=2, return_logprobs=asked, **GREEDY)
    assert [len(row) for row in mixed.logprobs] == [0, 2, 0, 0]
    assert [len(row) for row in mixed.top_logprobs] == [0, 2, 0, 0]
    assert [len(step) for step in mixed.top_logprobs[1]] == [1, 1]


@pytest.mark.slow
def test_logprobs_are_of_the_raw_model(lm):
    prompt = prompts()[2]
    banned = lm.generate(prompt, max_new_tokens=1, **GREEDY).tokens[0]
    options = GREEDY | {"suppress_tokens": banned, "return_logprobs": 2, "max_new_tokens": 1}
    other = lm.generate(prompt, **options)
    likeliest = other.top_logprobs[0][0]
    assert next(iter(likeliest)) == banned[0]
    assert other.logprobs[0][0] == likeliest[other.tokens[0][0]]


# --- one's own processors and criteria


@dataclasses.dataclass
class Scaled:
    by: float

    def __call__(self, ids, lengths, scores):
        return scores * self.by


def only_even(ids, lengths, scores):
    odd = jnp.arange(scores.shape[-1]) % 2 == 1
    return jnp.where(odd[None], -jnp.inf, scores)


def last_plus_one(ids, lengths, scores):
    last = jnp.take_along_axis(ids, lengths[:, None] - 1, axis=1)
    wanted = (last + 1) % scores.shape[-1]
    return jnp.where(jnp.arange(scores.shape[-1])[None] == wanted, scores, -jnp.inf)


@pytest.mark.slow
def test_custom_logits_processors(lm):
    even = lm.generate(prompts()[1:4], max_new_tokens=6, logits_processors=only_even, **GREEDY)
    assert all(token % 2 == 0 for row in even.tokens for token in row)
    # Processors see the history, prompt and response, of rows of different lengths.
    texts = prompts()[1:4]
    counted = lm.generate(texts, max_new_tokens=6, logits_processors=[last_plus_one], **GREEDY)
    for prompt, tokens in zip(texts, counted.tokens, strict=True):
        assert tokens == [(prompt[-1] + 1 + i) % 320 for i in range(6)]
    programs = lm.program_counts()
    lm.generate(texts, max_new_tokens=6, logits_processors=[last_plus_one], **GREEDY)
    assert lm.program_counts() == programs
    options = GREEDY | {"suppress_tokens": [[], [texts[1][-1] + 1], []]}
    with pytest.raises(ValueError, match="prompt 1: the options forbid every token at token 0"):
        lm.generate(texts, max_new_tokens=6, logits_processors=last_plus_one, **options)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 31, 32, 33, 40])
def test_a_stopping_criterion_sees_every_token(lm, at):
    prompt = prompts()[2]
    seen = []

    def enough(tokens):
        seen.append(len(tokens))
        return len(tokens) >= at

    whole = lm.generate(prompt, max_new_tokens=64, **GREEDY)
    result = lm.generate(prompt, max_new_tokens=64, stopping_criteria=enough, **GREEDY)
    assert result.tokens == [whole.tokens[0][:at]]
    assert result.finish_reasons == ["stop"]
    assert seen == list(range(1, at + 1))
    stream = lm.stream(prompt, max_new_tokens=64, stopping_criteria=[enough], **GREEDY)
    assert "".join(stream) == result.text


@pytest.mark.slow
def test_a_stopping_criterion_cannot_change_the_result(lm):
    def meddles(tokens):
        tokens.append(5)
        tokens.clear()

    whole = lm.generate(prompts()[2], max_new_tokens=6, **GREEDY)
    result = lm.generate(prompts()[2], max_new_tokens=6, stopping_criteria=[meddles] * 2, **GREEDY)
    assert result.tokens == whole.tokens


# --- stop strings


@pytest.mark.slow
def test_a_stop_string_ends_the_text_before_it(lm):
    prompt = prompts()[2]
    whole = lm.generate(prompt, max_new_tokens=60, **GREEDY)
    assert len(whole.text) > 20
    for start in range(0, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        result = lm.generate(prompt, max_new_tokens=60, stop_strings=stop, **GREEDY)
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reasons == ["stop"]
        n = len(result.tokens[0])
        assert result.tokens[0] == whole.tokens[0][:n]
        assert stop in lm.tokenizer.decode(whole.tokens[0][:n])
        assert stop not in lm.tokenizer.decode(whole.tokens[0][: n - 1])
        pieces = list(lm.stream(prompt, max_new_tokens=60, stop_strings=stop, **GREEDY))
        assert "".join(pieces) == result.text


@pytest.mark.slow
def test_a_stop_string_may_be_part_of_the_text(lm):
    prompt = prompts()[2]
    whole = lm.generate(prompt, max_new_tokens=60, **GREEDY).text
    for start in (0, 7, 12):
        stop = whole[start : start + 3]
        stops = [stop + whole[start + 3], stop]  # the longer one does not delay it
        options = GREEDY | {"max_new_tokens": 60, "stop_strings": stops}
        kept = lm.generate(prompt, include_stop_str_in_output=True, **options)
        assert kept.text == whole[: whole.index(stop) + 3]
        stream = lm.stream(prompt, include_stop_str_in_output=True, **options)
        assert "".join(stream) == kept.text
        assert lm.generate(prompt, **options).tokens == kept.tokens


@pytest.mark.slow
def test_stop_strings_of_each_prompt(lm):
    texts = [prompts()[2]] * 3
    whole = lm.generate(texts[0], max_new_tokens=60, **GREEDY).text
    stops = [whole[5:8], whole[12:15]]
    result = lm.generate(texts, max_new_tokens=60, stop_strings=[[stops[0]], [], stops], **GREEDY)
    assert result.texts == [whole[: whole.index(stops[0])], whole, result.texts[0]]
    assert result.finish_reasons == ["stop", "length", "stop"]
    # Cutting the text is work of the row: the program without stop strings runs.
    same = lm.generate(texts, max_new_tokens=60, stop_strings=stops, **GREEDY)
    assert same.texts == [result.texts[0]] * 3


def test_stop_strings_need_a_tokenizer(lm):
    bare = fdjax.LM(lm.model, lm.params)
    with pytest.raises(MissingTokenizerError):
        bare.generate([5], stop_strings="a")


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("case", ["llama3_gqa_tied", "llama2_mha"])
@pytest.mark.parametrize("window", [32, 9])
def test_pieces_of_a_thousand_random_texts_are_the_text_up_to_a_stop_string(
    case, window, monkeypatch
):
    monkeypatch.setattr("fdjax.text.tokenizer.Detokenizer._LONGEST", window)
    tokenizer = Tokenizer(FIXTURES / case)
    rng = random.Random(window)
    stopped = 0
    alphabet = ["a", "b", " ", "  ", "\n", "é", "€", "🦙", "日", "e\u0301", "The ", "ocean", "\x00"]
    vocabulary = tokenizer._tokenizer.get_vocab_size()
    for _ in range(1000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 30)))
        ids = tokenizer.encode(text)
        for _ in range(rng.randrange(3)):
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(vocabulary))
        decoded = tokenizer.decode(ids)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(decoded) + 1)
            stops.append(decoded[at : at + rng.randrange(1, 5)] or "zz")
        stops = tuple(s for s in stops if REPLACEMENT not in s) or ("zz",)
        # Expected: the first tokens whose text contains a stop string.
        texts = (tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1))
        final = next((t for t in texts if any(s in t for s in stops)), None)
        want = decoded
        if final is not None:
            want = final[: min(final.index(s) for s in stops if s in final)]
        growing = GrowingText(tokenizer, stops)
        pieces = []
        for token in ids:
            growing.push(token)
            if growing.stopped:
                break
            if rng.random() < 0.4:
                pieces.append(growing.take())
                # Text that was yielded is never taken back.
                assert want.startswith("".join(pieces))
        growing.finish()
        assert growing.stopped == (final is not None)
        pieces.append(growing.take())
        assert "".join(pieces) == growing.whole == want
        stopped += growing.stopped
    assert 300 < stopped < 1000


def test_a_window_of_ids_is_decoded_not_the_whole():
    tokenizer = Tokenizer(CASE)
    longest = 0

    class Counts:
        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    ids = tokenizer.encode("The largest ocean is the Pacific. 日本 🦙 " * 60)
    growing = GrowingText(Counts(), ("never",))
    for token in ids:
        growing.push(token)
    growing.finish()
    assert growing.take() == tokenizer.decode(ids)
    assert len(ids) > 1000 and longest < 60


# --- streams


@pytest.mark.slow
def test_a_stream_knows_its_result(lm):
    stream = lm.stream(TEXT, max_new_tokens=20, return_logprobs=2, **GREEDY)
    first = next(stream)
    assert stream.result.finish_reasons == [None]
    assert stream.result.text.startswith(first)
    pieces = [first, *stream]
    whole = lm.generate(TEXT, max_new_tokens=20, return_logprobs=2, **GREEDY)
    for name in ("tokens", "texts", "finish_reasons", "logprobs", "top_logprobs"):
        assert getattr(stream.result, name) == getattr(whole, name)
    assert "".join(pieces) == stream.result.text
    assert stream.stats.decode_tokens == 20
    assert stream.stats.prompt_tokens == whole.stats.prompt_tokens
    assert stream.stats.decode_seconds > 0


# --- what has no effect, what cannot be meant


@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"top_k": 3}, {"seed": 1}, {"min_p": 0.1}, {"top_p": 0.5}]
)
def test_an_option_without_effect_is_warned_of(lm, options):
    with pytest.warns(UserWarning, match=f"{next(iter(options))}: no effect, because do_sample is"):
        lm.generate([5], max_new_tokens=1, **GREEDY | options)


@pytest.mark.slow
def test_a_configuration_made_from_the_defaults_is_warned_of(lm):
    greedy = dataclasses.replace(lm.defaults, do_sample=False)
    with pytest.warns(UserWarning, match="temperature: no effect, because do_sample is False"):
        lm.generate([5], max_new_tokens=1, config=dataclasses.replace(greedy, temperature=1.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate([5], max_new_tokens=1, config=greedy)


def test_beams_take_no_tiny_temperature(lm):
    with pytest.raises(ValueError, match="temperature must be 0 or at least 1e-05 with num_beams"):
        lm.generate([5], max_new_tokens=3, num_beams=2, do_sample=True, temperature=1e-9)


@pytest.mark.slow
def test_what_was_chosen_is_not_warned_of(lm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate([5], max_new_tokens=1, temperature=0.0, seed=3)
        temperatures = [0.0, 1.0, 0.0, 0.0]
        lm.generate([[5]] * 4, max_new_tokens=1, temperature=temperatures, top_k=3, seed=3)
        lm.generate([5], max_new_tokens=1, do_sample=False)
        lm.generate([], top_p=0.5, do_sample=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suppress_tokens": [320]}, "suppress_tokens has id 320, the vocabulary is 0..319"),
        ({"bad_words_ids": [[1, 400]]}, "bad_words_ids has id 400"),
        ({"logit_bias": {999: 1.0}}, "logit_bias has id 999"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias of 3 must be a number in \[-100, 100\]"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of 3 must be a number"),
        ({"logit_bias": {3: 10**400}}, "logit_bias of 3 must be a number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must map ids to numbers"),
        ({"bad_words_ids": [[], [5]]}, "bad_words_ids must hold no empty sequence"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be"),
        ({"bad_words_ids": "no"}, "bad_words_ids must be a sequence"),
        ({"suppress_tokens": [-1]}, "suppress_tokens must be ids"),
        ({"suppress_tokens": "12"}, "suppress_tokens must be ids"),
        ({"stop_strings": ""}, "stop_strings must be strings that are not empty"),
        ({"stop_strings": [3]}, "stop_strings must be strings"),
        ({"stop_strings": [["a"], ["b"]]}, r"stop_strings must have one value per prompt \(1\)"),
        ({"stop_strings": [None] * 2}, r"stop_strings must have one value per prompt \(1\), got 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number in"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be a number in \[-2, 2\]"),
        ({"frequency_penalty": -3}, "frequency_penalty must be"),
        ({"min_p": 1.1}, "min_p must be"),
        ({"typical_p": 0.0}, "typical_p must be"),
        ({"no_repeat_ngram_size": 33}, r"no_repeat_ngram_size must be an integer in \[0, 32\]"),
        ({"num_return_sequences": 0}, "num_return_sequences must be"),
        ({"return_logprobs": 21}, r"return_logprobs must be an integer in \[0, 20\]"),
        ({"return_logprobs": -1}, "return_logprobs must be"),
        ({"return_logprobs": "yes"}, "return_logprobs must be"),
        ({"do_sample": 1}, "do_sample must be True or False"),
        ({"stopping_criteria": 3}, "stopping_criteria must be a sequence"),
        ({"logits_processors": [3]}, "logits_processors must be functions"),
        ({"logits_processors": [Scaled(2.0)]}, "logits_processors must be hashable"),
        ({"suppress_tokens": list(range(320))}, "options forbid every token at token 0"),
    ],
    ids=str,
)
def test_options_that_are_refused(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate([5], **{"do_sample": None if "min_p" in options else False} | options)


def test_processors_of_a_batch_must_agree(lm):
    config = dataclasses.replace(lm.defaults, logits_processors=(only_even,))
    with pytest.raises(ValueError, match="must be the same for all prompts"):
        lm.generate([[5], [6]], config, logits_processors=[[only_even], []], max_new_tokens=1)


# --- defaults of a checkpoint


@pytest.mark.slow
def test_defaults_of_generation_config_are_honoured_and_overridden(lm):
    files = {"repetition_penalty": 1.5, "suppress_tokens": [93], "stop_strings": ["zz"]}
    defaults = fdjax.GenerationConfig.from_files(files, {}, "generation_config.json")
    other = fdjax.LM(lm.model, lm.params, lm.tokenizer, defaults=defaults)
    (run,) = (r for r in runs() if r["options"] == {"repetition_penalty": 1.5} and r["prompt"] == 2)
    given = other.generate(prompts()[2], max_new_tokens=24, suppress_tokens=[])
    assert given.tokens == [run["tokens"]]
    assert 93 not in other.generate(prompts()[2], max_new_tokens=24).tokens[0]
    plain = other.generate(
        prompts()[2], max_new_tokens=24, suppress_tokens=(), repetition_penalty=1.0, stop_strings=()
    )
    assert plain.tokens == lm.generate(prompts()[2], max_new_tokens=24, **GREEDY).tokens


@pytest.mark.slow
def test_samples_that_the_checkpoint_asks_for(lm):
    files = {"num_return_sequences": 3, "do_sample": True, "num_beams": 1}
    defaults = fdjax.GenerationConfig.from_files(files, {}, "generation_config.json")
    other = fdjax.LM(lm.model, lm.params, lm.tokenizer, defaults=defaults)
    assert len(other.generate([5], max_new_tokens=2).tokens) == 3
    assert len(other.generate([5], max_new_tokens=2, num_return_sequences=4).tokens) == 4
    # As in transformers; `fdjax chat` must work with any checkpoint.
    with pytest.raises(ValueError, match="num_return_sequences must be 1 if nothing is sampled"):
        other.generate([5], max_new_tokens=2, do_sample=False)
    assert len(list(other.stream([5], max_new_tokens=2, do_sample=False))) > 0


@pytest.mark.parametrize("nothing", [None, [], {}])
def test_a_field_that_asks_for_nothing_is_not_told(nothing):
    fdjax.GenerationConfig.from_files({"sequence_bias": nothing}, {}, "here")


@pytest.mark.slow
def test_a_minimum_of_the_checkpoint_gives_way(lm):
    defaults = fdjax.GenerationConfig(max_new_tokens=64, min_new_tokens=20)
    other = fdjax.LM(lm.model, lm.params, lm.tokenizer, defaults=defaults)
    assert len(other.generate(prompts()[2], max_new_tokens=8, **GREEDY).tokens[0]) == 8
    with pytest.raises(ValueError, match="min_new_tokens must be between 0 and"):
        other.generate(prompts()[2], max_new_tokens=8, min_new_tokens=20)


@pytest.mark.parametrize(
    ("config", "options", "sampled"),
    [
        ({"temperature": 0.5}, {}, True),
        ({"top_k": 3, "do_sample": False}, {}, False),
        ({"do_sample": False}, {"temperature": 0.5}, False),
        ({"do_sample": False}, {"temperature": 0.5, "do_sample": True}, True),
        ({"temperature": 0.5}, {"do_sample": False}, False),
        ({"max_new_tokens": 3}, {}, False),
    ],
)
def test_options_of_sampling_turn_it_on_unless_do_sample_is_given(config, options, sampled):
    config = fdjax.GenerationConfig(**config)
    asked = bool(config.given & {"temperature", "top_k"} or "temperature" in options)
    told = pytest.warns(UserWarning, match="no effect, because do_sample is False")
    with told if asked and not sampled else contextlib.nullcontext():
        ((found, _),) = per_prompt(fdjax.GenerationConfig().filled(), config, options, 1)
    assert found.do_sample == sampled


def test_defaults_that_lack_fields(lm):
    """They are filled, so that each call without a seed draws a new one."""
    other = fdjax.LM(lm.model, lm.params, lm.tokenizer)
    other.defaults = fdjax.GenerationConfig(eos_token_ids=2)
    assert other.defaults == fdjax.GenerationConfig(eos_token_ids=2).filled()
    rows = per_prompt(other.defaults, None, {"temperature": 2.0}, 3)
    assert len({row.seed for row, _ in rows}) == 3


def test_empty_values_per_prompt():
    rows = per_prompt(fdjax.GenerationConfig().filled(), None, {"bad_words_ids": [[], []]}, 2)
    assert [row.bad_words_ids for row, _ in rows] == [(), ()]


def test_an_empty_generation_config_is_one(tmp_path):
    """As in transformers, config.json then gives only the end-of-sequence ids."""
    path = tmp_path / "generation_config.json"
    path.write_text("{}")
    old = {"repetition_penalty": 1.3, "eos_token_id": 2}
    found = fdjax.GenerationConfig.from_files({}, old, str(path))
    assert found == fdjax.GenerationConfig(eos_token_ids=(2,))


def test_without_generation_config_an_old_config_has_the_defaults():
    old = {"repetition_penalty": 1.3, "top_k": 7, "eos_token_id": 2, "hidden_size": 64}
    from_files = fdjax.GenerationConfig.from_files
    assert from_files({}, old, "a/generation_config.json") == fdjax.GenerationConfig(
        repetition_penalty=1.3, do_sample=False, top_k=7, eos_token_ids=(2,)
    )
    new = from_files({"top_k": 9}, old, "a/generation_config.json")
    assert new == fdjax.GenerationConfig(do_sample=False, top_k=9, eos_token_ids=(2,))
    with pytest.raises(fdjax.CheckpointError, match=r"^a/config\.json: .*top_k"):
        from_files({}, old | {"top_k": -1}, "a/generation_config.json")
    assert from_files({}, old | {"num_beams": 4}, "a/generation_config.json").num_beams == 4
    with pytest.raises(fdjax.CheckpointError, match=r"^a/config\.json: .*early_stopping"):
        from_files({}, old | {"early_stopping": "soon"}, "a/generation_config.json")


NOT_HONOURED = ["max_time", "penalty_alpha", "forced_eos_token_id", "min_length"]


@pytest.mark.parametrize("field", NOT_HONOURED)
def test_defaults_that_are_not_honoured_are_warned_of(field):
    with pytest.warns(UserWarning, match=rf"^here: {field} 4 is not supported and has no effect"):
        fdjax.GenerationConfig.from_files({field: 4}, {}, "here")


# --- any combination


ids_ = st.integers(0, 319)
some_ids = st.lists(ids_, max_size=4)
OPTIONS = {
    "max_new_tokens": st.integers(0, 9),
    "min_new_tokens": st.integers(0, 4),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.0, 1e-3, 0.7, 1.0, 30.0]),
    "top_k": st.integers(0, 400),
    "top_p": st.floats(0.01, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "typical_p": st.floats(0.01, 1.0),
    "repetition_penalty": st.floats(0.1, 10.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "no_repeat_ngram_size": st.integers(0, 5),
    "bad_words_ids": st.lists(st.lists(ids_, min_size=1, max_size=4), max_size=4),
    "suppress_tokens": some_ids,
    "begin_suppress_tokens": some_ids,
    "logit_bias": st.dictionaries(ids_, st.floats(-100, 100), max_size=4),
    "stop_strings": st.lists(st.text(min_size=1, max_size=2), max_size=3),
    "seed": st.integers(0, 2**32 - 1),
    "eos_token_id": st.one_of(st.none(), ids_, some_ids),
    "return_logprobs": st.one_of(st.none(), st.booleans(), st.integers(0, 20)),
    # Impossible values.
    "nonsense": st.just(1),
}
WRONG = {
    "max_new_tokens": -1,
    "temperature": float("nan"),
    "top_k": 1.5,
    "top_p": 0.0,
    "repetition_penalty": "1",
    "suppress_tokens": [999],
    "stop_strings": "",
    "logit_bias": {1: 1e9},
    "eos_token_id": "</s>",
}


@st.composite
def requests(draw):
    """(prompts, options), most of them valid."""
    names = draw(st.sets(st.sampled_from(sorted(set(OPTIONS) - {"nonsense"})), max_size=8))
    options = {name: draw(OPTIONS[name]) for name in sorted(names)}
    if draw(st.integers(0, 9)) == 0:
        name = draw(st.sampled_from(["nonsense", *WRONG]))
        options[name] = WRONG.get(name, 1)
    texts = draw(
        st.lists(
            st.one_of(st.text(max_size=8), st.lists(ids_, max_size=12)), min_size=4, max_size=4
        )
    )
    if draw(st.booleans()):
        return texts, options
    return [text or [7] for text in texts], options


# Errors that a call of generate may raise. All others are bugs.
DOCUMENTED = "generate: "


def check_combination(lm, texts, options):
    options = {"max_new_tokens": 6} | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no effect, because do_sample is False")
        try:
            result = lm.generate(texts, **options)
        except (ValueError, TypeError) as error:
            message = str(error)
            assert message.startswith(DOCUMENTED), message
            assert "\n" not in message
            return
        assert [len(x) for x in (result.tokens, result.texts, result.finish_reasons)] == [4] * 3
        for tokens, text, reason in zip(
            result.tokens, result.texts, result.finish_reasons, strict=True
        ):
            assert len(tokens) <= options["max_new_tokens"]
            assert all(0 <= token < 320 for token in tokens)
            assert (reason == "length") <= (len(tokens) == options["max_new_tokens"])
            stops = options.get("stop_strings", ())
            assert not any(stop in text for stop in stops)
        if options.get("seed") is not None:
            stream = lm.stream(texts[1], **options)
            assert "".join(stream) == result.texts[1]
            assert stream.result.tokens[0] == result.tokens[1]


def check_combinations(lm, examples):
    """The number of programs compiled for combinations of options, by kind."""
    before = lm.program_counts()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(requests())
    def check(request):
        check_combination(lm, *request)

    check()
    return {kind: count - before[kind] for kind, count in lm.program_counts().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "examples",
    [pytest.param(30, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)],
)
def test_combinations_of_options_and_prompts(lm, examples):
    # It counts its programs anew. XLA has compiled most of them for other tests here.
    alone = fdjax.LM(lm.model, lm.params, lm.tokenizer, max_batch=4)
    alone.engine.programs = Programs()
    counts = check_combinations(alone, examples)
    # States of one and of several rows; five sets of options.
    assert 0 < counts["prefill"] + counts["decode_steps"] <= 12
    assert 0 < counts["first_tokens"] <= 5 * 3


def test_updated_is_a_copy_with_other_values():
    config = fdjax.GenerationConfig(max_new_tokens=5, top_k=3)
    values = {"max_new_tokens": 9, "seed": None, "stop_strings": "x"}
    other = config.updated(values)
    assert other == dataclasses.replace(config, **values) and other.given == config.given | {
        *values
    }
    assert other.stop_strings == ("x",) and config.max_new_tokens == 5
    for wrong in ({"top_k": -1}, {"min_new_tokens": 6}):
        with pytest.raises(ValueError):
            config.updated(wrong)
