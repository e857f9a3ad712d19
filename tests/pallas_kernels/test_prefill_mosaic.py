"""The Mosaic GPU kernel of prefill attention: interpreted, compiled for an H100, and run on one.

`test_attention.py` tests its results on a GPU, together with all other implementations.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention import alibi_slopes, prefill_attention
from fdjax.pallas_kernels.attention.hopper import prefill as prefill_module
from fdjax.pallas_kernels.attention.hopper.prefill import (
    PrefillAttentionConfig,
    _splits,
    prefill_mosaic,
)
from fdjax.pallas_kernels.attention.spec import AttentionSpec

from . import oracle
from .oracle import NO_MASKS
from .tolerance import assert_attention, assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

try:
    InterpretParams = plgpu.InterpretGPUParams
except AttributeError:  # JAX 0.11.2
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

SMALL = PrefillAttentionConfig(block_kv=64)
SPLIT = dataclasses.replace(SMALL, splits=3)
ALL_MASKED = dataclasses.replace(SMALL, unified=False, skip_masks=False)

interpreted = functools.partial(prefill_mosaic, interpret=InterpretParams(detect_races=True))


def _operands(lengths, offsets, *, t, heads=2, kv_heads=1, s=136, d=64, scale=1.0):
    """q, k, v, lengths, offsets in bfloat16; NaN past the lengths."""
    rng = np.random.default_rng(0)
    b = len(lengths)
    lengths, offsets = np.asarray(lengths, np.int32), np.asarray(offsets, np.int32)
    q = rng.normal(size=(b, t, heads, d)) * scale
    k, v = rng.normal(size=(2, b, kv_heads, s, d))
    dead = np.arange(s)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (np.where(dead, np.nan, a) for a in (k, v))
    return *(a.astype(jnp.bfloat16) for a in (q, k, v)), lengths, offsets


def _check(operands, run, *, masks=NO_MASKS, **options):
    q, k, v, lengths, offsets = operands
    scale = q.shape[-1] ** -0.5
    o, lse = run(q, k, v, lengths, offsets, spec=AttentionSpec(scale, **masks), **options)
    k, v = (np.where(np.isnan(np.float32(a)), 0, a) for a in (k, v))
    exact = oracle.attention(
        *(np.float64(a) for a in (q, k, v)),
        lengths,
        offsets,
        scale=scale,
        **masks,
    )
    assert_attention(o, lse, exact, dtype=str(q.dtype), d=q.shape[-1], s=k.shape[2])
    return np.asarray(o)


@pytest.mark.parametrize(
    ("alibi", "config", "unified"),
    [(None, SPLIT, True), (alibi_slopes(2), SPLIT, False), (alibi_slopes(2), SMALL, True)],
    ids=["parts", "parts with ALiBi", "ALiBi"],
)
def test_parts_with_alibi_have_a_running_maximum(alibi, config, unified, monkeypatch):
    """In a part that is far away, all scores are too small for a unified maximum."""
    configs = []

    def kernel(*args, config, **options):
        configs.append(config)
        genuine(*args, config=config, **options)

    genuine = prefill_module._prefill_kernel
    monkeypatch.setattr(prefill_module, "_prefill_kernel", kernel)
    run = functools.partial(interpreted, spec=AttentionSpec(0.3, alibi=alibi), config=config)
    jax.eval_shape(run, *_operands([133, 70], [3, 60], t=130))
    assert set(configs) == {dataclasses.replace(config, unified=unified)}


@pytest.mark.slow
def test_interpreted_without_races():
    """Ragged rows at offsets, and tiles and a row without queries."""
    operands = _operands([133, 70, 0], [3, 60, 0], t=130)
    _check(operands, interpreted, config=SMALL)


@pytest.mark.slow
def test_interpreted_parts_of_the_cache():
    """Some parts are empty, and of others the first rows of a tile see nothing."""
    operands = _operands([133, 8, 0], [125, 0, 0], t=8)
    _check(operands, interpreted, config=SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "masks",
    [
        *(pytest.param(masks, marks=pytest.mark.soak) for masks in ({}, dict(causal=False))),
        dict(window=50, soft_cap=5.0),
    ],
    ids=str,
)
def test_interpreted_parts_of_the_cache_with_masks(masks):
    operands = _operands([133, 70], [3, 60], t=130)
    for config in (SPLIT, dataclasses.replace(SPLIT, unified=False, splits=2)):
        _check(operands, interpreted, config=config, masks=masks)


@pytest.mark.parametrize(
    ("tiles", "slots", "parts"),
    [(32, 8192, 4), (32, 2048, 2), (32, 2047, 1), (67, 8192, 1), (1, 10**6, 8), (200, 4096, 1)],
)
def test_few_tiles_split_a_long_cache(tiles, slots, parts):
    assert _splits(tiles, slots) == parts


@pytest.mark.slow
def test_interpreted_with_every_mask():
    masks = dict(window=50, soft_cap=5.0, alibi=alibi_slopes(2))
    operands = _operands([130], [60], t=70)
    _check(operands, interpreted, config=SMALL, masks=masks, phi=jnp.array([0.0, 3.0]))


@pytest.mark.slow
def test_interpreted_running_maximum_not_causal_and_all_masked():
    operands = _operands([100], [0], t=64)
    _check(operands, interpreted, config=ALL_MASKED, masks=dict(causal=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_interpreted_recomputation():
    """Scores of 800 in the last row of one tile, and of -800 in all rows of another."""
    q, k, v, lengths, offsets = _operands([130, 20], [2, 0], t=128)
    q[0, 127], k[0, 0, 128] = 10.0, 10.0
    q[1, :, 1], k[1, 0, :20] = 10.0, -10.0
    o = _check((q, k, v, lengths, offsets), interpreted, config=SMALL)
    np.testing.assert_array_equal(o[0, 127], np.broadcast_to(v[0, 0, 128], o[0, 127].shape))


def test_unsupported_cases_raise():
    for case, message in (
        (dict(d=80), "mosaic_gpu needs D of 64, 96, 128 or 256, got 80"),
        (dict(dtype=jnp.float32), "mosaic_gpu needs bfloat16 or float16, got float32"),
        (dict(s=100), "mosaic_gpu needs S to be a multiple of 8, got 100"),
    ):
        shape = dict(d=64, s=64, dtype=jnp.bfloat16) | case
        q = jnp.zeros((1, 16, 2, shape["d"]), shape["dtype"])
        k = jnp.zeros((1, 1, shape["s"], shape["d"]), shape["dtype"])
        lengths = jnp.array([16], jnp.int32)
        with pytest.raises(NotImplementedError, match=f"^prefill_attention: {message}"):
            prefill_attention(
                q, k, k, lengths, spec=AttentionSpec(1.0), implementation="mosaic_gpu"
            )


@pytest.mark.parametrize("config", [dict(block_kv=96), dict(stages=1), dict(splits=0)])
def test_impossible_configs_raise(config):
    with pytest.raises(ValueError, match=r"^prefill_attention: "):
        PrefillAttentionConfig(**config)


def _compiled(t, h, kv_heads, s, d, *, b=1, config=None, masks=NO_MASKS, dtype=jnp.bfloat16):
    from ..deviceless import compile_for

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    attend = functools.partial(prefill_mosaic, spec=AttentionSpec(d**-0.5, **masks), config=config)
    cache, row = spec(b, kv_heads, s, d), spec(b, dtype=jnp.int32)
    return compile_for("h100", attend, spec(b, t, h, d), cache, cache, row, row)


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "spilled_bytes"),
    [
        pytest.param(dict(t=4096, h=32, kv_heads=32, s=4096, d=128), 0, marks=pytest.mark.soak),
        (dict(t=512, h=32, kv_heads=8, s=2048, d=128, b=4), 0),
        pytest.param(dict(t=2048, h=32, kv_heads=8, s=131072, d=128), 0, marks=pytest.mark.soak),
        (dict(t=100, h=32, kv_heads=8, s=4096, d=96), 0),
        (dict(t=128, h=32, kv_heads=8, s=8192, d=128), 8),
        pytest.param(dict(t=128, h=32, kv_heads=8, s=8192, d=64), 0, marks=pytest.mark.soak),
        (dict(t=64, h=8, kv_heads=8, s=8192, d=256), 1600),
        (dict(t=1024, h=8, kv_heads=8, s=1024, d=128, dtype=jnp.float16), 0),
        (
            dict(
                **dict(t=1000, h=8, kv_heads=2, s=1000, d=128),
                masks=dict(window=100, soft_cap=30.0, alibi=alibi_slopes(8)),
            ),
            16,
        ),
        (dict(t=4096, h=32, kv_heads=8, s=4096, d=64), 0),
        pytest.param(dict(t=1000, h=8, kv_heads=4, s=1000, d=256), 1500, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_compiles_for_an_h100(case, spilled_bytes, monkeypatch, capfd):
    """All masks together spill three registers; D = 256 spills many."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = _compiled(**case).as_text()
    assert "prefill_attention" in text
    said = capfd.readouterr().out
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert spills, "ptxas said nothing"
    assert max(map(int, spills)) <= spilled_bytes
    assert "wgmma.mma_async instructions are serialized" not in said


EVERY_MASK = dict(window=300, soft_cap=20.0, alibi=alibi_slopes(8))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["healthy", "recomputed"])
@pytest.mark.parametrize(
    ("d", "masks"),
    [
        (64, {}),
        (96, {}),
        (128, {}),
        (256, {}),
        (128, dict(causal=False)),
        (64, EVERY_MASK),
        (128, EVERY_MASK),
        (128, dict(window=100)),
        (128, dict(causal=False, window=100)),
    ],
    ids=str,
)
def test_many_tiles(d, masks, scale):
    """Several tiles and blocks, ragged, at offsets, with sizes that are not multiples of a tile."""
    operands = _operands(
        [700, 301, 0, 555], [203, 0, 0, 100], t=497, heads=8, kv_heads=2, s=704, d=d, scale=scale
    )
    _check(operands, prefill_mosaic, masks=masks)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 60.0], ids=["healthy", "recomputed"])
@pytest.mark.parametrize("masks", [{}, dict(causal=False), dict(soft_cap=20.0)], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_few_rows_behind_a_long_cache(d, masks, scale):
    """Blocks see parts of the cache, which are merged."""
    operands = _operands(
        [4096, 5001, 90], [4000, 4999, 0], t=96, heads=8, kv_heads=2, s=5128, d=d, scale=scale
    )
    _check(operands, prefill_mosaic, masks=masks)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [0, 63, 64, 127, 128, 299])
@pytest.mark.parametrize("size", [300.0, -300.0])
def test_one_row_out_of_range(row, size):
    """Scores far above and below, in any row; the other rows keep their bits."""
    q, k, v, *rest = _operands([304], [4], t=300, heads=4, kv_heads=4, s=304, d=128)
    k[:] = np.abs(k)
    run = functools.partial(prefill_mosaic, spec=AttentionSpec(0.1))
    clean, _ = run(q, k, v, *rest)
    q[0, row, 2] = size
    o = _check((q, k, v, *rest), lambda *args, **options: prefill_mosaic(*args, **options))
    far, _ = run(q, k, v, *rest)
    others = np.arange(300) // 128 != row // 128
    assert_same_bits(np.asarray(far)[:, others], np.asarray(clean)[:, others])
    assert np.isfinite(np.float32(o)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_many_reruns_have_the_same_bits(d):
    operands = _operands([2048, 1000], [0, 0], t=2048, heads=16, kv_heads=4, s=2048, d=d)
    q, *rest = jax.device_put(operands)
    attend = functools.partial(prefill_mosaic, spec=AttentionSpec(0.1))
    first = jax.jit(attend)(q, *rest)

    def differs(i, count):
        again = attend(q + 0 * i.astype(q.dtype), *rest)
        wrong = [jnp.any(a != b) for a, b in zip(first, again, strict=True)]
        return count + jnp.sum(jnp.stack(wrong), dtype=jnp.int32)

    assert jax.jit(lambda: jax.lax.fori_loop(0, 300, differs, jnp.int32(0)))() == 0
