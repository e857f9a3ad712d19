"""Decode steps in one launch, run by XLA: only the set of programs differs."""

import contextlib
import copy
import dataclasses
import itertools
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from any_size import ANY_SIZE
from fdjax.engine.engine import ReusableState
from fdjax.engine.scheduler import StateShape
from fdjax.engine.session import Session
from fdjax.engine.state import StackedCache
from fdjax.models import decoder, describe, layers_shape, random_params
from fdjax.pallas_kernels.layers import decode_layers
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.pallas_kernels.quantised import WeightFormat

CASE = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3_gqa_tied"  # 512 positions
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], list(range(20, 43))]
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": [3, 4, 5], "max_new_tokens": 12}

pytestmark = pytest.mark.usefixtures("quick_compiles")


def load(plan):
    """With at most four rows, short and long prompts share programs."""
    options = {"compilation_cache": False, "progress": False, "max_batch": 4}
    return fdjax.load(str(CASE), dtype="float32", plan=plan, **options)


@pytest.fixture(scope="module")
def launches():
    """The number of rows of each launch that was traced."""
    traced = []

    def by_xla(x, *args, plan, **options):
        assert plan.choose("decode_layers", m=len(x)).implementation != "xla"
        traced.append(len(x))
        return decode_layers(x, *args, **options, implementation="xla")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "decode_layers", by_xla)
        yield traced


@pytest.fixture(scope="module")
def plain():
    return load(Plan(batch_invariant=True))


@pytest.fixture(scope="module")
def launched(launches):
    return load(Plan(batch_invariant=True, named=(("decode_layers", "mosaic_gpu"),)))


@pytest.fixture(scope="module", autouse=True)
def _remembers_how_it_ran():
    decode = Session.decode

    def remembering(session, *args):
        session._engine.ran_in_one_launch = session.one_launch
        return decode(session, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "decode", remembering)
        yield


def in_one_launch(lm):
    """Whether the last decode steps ran in one launch."""
    return lm.engine.ran_in_one_launch


def other_weights(lm):
    return jax.tree.map(lambda a: jnp.flip(a, -1) if a.ndim > 1 else a, lm.params)


def assert_alike(got, want):
    assert got.tokens == want.tokens
    assert got.finish_reasons == want.finish_reasons
    assert got.texts == want.texts
    for a, b in zip(got.logprobs or (), want.logprobs or (), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(GREEDY | {"max_new_tokens": [1, 40, 7]}, id="rows that end"),
        pytest.param(GREEDY | {"stop_strings": ["e"]}, id="stop strings"),
        pytest.param(
            SAMPLED
            | {"return_logprobs": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            id="sampled",
        ),
    ],
)
def test_tokens_are_those_of_layer_after_layer(plain, launched, launches, options):
    launches.clear()
    assert_alike(launched.generate(PROMPTS, **options), plain.generate(PROMPTS, **options))
    assert in_one_launch(launched) and not in_one_launch(plain)
    assert set(launches) <= {4}


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv_dtype"), [("int4", None), (None, "int8")])
def test_tokens_of_a_quantised_model_are_those_of_layer_after_layer(
    weights, kv_dtype, plain, launches
):
    config = plain.config
    if weights is not None:
        formats = {
            ("blocks", i, *linear.path, "weight"): WeightFormat(weights, 32)
            for i, block in enumerate(config.blocks)
            for linear in block.linears.values()
        }
        config = config.with_formats(formats)
    models = [
        describe(config, dtype="float32", plan=plan, kv_dtype=kv_dtype)
        for plan in (
            Plan(batch_invariant=True),
            dataclasses.replace(
                Plan(batch_invariant=True, implementations=ANY_SIZE),
                named=(("decode_layers", "mosaic_gpu"),),
            ),
        )
    ]
    params = random_params(models[0])
    want, got = (fdjax.LM(m, jax.tree.map(jnp.copy, params), max_batch=4) for m in models)
    launches.clear()
    assert_alike(got.generate(PROMPTS, **GREEDY), want.generate(PROMPTS, **GREEDY))
    assert in_one_launch(got) and not in_one_launch(want)
    assert launches


@pytest.mark.slow
def test_reruns_are_those_of_layer_after_layer(plain, launched):
    want, got = (lm.generate(PROMPTS, **GREEDY, return_reruns=True) for lm in (plain, launched))
    assert_alike(got, want)
    assert got.stats.reruns == want.stats.reruns
    assert len(got.stats.reruns) == launched.config.layers
    assert not in_one_launch(launched)
    assert_alike(launched.generate(PROMPTS, **GREEDY), want)
    assert in_one_launch(launched)


@pytest.mark.slow
def test_to_the_last_slot_of_a_cache(plain, launched):
    want, got = (fdjax.LM(lm.model, lm.params, max_len=64, max_batch=4) for lm in (plain, launched))
    for length in (40, 60, 63):
        prompts = [list(range(length)), [7, 8], [9]]
        asked = GREEDY | {"max_new_tokens": [64 - length, 20, 62]}
        assert_alike(got.generate(prompts, **asked), want.generate(prompts, **asked))
        assert in_one_launch(got)


@pytest.mark.slow
def test_between_the_layouts_on_one_model(plain, launches):
    """Two rows at most run in one launch, more do not."""
    shape = layers_shape(plain.config, 2, 256, 4)
    entry = Entry("decode_layers", tuple(sorted(shape.items())), Choice("mosaic_gpu", source=""))
    lm = load(Plan(batch_invariant=True, table=(entry,), implementations=ANY_SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "decode_layers", decode_layers_by_xla)
        for rows in (1, 3, 1):
            options = GREEDY | {"max_new_tokens": 9 + rows}
            want = plain.generate(PROMPTS, **options).tokens[:rows]
            assert lm.generate(PROMPTS[:rows], **options).tokens == want
            assert in_one_launch(lm) == (rows < 3)


def test_a_state_is_used_again_if_a_new_one_of_its_size_would_be_alike(plain):
    shape = layers_shape(plain.config, 2, 512, 4)
    entry = Entry("decode_layers", tuple(sorted(shape.items())), Choice("mosaic_gpu", source=""))
    engine = load(Plan(batch_invariant=True, table=(entry,), implementations=ANY_SIZE)).engine

    def take(slots, may_stack=True, batch=1):
        return engine.take_state(StateShape(batch, slots), may_stack)

    def is_stacked(state):
        return isinstance(state.kv, StackedCache)

    assert is_stacked(take(512)) and is_stacked(take(512, batch=2))
    assert not is_stacked(take(512, may_stack=False))
    assert not is_stacked(take(512, batch=4))  # more rows than any measured
    assert not is_stacked(take(2048))  # more slots
    for reusable, wanted, again in (
        ((1024, True), (512, True), True),
        ((1024, True), (512, False), False),
        ((512, False), (512, True), False),
        ((512, False), (512, False), True),
        ((2048, True), (512, True), True),  # so that there are no more programs
        ((512, True), (2048, True), False),
    ):
        state = take(*reusable)
        engine.reusable = ReusableState(state, [])
        assert (take(*wanted) is state) == again


def decode_layers_by_xla(*args, plan, **options):
    return decode_layers(*args, **options, implementation="xla")


@pytest.mark.slow
def test_a_stream_may_be_left(plain, launched):
    whole = plain.generate(PROMPTS, **GREEDY)
    want = whole.texts[0]
    for pieces in (1, 2):
        with contextlib.closing(launched.stream(PROMPTS[0], **GREEDY)) as stream:
            begun = "".join(itertools.islice(stream, pieces))
        assert want.startswith(begun)
    assert "".join(launched.stream(PROMPTS[0], **GREEDY)) == want
    assert_alike(launched.generate(PROMPTS, **GREEDY), whole)


@pytest.mark.slow
def test_copies_and_pickles(plain, launched):
    want = plain.generate(PROMPTS, **GREEDY)
    for other in (copy.copy(launched), pickle.loads(pickle.dumps(launched))):
        assert_alike(other.generate(PROMPTS, **GREEDY), want)
        assert in_one_launch(other)
        jax.tree.map(np.testing.assert_array_equal, other.params, plain.params)


@pytest.mark.slow
def test_weights_may_be_assigned(plain, launched):
    given = other_weights(plain)
    lm = copy.copy(launched)
    before = lm.generate(PROMPTS, **GREEDY)
    counts = lm.program_counts()
    lm.params = given
    want = fdjax.LM(plain.model, given, max_batch=4).generate(PROMPTS, **GREEDY)
    assert before.tokens != want.tokens
    assert lm.generate(PROMPTS, **GREEDY).tokens == want.tokens
    assert lm.program_counts() == counts
    lm.params = jax.tree.map(np.asarray, launched.params)
    assert_alike(lm.generate(PROMPTS, **GREEDY), before)
    assert_alike(launched.generate(PROMPTS, **GREEDY), before)

    # Weights of some layers are replaced, as after training. The others are still views.
    lm.params = lm.params | {"blocks": launched.params["blocks"] | {1: given["blocks"][1]}}
    mixed = plain.params | {"blocks": plain.params["blocks"] | {1: given["blocks"][1]}}
    want = fdjax.LM(plain.model, mixed, max_batch=4).generate(PROMPTS, **GREEDY)
    assert lm.generate(PROMPTS, **GREEDY).tokens == want.tokens != before.tokens


@pytest.mark.slow
def test_a_pure_function_takes_the_parameters(plain, launched):
    ids = jnp.array([PROMPTS[0]])
    config = fdjax.GenerationConfig(max_new_tokens=5)
    run = jax.jit(fdjax.generate, static_argnums=(0, 3))
    got, want = (run(lm.model, lm.params, ids, config) for lm in (launched, plain))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_scores_are_those_of_the_layers(plain, launched):
    launched.generate(PROMPTS, **GREEDY)
    got, want = (lm.score(PROMPTS) for lm in (launched, plain))
    assert got.logprobs == want.logprobs
    assert_alike(launched.generate(PROMPTS, **GREEDY), plain.generate(PROMPTS, **GREEDY))


@pytest.mark.slow
def test_damaged_weights_are_told_of_and_forgotten(launched):
    damaged = launched.params
    damaged["blocks"][1]["mlp"]["down"]["weight"] *= jnp.nan
    lm = copy.copy(launched)
    lm.params = damaged
    with pytest.raises(FloatingPointError, match="prompt 0"):
        lm.generate(PROMPTS, **GREEDY)
    assert not lm.engine.pool.used
    lm.params = launched.params
    assert_alike(lm.generate(PROMPTS, **GREEDY), launched.generate(PROMPTS, **GREEDY))


@pytest.mark.slow
def test_an_equal_model_shares_the_programs(launched, launches):
    launched.generate(PROMPTS, **GREEDY)
    launches.clear()
    other = load(dataclasses.replace(launched.model.plan))
    assert other.generate(PROMPTS, **GREEDY).stats.compile_seconds == 0
    assert not launches
