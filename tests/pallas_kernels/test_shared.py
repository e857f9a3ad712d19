"""Rows that share their first pages: who is found, and that reading them once changes nothing."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    append_decode_attention,
    can_share,
    find_shared,
    reading_shape,
)
from fdjax.pallas_kernels.attention.cache import quantise
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import Rope

from .test_append import GPU, cos_sin_at

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGE = 128
# For each row the pages that it shares with others, and its tokens after them. None: no work.
ROWS = ((9, 8, 7), 5), ((9, 8, 7), 200), None, ((9, 8), 128), ((9, 8, 7), 0), ((), 77), ((9,), 1)


def tables(rows, width=6, seed=0):
    """(pages [B, W], lengths [B]) with pages of its own after those that a row shares."""
    pages, lengths = np.zeros((len(rows), width), np.int32), np.zeros(len(rows), np.int32)
    free = iter(np.random.default_rng(seed).permutation(np.arange(10, 60)))
    for i, row in enumerate(rows):
        if row is not None:
            shared, own = row
            count = own // PAGE + 1
            pages[i, : len(shared) + count] = [*shared, *(next(free) for _ in range(count))]
            lengths[i] = len(shared) * PAGE + own
    return pages, lengths


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=1, max_size=20),
    st.sampled_from([1, 4, 8, 16, 40]),
)
def test_every_row_of_a_tile_has_its_pages(rows, group):
    pages = np.zeros((len(rows), 6), np.int32)
    for i, (table, row) in enumerate(zip(pages, rows, strict=True)):
        table[: len(row) + 1] = [*row, 10 + i]
    shared = find_shared(pages, group)
    if shared is None:
        return
    n, width = shared.members.shape
    assert group * width <= 32 or width == 2
    rows_of = {}
    for row, place in enumerate(shared.places):
        if place < n * width:
            assert shared.members.ravel()[place] == row
            rows_of.setdefault(place // width, []).append(row)
    assert len({p for p in shared.places if p < n * width}) == sum(map(len, rows_of.values()))
    for tile, count in enumerate(shared.counts):
        members = rows_of.get(tile, [])
        assert bool(count) <= (len(members) >= 2)
        for row in members:
            np.testing.assert_array_equal(shared.pages[tile, :count], pages[row, :count])
            assert pages[row, count] != 0  # its own last page is never shared
    saved = sum(int(c) * (len(rows_of.get(i, [])) - 1) for i, c in enumerate(shared.counts) if c)
    shape = reading_shape(shared, hkv=2, d=64, itemsize=2, size=PAGE)
    assert shape["saved"] == saved * PAGE > 0
    assert shape["rows"] == sum(map(len, rows_of.values()))


def test_who_shares_is_found():
    shared = find_shared(np.array([[7, 5, 1], [0, 0, 0], [7, 5, 2], [3, 0, 0]], np.int32), 1)
    assert shared.counts.tolist() == [2, 0]
    assert sorted(shared.members[0, :2]) == [0, 2]
    assert shared.places[[1, 3]].tolist() == [8, 8]


def together(plan, rows, tokens, hkv=8, d=128):
    """Whether rows with 4 query heads for a KV head read their shared beginning together."""
    tables = np.array([[*range(1, tokens // PAGE + 1), 1000 + row] for row in range(rows)])
    shape = reading_shape(find_shared(tables, 4), hkv, d, 2, PAGE)
    return plan.choose("shared_pages", **shape).implementation == "together"


def test_the_plan_decides_which_rows_read_together():
    """The table does where it has measured; otherwise 16 rows must save 64 MB of a layer."""
    h100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    unmeasured = dataclasses.replace(h100, table=())
    assert [together(h100, 32, n) for n in (4096, 1024, 512)] == [True, True, False]
    assert together(h100, 32, 640) != together(unmeasured, 32, 640)  # nearer to 512
    assert [together(unmeasured, 16, n) for n in (1024, 4096)] == [False, True]
    assert not together(h100, 8, 4096) and not together(unmeasured, 8, 4096)
    assert together(Plan(), 2, 128)  # a CPU
    assert not together(h100.with_xla("shared_pages"), 32, 4096)
    apart = dataclasses.replace(h100, named=(("shared_pages", "apart"),))
    assert not together(apart, 32, 4096)


def operands(rows, *, group=4, kv_heads=2, d=64, dtype=jnp.float32, layer=None, seed=1):
    """What `append_decode_attention` takes, with NaN in every slot that no row sees."""
    pages, lengths = tables(rows)
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(len(rows), 1, kv_heads, group + 2, d))
    pools = rng.normal(size=(2, 60, kv_heads, PAGE, d))
    written = np.zeros((60, PAGE), bool)
    for table, length in zip(pages, lengths, strict=True):
        for i in range(length):
            written[table[i // PAGE], i % PAGE] = True
    pools = np.where(written[:, None, :, None], pools, np.nan)
    if layer is not None:
        pools = np.broadcast_to(pools[:, None], (2, 3, *pools.shape[1:]))
    qkv, k, v = (jnp.asarray(a, dtype) for a in (qkv, *pools))
    cos_sin = cos_sin_at(lengths[:, None], Rope(d, 10000.0))
    return (qkv, k, v, jnp.asarray(lengths)), {"pages": pages, "rotation": cos_sin, "layer": layer}


def both(given, options, spec, rows=ROWS, **more):
    """Results with and without reading shared pages once."""
    run = jax.jit(functools.partial(append_decode_attention, **options, spec=spec, **more))
    group = given[0].shape[3] - 2
    shared = find_shared(options["pages"], group)
    assert shared is not None
    return run(*given, shared=jax.tree.map(jnp.asarray, shared)), run(*given)


def same(got, want, rows=ROWS, tolerance=1e-5):
    live = [i for i, row in enumerate(rows) if row is not None]
    got_o, want_o = np.float32(got[0])[live], np.float32(want[0])[live]
    assert np.isfinite(want_o).all()
    np.testing.assert_allclose(got_o, want_o, rtol=tolerance, atol=tolerance)
    for cache, expected in zip(got[1:], want[1:], strict=True):
        # As fp32, because NumPy does not know that NaN of bf16 are equal.
        cache, expected = (jax.tree.map(np.float32, tree) for tree in (cache, expected))
        jax.tree.map(np.testing.assert_array_equal, cache, expected)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [pytest.param(True, marks=pytest.mark.slow), False])
def test_reading_them_once_changes_nothing(plain):
    given, options = operands(ROWS, layer=1 if plain else None)
    spec = AttentionSpec(0.125)
    if not plain:
        scale = jnp.linspace(0.5, 2, 64)
        options["norms"] = RMSNorm(scale, 1e-6), RMSNorm(scale[::-1], 1e-6)
        options["sinks"] = jnp.linspace(-1, 2, 8)
        phi = tuple(float(i) for i in range(8))
        spec = dataclasses.replace(spec, soft_cap=5.0, phi=phi, sinks=True)
    same(*both(given, options, spec))


def test_the_arrays_of_the_host_need_no_jit():
    given, options = operands(ROWS)
    shared = find_shared(options["pages"], 4)
    run = functools.partial(append_decode_attention, **options, spec=AttentionSpec(0.125))
    want, got = (
        jax.eval_shape(run, *given),
        jax.eval_shape(functools.partial(run, shared=shared), *given),
    )
    assert got == want


@pytest.mark.slow
def test_of_a_quantised_cache():
    given, options = operands(ROWS)
    qkv, k, v, lengths = given
    k, v = (quantise(jnp.nan_to_num(cache)) for cache in (k, v))
    same(*both((qkv, k, v, lengths), options, AttentionSpec(0.125)), tolerance=1e-4)


def test_where_distances_count_rows_read_all_of_their_pages():
    given, options = operands(ROWS)
    got, want = both(given, options, AttentionSpec(0.125, window=150))
    same(got, want, tolerance=0)
    assert not can_share(AttentionSpec(0.125, alibi=(0.1,) * 8))


@pytest.mark.parametrize("implementation", GPU)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("plain", [True, False])
def test_on_a_gpu(implementation, group, plain):
    rows = [((9, 8, 7), 13 * i) for i in range(24)] + [None, ((), 77)]
    given, options = operands(rows, group=group, dtype=jnp.bfloat16, d=128)
    spec = AttentionSpec(0.125)
    if not plain:
        phi = tuple(i / 4 for i in range(2 * group))
        spec = dataclasses.replace(spec, soft_cap=5.0, phi=phi, sinks=True)
        options["sinks"] = jnp.linspace(-1, 2, 2 * group)
    got, want = both(given, options, spec, rows, implementation=implementation)
    same(got, want, rows, tolerance=0.02)


def test_what_cannot_be_shared_is_refused():
    given, options = operands(ROWS)
    shared = find_shared(options["pages"], 4)
    with pytest.raises(ValueError, match="shared needs pages and T = 1, and excludes beams"):
        append_decode_attention(
            *given, **options, spec=AttentionSpec(0.125), shared=shared, return_reruns=True
        )
