"""The int8 cache: how it rounds, what appending writes, which kernels refuse it.

`test_attention` runs attention over it against the oracle.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    BeamSlots,
    QuantisedCache,
    append_decode_attention,
    append_prefill_attention,
    decode_attention,
    prefill_attention,
)
from fdjax.pallas_kernels.attention.append import append
from fdjax.pallas_kernels.attention.cache import cache_features, dequantised, quantise
from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.plan import Plan

from . import oracle
from .tolerance import assert_same_bits, assert_within

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGE, HKV, G, D = 16, 2, 4, 64
SPEC = AttentionSpec(D**-0.5)
quantised = jax.jit(quantise)


def normal(*shape, seed=0, dtype="bfloat16"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


# Rounding


@settings(max_examples=40)
@given(
    data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "float16"]), d=st.integers(1, 5)
)
def test_every_value_is_off_by_at_most_half_a_scale(data, dtype, d):
    width = {"float32": 32, "bfloat16": 16, "float16": 16}[dtype]
    values = st.floats(-60000, 60000, width=width)
    rows = data.draw(st.lists(st.lists(values, min_size=5, max_size=5), min_size=3, max_size=3))
    x = np.array(rows).astype(jnp.dtype(dtype))[:, :d]
    x = np.pad(x, ((0, 0), (0, 5 - d)))  # one compilation
    cache = quantised(x)
    exact = x.astype(np.float64)
    largest = np.abs(exact).max(axis=-1)
    # Scales are rounded to fp32, and a CPU flushes what is smaller than 2^-126 to zero.
    half = largest / 254 + largest * 2.0**-23 + 2.0**-126
    back = oracle.dequantised(cache.codes, cache.scales)
    assert_within(back, exact, half[:, None])
    assert np.abs(np.asarray(cache.codes)).max() <= 127
    assert (cache.codes.dtype, cache.scales.dtype, cache.dtype) == (np.int8, np.float32, x.dtype)


def test_ends_of_the_range():
    largest = np.finfo(np.float32).max
    x = np.array([[0, -0.0, 0], [-1, 0.5, 1], [largest, -largest, 1], [127, 2.4, -2.6]], np.float32)
    cache = quantised(x)
    assert np.asarray(cache.codes).tolist() == [
        [0, 0, 0],
        [-127, 64, 127],  # 63.5 goes to the even neighbour
        [127, -127, 0],
        [127, 2, -3],
    ]
    assert cache.scales[0] == 0 and cache.scales[3] == 1
    assert np.isfinite(dequantised(cache)).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_own_head(wrong):
    x = normal(2, 3, D, dtype="float32")
    x[0, 1, 5] = wrong
    back = np.array(dequantised(quantised(x)))
    assert not np.isfinite(back[0, 1]).any()
    back[0, 1] = x[0, 1] = 0
    assert_same_bits(back, dequantised(quantised(x)))


@pytest.mark.slow
def test_attention_is_off_by_no_more_than_the_scales_say():
    q, k, v = normal(3, 1, 8, D), normal(3, HKV, 96, D, seed=1), normal(3, HKV, 96, D, seed=2)
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    lengths = np.array([1, 40, 96], np.int32)
    o, _ = decode_attention(q, quantised(k), quantised(v), lengths, spec=SPEC, return_lse=True)
    exact = oracle.attention(q, k, v, lengths, lengths - 1, scale=SPEC.scale)
    # Every key is off by at most this much, and so is a score times the sum of |q|.
    key, value = (np.abs(a).max(axis=(1, 2, 3))[:, None, None, None] / 254 for a in (k, v))
    score = SPEC.scale * np.abs(q).sum(axis=-1, keepdims=True) * key
    # Weights of the softmax change by a factor of at most exp(2 · score).
    bound = np.expm1(2 * score) * (exact.o_magnitude + value) + value + 1e-5
    assert_within(o, exact.o, bound)
    assert np.abs(o - exact.o).max() > 1e-4  # of what was quantised
    assert np.abs(o - exact.o).mean() < 0.01


# Appending


def caches(kind, b=3, s=64):
    """Quantised caches of random values, with the keywords that name the rows' slots."""
    n = s // PAGE
    shapes = {
        "rows": (b, HKV, s, D),
        "layers": (2, b, HKV, s, D),
        "pages": (b * n + 2, HKV, PAGE, D),
        "pages of layers": (2, b * n + 2, HKV, PAGE, D),
    }
    k, v = (quantised(normal(*shapes[kind], seed=i)) for i in (1, 2))
    named = {"layer": 1} if "layers" in kind else {}
    if "pages" in kind:
        pages = np.random.default_rng(3).permutation(b * n + 2)[: b * n].reshape(b, n)
        named["pages"] = jnp.asarray(pages, jnp.int32)
    return k, v, named


def stored(cache, named, row, slot):
    """Codes [Hkv,D] and scales [Hkv] of a row's slot."""
    arrays = [np.asarray(a)[named.get("layer", ...)] for a in (cache.codes, cache.scales)]
    if "pages" in named:
        row, slot = int(named["pages"][row, slot // PAGE]), slot % PAGE
    return [a[row, :, slot] for a in arrays]


def assert_holds(after, before, named, written):
    """What is `written`, {(row, slot): values [Hkv,D]}, is there, and nothing else has changed."""
    changed = np.zeros(before.scales.shape, bool)
    for (row, slot), values in written.items():
        want = quantised(values)
        codes, scales = stored(after, named, row, slot)
        assert_same_bits(codes, want.codes)
        assert_same_bits(scales, want.scales)
        if "pages" in named:
            row, slot = int(named["pages"][row, slot // PAGE]), slot % PAGE
        changed[named.get("layer", ...)][row, :, slot] = True
    for name in ("codes", "scales"):
        new, old = (np.asarray(getattr(cache, name)) for cache in (after, before))
        assert_same_bits(new[~changed], old[~changed], name)


kinds = pytest.mark.parametrize(
    "kind",
    [
        "pages of layers",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("rows", "layers", "pages")),
    ],
)


@pytest.mark.slow
@kinds
def test_decode_reads_what_it_wrote(kind):
    k, v, named = caches(kind)
    qkv, lengths = normal(3, 2, HKV, G + 2, D), np.array([0, 15, 63], np.int32)
    o, k_after, v_after = append_decode_attention(qkv, k, v, lengths, spec=SPEC, **named)
    at = [(r, t) for r in range(3) for t in range(2) if lengths[r] + t < 64]
    for part, after, before in ((-2, k_after, k), (-1, v_after, v)):
        written = {(r, lengths[r] + t): qkv[r, t, :, part] for r, t in at}
        assert_holds(after, before, named, written)
    q = qkv[..., :-2, :].reshape(3, 2, HKV * G, D)
    again = decode_attention(q, k_after, v_after, lengths + 2, spec=SPEC, **named)
    assert_same_bits(o, again)


@pytest.mark.slow
@kinds
def test_prefill_reads_what_it_wrote(kind):
    k, v, named = caches(kind)
    qkv = normal(3, 16, HKV, G + 2, D)
    offsets, lengths = np.array([[0, 16, 48], [9, 0, 64]], np.int32)
    o, k_after, v_after = append_prefill_attention(qkv, k, v, lengths, offsets, spec=SPEC, **named)
    at = [(r, t) for r in range(3) for t in range(16) if offsets[r] + t < lengths[r]]
    for part, after, before in ((-2, k_after, k), (-1, v_after, v)):
        written = {(r, offsets[r] + t): qkv[r, t, :, part] for r, t in at}
        assert_holds(after, before, named, written)
    q = qkv[..., :-2, :].reshape(3, 16, HKV * G, D)
    again = prefill_attention(q, k_after, v_after, lengths, offsets, spec=SPEC, **named)
    assert_same_bits(o, again)


@pytest.mark.parametrize("slot", [0, 63, 64, 1000])
def test_one_row_and_a_slot_that_may_not_exist(slot):
    k, _, named = caches("rows", b=1)
    new = normal(1, 1, HKV, D, seed=7)
    after = jax.jit(append)(k, new, np.array([slot], np.int32))
    assert_holds(after, k, named, {(0, slot): new[0, 0]} if slot < 64 else {})


@pytest.mark.slow
def test_beams_read_the_slots_of_others():
    """Beams of a prompt of 10 tokens: the result is that of the same values in one piece."""
    k, v, named = caches("pages", b=2)
    sources = np.array([[1] * 64, [1] * 64], np.int32)
    sources[0, 13:] = 0
    prompts, first = jnp.full((2,), 10, jnp.int32), jnp.zeros((2,), jnp.int32)
    beams = BeamSlots(jnp.asarray(sources), prompts, first, 2)
    pages = named["pages"].at[1, 0].set(named["pages"][0, 0])
    lengths = np.array([15, 15], np.int32)
    q = normal(2, 1, HKV * G, D)
    got = decode_attention(q, k, v, lengths, spec=SPEC, pages=pages, beams=beams)

    def in_one_piece(cache):
        cache = np.asarray(dequantised(cache))
        rows = np.zeros((2, HKV, 64, D), cache.dtype)
        for row, slot in np.ndindex(2, 15):
            page, at = pages[row, 0], slot
            if slot >= 10:
                page, at = pages[sources[row, slot], 1], slot - 10
            rows[row, :, slot] = cache[int(page), :, at]
        return rows

    want = decode_attention(q, in_one_piece(k), in_one_piece(v), lengths, spec=SPEC)
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=0.02)


# Refusals


def test_what_reads_it():
    able = {(i.op, i.name) for i in IMPLEMENTATIONS if cache_features("int8") <= i.can}
    names = ("xla", "cudnn", "mosaic_gpu")
    assert able == {
        *(("prefill_attention", name) for name in names),
        *(("decode_attention", name) for name in names),
        *(("decode_layers", name) for name in ("xla", "mosaic_gpu")),
    }


def test_the_plan_of_a_gpu_reads_it():
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    shape = dict(b=1, t=1, h=32, hkv=8, s=4096, d=128, itemsize=2, masks=0)
    assert plan.choose("decode_attention", **shape).implementation == "mosaic_gpu"
    int8 = cache_features("int8")
    assert plan.choose("decode_attention", int8, **shape).implementation == "mosaic_gpu"
    older = Plan.for_kind("NVIDIA A100-SXM4-80GB", (8, 0))
    assert older.choose("decode_attention", int8, **shape).implementation == "cudnn"
    assert plan.choose("decode_attention", int8 | {"beams"}, **shape).implementation == "mosaic_gpu"
    shape["t"] = 512
    assert plan.choose("prefill_attention", int8, **shape).implementation == "mosaic_gpu"


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["rows", "pages of layers"])
def test_prompts_compile_for_an_h100(kind, monkeypatch):
    from ..deviceless import compile_for

    monkeypatch.setattr(f"{__name__}.PAGE", 128)  # that of other tests is smaller than a block
    k, v, named = caches(kind, s=128)
    qkv = normal(3, 64, HKV, G + 2, D)
    offsets, lengths = np.array([[0, 64, 0], [9, 128, 64]], np.int32)

    def run(qkv, k, v, lengths, offsets, named):
        return append_prefill_attention(
            qkv, k, v, lengths, offsets, spec=SPEC, implementation="mosaic_gpu", **named
        )

    compiled = compile_for("h100", run, qkv, k, v, lengths, offsets, named, donate_argnums=(1, 2))
    assert "prefill_attention" in compiled.as_text()


def test_operands_that_disagree():
    k, v, _ = caches("rows")
    q, lengths = normal(3, 1, HKV * G, D), np.array([1, 2, 3], np.int32)
    with pytest.raises(ValueError, match="must share a dtype, got float32, bfloat16, bfloat16"):
        decode_attention(q.astype(np.float32), k, v, lengths, spec=SPEC)
    with pytest.raises(ValueError, match="must both be quantised or neither"):
        decode_attention(q, k, normal(3, HKV, 64, D), lengths, spec=SPEC)
    short = dataclasses.replace(k, scales=k.scales[..., :-1])
    with pytest.raises(ValueError, match="scales must be"):
        decode_attention(q, short, v, lengths, spec=SPEC)


def test_its_structure():
    one, other = (QuantisedCache.abstract((2, 3, 8, 4), d) for d in ("float32", "bfloat16"))
    assert (one.shape, one.ndim, one.dtype) == ((2, 3, 8, 4), 4, np.float32)
    assert [leaf.shape for leaf in jax.tree.leaves(one)] == [(2, 3, 8, 4), (2, 3, 8)]
    assert jax.tree.structure(one) != jax.tree.structure(other)
