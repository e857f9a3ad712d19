"""The kernel of decode attention over an int8 cache: interpreted, compiled for an H100, and run.

The interpreter multiplies no operand in registers, so there the codes of K go through shared
memory.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    QuantisedCache,
    alibi_slopes,
    append_decode_attention,
    decode_attention,
)
from fdjax.pallas_kernels.attention.cache import quantise
from fdjax.pallas_kernels.attention.hopper.decode import (
    DecodeAttentionConfig,
    append_decode_mosaic,
    decode_mosaic,
)
from fdjax.pallas_kernels.rope import Rope, rotation

from . import oracle
from .test_decode_mosaic import INTERPRET
from .tolerance import assert_attention

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

PAGE = 128
MASKS = dict(window=70, soft_cap=5.0, alibi=alibi_slopes(4))
SPLIT = DecodeAttentionConfig(splits=3, stages=2)
quantised = jax.jit(quantise)


def operands(lengths, *, t=1, group=4, kv_heads=1, s=200, d=64, scale=1.0):
    """q, quantised k and v, lengths; scales of dead slots are NaN."""
    rng = np.random.default_rng(1)
    b, lengths = len(lengths), np.array(lengths, np.int32)
    q, k, v = (
        rng.normal(size=shape).astype(jnp.bfloat16)
        for shape in ((b, t, kv_heads * group, d), *((b, kv_heads, s, d),) * 2)
    )
    dead = (np.arange(s)[None] >= lengths[:, None])[:, None]
    caches = []
    for values in (np.asarray(scale, k.dtype) * k, v):
        cache = quantised(values)
        scales = np.where(dead, np.float32(np.nan), cache.scales)
        caches.append(QuantisedCache(np.asarray(cache.codes), scales, cache.dtype))
    return q, *caches, lengths


def in_pages(cache, pages):
    """A cache [B,Hkv,S,D] as layer 1 of a pool of pages."""

    def pooled(array):
        b, kv_heads, s, *d = array.shape
        rows = array.reshape(b, kv_heads, s // PAGE, PAGE, *d).swapaxes(1, 2)
        pool = np.zeros((2, pages.max() + 2, kv_heads, PAGE, *d), array.dtype)
        pool[1][pages] = rows
        return pool

    return QuantisedCache(pooled(cache.codes), pooled(cache.scales), cache.dtype)


def check(operands, run, masks=None, pages=None, **options):
    q, k, v, lengths = operands
    masks, d, s = masks or {}, q.shape[-1], k.shape[-2]
    spec = AttentionSpec(d**-0.5, **masks)
    exact = oracle.attention(
        q,
        *(oracle.dequantised(c.codes, np.nan_to_num(c.scales)) for c in (k, v)),
        lengths,
        lengths - q.shape[1],
        scale=spec.scale,
        **masks,
    )
    if pages is not None:
        k, v = in_pages(k, pages), in_pages(v, pages)
        options |= {"pages": pages, "layer": 1}
    o, lse, *_ = run(q, k, v, lengths, spec=spec, **options)
    assert_attention(o, lse, exact, dtype="bfloat16", d=d, s=s, quantised=True)


interpreted = functools.partial(decode_mosaic, interpret=INTERPRET)


@pytest.mark.parametrize(
    "config",
    [
        DecodeAttentionConfig(splits=1),
        pytest.param(SPLIT, marks=pytest.mark.slow),
        pytest.param(DecodeAttentionConfig(splits=2, unified=False), marks=pytest.mark.slow),
    ],
    ids=["one", "split", "running maximum"],
)
def test_interpreted_without_races(config):
    check(operands([0, 1, 65, 200]), interpreted, config=config)


@pytest.mark.slow
def test_interpreted_with_every_mask():
    phi = jnp.arange(4, dtype=jnp.float32)
    check(operands([2, 77, 200], t=3), interpreted, config=SPLIT, masks=MASKS, phi=phi)


@pytest.mark.slow
def test_interpreted_recomputation():
    """Scores of hundreds leave the range of the unified maximum."""
    check(operands([200, 130], scale=60.0), interpreted, config=DecodeAttentionConfig(splits=1))


@pytest.mark.slow
def test_interpreted_through_pages():
    pages = np.array([[3, 1], [0, 5], [2, 4]], np.int32)
    case = operands([0, 130, 256], group=2, kv_heads=2, s=256)
    check(case, interpreted, config=SPLIT, pages=pages)


@pytest.mark.slow
@pytest.mark.parametrize("s", [264, pytest.param(72, marks=pytest.mark.soak)])
def test_interpreted_where_the_last_block_is_larger_than_what_it_holds(s):
    config = DecodeAttentionConfig(splits=2, block_kv=128, stages=2)
    check(operands([20, s - 7], t=16, group=1, s=s), interpreted, config=config)


@pytest.mark.slow
def test_interpreted_in_float16():
    """P times a scale is in bfloat16, because float16 would lose small products."""
    pages = np.array([[3, 1], [0, 5], [2, 4]], np.int32)
    q, k, v, lengths = operands([0, 130, 256], group=2, kv_heads=2, s=256)
    k, v = (dataclasses.replace(c, dtype=np.dtype("float16")) for c in (k, v))
    v = dataclasses.replace(v, scales=v.scales * np.float32(2.0**-16))
    case = q.astype(np.float16), k, v, lengths
    check(case, interpreted, config=DecodeAttentionConfig(splits=1), pages=pages)


def appended(interpret=None, **options):
    """The caches and o of a token that is appended to pages, by the kernel and by XLA."""
    pages = np.array([[3, 1], [0, 5], [2, 4], [6, 7]], np.int32)
    _, k, v, lengths = operands([0, 63, 130, 256], kv_heads=2, group=2, s=256)
    pools = jax.tree.map(jnp.asarray, (in_pages(k, pages), in_pages(v, pages)))
    qkv = np.random.default_rng(3).normal(size=(4, 1, 2, 4, 64)).astype(jnp.bfloat16)
    qkv[1, :, 0, -1] = 0.0
    cos_sin = rotation(lengths[:, None], Rope(64, 10000.0))
    named = {"spec": AttentionSpec(0.125), "pages": pages, "layer": 1}
    o, _, *caches, _ = append_decode_mosaic(
        *(qkv[:, 0], *pools, lengths),
        cos=cos_sin[0],
        sin=cos_sin[1],
        interpret=interpret,
        **named,
        **options,
    )
    want, *others = append_decode_attention(qkv, *pools, lengths, rotation=cos_sin, **named)
    return (o, *caches), (want, *others)


def check_appended(found, want):
    """The last row has no slot left, so its result is not defined."""
    np.testing.assert_allclose(*(np.float32(o)[:3] for o in (found[0], want[0])), atol=0.02)
    for got, cache in zip(found[1:], want[1:], strict=True):
        np.testing.assert_array_equal(got.codes, cache.codes)
        np.testing.assert_array_equal(got.scales, cache.scales)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_interpreted_append(splits):
    """The token is quantised as elsewhere, and attention reads the rounded values."""
    config = DecodeAttentionConfig(splits=splits, stages=2)
    check_appended(*appended(INTERPRET, config=config))


def scales_of_what_is_not_finite(interpret=None):
    """The scales of new keys and values [2 rows], the first with NaN, the second with infinity."""
    _, k, v, lengths = operands([3, 5], group=2, s=64)
    k, v = (jax.tree.map(jnp.asarray, cache) for cache in (k, v))
    qkv = np.ones((2, 1, 4, 64), jnp.bfloat16)
    qkv[0, 0, 2:, 7], qkv[1, 0, 2:, 40] = np.nan, np.inf
    cos, sin = rotation(lengths[:, None], Rope(64, 10000.0))
    config = DecodeAttentionConfig(splits=1, stages=2)
    _, _, *caches, _ = append_decode_mosaic(
        *(qkv, k, v, lengths),
        cos=cos,
        sin=sin,
        spec=AttentionSpec(0.125),
        config=config,
        interpret=interpret,
    )
    return np.stack([cache.scales[np.arange(2), 0, lengths] for cache in caches])


@pytest.mark.slow
def test_interpreted_append_of_what_is_not_finite():
    assert not np.isfinite(scales_of_what_is_not_finite(INTERPRET)).any()


@pytest.mark.gpu
def test_append_of_what_is_not_finite_on_a_gpu():
    assert not np.isfinite(scales_of_what_is_not_finite()).any()


@pytest.mark.gpu
def test_append_on_a_gpu():
    check_appended(*appended())


def compiled(b, t, h, kv_heads, s, d, masks=None, dtype="bfloat16", **options):
    from ..deviceless import compile_for

    attend = functools.partial(decode_mosaic, spec=AttentionSpec(d**-0.5, **masks or {}), **options)
    cache = QuantisedCache.abstract((b, kv_heads, s, d), dtype)
    q = jax.ShapeDtypeStruct((b, t, h, d), dtype)
    return compile_for("h100", attend, q, cache, cache, jax.ShapeDtypeStruct((b,), jnp.int32))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(b=1, t=1, h=32, kv_heads=32, s=1024, d=128), marks=pytest.mark.soak),
        dict(b=1, t=1, h=32, kv_heads=8, s=32768, d=128),
        pytest.param(dict(b=64, t=1, h=32, kv_heads=8, s=1024, d=128), marks=pytest.mark.soak),
        dict(b=8, t=4, h=32, kv_heads=8, s=2048, d=64),
        dict(b=2, t=1, h=16, kv_heads=8, s=1000, d=256, dtype="float16"),
        dict(b=2, t=8, h=32, kv_heads=8, s=2048, d=128),
        dict(b=2, t=16, h=32, kv_heads=8, s=1000, d=64),
        dict(
            **dict(b=1, t=2, h=8, kv_heads=1, s=512, d=128, config=SPLIT),
            masks=dict(window=100, soft_cap=30.0, alibi=alibi_slopes(8)),
        ),
    ],
    ids=str,
)
def test_compiles_for_an_h100_without_spills(case, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert "decode_attention" in compiled(**case).as_text()
    spills = [line for line in capfd.readouterr().out.splitlines() if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


SOME_OF_THE_MOST = {(64, False, 1), (128, True, 8), (256, False, 8)}


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("d", "cluster", "splits"),
    [
        # Each value occurs; other combinations are a grid.
        pytest.param(*case, marks=() if case in SOME_OF_THE_MOST else pytest.mark.soak)
        for case in itertools.product((64, 128, 256), (False, True), (1, 8))
    ],
)
def test_the_most_rows_compile(d, splits, cluster):
    config = DecodeAttentionConfig(splits, stages=1, cluster=cluster)
    compiled(b=2, t=16, h=32, kv_heads=8, s=1000, d=d, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["healthy", "recomputed"])
@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_on_a_gpu(d, t, scale):
    case = operands([t, 77, 1000], t=t, kv_heads=3, s=1000, d=d, scale=scale)
    run = functools.partial(decode_attention, return_lse=True, implementation="mosaic_gpu")
    check(case, run)


@pytest.mark.gpu
def test_pages_on_a_gpu():
    pages = np.array([[3, 1], [0, 5], [2, 4]], np.int32)
    case = operands([1, 130, 256], group=4, kv_heads=2, s=256, d=128)
    run = functools.partial(decode_attention, return_lse=True, implementation="mosaic_gpu")
    check(case, run, pages=pages)
