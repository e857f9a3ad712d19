"""Attention sinks: appends and pages, merged results, what refuses them.

`test_attention.py` compares attention with sinks with the oracle.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    append_decode_attention,
    append_prefill_attention,
    attention_reference,
    decode_attention,
    merge_attention,
    split_qkv,
)
from fdjax.pallas_kernels.attention.hopper.decode import DECODE_HOPPER
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.layers.hopper.decode_layers import LAYERS_HOPPER

from .tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.slow
@pytest.mark.parametrize("pages", [False, True])
def test_appends_and_pages_give_what_a_whole_text_gives(pages):
    """Sinks in both ops that append, with a layer of a stack, rows of other lengths and pages."""
    rng = np.random.default_rng(0)
    b, t, kv_heads, group, d, s = 3, 16, 2, 2, 8, 128
    spec = AttentionSpec(d**-0.5, window=9, sinks=True)
    sinks = jnp.array([-1.0, 0.5, 2.0, -3.0])
    qkv = jnp.asarray(rng.normal(size=(b, t, kv_heads, group + 2, d)), jnp.float32)
    q, k, v = split_qkv(qkv)
    lengths = jnp.array([16, 9, 1])
    want = attention_reference(
        *(q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths, jnp.zeros(b, jnp.int32)),
        spec=spec,
        sinks=sinks,
    )[0]
    shape = (2, b, kv_heads, s, d)
    table = {"pages": jnp.array([[2], [0], [1]])} if pages else {}
    caches = jnp.zeros(shape), jnp.zeros(shape)
    options = {"spec": spec, "sinks": sinks, "layer": 1, **table}
    before = jnp.maximum(lengths - 3, 0)
    first, *caches = append_prefill_attention(
        qkv, *caches, before, jnp.zeros(b, jnp.int32), **options
    )
    rest = jnp.stack([jnp.roll(qkv[i], -int(before[i]), axis=0)[:3] for i in range(b)])
    last, *caches = append_decode_attention(rest, *caches, before, **options)
    for i, (start, end) in enumerate(zip(before, lengths, strict=True)):
        np.testing.assert_allclose(first[i, :start], want[i, :start], atol=1e-5)
        np.testing.assert_allclose(last[i, : end - start], want[i, start:end], atol=1e-5)


def test_kernels_that_return_a_logsumexp_take_sinks():
    features = AttentionSpec(1.0, sinks=True).features
    shape = dict(b=1, t=1, h=8, hkv=8, s=128, d=64, itemsize=2, masks=0)
    assert DECODE_HOPPER.supports(shape, features)
    assert DECODE_HOPPER.append.supports(shape, features)
    assert "attention.sinks" not in LAYERS_HOPPER.can


@pytest.mark.slow
def test_results_of_disjoint_keys_merge_with_the_sink_of_one():
    """The sink counts once, also where the part that has it sees no key."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, 1, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(3, 2, 24, 16)), jnp.float32) for _ in range(2))
    sinks = jnp.array([-2.0, 0.0, 1.0, 5.0])
    run = functools.partial(decode_attention, return_lse=True)
    plain, with_sinks = (AttentionSpec(0.25, sinks=there) for there in (False, True))
    lengths, first = jnp.array([24, 24, 24]), jnp.array([8, 0, 8])
    # Slots of the first part, then those after it.
    shifted = [
        jnp.stack([jnp.roll(a[i], -int(first[i]), axis=1) for i in range(3)]) for a in (k, v)
    ]
    one = run(q, k, v, first, spec=with_sinks, sinks=sinks)
    other = run(q, *shifted, lengths - first, spec=plain)
    want = run(q, k, v, lengths, spec=with_sinks, sinks=sinks)
    for got, exact in zip(merge_attention(*one, *other), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def test_sinks_without_a_spec_that_has_them():
    cache = jnp.ones((2, 2, 8, 16))
    arrays = jnp.ones((2, 3, 4, 16)), cache, cache, jnp.array([8, 3])
    with pytest.raises(ValueError, match=r"^decode_attention: sinks must be None, got \[4\]$"):
        decode_attention(*arrays, spec=AttentionSpec(1.0), sinks=jnp.zeros(4))
    with pytest.raises(ValueError, match=r"^decode_attention: sinks must be \[4\], got \[3\]$"):
        decode_attention(*arrays, spec=AttentionSpec(1.0, sinks=True), sinks=jnp.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [*(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4)), 3])
@pytest.mark.usefixtures("full_compiles")
def test_bits_do_not_depend_on_rows_and_chunks(heads):
    rng = np.random.default_rng(0)
    shapes = (3, 64, heads, 16), (3, 64, heads)
    o, lse = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    sinks = jnp.linspace(-3, 3, heads)
    whole = [np.asarray(a) for a in apply_sinks(o, lse, sinks, batch_invariant=True)]
    for rows in (np.s_[:1], np.s_[1:3]):
        for tokens in (np.s_[:1], np.s_[5:21], np.s_[:]):
            parts = apply_sinks(o[rows, tokens], lse[rows, tokens], sinks, batch_invariant=True)
            for got, want in zip(parts, whole, strict=True):
                assert_same_bits(got, want[rows, tokens])


def test_sinks_far_from_all_scores():
    o, lse = jnp.ones((1, 1, 3, 2)), jnp.array([[[5.0, 5.0, -jnp.inf]]])
    got, total = apply_sinks(o.at[:, :, 2].set(0.0), lse, jnp.array([-1e4, 1e4, 3.0]))
    np.testing.assert_array_equal(got[0, 0], [[1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(total[0, 0], [5.0, 1e4, 3.0])
    # A head without a sink.
    got, total = apply_sinks(o.at[:, :, 2].set(0.0), lse, jnp.full(3, -jnp.inf))
    np.testing.assert_array_equal(got[0, 0], [[1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(total[0, 0], [5.0, 5.0, -jnp.inf])
