"""Prompts packed into calls: every token once, in few sizes, and the same results as alone."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.engine.packed import PackedPrompts, call_sizes, largest_call
from fdjax.engine.state import SLOT_MULTIPLE, init_pool, start_in_pages
from fdjax.engine.step import prefill
from fdjax.models import describe, parse_config, random_params
from fdjax.sampling.options import GenerationConfig, per_row

PAGE = SLOT_MULTIPLE


def packed(lengths, batch, *, cached=0, generated=0, leaders=None, **options):
    """The prompts of some rows, which are the numbers 1, 2, 3 and so on."""
    leaders = leaders or {}
    prompts = {i: range(1, n + 1) for i, n in enumerate(lengths) if i not in leaders}
    queue = PackedPrompts(batch, **options)
    same = functools.partial(dict.fromkeys, prompts)
    queue.add(prompts, cached=same(cached), generated=same(generated))
    for row, leader in leaders.items():
        queue.follow(row, leader)
    return queue


def taken(queue, budgets=(math.inf,)):
    """All calls of a queue, each checked by itself; the last budget serves all that follow."""
    calls = []
    while queue:
        budget = budgets[min(len(calls), len(budgets) - 1)]
        call = queue.take(budget)
        calls.append(call)
        width = call.tokens.shape[1]
        assert call.tokens.size <= max(budget, PAGE)
        assert call.lengths.any() and (call.lengths <= width).all()
        starts = call.offsets[call.lengths > 0].tolist()
        assert starts == sorted(starts, reverse=True)
        for tokens, n, offset in zip(call.tokens, call.lengths, call.offsets, strict=True):
            assert tokens[:n].tolist() == list(range(offset + 1, offset + n + 1))
            assert not tokens[n:].any()
        assert call.tokens.dtype == call.lengths.dtype == call.offsets.dtype == np.int32
    return calls


def parts(calls, batch):
    """(row, first token, tokens, whether the prompt ends) of each call's rows."""
    found = []
    for call in calls:
        rows = range(batch) if call.rows is None else call.rows.tolist()
        small = len(call.tokens) == 4 and len(rows) == min(batch, 16)
        assert len(set(rows)) == len(rows) and (small or len(rows) == min(batch, len(call.tokens)))
        owners = range(len(rows)) if call.owners is None else call.owners.tolist()
        for r, row in enumerate(rows):
            blocks = [b for b, n in enumerate(call.lengths) if n and owners[b] == r]
            if row in call.copied:
                leader = list(rows).index(call.copied[row])
                assert not blocks and call.final[r] and call.last[r] == call.last[leader] >= 0
                assert call.prompts[r] == call.prompts[leader]
                found.append((row, 0, int(call.prompts[r]), True))
            elif not blocks:
                assert not call.final[r] and (call.last is None or call.last[r] == -1)
            if not blocks:
                continue
            blocks.sort(key=lambda b: call.offsets[b])
            assert call.last is None or call.last[r] == blocks[-1]
            ends = call.offsets[blocks] + call.lengths[blocks]
            assert call.offsets[blocks[1:]].tolist() == ends[:-1].tolist()
            found.append((row, int(call.offsets[blocks[0]]), int(ends[-1]), bool(call.final[r])))
    return found


BUDGETS = st.lists(st.sampled_from([1, 128, 600, 2048, math.inf]), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    st.integers(0, 40),
    BUDGETS,
    st.booleans(),
    st.data(),
)
@pytest.mark.slow
def test_every_token_is_computed_once_and_in_order(lengths, spare, budgets, on_cpu, data):
    batch = len(lengths) + spare
    queue = packed(lengths, batch, on_cpu=on_cpu)
    left_out = data.draw(st.sampled_from([None, *range(len(lengths))]))
    calls = [queue.take(budgets[0])]
    if left_out is not None:
        queue.leave_out(left_out)
    calls += taken(queue, budgets)
    reached = dict.fromkeys(range(len(lengths)), 0)
    for row, begin, end, final in parts(calls, batch):
        assert begin == reached[row]
        reached[row] = end
        assert final == (end == lengths[row])
    for row, n in enumerate(lengths):
        assert reached[row] == n or row == left_out
    short = {(8, 16)} if on_cpu and batch >= 8 else set()
    shapes = {call.tokens.shape for call in calls}
    assert shapes <= {(size, PAGE) for size in call_sizes(batch, on_cpu=on_cpu)} | short
    # What `workspace_bytes` counts.
    foreseen = largest_call(max(lengths), batch)
    assert max(call.tokens.size for call in calls) <= foreseen


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(0, 40),
    BUDGETS,
    st.booleans(),
    st.data(),
)
def test_samples_of_a_prompt_are_computed_once(prompts, spare, budgets, on_cpu, data):
    lengths, leaders = [], {}
    for length, samples in prompts:
        first = len(lengths)
        lengths += [length] * samples
        leaders |= dict.fromkeys(range(first + 1, first + samples), first)
    batch = len(lengths) + spare
    queue = packed(lengths, batch, leaders=leaders, on_cpu=on_cpu)
    left_out = data.draw(st.sets(st.sampled_from(range(len(lengths)))))
    calls = [queue.take(budgets[0])]
    for row in left_out:
        queue.leave_out(row)
    calls += taken(queue, budgets)
    last = {}
    for row, begin, end, final in parts(calls, batch):
        group = leaders.get(row, row)
        if not any(row in call.copied for call in calls):
            # The rest of its prompt, or its last page once more.
            assert begin in (last.get(group, 0), (lengths[row] - 1) // PAGE * PAGE)
            last[group] = end
        assert final == (end == lengths[row])
        if final:
            last[row, "ends"] = last.get((row, "ends"), 0) + 1
    for row in range(len(lengths)):
        assert last.get((row, "ends"), 0) == 1 or row in left_out
    if budgets[0] == math.inf and not left_out and not on_cpu:
        computed = sum(int(call.lengths.sum()) for call in calls)
        groups = sum(length + samples // 4 * PAGE for length, samples in prompts)
        assert computed <= groups


def test_few_samples_take_one_small_call():
    (call,) = taken(packed([100] * 16, 64, leaders=dict.fromkeys(range(1, 16), 0)))
    assert call.tokens.shape == (4, PAGE) and call.final.sum() == 16 and len(call.copied) == 15
    (call,) = taken(packed([2000] * 16, 64, leaders=dict.fromkeys(range(1, 16), 0)))
    assert call.tokens.shape == (16, PAGE) and call.lengths.sum() == 2000


def test_samples_without_room_compute_their_whole_last_page():
    """A page of devices that divide the tokens of a KV head has several blocks."""
    leaders = dict.fromkeys(range(1, 20), 0)
    calls = taken(packed([1000] * 20, 64, leaders=leaders, page_tokens=2 * PAGE))
    starts = [int(call.offsets[call.lengths > 0].min()) for call in calls]
    assert starts == [0, 4 * PAGE, 6 * PAGE]
    assert [call.final.sum() for call in calls] == [0, 16, 4]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 12, 64, 256])
def test_sizes_are_few(batch):
    sizes = call_sizes(batch)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and len(sizes) <= 5
    assert min(8 * batch, 64) in sizes and sizes[-1] == min(32 * batch, 64)


def test_a_long_prompt_of_a_mixture_of_experts_takes_one_call():
    """Each call reads all experts. Otherwise the only row has at most 4096 tokens of a call."""

    def sizes(tokens, **options):
        return [len(call.tokens) for call in taken(packed([tokens], 1, **options))]

    assert sizes(8192) == [32, 32]
    assert sizes(6000) == [32, 8, 8]
    assert sizes(2000) == [8, 8]
    assert sizes(8192, experts=True) == [64]
    assert sizes(6000, experts=True) == [64]
    assert sizes(2000, experts=True) == [8, 8]
    assert sizes(1000, experts=True) == [8]
    assert call_sizes(64, experts=True) == call_sizes(64)


def test_three_prompts_are_not_four():
    """48 blocks of 128 tokens, and not four rows of 2 048."""
    calls = taken(packed([2000] * 3, 4))
    assert [len(call.tokens) for call in calls] == [32, 16]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=64))
def test_padding_is_less_than_a_block_a_prompt_and_a_few_blocks_at_the_end(lengths):
    calls = taken(packed(lengths, 64))
    computed = sum(call.tokens.size for call in calls)
    whole = sum(-(-n // PAGE) for n in lengths)
    # A call costs as much as a block, so six blocks of padding are worth six calls.
    assert whole * PAGE <= computed <= (whole + 6) * PAGE


def test_what_the_cache_holds_is_not_computed():
    (call,) = taken(packed([300], 1, cached=256, generated=7))
    assert call.tokens.shape == (1, PAGE)
    assert (call.offsets[0], call.lengths[0]) == (256, 44)
    assert (call.prompts[0], call.generated[0]) == (293, 7)


def test_short_prompts_share_a_small_call_on_a_cpu():
    calls = taken(packed([3, 200, 16, 17], 8, on_cpu=True))
    assert [call.tokens.shape for call in calls] == [(8, 16), (4, PAGE)]
    assert parts(calls, 8)[:2] == [(0, 0, 3, True), (2, 0, 16, True)]


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 150},
    "gemma2": {"sliding_window": 150, "head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
}


@functools.cache
def program(family):
    config = parse_config(
        {
            "model_type": family,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
            "num_hidden_layers": 2,
            "max_position_embeddings": 2048,
            **FAMILIES[family],
        }
    )
    model = describe(config, dtype="float32")
    return model, jax.jit(functools.partial(prefill, model, random_params(model)))


@pytest.mark.parametrize(
    "family",
    [
        # Windows, and windows with soft caps in some layers.
        pytest.param(f, marks=pytest.mark.slow if f in ("mistral", "gemma2") else pytest.mark.soak)
        for f in FAMILIES
    ],
)
@pytest.mark.usefixtures("quick_compiles")
def test_a_packed_call_is_bit_by_bit_what_blocks_give_one_by_one(family):
    """In any order of blocks, and whatever the pages held before."""
    model, run = program(family)
    rng = np.random.default_rng(0)
    lengths, batch = [300, 1, 128, 260], 5
    sampling = jax.tree.map(jnp.asarray, per_row([GenerationConfig()] * batch, batch))
    prompts = [rng.integers(0, 64, n) for n in lengths]
    pages = np.zeros((batch, 3), np.int32)
    numbers = iter(rng.permutation(np.arange(1, 20)))
    for row, n in enumerate(lengths):
        pages[row, : -(-n // PAGE)] = [next(numbers) for _ in range(-(-n // PAGE))]
    pool = init_pool(model, 20)
    pool = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan).at[:, 0].set(0), pool)
    restarts = np.ones(batch, np.int32)

    def call(state, blocks, restarts):
        """Blocks are (row, first token); the rows of the call are 4, 3, 2, 1, 0."""
        rows = np.arange(batch, dtype=np.int32)[::-1].copy()
        tokens = np.zeros((len(blocks), PAGE), np.int32)
        sizes, offsets, owners = np.zeros((3, len(blocks)), np.int32)
        last, of_prompts = np.full(batch, -1, np.int32), np.ones(batch, np.int32)
        final = np.zeros(batch, bool)
        for b, block in enumerate(blocks):
            if block is None:
                continue
            row, start = block
            piece = prompts[row][start : start + PAGE]
            tokens[b, : len(piece)] = piece
            sizes[b], offsets[b], owners[b] = len(piece), start, 4 - row
            of_prompts[4 - row] = lengths[row]
            if last[4 - row] < 0 or start > offsets[last[4 - row]]:
                last[4 - row] = b
            final[4 - row] |= start + len(piece) == lengths[row]
        args = sampling, tokens, sizes, offsets, final, rows, of_prompts, restarts
        return run(state, *args, pages[rows], owners, last)

    blocks = [(row, s) for row, n in enumerate(lengths) for s in range(0, n, PAGE)]
    order = [blocks[i] for i in rng.permutation(len(blocks))]
    packed_state, first, _ = call(start_in_pages(pool, batch, 384), [None, *order], restarts)
    state, firsts = start_in_pages(pool, batch, 384), np.full(batch, -1)
    for block in blocks:
        state, chosen, _ = call(state, [block, None, None], restarts)
        restarts = 0 * restarts
        firsts = np.maximum(firsts, chosen)
    assert first.tolist() == firsts.tolist() and (first >= 0).tolist() == [False, *[True] * 4]
    assert packed_state.lengths.tolist() == [*lengths, 0]
    assert np.array_equal(packed_state.progress, state.progress)
    assert np.array_equal(packed_state.ids, state.ids)
    for got, want in zip(jax.tree.leaves(packed_state.kv), jax.tree.leaves(state.kv), strict=True):
        assert np.array_equal(got, want, equal_nan=True)
