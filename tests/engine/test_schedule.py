"""Prompts cut into calls: every token once, few shapes, little waste, nothing past the cache."""

import collections
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.engine import schedule
from fdjax.engine.schedule import (
    CHUNKS,
    chunks_for,
    covered_slots,
    prefill_calls,
    rows_of_call,
    slots_for,
    widest_chunk,
)
from fdjax.engine.state import SLOT_MULTIPLE

NARROW, WIDE = min(CHUNKS), max(CHUNKS)
LONGEST = 20_000


def test_chunks_cover_every_length_with_bounded_waste():
    for length in range(LONGEST + 1):
        chunks = chunks_for(length)
        assert set(chunks) <= set(CHUNKS)
        waste = sum(chunks) - length
        assert waste >= 0
        # A call costs as much as 128 tokens, so some waste saves time; it never doubles the work.
        assert waste < 512
        assert waste < NARROW or sum(chunks) <= 2 * length
        # No chunk is superfluous.
        assert not chunks or waste < min(chunks)
        # Wide chunks come first. A wide chunk that starts late would exceed the cache most.
        assert list(chunks) == sorted(chunks, reverse=True)
        # Calls: as many as whole wide chunks, and a few more for the rest.
        assert len(chunks) <= length // WIDE + 5
    assert chunks_for(0) == ()


def test_chunks_of_known_lengths():
    assert [chunks_for(n) for n in (1, 128)] == [(128,)] * 2
    assert chunks_for(129) == (128, 128)
    assert chunks_for(512) == (512,)
    assert chunks_for(1024) == (1024,)
    assert chunks_for(2049) == (1024, 1024, 128)


def test_the_cost_of_chunks_is_the_least_there_is():
    """Compare with all sums of widths, by dynamic programming over multiples of the narrowest."""
    best = [0]
    for units in range(1, 2 * WIDE // NARROW + 1):
        best.append(min(c + 128 + best[max(0, units - c // NARROW)] for c in CHUNKS))
        chunks = chunks_for(units * NARROW)
        assert sum(chunks) + 128 * len(chunks) == best[units]


def test_a_very_long_prompt_is_no_deep_recursion():
    chunks = chunks_for(10_000_001)
    assert 0 <= sum(chunks) - 10_000_001 < 512


def test_sums_of_chunks_need_no_chunks():
    for length in range(1, LONGEST, 7):
        chunks = chunks_for(length)
        assert (covered_slots(length), widest_chunk(length)) == (sum(chunks), max(chunks))
    schedule.cheapest.cache_clear()
    tracemalloc.start()
    assert covered_slots(10**12) == slots_for(1, 1, 10**12) == 10**12
    assert widest_chunk(10**12) == WIDE
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert schedule.cheapest.cache_info().currsize <= 3 * WIDE // NARROW


def test_a_longer_prompt_never_covers_fewer_slots():
    covered = [covered_slots(n) for n in range(LONGEST + 1)]
    assert covered == sorted(covered)
    assert all(c % SLOT_MULTIPLE == 0 for c in covered)


# --- slots


@given(st.integers(0, LONGEST), st.integers(0, 5000))
def test_slots_hold_the_tokens_and_the_chunks(prompt, new):
    slots = slots_for(prompt, prompt + new, None)
    assert slots >= max(prompt + new, covered_slots(prompt))
    assert slots % SLOT_MULTIPLE == 0
    # A few sizes, and none four times too large.
    assert slots in {512 * 4**i for i in range(8)}
    assert slots == 512 or slots // 4 < max(prompt + new, covered_slots(prompt))


@given(st.integers(1, LONGEST), st.data())
def test_a_limit_fixes_the_slots_whatever_the_prompt(limit, data):
    prompt = data.draw(st.integers(1, limit))
    slots = slots_for(prompt, data.draw(st.integers(prompt, limit)), limit)
    assert slots == slots_for(1, 1, limit)
    assert slots % SLOT_MULTIPLE == 0
    assert limit <= slots < limit + 512
    assert slots >= covered_slots(prompt)


# --- calls


def check(lengths: list[int], batch: int, limit: int | None = None) -> set[tuple]:
    """Run the calls on a model of the state; returns the shapes of the programs."""
    rng = np.random.default_rng(len(lengths))
    prompts = [rng.integers(1, 30_000, n).tolist() for n in lengths]
    longest = max(lengths, default=0)
    slots = slots_for(longest, longest + 1, limit)
    cache: list[list[int]] = [[] for _ in range(batch)]
    finals = collections.Counter()
    shapes = set()
    for call in prefill_calls(dict(enumerate(prompts)), batch):
        count, width = call.tokens.shape
        rows = list(range(batch)) if call.rows is None else call.rows.tolist()
        shapes.add((call.rows is None, count, width))
        assert call.tokens.dtype == call.lengths.dtype == call.offsets.dtype == np.int32
        assert call.final.dtype == bool
        assert len(rows) == count == len(set(rows)) and set(rows) <= set(range(batch))
        assert width in CHUNKS
        assert (call.offsets + width <= slots).all()
        # A call costs as much as its tokens, or as one row of the widest chunk.
        assert count == 1 or count * width <= 8192
        assert call.lengths.any(), "a call without work"
        for row, tokens, n, offset, final in zip(
            rows, call.tokens, call.lengths, call.offsets, call.final, strict=True
        ):
            assert not tokens[n:].any()
            if n == 0:
                # Left untouched: neither written nor ended.
                assert not final
                continue
            # In order and in the right place: earlier tokens are neither lost nor repeated.
            assert offset == len(cache[row])
            cache[row] += tokens[:n].tolist()
            finals[row] += int(final)
            assert bool(final) == (len(cache[row]) == lengths[row])
    assert cache == prompts + [[]] * (batch - len(prompts))
    assert finals == collections.Counter(i for i, n in enumerate(lengths) if n)
    return shapes


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [
        ([], 1),
        ([0], 1),
        ([0, 0, 0], 4),
        ([1], 1),
        ([20_000], 1),
        ([129, 3], 2),
        ([5, 600, 1], 4),
        # More long prompts than fit into a call: rows that fill up the last call are done already.
        ([2000] * 5, 8),
        ([2000] * 7 + [1000], 8),
        # The rest is short enough for a call of the whole batch, which also holds finished rows.
        ([2000] + [10] * 7, 8),
        ([10] * 7 + [2000], 8),
        ([5000, 3000, 20, 2000, 1, 600, 128, 129], 8),
        # Rows without a prompt among rows with one.
        ([2000, 0, 2000, 0, 2000, 0, 2000, 0], 8),
        ([0, 2000, 2000, 2000, 2000, 0, 0, 0], 8),
        ([0] * 7 + [5], 8),
        ([3000] * 40 + [100] * 24, 64),
        ([17] * 65, 128),
        ([600] * 100 + [30] * 156, 256),
    ],
    ids=str,
)
def test_every_token_is_processed_once_in_its_place(lengths, batch):
    check(lengths, batch)


@st.composite
def batches(draw):
    batch = 2 ** draw(st.integers(0, 7))
    sizes = st.one_of(
        st.just(0),
        st.integers(1, 10),
        st.integers(100, 700),
        st.integers(1500, 2100),
        st.integers(4000, 9000),
    )
    return draw(st.lists(sizes, max_size=min(batch, 24))), batch


@settings(max_examples=200)
@given(batches())
def test_every_token_of_any_batch_is_processed_once_in_its_place(case):
    check(*case)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=8))
def test_chunks_stay_inside_a_cache_as_small_as_the_limit(lengths):
    check(lengths, 8, limit=max(lengths))


def test_a_limit_just_over_a_prompt_that_prefers_a_wide_chunk():
    assert chunks_for(850) == (WIDE,)
    check([850], 1, limit=851)


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_programs_are_few_whatever_the_prompts(batch):
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(20):
        high = int(rng.choice([100, 600, 3000, 9000]))
        lengths = rng.integers(1, high, rng.integers(1, min(batch, 40) + 1)).tolist()
        shapes |= check(lengths, batch)
    assert len(shapes) <= (3 if batch == 1 else 9)
    for whole, count, _ in shapes:
        assert count == batch if whole else count in {2**i for i in range(9)}


def test_a_call_has_all_rows_or_a_half_of_them_and_so_on():
    assert [rows_of_call(WIDE, batch) for batch in (1, 8, 12, 20, 64)] == [1, 8, 6, 5, 8]
    calls = prefill_calls(dict(enumerate([[7] * 2000] * 12)), 12)
    assert {len(call.tokens) for call in calls} == {6}


def test_prompts_of_one_length_share_calls():
    assert len(prefill_calls(dict(enumerate([[7] * 100] * 64)), 64)) == 1
    assert len(prefill_calls(dict(enumerate([[7] * 2000] * 8)), 8)) == 2
    assert len(prefill_calls(dict(enumerate([[7]])), 1)) == 1


def test_an_array_is_a_prompt_too():
    (call,) = prefill_calls({i: np.arange(n) for i, n in enumerate([3, 0, 9, 1])}, 4)
    assert call.tokens[2, :10].tolist() == [*range(9), 0]
    assert call.lengths.tolist() == [3, 0, 9, 1]
    assert call.final.tolist() == [True, False, True, True]
