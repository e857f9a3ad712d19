"""The rules of beam search, against a search in plain Python on a model that is a table.

The scores of the next token depend on the step and on the last token.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.sampling import beams
from fdjax.sampling.beams import BeamState
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import next_tokens, next_tokens_and_scores

pytestmark = pytest.mark.usefixtures("quick_compiles")

START = 0


def power(length: int, config: GenerationConfig) -> float:
    return min(max(float(length) ** config.length_penalty, 1e-25), 1e25)


def search(table: np.ndarray, config: GenerationConfig, draws=None) -> list[tuple[float, list]]:
    """The ended beams (score, tokens), best first.

    Args:
      table: [steps, V, V] log-probabilities of the next token.
      config: the options.
      draws: for each step, the places of the candidates [beam, token] in the order in which they
        were drawn; default in the order of their scores.
    """
    w, ends = config.num_beams, set(config.eos_token_ids)
    going, ended = [(0.0, [])], []
    for step in range(1, config.max_new_tokens + 1):
        found = [
            (score + table[step - 1, tokens[-1] if tokens else START, token], b, token)
            for b, (score, tokens) in enumerate(going)
            for token in range(len(table[0]))
        ]
        if draws is None:
            found = sorted(found, key=lambda c: (-c[0], c[1], c[2]))[: w * max(2, 1 + len(ends))]
        else:
            found = [found[i] for i in draws[step - 1]]
        found = [(score, going[b][1] + [token]) for score, b, token in found]
        is_last = step == config.max_new_tokens
        hits = [is_last or tokens[-1] in ends for _, tokens in found]
        new = [
            (score / power(step, config), tokens)
            for (score, tokens), hit in zip(found[:w], hits, strict=False)
            if hit
        ]
        ended = sorted(ended + new, key=lambda c: -c[0])[:w]
        going = [c for c, hit in zip(found, hits, strict=True) if not hit]
        going = sorted(going, key=lambda c: -c[0])[:w]
        if not going or (config.early_stopping is True and len(ended) == w):
            break
        never = config.early_stopping == "never" and config.length_penalty > 0
        length = config.max_new_tokens if never else step
        if len(ended) == w and going[0][0] / power(length, config) <= ended[-1][0]:
            break
    return ended


@jax.jit
def first(table, state, sampling, ids):
    return _step(table, state, sampling, ids, 0)


@jax.jit
def following(table, state, sampling, ids, steps):
    return _step(table, state, sampling, ids, steps)


def _step(table, state, sampling, ids, steps):
    processors = STATIC["processors"]
    b = len(ids)
    lengths = jnp.full((b,), 1, jnp.int32) + steps
    last = ids[:, 0] if isinstance(steps, int) else ids[jnp.arange(b), steps]
    at = jnp.zeros((b,), jnp.int32) + steps
    _, _, scores = next_tokens_and_scores(table[at, last], sampling, ids, lengths, at, processors)
    everyone = jnp.ones((b,), bool)
    if isinstance(steps, int):
        found = beams.candidates(scores, jnp.zeros((b,), jnp.float32), processors)
        return beams.begin(found, state, sampling, everyone)
    found = beams.candidates(scores, state.scores, processors)
    return beams.advance(found, state, sampling, at, everyone)


STATIC = {}


def run(table: np.ndarray, configs: list[GenerationConfig]) -> list[list[tuple[float, list]]]:
    """The ended beams of each search on the device, from its steps."""
    rows = [(c, beam) for c in configs for beam in range(c.num_beams)]
    processors = configs[0].processors
    for config in configs:
        processors |= config.processors
    if STATIC.get("processors") != processors:
        STATIC["processors"] = processors
        jax.clear_caches()
    b, new = len(rows), configs[0].max_new_tokens
    sampling = per_row([c for c, _ in rows], b, sample_indices=[beam for _, beam in rows])
    sampling = jax.tree.map(jnp.asarray, sampling)
    state = jax.tree.map(jnp.asarray, BeamState.empty(b, new + 1, processors.beams[0]))
    table, ids = jnp.asarray(table, jnp.float32), np.full((b, new + 1), START, np.int32)
    steps, ended = [], [None] * len(configs)
    starts = np.cumsum([0, *(c.num_beams for c in configs)])
    for i in range(new):
        step, state = (
            following(table, state, sampling, jnp.asarray(ids), jnp.int32(i))
            if i
            else first(table, state, sampling, jnp.asarray(ids))
        )
        ids = ids[np.asarray(step.rows)]
        ids[:, i + 1] = np.asarray(step.tokens)
        steps.append((np.asarray(step.tokens), np.asarray(step.parents)))
        scores, ends = np.asarray(state.ended), np.asarray(state.ends)
        for g, config in enumerate(configs):
            row = starts[g]
            if ended[g] is None and bool(step.finished[row]):
                ended[g] = [
                    (scores[row, k].item(), backwards(steps, row, *ends[row, k].tolist()))
                    for k in range(config.num_beams)
                    if ends[row, k, 0]
                ]
    return ended


def backwards(steps, row, length, beam, last):
    tokens = [last]
    for chosen, parents in reversed(steps[: length - 1]):
        tokens.append(chosen[row + beam].item())
        beam = parents[row + beam].item()
    return tokens[::-1]


def log_table(rng, steps: int, v: int) -> np.ndarray:
    logits = rng.normal(size=(steps, v, v)) * 1.5
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1))
def test_searches_on_a_table(seed):
    rng = np.random.default_rng(seed)
    table = log_table(rng, 7, 12)
    configs = [
        GenerationConfig(
            max_new_tokens=7,
            num_beams=int(beams),
            length_penalty=float(rng.choice([-100, -25, -1, 0, 0.6, 1, 2, 100])),
            early_stopping=[True, False, "never"][rng.integers(3)],
            eos_token_ids=tuple(rng.choice(12, rng.integers(0, 4), replace=False).tolist()),
            seed=0,
        ).filled()
        for beams in rng.permutation([2, 3, 4, 5] * 6)
    ]
    # All examples have the same shapes, so that they share a program.
    (widest,) = [i for i, c in enumerate(configs) if c.num_beams == 5][:1]
    configs[widest] = dataclasses.replace(configs[widest], eos_token_ids=(1, 2, 3))
    for config, found in zip(configs, run(table, configs), strict=True):
        want = search(table, config)
        assert [tokens for _, tokens in found] == [tokens for _, tokens in want], config
        np.testing.assert_allclose([s for s, _ in found], [s for s, _ in want], rtol=1e-4)


def exact_distribution(table: np.ndarray, config: GenerationConfig) -> dict[tuple, float]:
    """The probability of each best answer of a sampled search of two steps."""
    w, kept = config.num_beams, config.num_beams * max(2, 1 + len(config.eos_token_ids))
    v, chances = len(table[0]), {}

    def orders(weights, count):
        """All ordered draws without replacement, with their probabilities."""
        for order in itertools.permutations(np.flatnonzero(weights).tolist(), count):
            chance, left = 1.0, weights.sum()
            for i in order:
                chance, left = chance * weights[i] / left, left - weights[i]
            yield order, chance

    for one, chance in orders(np.exp(table[0, START]), kept):
        ends = config.eos_token_ids
        going = sorted((-table[0, START, t], t) for t in one if t not in ends)[:w]
        weights = np.exp(np.concatenate([table[1, t] - score for score, t in going]))
        best: dict[tuple, float] = {}
        # Only the first W draws can become an answer.
        for two, second in orders(weights, w):
            answers = search(table, config, draws=[one, two])
            key = tuple(answers[0][1])
            best[key] = best.get(key, 0.0) + second
        for key, second in best.items():
            chances[key] = chances.get(key, 0.0) + chance * second
    assert math.isclose(sum(chances.values()), 1.0, rel_tol=1e-9)
    assert all(len(key) <= 2 and max(key) < v for key in chances)
    return chances


@pytest.mark.slow
@pytest.mark.parametrize("ends", [pytest.param((), marks=pytest.mark.soak), (3,)])
def test_sampled_searches_have_the_exact_distribution(ends):
    count, table = 6000, log_table(np.random.default_rng(5), 2, 5)
    config = GenerationConfig(
        max_new_tokens=2, num_beams=2, do_sample=True, eos_token_ids=ends, length_penalty=0.7
    ).filled()
    want = exact_distribution(table, config)
    found = run(
        table, [GenerationConfig(seed=i, max_new_tokens=2).filled(config) for i in range(count)]
    )
    counts = {key: 0 for key in want}
    for answers in found:
        counts[tuple(answers[0][1])] += 1
    likely = [key for key, chance in want.items() if chance * count >= 5]
    rest = count * (1 - sum(want[key] for key in likely))
    chi = sum((counts[k] - count * want[k]) ** 2 / (count * want[k]) for k in likely)
    if rest >= 5:
        chi += (count - sum(counts[k] for k in likely) - rest) ** 2 / rest
    # Six standard deviations of chi-square, with as many degrees of freedom.
    assert chi < len(likely) + 6 * math.sqrt(2 * len(likely)), (chi, len(likely))


LIMITS = [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"typical_p": 0.01}]


@pytest.mark.slow
def test_limits_of_a_draw_keep_more_tokens_than_end_tokens():
    """Otherwise all continuations of a beam could end. Other rows keep one token."""
    ends = [(), (1,), (1, 2), (1, 2, 3)]
    configs = [
        GenerationConfig(
            do_sample=True, num_beams=2, eos_token_ids=e, temperature=0.5, seed=0, **limit
        )
        for limit in LIMITS
        for e in ends
    ]
    configs += [GenerationConfig(do_sample=True, seed=0, **limit) for limit in LIMITS]
    b = len(configs)
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(b, 11)).astype(np.float32)
    processors = configs[0].filled().processors
    sampling = jax.tree.map(jnp.asarray, per_row(configs, b))
    ids, zeros = jnp.zeros((b, 4), jnp.int32), jnp.zeros((b,), jnp.int32)
    choose = jax.jit(next_tokens_and_scores, static_argnums=5)
    tokens, _, found = choose(jnp.asarray(logits), sampling, ids, zeros + 1, zeros, processors)
    kept = np.isfinite(found.scores)
    want = [max(2, 1 + len(e)) for _ in LIMITS for e in ends] + [1] * len(LIMITS)
    assert kept.sum(axis=1).tolist() == want
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    n = len(LIMITS) * len(ends)
    scores = np.where(kept, found.scores, 0.0)[:n]
    np.testing.assert_allclose(scores, np.where(kept, logprobs / 0.5, 0.0)[:n], rtol=1e-5)
    for row in range(b):
        if "typical_p" not in configs[row].given:
            likeliest = np.argsort(-logits[row])[: want[row]]
            assert set(np.flatnonzero(kept[row])) == set(likeliest)
    # A row that is no beam draws what it draws where there are none.
    alone = per_row(configs[n:], len(LIMITS))
    args = jax.tree.map(jnp.asarray, (logits[n:], alone, ids[n:], zeros[n:] + 1, zeros[n:]))
    plain, _ = jax.jit(next_tokens, static_argnums=5)(*args, processors)
    assert plain.tolist() == tokens[n:].tolist()


def test_rows_without_beams_have_no_columns_for_them():
    """So their programs are those of before."""
    config = GenerationConfig(seed=0)
    names = per_row([config], 2).names
    assert not {"num_beams", "length_penalty", "early_stopping"} & {*names[0], *names[1]}
    with_beams = per_row([config, GenerationConfig(num_beams=2, seed=0)], 2)
    assert {"num_beams", "length_penalty", "early_stopping"} <= {
        *with_beams.names[0],
        *with_beams.names[1],
    }


@pytest.mark.parametrize(
    ("widths", "first", "aligned"),
    [
        ((3, 3), (0, 3), True),
        ((3,), (3,), True),
        ((3,), (2,), False),
        ((3, 3), (0, 4), False),
        ((3, 2), (0, 3), False),
        ((3, 1), (0, 3), False),
        ((2,), (0,), False),
        ((), (), True),
    ],
)
def test_aligned_beams_begin_at_multiples_of_their_number(widths, first, aligned):
    of_row, index = np.zeros((2, 8), int)
    for width, row in zip(widths, first, strict=True):
        of_row[row : row + width], index[row : row + width] = width, np.arange(width)
    assert beams.are_aligned(of_row, index, 3) == aligned


@pytest.mark.parametrize(("n", "count"), [(5, 4), (3, 8), (700, 8), (700, 1), (701, 300)])
def test_the_largest_values_keep_the_order_of_equal_ones(n, count):
    values = np.random.default_rng(n).integers(0, 40, (6, n)).astype(np.float32)
    values[1, 2:] = values[2] = -np.inf
    values[3] = -np.inf
    values[3, -1] = 7
    largest, at = jax.jit(beams._largest, static_argnums=1)(values, count)
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    want = np.take_along_axis(values, order, axis=1)
    missing = ((0, 0), (0, count - order.shape[1]))
    want = np.pad(want, missing, constant_values=-np.inf)
    np.testing.assert_array_equal(largest, want)
    np.testing.assert_array_equal(at, np.where(want > -np.inf, np.pad(order, missing), 0))
