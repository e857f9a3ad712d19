"""The next token: transformers' masks, the right distribution, no influence of the batch."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.engine.generation import GenerationConfig, per_row
from fdjax.sampling.sampler import NOT_FINITE, Processors, Sampling, gumbel, next_tokens

V = 23
ROWS = 4000
ALL = Processors(edit=True, sample=True, truncate=True, logprobs=True)
SAMPLE = Processors(sample=True)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def choose(logits, values, steps, processors):
    """`next_tokens` for rows that need no history."""
    return _choose(
        logits, values, NO_IDS[: len(logits)], NO_LENGTHS[: len(logits)], steps, processors
    )


_choose = jax.jit(next_tokens, static_argnums=5)
NO_IDS = np.zeros((20_000, 1), np.int32)
NO_LENGTHS = np.zeros(20_000, np.int32)


def sampling(batch: int, **values) -> Sampling:
    """Per-row values. One value is used for all rows."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "no_repeat_ngram_size": 0,
        "top_logprobs": 0,
        "seed": 0,
        "sample_index": 0,
        "max_new_tokens": 100,
        "min_new_tokens": 0,
    }
    assert set(values) <= {*defaults, "stop_tokens"}
    stops = np.asarray(values.pop("stop_tokens", np.full((batch, 2), -1)), np.int32)
    columns = {
        name: np.array(np.broadcast_to(np.asarray(values.get(name, default)), (batch,)))
        for name, default in defaults.items()
    }
    floats = {name for name, default in defaults.items() if isinstance(default, float)}
    reals = {name: column for name, column in columns.items() if name in floats}
    counts = {name: column for name, column in columns.items() if name not in floats}
    counts["seed"] = counts["seed"].astype(np.uint32).view(np.int32)
    until = np.array(np.broadcast_to(columns["min_new_tokens"][:, None], stops.shape), np.int32)
    return Sampling.pack(
        reals,
        counts,
        stop_tokens=stops,
        bias=np.full(stops.shape, -np.inf, np.float32),
        bias_ids=stops,
        bias_until=until,
        bad_words=np.full((batch, 1, 2), -1, np.int32),
    )


def random_logits(batch: int, vocabulary: int = V, seed: int = 0, spread: float = 2.0):
    rng = np.random.default_rng(seed)
    return (spread * rng.normal(size=(batch, vocabulary))).astype(np.float32)


def widened(values: Sampling) -> Sampling:
    """The same with tables of equal width."""

    def widen(table):
        fill = np.full((len(table), 32 - table.shape[1]), -1, table.dtype)
        return np.concatenate([table, fill], axis=1)

    names = ("stop_tokens", "bias", "bias_ids", "bias_until")
    return dataclasses.replace(values, **{name: widen(getattr(values, name)) for name in names})


def tokens_of(logits, values: Sampling, steps=None, processors: Processors = ALL) -> np.ndarray:
    """Tokens of any number of rows, in calls of `ROWS` rows, so that one shape compiles once."""
    batch = len(logits)
    steps = np.zeros(batch, np.int32) if steps is None else np.asarray(steps, np.int32)
    parts = []
    for start in range(0, batch, ROWS):
        index = np.minimum(np.arange(start, start + ROWS), batch - 1)
        some = widened(values.rows(index))
        tokens, _ = choose(logits[index], some, steps[index], processors=processors)
        assert tokens.dtype == np.int32 and tokens.shape == (ROWS,)
        parts.append(np.asarray(tokens))
    return np.concatenate(parts)[:batch]


# --- the processors of transformers, one row at a time, in float64


def softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores - scores.max())
    return p / p.sum()


def min_new_tokens(scores, stops, minimum, step):
    """MinNewTokensLengthLogitsProcessor."""
    scores = scores.copy()
    if step < minimum:
        scores[[s for s in stops if s >= 0]] = -np.inf
    return scores


def top_k(scores, k):
    """TopKLogitsWarper."""
    k = min(k, len(scores))
    return np.where(scores < np.sort(scores)[-k], -np.inf, scores)


def top_p(scores, p):
    """TopPLogitsWarper, which keeps at least one token."""
    order = np.argsort(scores, kind="stable")
    remove = np.cumsum(softmax(scores[order])) <= 1 - p
    remove[-1:] = False
    scores = scores.copy()
    scores[order[remove]] = -np.inf
    return scores


def processed(logits, values: Sampling, steps) -> np.ndarray:
    """The scores from which transformers would draw, [B, V] float64."""
    rows = []
    for i, row in enumerate(logits.astype(np.float64)):
        row = min_new_tokens(row, values.stop_tokens[i], values.bias_until[i, 0], steps[i])
        row = row / float(values.temperature[i])
        if values.top_k[i]:
            row = top_k(row, values.top_k[i])
        if values.top_p[i] < 1:
            row = top_p(row, float(values.top_p[i]))
        rows.append(row)
    return np.stack(rows)


@functools.partial(jax.jit, static_argnums=3)
def random_bits(seed, index, step, v):
    def one(seed, index, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), step)
        return jax.random.bits(key, (v,), jnp.uint32)

    return jax.vmap(one)(seed, index, step)


def gumbel_in_float64(bits):
    return -np.log(-np.log1p(-(np.asarray(bits, np.float64) + 0.5) / 2**32))


def draw(scores, seed, index, step):
    bits = random_bits(seed, index, step, scores.shape[1])
    return np.argmax(scores + gumbel_in_float64(bits), axis=1)


def test_noise_is_exact_for_the_smallest_and_largest_bits():
    bits = np.uint32([0, 1, 2, 99, 2**23 + 1, 2**31, 2**32 - 2, 2**32 - 1])
    found, want = np.asarray(jax.jit(gumbel)(bits)), gumbel_in_float64(bits)
    assert np.isfinite(found).all() and found[0] > 22.8
    # In fp32, the largest bits all stand for the largest number below 1.
    np.testing.assert_allclose(found[:-2], want[:-2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[-2:], -2.81, atol=0.01)


@pytest.mark.slow
def test_unlikely_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should():
    """With noise of 23 bits, they are drawn half as often."""
    v, rows, calls = 2**17, 32, 125
    likelihood = 1e-7 * (v - 1)  # of all but the first, together 1.3 %
    logits = np.full((rows, v), np.log(1e-7 / (1 - likelihood)), np.float32)
    logits[:, 0] = 0
    tokens = [
        choose(logits, sampling(rows, seed=np.arange(rows) + i * rows), NO_LENGTHS[:rows], SAMPLE)[
            0
        ]
        for i in range(calls)
    ]
    drawn, expected = np.sum(np.stack(tokens) > 0), rows * calls * likelihood
    assert abs(drawn - expected) < 3 * expected**0.5


def expected_tokens(logits, values: Sampling, steps) -> np.ndarray:
    """Tokens are drawn from those that transformers would draw from."""
    scores = processed(logits, values, steps).astype(np.float32)
    return np.asarray(draw(scores, values.seed, values.sample_index, steps))


def random_values(batch: int, rng: np.random.Generator, **values) -> Sampling:
    drawn = {
        "temperature": rng.uniform(0.3, 3.0, batch),
        "top_k": rng.integers(0, 2 * V, batch),
        "top_p": np.where(rng.random(batch) < 0.2, 1.0, rng.uniform(0.01, 0.999, batch)),
        "seed": rng.integers(0, 2**32, batch, dtype=np.uint32),
        "sample_index": rng.integers(0, 9, batch),
        "min_new_tokens": rng.integers(0, 5, batch),
        "stop_tokens": rng.integers(-1, V, (batch, 3)),
    }
    return sampling(batch, **(drawn | values))


# --- masks


OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0}


@pytest.mark.slow
@pytest.mark.parametrize("only", [None, *OFF])
def test_a_batch_of_different_rows_draws_what_transformers_would(only):
    """Thousands of rows with their own values. `only` switches the other processors off."""
    batch = ROWS
    rng = np.random.default_rng(0)
    off = {} if only is None else {name: value for name, value in OFF.items() if name != only}
    values = random_values(batch, rng, **off)
    steps = rng.integers(0, 7, batch).astype(np.int32)
    # Nearly flat, so that tokens at the edge of a mask are drawn often.
    logits = random_logits(batch, spread=0.5)
    got = tokens_of(logits, values, steps)
    masked = np.isneginf(processed(logits, values, steps))
    assert not masked[np.arange(batch), got].any()
    np.testing.assert_array_equal(got, expected_tokens(logits, values, steps))


def support(logits, **values) -> set[int]:
    """Tokens found by thousands of draws from one row of logits."""
    row_logits = np.full(V, -np.inf, np.float32)
    row_logits[: len(logits)] = logits
    rows = sampling(ROWS, seed=np.arange(ROWS), **values)
    return set(tokens_of(np.tile(row_logits, (ROWS, 1)), rows).tolist())


FLAT = np.linspace(0.0, 1.0, V).astype(np.float32)  # token i is the (V - i)-th likeliest


@pytest.mark.parametrize("k", [1, 2, 5, V - 1, V, V + 1, 1000, 2**31 - 1])
def test_top_k_leaves_k_tokens(k):
    assert support(FLAT, top_k=k) == set(range(max(0, V - k), V))


def test_top_k_of_zero_is_off():
    assert support(FLAT, top_k=0) == set(range(V))


@pytest.mark.parametrize("p", [1e-7, 0.03, 0.2, 0.5, 0.9, 0.999])
def test_top_p_leaves_the_smallest_set_with_that_mass(p):
    mass = np.cumsum(softmax(FLAT.astype(np.float64))[::-1])
    count = int(np.searchsorted(mass, p)) + 1
    assert support(FLAT, top_p=p) == set(range(V - count, V))
    assert support(FLAT, top_p=p) == set(np.flatnonzero(np.isfinite(top_p(FLAT, p))).tolist())


@pytest.mark.parametrize("option", ["top_p", "typical_p"])
def test_a_share_too_small_for_fp32_leaves_the_first(option):
    assert support(FLAT[:5], **{option: 1e-40}) == support(FLAT[:5], **{option: 1e-30})


@pytest.mark.parametrize("values", [{}, {"top_k": 3}])
def test_the_greatest_temperature_forbids_as_any(values):
    kept = support(FLAT[:5], temperature=1e30, **values)
    assert kept == support(FLAT[:5], temperature=100.0, **values) != set(range(V))


def test_top_p_acts_on_what_top_k_leaves():
    # With the two likeliest, renormalised, the first has a probability just above one half.
    assert support(FLAT, top_k=2, top_p=0.5) == {V - 1}
    assert support(FLAT, top_k=2, top_p=0.52) == {V - 1, V - 2}


def test_top_p_acts_after_the_temperature():
    cold = support(FLAT, temperature=0.05, top_p=0.5)
    assert cold < support(FLAT, temperature=5.0, top_p=0.5)


def test_tokens_that_tie_at_the_edge_are_all_kept():
    """Top-k keeps ties, as in transformers. There top-p keeps only some ties."""
    logits = np.array([0, 3, 1, 1, 1, 3, 0], np.float32)
    assert support(logits, top_k=3) == {1, 5, 2, 3, 4}
    assert support(logits, top_k=1) == {1, 5}
    p = float(softmax(logits)[[1, 5, 2]].sum()) - 0.01
    assert support(logits, top_p=p) == {1, 5, 2, 3, 4}
    assert support(np.zeros(5, np.float32), top_p=0.1) == set(range(5))


def test_stop_tokens_wait_for_the_minimum_length():
    logits = np.zeros((8, V), np.float32)
    logits[:, [1, 3]] = 10
    values = sampling(
        8,
        temperature=[0, 0, 0, 0, 1, 1, 1, 1],
        min_new_tokens=[3, 3, 3, 0, 3, 3, 3, 0],
        stop_tokens=[[1, 3]] * 4 + [[1, 3]] * 4,
    )
    got = tokens_of(logits, values, [0, 2, 3, 0, 0, 2, 3, 0])
    assert np.isin(got, [1, 3]).tolist() == [False, False, True, True] * 2


def test_padding_of_the_stop_tokens_forbids_nothing():
    logits = np.zeros((2, V), np.float32)
    logits[0, V - 1] = logits[1, 0] = 10
    values = sampling(2, temperature=0, min_new_tokens=9, stop_tokens=[[-1, -1]] * 2)
    assert tokens_of(logits, values).tolist() == [V - 1, 0]


@pytest.mark.parametrize("processors", [ALL, SAMPLE])
def test_logits_of_minus_infinity_are_never_drawn(processors):
    rng = np.random.default_rng(3)
    logits = random_logits(3000, spread=0.5)
    logits[rng.random(logits.shape) < 0.8] = -np.inf
    logits[np.arange(3000), rng.integers(0, V, 3000)] = 0.0
    values = random_values(3000, rng, min_new_tokens=0)
    got = tokens_of(logits, values, processors=processors)
    assert np.isfinite(logits[np.arange(3000), got]).all()
    one = np.full((V, V), -np.inf, np.float32)
    np.fill_diagonal(one, np.arange(V) - 40.0)
    values = random_values(V, rng, min_new_tokens=0)
    assert tokens_of(one, values, processors=processors).tolist() == list(range(V))


# --- greedy


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 1e-7},
        {"top_p": 0.0},
        {"top_k": 1, "top_p": 0.5, "temperature": 3.0},
        {"temperature": 1e-4},
        # Divided by these temperatures, a logit overflows.
        {"temperature": 1e-30},
        {"temperature": 2e-38},
        {"temperature": 2e-38, "top_k": 3, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
def test_what_leaves_one_token_is_greedy(values, shift):
    logits = random_logits(500) + np.float32(shift)
    rows = sampling(500, seed=np.arange(500), **values)
    np.testing.assert_array_equal(tokens_of(logits, rows), logits.argmax(-1))


def test_greedy_rows_among_sampled_ones_are_greedy():
    logits = random_logits(2000, spread=0.1)
    rng = np.random.default_rng(1)
    temperature = np.where(np.arange(2000) % 2, 0.0, 1.0)
    rows = random_values(2000, rng, temperature=temperature, min_new_tokens=0, top_k=0, top_p=1.0)
    greedy = tokens_of(logits, rows) == logits.argmax(-1)
    assert greedy[1::2].all()
    assert greedy[::2].mean() < 0.2


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros((2, V), np.float32)
    logits[1, [7, 3]] = 5
    assert tokens_of(logits, sampling(2), processors=Processors()).tolist() == [0, 3]


def test_without_sampling_the_values_of_sampling_are_no_matter():
    logits = random_logits(200)
    rows = random_values(200, np.random.default_rng(2), min_new_tokens=0)
    got = tokens_of(logits, rows, processors=Processors())
    np.testing.assert_array_equal(got, logits.argmax(-1))


# --- distribution


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    """How many standard deviations the counts are too far off (Wilson and Hilferty 1931)."""
    possible = p > 0
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[~possible].sum() == 0
    expected = len(tokens) * p[possible]
    assert expected.min() > 5
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


DRAWS = 20_000


@pytest.mark.parametrize("vary", ["seed", "sample_index", "steps"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.7, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
    ],
    ids=str,
)
def test_draws_follow_the_softmax_whatever_sets_them_apart(vary, values):
    logits = random_logits(1, seed=5, spread=1.0)
    rows = {"seed": 1234, "sample_index": 5} | values
    steps = np.full(DRAWS, 7)
    if vary == "steps":
        steps = np.arange(DRAWS)
    else:
        rows[vary] = np.arange(DRAWS)
    one = sampling(1, **values)
    p = softmax(processed(logits, one, [7])[0])
    got = tokens_of(np.tile(logits, (DRAWS, 1)), sampling(DRAWS, **rows), steps)
    assert chi_square(got, p) < 4
    # The check can fail: a temperature that is off by a quarter exceeds the limit.
    wrong = sampling(1, **(values | {"temperature": values.get("temperature", 1.0) * 1.25}))
    wrong = softmax(processed(logits, wrong, [7])[0])
    if (wrong > 0).tolist() == (p > 0).tolist():
        assert chi_square(got, wrong) > 4


@pytest.mark.slow
def test_seeds_indices_and_steps_all_set_draws_apart():
    """A few draws from a wide flat row agree by chance with probability 1 in 4096."""
    batch, wide = 500, 4096
    logits = np.zeros((batch, wide), np.float32)
    steps = np.arange(batch, dtype=np.int32)

    def tokens_of(logits, values, steps):
        return np.asarray(choose(logits, values, steps, processors=SAMPLE)[0])

    base = tokens_of(logits, sampling(batch, seed=3), steps)
    assert len(set(base.tolist())) > 400
    for other in (
        tokens_of(logits, sampling(batch, seed=4), steps),
        tokens_of(logits, sampling(batch, seed=3, sample_index=1), steps),
        tokens_of(logits, sampling(batch, seed=3), steps + 1),
        # Index and step must have different effects: neither their sum nor their order may decide.
        tokens_of(logits, sampling(batch, seed=3, sample_index=steps), 0 * steps),
        tokens_of(logits, sampling(batch, seed=3, sample_index=1), steps - 1),
    ):
        assert (base == other).sum() <= 5
    top = sampling(batch, seed=2**32 - 1)
    assert (tokens_of(logits, top, steps) == base).sum() <= 5


# --- a row is its own


def test_a_seed_draws_what_it_drew_in_other_processes_and_versions_of_jax():
    logits = 2 * np.sin(1.7 * np.arange(300, dtype=np.float32).reshape(6, 50))
    values = sampling(6, seed=[0, 1, 7, 2**32 - 1, 7, 7], sample_index=[0, 0, 0, 0, 1, 0])
    steps = np.array([0, 0, 0, 3, 0, 1], np.int32)
    drawn = [choose(logits, values, steps + i, SAMPLE)[0].tolist() for i in range(3)]
    assert drawn == [[23, 6, 37, 17, 34, 39], [16, 6, 1, 3, 6, 6], [49, 32, 16, 28, 15, 32]]


def test_draws_do_not_follow_the_generator_that_jax_is_told_to_use():
    logits = random_logits(4, vocabulary=1000, spread=0.1)
    operands = sampling(4, seed=[1, 2, 3, 4]), NO_IDS[:4], NO_LENGTHS[:4], NO_LENGTHS[:4]

    def draw():  # traced again
        return jax.jit(lambda *args: next_tokens(*args, SAMPLE)[0])(logits, *operands)

    tokens = draw()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw(), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["jax_threefry_partitionable", "jax_high_dynamic_range_gumbel"])
def test_draws_do_not_follow_other_settings_of_jax(setting):
    logits = random_logits(64, vocabulary=101)
    operands = (
        sampling(64, seed=np.arange(64), temperature=3.0),
        NO_IDS[:64],
        *[NO_LENGTHS[:64]] * 2,
    )

    def draw():  # traced again
        return jax.jit(lambda *args: next_tokens(*args, SAMPLE)[0])(logits, *operands)

    tokens, was = draw(), getattr(jax.config, setting)
    jax.config.update(setting, not was)
    try:
        np.testing.assert_array_equal(draw(), tokens)
    finally:
        jax.config.update(setting, was)


@pytest.mark.slow
def test_a_row_draws_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(4)
    logits = random_logits(16, vocabulary=99)
    values = random_values(16, rng, top_k=rng.integers(0, 99, 16))
    steps = rng.integers(0, 9, 16).astype(np.int32)
    tokens, logprobs = choose(logits, values, steps, processors=ALL)
    tokens = np.asarray(tokens)
    for order in [*([i] for i in range(16)), rng.permutation(16), [3, 9] * 8]:
        index = np.asarray(order)
        some, some_logprobs = choose(
            logits[index], values.rows(index), steps[index], processors=ALL
        )
        np.testing.assert_array_equal(some, tokens[index])
        # XLA sums a row in another order if the shape differs.
        np.testing.assert_allclose(some_logprobs.chosen, logprobs.chosen[index], rtol=0, atol=2e-6)


@pytest.mark.parametrize("active", [SAMPLE, Processors(sample=True, truncate=True)])
def test_a_processor_that_only_other_rows_need_changes_nothing(active):
    logits = random_logits(1000)
    values = sampling(1000, seed=np.arange(1000), temperature=0.8)
    np.testing.assert_array_equal(
        tokens_of(logits, values, processors=ALL), tokens_of(logits, values, processors=active)
    )


def test_values_are_data_and_compile_nothing():
    calls = 0

    @functools.partial(jax.jit, static_argnames="processors")
    def traced(logits, values, steps, processors):
        nonlocal calls
        calls += 1
        ids, lengths = jnp.zeros((4, 1), jnp.int32), jnp.zeros(4, jnp.int32)
        return next_tokens(logits, values, ids, lengths, steps, processors)

    rng = np.random.default_rng(5)
    for _ in range(3):
        traced(random_logits(4), random_values(4, rng), np.zeros(4, np.int32), processors=ALL)
    assert calls == 1


# --- log-probabilities


@pytest.mark.slow
@pytest.mark.parametrize("processors", [ALL, Processors(logprobs=True)])
def test_logprobs_are_those_of_the_raw_logits(processors):
    rng = np.random.default_rng(6)
    logits = random_logits(300, spread=5.0) + np.float32(30)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, 0] = 30
    values = random_values(300, rng)
    steps = np.zeros(300, np.int32)
    tokens, logprobs = choose(logits, values, steps, processors=processors)
    tokens, logprobs = np.asarray(tokens), logprobs.chosen
    wide = logits.astype(np.float64)
    normal = wide - np.log(np.exp(wide - 50).sum(-1, keepdims=True)) - 50
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, normal[np.arange(300), tokens], rtol=0, atol=2e-5)


def test_logprobs_near_0_are_not_rounded_like_logits():
    gaps = np.linspace(8, 16, 9, dtype=np.float32)
    logits = np.full((9, 320), -np.inf, np.float32)
    logits[:, 5], logits[:, 7] = 30, 30 - gaps
    values = sampling(9, top_logprobs=2)
    zeros = np.zeros(9, np.int32)
    _, logprobs = choose(logits, values, zeros, processors=Processors(logprobs=True))
    certain = -np.log1p(np.exp(-gaps.astype(np.float64)))
    np.testing.assert_allclose(logprobs.chosen, certain, rtol=0, atol=1e-7)
    np.testing.assert_allclose(logprobs.top[:, 0], certain, rtol=0, atol=1e-7)
    np.testing.assert_allclose(logprobs.top[:, 1], certain - gaps, rtol=1e-6)


def test_logprobs_are_not_computed_unasked():
    tokens, logprobs = choose(random_logits(2), sampling(2), np.zeros(2, np.int32), SAMPLE)
    assert logprobs is None and tokens.shape == (2,)


# --- from requests to rows


def test_requests_become_rows_and_unused_rows_are_greedy():
    configs = [
        GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, seed=2**32 - 1),
        GenerationConfig(
            do_sample=False, temperature=0.5, eos_token_ids=(1, 2, 3, 4, 5), min_new_tokens=2
        ),
    ]
    rows = per_row(configs, 4)
    # A request without sampling is greedy, whatever its temperature.
    assert rows.temperature.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert rows.top_k.tolist() == [3, 0, 0, 0]
    assert rows.seed.tolist() == [2**32 - 1, 0, 0, 0]
    assert rows.stop_tokens[1].tolist() == [1, 2, 3, 4, 5] + [-1] * 11
    assert (rows.stop_tokens[[0, 2, 3]] == -1).all()
    assert rows.bias_until[1, :5].tolist() == [2] * 5
    logits = random_logits(4)
    got = tokens_of(logits, rows, processors=Processors(sample=True, truncate=True))
    assert got[1:].tolist() == logits.argmax(-1)[1:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("processors", [Processors(), SAMPLE, ALL], ids=["greedy", "sample", "all"])
def test_one_logit_that_is_not_finite_is_told_wherever_it_is(bad, processors):
    size = 1000
    logits = random_logits(size + 1, size)
    logits[np.arange(size), np.arange(size)] = bad
    values = sampling(size + 1, temperature=0.0)
    tokens, _ = choose(logits, values, np.zeros(size + 1, np.int32), processors)
    assert (np.asarray(tokens[:size]) == NOT_FINITE).all()
    assert tokens[size] == logits[size].argmax()


def test_of_equal_logits_the_first_is_chosen():
    logits = np.zeros((3, 1000), np.float32)
    logits[1, [37, 38, 999]] = 1
    logits[2, [998, 999]] = 1
    values = sampling(3, temperature=0.0)
    tokens, _ = choose(logits, values, np.zeros(3, np.int32), Processors())
    assert tokens.tolist() == [0, 37, 998]
