"""Every op gives through a pool of pages, in any order, what it gives from rows in one piece."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    alibi_slopes,
    append_decode_attention,
    append_prefill_attention,
    decode_attention,
    prefill_attention,
)
from fdjax.pallas_kernels.attention.hopper.decode import DecodeAttentionConfig, decode_mosaic
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.rope import Rope

from . import test_decode_layers as layers
from .test_append import GPU, cos_sin_at

PAGE = 128
MASKS = dict(window=150, soft_cap=5.0, alibi=alibi_slopes(8))

pytestmark = pytest.mark.usefixtures("quick_compiles")
implementations = pytest.mark.parametrize("implementation", ["xla", "cudnn", *GPU])
at_layer = pytest.mark.parametrize("layer", [None, 1])


@pytest.fixture(autouse=True)
def _cudnn_needs_a_gpu(request):
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("implementation") == "cudnn" and jax.default_backend() != "gpu":
        pytest.skip("cuDNN needs a GPU")


def in_pages(*caches, spare=3, seed=0):
    """Caches [...,B,Hkv,S,D] as pools in random order, with NaN in `spare` pages, and the table."""
    b, kv_heads, s, d = caches[0].shape[-4:]
    n = s // PAGE
    pages = np.random.default_rng(seed).permutation(b * n + spare)[: b * n].reshape(b, n)
    pools = []
    for cache in caches:
        stack = np.asarray(cache).reshape(-1, b, kv_heads, n, PAGE, d)
        pool = np.full((len(stack), b * n + spare, kv_heads, PAGE, d), np.nan, stack.dtype)
        pool[:, pages] = stack.transpose(0, 1, 3, 2, 4, 5)
        pools.append(jnp.asarray(pool if cache.ndim == 5 else pool[0]))
    return *pools, pages.astype(np.int32)


def in_rows(pool, pages):
    """A pool [...,P,Hkv,page,D] as a cache [...,B,Hkv,S,D]."""
    found = np.take(np.asarray(pool), pages, axis=pool.ndim - 4)
    found = np.moveaxis(found, -4, -3)  # [...,B,Hkv,N,page,D]
    return found.reshape(*found.shape[:-3], -1, found.shape[-1])


def _cache(rng, b, s, d, layer, kv_heads=2, dtype=jnp.bfloat16):
    shape = (b, kv_heads, s, d) if layer is None else (3, b, kv_heads, s, d)
    return [rng.normal(size=shape).astype(dtype) for _ in range(2)]


def _close(got, want):
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=0.02, rtol=0.02)


def _unowned_are_untouched(pool, pages):
    """Pages that no row has are still NaN."""
    others = np.setdiff1d(np.arange(pool.shape[-4]), pages)
    assert others.size
    assert np.isnan(np.take(np.float32(pool), others, axis=pool.ndim - 4)).all()


def _check_append(run, qkv, k, v, rows):
    """Results of `rows`, and all caches, are the same through pages."""
    *pools, pages = in_pages(k, v)
    o, *got = run(qkv, *pools, pages=pages)
    want, *caches = run(qkv, k, v)
    _close(np.asarray(o)[rows], np.asarray(want)[rows])
    for pool, cache in zip(got, caches, strict=True):
        _close(in_rows(pool, pages), cache)
        _unowned_are_untouched(pool, pages)


@implementations
@at_layer
@pytest.mark.parametrize(
    ("lengths", "t", "d", "masks"),
    [
        ([1, 128, 129, 384], 1, 64, {}),
        pytest.param([0, 127, 300], 1, 128, {}, marks=pytest.mark.slow),
        pytest.param([16, 200], 16, 128, {}, marks=pytest.mark.slow),
        pytest.param([40, 384, 256], 1, 64, MASKS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decode_attention(implementation, layer, lengths, t, d, masks):
    if implementation == "cudnn" and (t > 1 or masks):
        pytest.skip("cuDNN has neither")
    rng = np.random.default_rng(1)
    k, v = _cache(rng, len(lengths), 384, d, layer)
    q = rng.normal(size=(len(lengths), t, 8, d)).astype(k.dtype)
    run = functools.partial(
        decode_attention,
        lengths=jnp.array(lengths, jnp.int32),
        spec=AttentionSpec(d**-0.5, **masks),
        layer=layer,
        implementation=implementation,
    )
    *pools, pages = in_pages(k, v)
    if implementation == "cudnn":  # it multiplies dead slots by zero
        pools = [np.nan_to_num(pool) for pool in pools]
    _close(run(q, *pools, pages=pages), run(q, k, v))


@implementations
@at_layer
@pytest.mark.parametrize(
    ("lengths", "offsets", "masks"),
    [([128, 300, 0], [0, 256, 128], {}), pytest.param([384], [256], MASKS, marks=pytest.mark.slow)],
    ids=str,
)
def test_prefill_attention(implementation, layer, lengths, offsets, masks):
    if implementation == "cudnn" and masks:
        pytest.skip("cuDNN has no masks")
    rng = np.random.default_rng(2)
    k, v = _cache(rng, len(lengths), 384, 64, layer)
    q = rng.normal(size=(len(lengths), 128, 8, 64)).astype(k.dtype)
    run = functools.partial(
        prefill_attention,
        lengths=jnp.array(lengths, jnp.int32),
        offsets=jnp.array(offsets, jnp.int32),
        spec=AttentionSpec(0.125, **masks),
        layer=layer,
        implementation=implementation,
    )
    *pools, pages = in_pages(k, v)
    _close(run(q, *pools, pages=pages), run(q, k, v))


@pytest.mark.parametrize("implementation", ["xla", *GPU])
@at_layer
@pytest.mark.parametrize("t", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_append_decode_attention(implementation, layer, t):
    """A full row drops its token, as it does without pages."""
    lengths = np.array([0, 127, 128, 383, 384], np.int32)
    rng = np.random.default_rng(3)
    k, v = _cache(rng, len(lengths), 384, 64, layer)
    qkv = rng.normal(size=(len(lengths), t, 2, 4, 64)).astype(k.dtype)
    positions = lengths[:, None] + np.arange(t, dtype=np.int32)
    run = jax.jit(
        functools.partial(
            append_decode_attention,
            lengths=jnp.array(lengths),
            rotation=cos_sin_at(positions, Rope(64, 10000.0)),
            spec=AttentionSpec(0.125),
            layer=layer,
            implementation=implementation,
        )
    )
    _check_append(run, qkv, k, v, lengths + t <= 384)


@pytest.mark.parametrize("implementation", ["xla", *GPU])
@at_layer
def test_append_prefill_attention(implementation, layer):
    lengths, offsets = np.array([128, 70, 256, 0]), np.array([0, 0, 128, 0])
    rng = np.random.default_rng(4)
    k, v = _cache(rng, len(lengths), 256, 64, layer)
    qkv = rng.normal(size=(len(lengths), 128, 2, 4, 64)).astype(k.dtype)
    positions = (offsets[:, None] + np.arange(128)).astype(np.int32)
    run = jax.jit(
        functools.partial(
            append_prefill_attention,
            lengths=jnp.array(lengths, jnp.int32),
            offsets=jnp.array(offsets, jnp.int32),
            rotation=cos_sin_at(positions, Rope(64, 10000.0)),
            spec=AttentionSpec(0.125),
            layer=layer,
            implementation=implementation,
        )
    )
    _check_append(run, qkv, k, v, slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize("window", [None, pytest.param(150, marks=pytest.mark.slow)])
def test_chunks_of_a_prompt_share_a_call(implementation, window):
    """All are written before any attends, in whatever order they come."""
    rng, order = np.random.default_rng(5), np.array([2, 0, 1])
    k, v = map(jnp.asarray, _cache(rng, 1, 384, 64, None))
    qkv = rng.normal(size=(1, 384, 2, 4, 64)).astype(k.dtype)
    run = functools.partial(
        append_prefill_attention,
        spec=AttentionSpec(0.125, window=window),
        implementation=implementation,
    )

    def at(positions):
        return {"rotation": cos_sin_at(positions.astype(np.int32), Rope(64, 10000.0))}

    one = np.arange(384)[None]
    want, *caches = run(qkv, k, v, jnp.array([300]), jnp.array([0]), **at(one))
    *pools, pages = in_pages(k, v)
    o, *pools = run(
        qkv.reshape(3, PAGE, 2, 4, 64)[order],
        *pools,
        jnp.minimum(300, PAGE * (order + 1)),
        jnp.array(PAGE * order),
        **at(one.reshape(3, PAGE)[order]),
        pages=np.repeat(pages, 3, axis=0),
    )
    o = np.asarray(o)[np.argsort(order)].reshape(want.shape)
    _close(o[:, :300], np.asarray(want)[:, :300])
    for pool, cache in zip(pools, caches, strict=True):
        _close(in_rows(pool, pages)[..., :300, :], np.asarray(cache)[..., :300, :])
        _unowned_are_untouched(pool, pages)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_decode_layers(implementation):
    operands = layers._operands(5, **layers.SMALL)
    *pools, pages = in_pages(operands["k"], operands["v"])
    run = functools.partial(layers._run, implementation=implementation)
    want, *caches = run(operands)
    got, *pools = run(operands | {"k": pools[0], "v": pools[1], "pages": pages})
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=0.06, rtol=0.03)
    for pool, cache in zip(pools, caches, strict=True):
        np.testing.assert_allclose(
            np.float32(in_rows(pool, pages)), np.float32(cache), atol=0.06, rtol=0.03
        )
        _unowned_are_untouched(pool, pages)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (np.zeros((2, 3), np.int32), r"pages must be signed integers \[1,N\], got int32 \[2, 3\]"),
        (np.zeros((1, 3), np.float32), "pages must be signed integers"),
        (np.zeros(1, np.int32), "pages must be signed integers"),
    ],
    ids=str,
)
def test_tables_that_are_refused(pages, message):
    q, k = jnp.zeros((1, 1, 2, 64)), jnp.zeros((4, 2, PAGE, 64))
    with pytest.raises(ValueError, match=message):
        decode_attention(q, k, k, jnp.ones(1, jnp.int32), pages=pages, spec=AttentionSpec(0.125))


def test_rows_and_pages_exclude_each_other():
    q, k = jnp.zeros((1, 1, 2, 64)), jnp.zeros((4, 2, PAGE, 64))
    some = {"rows": jnp.zeros(1, jnp.int32), "pages": jnp.zeros((1, 3), jnp.int32)}
    with pytest.raises(ValueError, match="rows and pages exclude each other"):
        prefill_attention(q, k, k, jnp.ones(1, jnp.int32), **some, spec=AttentionSpec(0.125))


def test_a_block_lies_in_one_page():
    q, k = jnp.zeros((1, 1, 2, 64), "bfloat16"), jnp.zeros((4, 2, PAGE, 64), "bfloat16")
    with pytest.raises(ValueError, match="block_kv must divide the 128 slots of a page, got 192"):
        decode_mosaic(
            *(q, k, k, jnp.ones(1, jnp.int32)),
            pages=jnp.zeros((1, 3), jnp.int32),
            spec=AttentionSpec(0.125),
            config=DecodeAttentionConfig(1, block_kv=192),
        )


@pytest.mark.slow
def test_a_pool_needs_its_table():
    operands = layers._operands(2, **layers.SMALL)
    *pools, _ = in_pages(operands["k"], operands["v"])
    with pytest.raises(ValueError, match="k must be"):
        layers._run(operands | {"k": pools[0], "v": pools[1]})


def _shapes(b, pool, d=128):
    """Shapes of a stacked pool of two layers with 32 KV heads, and of a table."""
    pool = jax.ShapeDtypeStruct((2, pool, 32, PAGE, d), jnp.bfloat16)
    return pool, pool, jax.ShapeDtypeStruct((b, 8), jnp.int32)


def _operands(t, b, pages):
    """Shapes of qkv, of two numbers per row, of the table, and of cos and sin."""
    row, angles = (b,), (b, t, 64)
    floats = [jax.ShapeDtypeStruct(angles, jnp.float32)] * 2
    qkv = jax.ShapeDtypeStruct((b, t, 32, 3, 128), jnp.bfloat16)
    return qkv, *[jax.ShapeDtypeStruct(row, jnp.int32)] * 2, pages, *floats


def _compiles(function, caches, operands, kernels, capfd, monkeypatch):
    from deviceless import alias_bytes, compile_for, large_copies

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for("h100", function, caches, operands, donate_argnums=0)
    printed = "".join(capfd.readouterr())
    assert all(kernel in printed for kernel in kernels)
    spills = [line for line in printed.splitlines() if "spill" in line]
    assert len(spills) >= len(kernels)
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    nbytes = caches[0].size * 2
    assert alias_bytes(compiled) == 2 * nbytes
    assert not large_copies(compiled, nbytes // 8)


@pytest.mark.deviceless
@pytest.mark.parametrize("b", [1, pytest.param(8, marks=pytest.mark.soak), 64])
def test_decode_compiles_in_place_without_spills(b, capfd, monkeypatch):
    k, v, pages = _shapes(b, 100)

    def run(caches, operands):
        qkv, lengths, _, pages, cos, sin = operands
        return append_decode_attention(
            *(qkv, *caches, lengths),
            rotation=(cos, sin),
            spec=AttentionSpec(0.1),
            layer=jnp.int32(1),
            pages=pages,
            implementation="mosaic_gpu",
        )

    _compiles(run, (k, v), _operands(1, b, pages), ["decode_attention"], capfd, monkeypatch)


@pytest.mark.deviceless
def test_prefill_compiles_in_place_without_spills(capfd, monkeypatch):
    k, v, pages = _shapes(4, 100)

    def run(caches, operands):
        qkv, lengths, offsets, pages, cos, sin = operands
        return append_prefill_attention(
            *(qkv, *caches, lengths, offsets),
            rotation=(cos, sin),
            spec=AttentionSpec(0.1),
            layer=jnp.int32(1),
            pages=pages,
            implementation="mosaic_gpu",
        )

    kernels = ["write_chunk", "prefill_attention"]
    _compiles(run, (k, v), _operands(512, 4, pages), kernels, capfd, monkeypatch)


@pytest.mark.deviceless
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.soak), 8])
def test_layers_compile_in_place_without_spills(rows, capfd, monkeypatch):
    operands = jax.eval_shape(lambda: layers._operands(rows, **layers.LLAMA2_7B, layers=2))
    for name in "kv":
        del operands[name]
    k, v, pages = _shapes(rows, 100)
    operands["pages"] = pages

    def run(caches, operands):
        keywords = operands | dict(zip("kv", caches, strict=True))
        return layers._run(keywords, implementation="mosaic_gpu")

    _compiles(run, (k, v), operands, ["layers_kernel"], capfd, monkeypatch)
