"""Decode attention where rows share prompts and parts of responses, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    BeamSlots,
    alibi_slopes,
    append_decode_attention,
    decode_attention,
)
from fdjax.pallas_kernels.attention.spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGE, B, S, HKV, H, D = 16, 6, 96, 2, 4, 8
# Rows 0 to 3 are beams of a prompt of 19 tokens, row 5 is one by itself, row 4 is empty.
PROMPTS = np.array([19, 19, 19, 19, S, S], np.int32)
LENGTHS = np.array([60, 60, 60, 60, 0, 37], np.int32)
FIRST = np.array([0, 0, 0, 0, 4, 5], np.int32)


def case(seed=0, layer=None):
    """(pool of keys, of values, table, sources, keys and values [B, S, Hkv, D] of each row)."""
    rng = np.random.default_rng(seed)
    n = S // PAGE
    pools = np.full((2, 2, 64, HKV, PAGE, D), np.nan, np.float32)
    free = iter(rng.permutation(np.arange(1, 64)))
    pages = np.zeros((B, n), np.int32)
    prompt = [next(free), next(free)]
    for row in range(4):
        pages[row, :2] = prompt
        pages[row, 2:5] = [next(free) for _ in range(3)]
    pages[5, :3] = [next(free) for _ in range(3)]
    # A beam that took the place of another one reads what that one read before.
    sources = np.zeros((B, S), np.int32)
    for position in range(19, 60):
        sources[:4] = sources[rng.integers(0, 4, 4)]
        sources[:4, position] = np.arange(4)
    sources[4:] = np.arange(4, 6)[:, None]
    whole = np.full((2, B, S, HKV, D), np.nan, np.float32)
    for row in range(B):
        for position in range(LENGTHS[row]):
            source, slot = row, position
            page = pages[row, position // PAGE]
            if position >= PROMPTS[row]:
                source, slot = sources[row, position], position - PROMPTS[row]
                page = pages[source, 2 + slot // PAGE]
            at = pools[:, layer or 0, page, :, slot % PAGE]
            if np.isnan(at).any():
                at[:] = rng.normal(size=at.shape)
            whole[:, row, position] = at
    if layer is None:
        pools = pools[:, 0]
    return *pools, pages, sources, *whole


def attention(q, k, v, lengths, spec, sinks=None):
    """float64 attention of the last token of each row, [B, H, D]."""
    out = np.zeros((B, H, D))
    for row, length in enumerate(lengths):
        for head in range(H):
            if not length:
                continue
            keys, values = (a[row, :length, head // (H // HKV)].astype(np.float64) for a in (k, v))
            scores = keys @ q[row, 0, head] * spec.scale
            positions = np.arange(length)
            if spec.soft_cap:
                scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
            if spec.alibi:
                scores = scores + spec.alibi[head] * (positions - (length - 1))
            if spec.window:
                scores = np.where(positions > length - 1 - spec.window, scores, -np.inf)
            p = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
            out[row, head] = p @ values / (p.sum() + sink)
    return out


SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=30),
    "masks": AttentionSpec(0.3, soft_cap=4.0, alibi=alibi_slopes(H)),
    "sinks": AttentionSpec(0.3, window=30, sinks=True),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("layer", [None, 1])
def test_beams_read_the_slots_of_others(spec, layer):
    k_pool, v_pool, pages, sources, k, v = case(layer=layer)
    q = np.random.default_rng(1).normal(size=(B, 1, H, D)).astype(np.float32)
    sinks = np.linspace(-2, 2, H, dtype=np.float32) if spec.sinks else None
    got = jax.jit(functools.partial(decode_attention, spec=spec, layer=layer))(
        *(q, k_pool, v_pool, LENGTHS),
        pages=pages,
        beams=BeamSlots(sources, PROMPTS, FIRST, 4),
        sinks=sinks,
    )
    want = attention(q, k, v, LENGTHS, spec, sinks)
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_beams_append_to_their_own_pages():
    k_pool, v_pool, pages, sources, k, v = case(2)
    pools = jnp.asarray(k_pool), jnp.asarray(v_pool)
    qkv = np.random.default_rng(3).normal(size=(B, 1, HKV, 4, D)).astype(np.float32)
    lengths = np.array([60, 60, 60, 60, 0, 37], np.int32)
    own = np.arange(B)
    sources[own, lengths] = own
    o, k_new, v_new = append_decode_attention(
        qkv, *pools, lengths, spec=SPECS["plain"], pages=pages,
        beams=BeamSlots(jnp.asarray(sources), jnp.asarray(PROMPTS), FIRST, 4),
    )  # fmt: skip
    for row in (0, 1, 2, 3, 5):
        page, slot = (2 + 41 // PAGE, 41 % PAGE) if row < 4 else (37 // PAGE, 37 % PAGE)
        for part, pool, before, whole in ((2, k_new, k_pool, k), (3, v_new, v_pool, v)):
            at = pages[row, page], slice(None), slot
            assert np.isnan(before[at]).all()
            np.testing.assert_array_equal(pool[at], qkv[row, 0, :, part])
            whole[row, lengths[row]] = qkv[row, 0, :, part]
    # The empty row writes to nobody's page, and all others changed one slot each.
    changed = (np.asarray(k_new) != k_pool) & ~(np.isnan(k_new) & np.isnan(k_pool))
    assert changed.sum() == B * HKV * D
    q = qkv[:, :, :, :2].reshape(B, 1, H, D)
    lengths[lengths > 0] += 1
    want = attention(q, k, v, lengths, SPECS["plain"])
    np.testing.assert_allclose(o[[0, 1, 2, 3, 5], 0], want[[0, 1, 2, 3, 5]], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_response_past_the_table_is_dropped():
    """As without beams, what has no slot changes none."""
    k_pool, v_pool, pages, sources, *_ = case()
    pools = jnp.asarray(k_pool), jnp.asarray(v_pool)
    lengths = np.full(B, S, np.int32)
    prompts = np.full(B, 19, np.int32)  # position 96 would be slot 77, in page 6 of 6
    qkv = np.ones((B, 1, HKV, 4, D), np.float32)
    _, k_new, _ = append_decode_attention(
        qkv, *pools, lengths, spec=SPECS["plain"], pages=pages,
        beams=BeamSlots(jnp.asarray(sources), jnp.asarray(prompts), FIRST, 4),
    )  # fmt: skip
    np.testing.assert_array_equal(k_new, k_pool)


@pytest.mark.parametrize("name", ["cudnn", "mosaic_gpu"])
def test_kernels_refuse_beams(name):
    k_pool, v_pool, pages, sources, *_ = case()
    q = jnp.ones((B, 1, H, D), jnp.bfloat16)
    pools = [jnp.asarray(a, jnp.bfloat16) for a in (k_pool, v_pool)]
    with pytest.raises(NotImplementedError, match=rf"decode_attention: {name} cannot do beams"):
        decode_attention(
            q, *pools, LENGTHS, spec=SPECS["plain"], pages=pages,
            beams=BeamSlots(sources, PROMPTS, FIRST, 4), implementation=name,
        )  # fmt: skip


def test_wrong_operands():
    k_pool, v_pool, pages, sources, *_ = case()
    q = jnp.ones((B, 1, H, D), jnp.float32)
    decode = functools.partial(decode_attention, q, spec=SPECS["plain"])
    with pytest.raises(ValueError, match=r"beams must be \[6,96\] and \[6\], got"):
        decode(
            k_pool, v_pool, LENGTHS, pages=pages, beams=BeamSlots(sources[:, 1:], PROMPTS, FIRST, 4)
        )
    rows = np.zeros((B, HKV, S, D), np.float32)
    with pytest.raises(ValueError, match="beams need pages"):
        decode(rows, rows, LENGTHS, beams=BeamSlots(sources, PROMPTS, FIRST, 4))
