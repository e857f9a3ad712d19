"""Pages of an int8 cache that a prompt reads are dequantised once: interpreted, and for an H100."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import AttentionSpec, QuantisedCache, prefill_attention
from fdjax.pallas_kernels.attention.cache import quantise
from fdjax.pallas_kernels.attention.hopper import prefill
from fdjax.pallas_kernels.attention.hopper.widen import (
    can_widen,
    rows_at_once,
    widened_pages,
)

from . import oracle
from .test_decode_mosaic import INTERPRET
from .tolerance import assert_attention

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

PAGE = 128
# Two rows have the same table, one is empty.
PAGES = np.array([[3, 1], [0, 5], [3, 1], [2, 4]], np.int32)
LENGTHS = np.array([70, 0, 200, 128], np.int32)


@functools.cache
def pool(d: int, *, dtype: str = "bfloat16", seed: int = 0) -> QuantisedCache:
    """Layers of pages with 2 KV heads, whose slots past the lengths have scales of NaN."""
    values = np.random.default_rng(seed).normal(size=(2, 7, 2, PAGE, d)).astype(jnp.dtype(dtype))
    cache = jax.jit(quantise)(values)
    live = np.zeros((7, PAGE), bool)
    for row, length in enumerate(LENGTHS):
        for page, first in zip(PAGES[row], range(0, 2 * PAGE, PAGE), strict=True):
            live[page] |= np.arange(PAGE) < length - first
    scales = np.where(live[None, :, None], cache.scales, np.float32(np.nan))
    return QuantisedCache(np.asarray(cache.codes), scales, cache.dtype)


def rows_of(cache: QuantisedCache, row: int) -> np.ndarray:
    """The slots of a row of layer 1 [Hkv, S, D], dequantised in fp64."""
    values = oracle.dequantised(cache.codes[1], np.nan_to_num(cache.scales[1]))
    return np.concatenate(values[PAGES[row]], axis=1)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (128, "bfloat16"),
        pytest.param(64, "float16", marks=pytest.mark.slow),
        pytest.param(256, "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_live_slots_are_dequantised_and_others_are_not_read(d, dtype):
    k, v = pool(d, dtype=dtype), pool(d, dtype=dtype, seed=1)
    *found, pages = widened_pages(k, v, LENGTHS, pages=PAGES, layer=1, interpret=INTERPRET)
    np.testing.assert_array_equal(pages, [[0, 1], [2, 3], [0, 1], [6, 7]])
    for got, cache in zip(found, (k, v), strict=True):
        assert got.dtype == dtype
        for row, length in enumerate(LENGTHS):
            slots = np.concatenate(np.asarray(got)[pages[row]], axis=1)[:, :length]
            want = rows_of(cache, row)[:, :length]
            # The product is rounded to fp32, then to 16 bits.
            np.testing.assert_array_equal(slots, want.astype(np.float32).astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [4, 2, 1])
def test_a_prompt_behind_int8_pages(monkeypatch, at_once):
    """Blocks of a prompt share a table. They run in groups if the memory is limited."""
    d, t = 64, 64
    k, v = pool(d), pool(d, seed=1)
    q = np.random.default_rng(2).normal(size=(4, t, 4, d)).astype(jnp.bfloat16)
    offsets = np.array([6, 0, 136, 64], np.int32)
    for name in ("widened_pages", "prefill_mosaic"):
        run = functools.partial(getattr(prefill, name), interpret=INTERPRET)
        monkeypatch.setattr(prefill, name, run)
    monkeypatch.setattr(prefill, "rows_at_once", lambda rows, slots: at_once)
    spec = AttentionSpec(d**-0.5)
    o, lse = prefill_attention(
        *(q, k, v, LENGTHS, offsets),
        spec=spec,
        layer=1,
        pages=PAGES,
        return_lse=True,
        implementation="mosaic_gpu",
    )
    rows = [np.stack([rows_of(cache, row) for row in range(4)]) for cache in (k, v)]
    exact = oracle.attention(q, *rows, LENGTHS, offsets, scale=spec.scale)
    assert_attention(o, lse, exact, dtype="bfloat16", d=d, s=2 * PAGE, quantised=True)


def test_what_can_be_dequantised_this_way():
    def of(page, d):
        return QuantisedCache.abstract((3, 2, page, d), "bfloat16")

    assert all(can_widen(of(PAGE, d)) for d in (64, 128, 256))
    assert not can_widen(of(PAGE, 96))
    assert not can_widen(of(96, 128))


@pytest.mark.parametrize(
    ("rows", "slots", "count"),
    [(64, 512, 64), (64, 8192, 16), (32, 2**17, 1), (1, 2**20, 1), (12, 2**14, 6)],
)
def test_rows_at_once_bound_the_memory(rows, slots, count):
    assert rows_at_once(rows, slots) == count


@pytest.mark.deviceless
@pytest.mark.parametrize("d", [128, pytest.param(256, marks=pytest.mark.soak)])
def test_compiles_for_an_h100_without_spills(d, monkeypatch, capfd):
    from ..deviceless import compile_for

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    cache = QuantisedCache.abstract((32, 100, 8, PAGE, d), "bfloat16")
    of_rows = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((16,), (16, 64))]

    def run(k, v, lengths, pages):
        return widened_pages(k, v, lengths, pages=pages, layer=3)

    compiled = compile_for("h100", run, cache, cache, *of_rows)
    assert "widen_pages" in compiled.as_text()
    spills = [line for line in capfd.readouterr().out.splitlines() if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_on_a_gpu(d):
    k, v = pool(d), pool(d, seed=1)
    *found, pages = widened_pages(k, v, LENGTHS, pages=PAGES, layer=1)
    for got, cache in zip(found, (k, v), strict=True):
        for row, length in enumerate(LENGTHS):
            slots = np.concatenate(np.asarray(got)[np.asarray(pages)[row]], axis=1)[:, :length]
            want = rows_of(cache, row)[:, :length].astype(np.float32).astype(jnp.bfloat16)
            np.testing.assert_array_equal(slots, want)
