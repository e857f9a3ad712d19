"""The Mosaic GPU kernel of decode attention: interpreted, compiled for an H100, and run on one.

`test_attention.py` tests its results on a GPU, together with all other implementations.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention import alibi_slopes, decode_attention
from fdjax.pallas_kernels.attention.hopper import decode as decode_mosaic_module
from fdjax.pallas_kernels.attention.hopper.decode import (
    DecodeAttentionConfig,
    decode_mosaic,
    default_config,
    int8_config,
    query_tiles,
)
from fdjax.pallas_kernels.attention.spec import AttentionSpec

from . import oracle
from .oracle import NO_MASKS
from .tolerance import assert_attention

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

try:
    InterpretParams = plgpu.InterpretGPUParams
except AttributeError:  # JAX 0.11.2
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

# A slot outside the first block of its split, with one split or with three.
OUTLIER = 195
INTERPRET = InterpretParams(detect_races=True)
ONE = DecodeAttentionConfig(splits=1)
SPLIT = DecodeAttentionConfig(splits=3, stages=2)
RUNNING_MAXIMUM = dataclasses.replace(SPLIT, unified=False)


def _operands(lengths, *, t=1, group=4, kv_heads=1, s=200, d=64, dtype=jnp.bfloat16, scale=1.0):
    """q, k, v, lengths; NaN past the lengths."""
    rng = np.random.default_rng(0)
    b = len(lengths)
    lengths = np.asarray(lengths, np.int32)
    q = rng.normal(size=(b, t, group * kv_heads, d)) * scale
    k, v = rng.normal(size=(2, b, kv_heads, s, d))
    dead = np.arange(s)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (np.where(dead, np.nan, a) for a in (k, v))
    return *(a.astype(dtype) for a in (q, k, v)), lengths


def _check(operands, run, *, masks=NO_MASKS, **options):
    q, k, v, lengths = operands
    scale = q.shape[-1] ** -0.5
    o, lse, _ = run(q, k, v, lengths, spec=AttentionSpec(scale, **masks), **options)
    k, v = (np.where(np.isnan(np.float32(a)), 0, a) for a in (k, v))
    exact = oracle.attention(
        *(np.float64(a) for a in (q, k, v)),
        lengths,
        lengths - q.shape[1],
        scale=scale,
        causal=True,
        **masks,
    )
    assert_attention(o, lse, exact, dtype=str(q.dtype), d=q.shape[-1], s=k.shape[2])
    return np.asarray(o)


interpreted = functools.partial(decode_mosaic, interpret=INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ONE, id="one"),
        pytest.param(SPLIT, id="split"),
        pytest.param(RUNNING_MAXIMUM, id="running_maximum"),
    ],
)
def test_interpreted_without_races(config):
    _check(_operands([0, 1, 65, 200]), interpreted, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "t",
    [pytest.param(3, marks=pytest.mark.soak), pytest.param(10, id="two tiles of query rows")],
)
def test_interpreted_with_every_mask(t):
    masks = dict(window=70, soft_cap=5.0, alibi=alibi_slopes(4))
    phi = jnp.arange(4, dtype=jnp.float32)
    operands = _operands([2, 77, 200], t=t)
    _check(operands, interpreted, config=SPLIT, masks=masks, phi=phi)


@pytest.mark.slow
def test_interpreted_with_many_query_rows():
    """A KV head has 128 query rows, in four tiles."""
    _check(_operands([17, 130], t=16, group=8), interpreted, config=ONE)


@pytest.mark.slow
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_interpreted_where_the_last_block_is_larger_than_what_it_holds(group):
    """With 16 query rows the last block repeats slots of the block before; with 32 it is padded."""
    config = DecodeAttentionConfig(splits=2, block_kv=128, stages=2)
    _check(_operands([20, 130, 257, 264], t=16, group=group, s=264), interpreted, config=config)


@pytest.mark.parametrize(
    "masks",
    [
        pytest.param({}, id="whole"),
        pytest.param(dict(window=30), id="window", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_interpreted_where_a_split_begins_past_the_cache(masks):
    config = DecodeAttentionConfig(splits=2, block_kv=128, stages=2)
    _check(_operands([0, 5, 72], s=72), interpreted, config=config, masks=masks)


def test_tiles_hold_all_query_rows():
    for d in (64, 128, 256):
        for rows in range(1, 257):
            tiles, size = query_tiles(rows, d)
            assert size % 8 == 0
            assert rows <= tiles * size < rows + 8 * tiles


@pytest.mark.parametrize(
    "config",
    [pytest.param(ONE, id="one", marks=pytest.mark.slow), pytest.param(SPLIT, id="split")],
)
@pytest.mark.slow
def test_scores_outside_the_safe_range(config):
    operands = _out_of_range()
    o = _check(operands, interpreted, config=config)
    value = operands[2][1, 0, OUTLIER]
    np.testing.assert_array_equal(o[1, 0], np.broadcast_to(value, o[1, 0].shape))


def _out_of_range(**shape):
    """Operands with scores far outside the safe range on both sides, in one split and in all."""
    q, k, v, lengths = _operands([130, 200], **shape)
    q[:] = 1.0
    k[0, :, :130] = -16.0  # all scores are -128, where the maximum starts
    k[1, :, :200] = 0.0
    k[1, :, OUTLIER] = 100.0  # a score of 800
    return q, k, v, lengths


def _check_reruns(run, config, expected):
    spec = AttentionSpec(0.125)
    count = functools.partial(run, spec=spec, config=config, return_reruns=True)
    *_, reruns = count(*_out_of_range(d=128))
    assert reruns == pytest.approx(expected)
    *_, reruns = count(*_operands([130, 200], d=128))
    assert reruns == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(ONE, 1 / 2, marks=pytest.mark.slow),
        pytest.param(SPLIT, 1 / 6, marks=pytest.mark.slow),
        pytest.param(RUNNING_MAXIMUM, 0, marks=pytest.mark.slow),
    ],
    ids=["one", "split", "running_maximum"],
)
def test_reruns_are_counted(config, expected):
    """Counted in blocks of (row, head, split): one of row 1 starts at maximum 0 and meets 800."""
    _check_reruns(interpreted, config, expected)


@pytest.mark.gpu
def test_reruns_are_counted_on_a_gpu():
    _check_reruns(decode_mosaic, ONE, 1 / 2)
    _check_reruns(decode_mosaic, SPLIT, 1 / 6)
    _check_reruns(decode_mosaic, dataclasses.replace(SPLIT, cluster=True), 1 / 6)
    _check_reruns(decode_mosaic, RUNNING_MAXIMUM, 0)


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.1, unified=False), AttentionSpec(0.1, alibi=alibi_slopes(4))],
    ids=["not asked for", "ALiBi"],
)
def test_without_a_unified_maximum(spec, monkeypatch):
    """Any configuration runs with a running maximum."""
    configs = []

    def kernel(*args, config, **kwargs):
        configs.append(config)
        decode_kernel(*args, config=config, **kwargs)

    decode_kernel = decode_mosaic_module.decode_kernel
    monkeypatch.setattr(decode_mosaic_module, "decode_kernel", kernel)
    run = functools.partial(interpreted, spec=spec, config=SPLIT)
    jax.eval_shape(run, *_operands([1, 120], s=136))
    assert set(configs) == {RUNNING_MAXIMUM}


@pytest.mark.slow
def test_large_values_do_not_overflow_the_unified_sum():
    q, k, v, lengths = _operands([130])
    q[:], k[0, 0, :130] = 1.0, 2.75  # p = 2^31.7, in range
    v[0, 0, :130] = 2.0**85
    o, *_ = interpreted(q, k, v, lengths, spec=AttentionSpec(0.125), config=SPLIT)
    assert (np.float64(o) == 2.0**85).all()


def test_unsupported_cases_raise():
    def attend(d=64, t=1, group=4, s=64, dtype=jnp.bfloat16):
        q, k, v, lengths = _operands([20], t=t, group=group, s=s, d=d, dtype=dtype)
        decode_attention(q, k, v, lengths, spec=AttentionSpec(1.0), implementation="mosaic_gpu")

    for case, message in (
        (dict(d=80), "mosaic_gpu needs D of 64, 128 or 256, got 80"),
        (dict(dtype=jnp.float32), "mosaic_gpu needs bfloat16 or float16, got float32"),
        (dict(s=63), "mosaic_gpu needs S to be a multiple of 8, got 63"),
    ):
        with pytest.raises(NotImplementedError, match=f"decode_attention: {message}"):
            attend(**case)


@pytest.mark.parametrize(
    "config", [dict(splits=0), dict(splits=1, block_kv=96), dict(splits=16, cluster=True)]
)
def test_impossible_configs_raise(config):
    with pytest.raises(ValueError, match=r"^decode_attention: "):
        DecodeAttentionConfig(**config)


@pytest.mark.parametrize(("choose", "itemsize"), [(default_config, 2), (int8_config, 1)])
def test_default_configs_fit_and_reach_every_slot(choose, itemsize):
    for b in (1, 2, 3, 8, 17, 64):
        for kv_heads in (1, 2, 8, 32, 40):
            for s in (1, 64, 128, 1000, 8192, 131072):
                for d in (64, 128, 256):
                    config = choose(b, kv_heads, s, d)
                    assert config.stages * config.block_kv * d * 2 * itemsize <= 200 * 1024
                    assert config.splits * 64 < s + 64 * 8 or config.splits == 1


def _compiled(b, t, h, kv_heads, s, d, *, masks=NO_MASKS, dtype=jnp.bfloat16, **options):
    from ..deviceless import compile_for

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    attend = functools.partial(decode_mosaic, spec=AttentionSpec(d**-0.5, **masks), **options)
    cache = spec(b, kv_heads, s, d)
    return compile_for("h100", attend, spec(b, t, h, d), cache, cache, spec(b, dtype=jnp.int32))


CLUSTER = DecodeAttentionConfig(splits=4, cluster=True)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "case",
    [
        dict(b=1, t=1, h=32, kv_heads=32, s=1024, d=128),
        dict(b=1, t=1, h=32, kv_heads=8, s=32768, d=128),
        pytest.param(dict(b=64, t=1, h=32, kv_heads=8, s=1024, d=128), marks=pytest.mark.soak),
        dict(b=8, t=4, h=32, kv_heads=8, s=2048, d=64),
        dict(b=2, t=1, h=16, kv_heads=8, s=1000, d=256),
        dict(b=1, t=1, h=8, kv_heads=8, s=512, d=128, dtype=jnp.float16),
        dict(b=1, t=2, h=8, kv_heads=8, s=512, d=128, config=CLUSTER),
        dict(b=1, t=1, h=32, kv_heads=8, s=8192, d=128, return_reruns=True),
        pytest.param(dict(b=2, t=8, h=32, kv_heads=8, s=2048, d=128), marks=pytest.mark.soak),
        pytest.param(dict(b=2, t=10, h=32, kv_heads=8, s=1000, d=64), marks=pytest.mark.soak),
        dict(b=2, t=16, h=32, kv_heads=8, s=1000, d=64),
        pytest.param(dict(b=2, t=16, h=32, kv_heads=8, s=8192, d=128), marks=pytest.mark.soak),
        pytest.param(dict(b=64, t=16, h=32, kv_heads=2, s=8192, d=128), marks=pytest.mark.soak),
        pytest.param(dict(b=2, t=16, h=16, kv_heads=8, s=8192, d=256), marks=pytest.mark.soak),
        dict(b=64, t=12, h=16, kv_heads=2, s=8192, d=256),
        dict(
            **dict(b=1, t=2, h=8, kv_heads=1, s=512, d=128, config=RUNNING_MAXIMUM),
            masks=dict(window=100, soft_cap=30.0, alibi=alibi_slopes(8)),
        ),
    ],
    ids=str,
)
def test_compiles_for_an_h100_without_spills(case, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = _compiled(**case).as_text()
    assert "decode_attention" in text
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
    _compiled(b=2, t=16, h=32, kv_heads=8, s=1000, d=d, config=config)


def _on_gpu(operands, config, **options):
    run = functools.partial(decode_mosaic, config=config)
    return _check(operands, run, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["healthy", "recomputed"])
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("t", [1, 8, 16])
def test_cluster_equals_two_launches(t, splits, scale):
    """On a GPU, because the interpreter does not support clusters."""
    operands = _operands([0, t, 77, 1000], t=t, kv_heads=3, s=1000, d=128, scale=scale)
    two = DecodeAttentionConfig(splits=splits, stages=2)
    expected = _on_gpu(operands, two)
    got = _on_gpu(operands, dataclasses.replace(two, cluster=True))
    np.testing.assert_array_equal(np.float32(got), np.float32(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [False, True])
def test_splits_that_begin_past_the_cache(cluster):
    config = DecodeAttentionConfig(splits=4, block_kv=128, stages=2, cluster=cluster)
    _on_gpu(_operands([0, 5, 72, 136, 200], s=200, d=128, kv_heads=3), config)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["healthy", "recomputed"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_query_rows(d, scale):
    masks = dict(window=300, soft_cap=50.0, alibi=alibi_slopes(14))
    lengths = [0, 16, 77, 1000]
    operands = _operands(lengths, t=16, group=7, kv_heads=2, s=1000, d=d, scale=scale)
    _on_gpu(operands, None, masks=masks)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("s", [8, 64, 1000, 4096])
def test_a_thousand_reruns_have_the_same_bits(kv_heads, s):
    attend = functools.partial(decode_mosaic, spec=AttentionSpec(0.1))

    @jax.jit
    def differing(q, k, v, lengths):
        first = attend(q, k, v, lengths)[:2]

        def count(i, total):
            again = attend(q + 0 * i.astype(q.dtype), k, v, lengths)[:2]
            same = [
                jnp.all((a == b) | (jnp.isnan(a) & jnp.isnan(b)))
                for a, b in zip(first, again, strict=True)
            ]
            return total + (~(same[0] & same[1])).astype(jnp.int32)

        return jax.lax.fori_loop(0, 1000, count, jnp.int32(0))

    assert differing(*_operands([s, s // 2 - 1], kv_heads=kv_heads, s=s, d=128)) == 0
