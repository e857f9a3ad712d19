"""RoPE, append and attention of a decode step equal the three ops one after another."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    alibi_slopes,
    append_decode_attention,
    append_prefill_attention,
    attention_reference,
    split_qkv,
    with_norms,
)
from fdjax.pallas_kernels.attention.append import append
from fdjax.pallas_kernels.attention.hopper.decode import (
    DecodeAttentionConfig,
    append_decode_mosaic,
)
from fdjax.pallas_kernels.attention.operands import no_rotation
from fdjax.pallas_kernels.attention.sinks import apply_sinks
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import NAMES
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import Rope, rotate, rotation

from .test_decode_mosaic import INTERPRET

GPU = [pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]

pytestmark = pytest.mark.usefixtures("quick_compiles")

SPEC = AttentionSpec(1.0)
reference = jax.jit(attention_reference, static_argnames="spec")
cos_sin_at = jax.jit(rotation, static_argnums=1)


@jax.jit
def rotated(qkv, cos_sin):
    """q, k and v after RoPE."""
    q, k, v = split_qkv(qkv)
    return (q, k, v) if cos_sin is None else (rotate(q, *cos_sin), rotate(k, *cos_sin), v)


def _operands(lengths, *, t=1, group=4, kv_heads=2, s=200, d=64, rope_dim=None, seed=0):
    """qkv, caches, lengths, (cos, sin); unfilled slots are NaN."""
    rng = np.random.default_rng(seed)
    b = len(lengths)
    lengths = np.array(lengths, np.int32)
    qkv, *caches = (
        rng.normal(size=shape).astype(jnp.bfloat16)
        for shape in ((b, t, kv_heads, group + 2, d), *((b, kv_heads, s, d),) * 2)
    )
    filled = (np.arange(s)[None] < lengths[:, None])[:, None, :, None]
    caches = [np.where(filled, cache, np.nan).astype(jnp.bfloat16) for cache in caches]
    positions = lengths[:, None] + np.arange(t, dtype=np.int32)[None]
    return qkv, *caches, lengths, cos_sin_at(positions, Rope(rope_dim or d, 10000.0))


def _expected(qkv, k_cache, v_cache, lengths, cos_sin, sinks=None, **masks):
    """Expected o in fp32, and the caches, computed row by row."""
    t, d = qkv.shape[1], qkv.shape[-1]
    q, k, v = rotated(qkv, cos_sin)
    caches = []
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache = np.array(cache)
        for row, length in enumerate(np.asarray(lengths)):
            kept = min(t, cache.shape[2] - length)
            cache[row, :, length : length + kept] = np.asarray(new)[row, :kept].swapaxes(0, 1)
        caches.append(cache)
    read = [np.where(np.isnan(np.float32(c)), 0, c).astype(c.dtype) for c in caches]
    spec = AttentionSpec(d**-0.5, **masks)
    o, lse = reference(q, *read, lengths + t, lengths, spec=spec)
    o = o if sinks is None else apply_sinks(o, lse, sinks)[0]
    return np.asarray(o), caches


def _check(operands, run, norms=None, **masks):
    o, *caches = jax.jit(run)(*operands)
    qkv, *others = operands
    want, want_caches = _expected(with_norms(qkv, norms) if norms else qkv, *others, **masks)
    np.testing.assert_allclose(np.float32(o), want, atol=0.02, rtol=0.02)
    for got, expected in zip(caches, want_caches, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(expected))


def _run(qkv, k, v, lengths, cos_sin, *, implementation, plan=None, norms=None, **masks):
    return append_decode_attention(
        *(qkv, k, v, lengths),
        norms=norms,
        rotation=cos_sin,
        spec=AttentionSpec(qkv.shape[-1] ** -0.5, **masks),
        implementation=implementation,
        plan=plan,
    )


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(dict(lengths=[0]), marks=pytest.mark.slow),
        dict(lengths=[63, 64, 199, 0]),
        pytest.param(dict(lengths=[5, 130], d=128, group=1, kv_heads=3), marks=pytest.mark.slow),
        pytest.param(dict(lengths=[5, 130], d=128, group=8), marks=pytest.mark.slow),
        pytest.param(dict(lengths=[5, 130], d=256, group=16), marks=pytest.mark.slow),
        pytest.param(dict(lengths=[5, 130], d=128, group=20), marks=pytest.mark.slow),
        dict(lengths=[5, 130], d=128, rope_dim=32),
        dict(lengths=[5, 130], t=3),
        pytest.param(
            dict(lengths=[999, 3000], s=4096, d=128, kv_heads=8, group=4), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_equals_its_three_ops(implementation, shape):
    _check(_operands(**shape), functools.partial(_run, implementation=implementation))


@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_masks(implementation):
    masks = dict(window=70, soft_cap=5.0, alibi=alibi_slopes(8))
    run = functools.partial(_run, implementation=implementation, **masks)
    _check(_operands([64, 130, 3]), run, **masks)


@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_without_rope(implementation):
    *operands, _ = _operands([5, 130])
    _check((*operands, None), functools.partial(_run, implementation=implementation))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize(
    ("lengths", "t"),
    [
        ([200, 100], 1),
        pytest.param([200], 1, marks=pytest.mark.slow),
        ([199], 1),
        pytest.param([198], 3, marks=pytest.mark.slow),
        ([192], 16),
    ],
    ids=str,
)
def test_a_full_row_keeps_its_cache(implementation, lengths, t):
    """A finished row may be full. Its output is ignored."""
    operands = _operands(lengths, t=t)
    _, *caches = jax.jit(functools.partial(_run, implementation=implementation))(*operands)
    _, want = _expected(*operands)
    for got, expected in zip(caches, want, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(expected))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("t", [1, 3])
def test_no_rows(implementation, t):
    operands = _operands([], t=t)
    o, *caches = jax.jit(functools.partial(_run, implementation=implementation))(*operands)
    assert (o.shape, o.dtype) == ((0, t, 8, 64), jnp.bfloat16)
    assert [cache.shape for cache in caches] == [operands[1].shape] * 2


def _norms(d):
    """Norms of q and k with other scales and eps."""
    rng = np.random.default_rng(0)
    return tuple(
        RMSNorm(jnp.asarray(1 + 0.3 * rng.normal(size=d), jnp.bfloat16), eps) for eps in (1e-6, 0.5)
    )


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(dict(d=64), marks=pytest.mark.slow),
        dict(d=128, group=8),
        pytest.param(dict(d=128, t=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_norms_come_first(implementation, shape):
    qkv, *others = _operands([5, 130], **shape)
    norms = _norms(qkv.shape[-1])
    run = jax.jit(functools.partial(_run, implementation=implementation, norms=norms))
    got = run(qkv, *others)
    want = _expected(with_norms(qkv, norms), *others)
    for g, w in zip(got, (want[0], *want[1]), strict=True):
        np.testing.assert_allclose(np.float32(g), np.float32(w), atol=0.02, rtol=0.02)
    without, *_ = jax.jit(functools.partial(_run, implementation="xla"))(qkv, *others)
    assert np.abs(np.float32(without) - want[0]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "rope", "more"),
    [
        pytest.param(1, True, False, marks=pytest.mark.soak),
        (2, True, True),
        pytest.param(2, False, False, marks=pytest.mark.soak),
    ],
)
def test_interpreted_without_races(splits, rope, more):
    """With `more`, there are norms of q and k, and sinks."""
    masks = {} if rope else {"alibi": alibi_slopes(4)}
    norms, sinks = (_norms(64), jnp.array([-3.0, 0.0, 2.0, 5.0])) if more else (None, None)

    def run(qkv, k, v, lengths, cos_sin):
        cos, sin = cos_sin or no_rotation(len(qkv), 1, qkv.shape[-1])
        o, lse, k, v, _ = append_decode_mosaic(
            qkv[:, 0],
            k,
            v,
            lengths,
            norms=norms,
            cos=cos,
            sin=sin,
            spec=AttentionSpec(0.125, **masks),
            sinks=sinks,
            config=DecodeAttentionConfig(splits),
            return_lse=more,
            interpret=INTERPRET,
        )
        assert (lse is not None) == more
        return o, k, v

    # After two tokens, the new one has about a third of the weight.
    *operands, cos_sin = _operands([0, 2, 64, 130], kv_heads=1)
    operands = *operands, cos_sin if rope else None
    _check(operands, run, norms=norms, sinks=sinks, **masks)


@pytest.mark.parametrize(
    ("qkv", "cache", "message"),
    [
        ((1, 1, 2, 64), (1, 2, 8, 64), r"qkv must be \[B,T,Hkv,G\+2,D\], got \[1, 1, 2, 64\]"),
        ((1, 1, 2, 2, 64), (1, 2, 8, 64), r"qkv must be \[B,T,Hkv,G\+2,D\]"),
        ((1, 1, 4, 3, 64), (1, 2, 8, 64), "qkv must have the 2 KV heads of the cache, got 4"),
    ],
)
def test_wrong_shapes_raise(qkv, cache, message):
    qkv, cache = jnp.zeros(qkv), jnp.zeros(cache)
    with pytest.raises(ValueError, match=f"append_decode_attention: {message}"):
        append_decode_attention(
            qkv, cache, cache, jnp.zeros((1,), jnp.int32), spec=AttentionSpec(1.0)
        )


@pytest.mark.parametrize(
    ("cos", "sin"),
    [
        ((1, 1, 64), (1, 1, 64)),
        ((1, 2, 32), (1, 2, 32)),
        ((1, 32), (1, 32)),
        ((1, 1, 32), (1, 1, 16)),
    ],
)
def test_a_rotation_of_the_wrong_shape_is_refused(cos, sin):
    qkv, cache = jnp.zeros((1, 1, 2, 3, 64)), jnp.zeros((1, 2, 8, 64))
    tokens = jnp.zeros(1, jnp.int32)
    options = {"spec": SPEC, "rotation": (jnp.ones(cos), jnp.ones(sin))}
    message = f"[1,1,N] with N at most 32, got {[*cos]} and {[*sin]}"
    with pytest.raises(ValueError, match=f"^append_decode_attention: .*{re.escape(message)}$"):
        append_decode_attention(qkv, cache, cache, tokens, **options)
    with pytest.raises(ValueError, match=f"^append_prefill_attention: .*{re.escape(message)}$"):
        append_prefill_attention(qkv, cache, cache, tokens, tokens, **options)


@pytest.mark.deviceless
@pytest.mark.parametrize("group", [1, 4])
def test_the_caches_stay_where_they_are(group):
    from ..deviceless import alias_bytes, compile_for, large_copies

    specs = jax.eval_shape(lambda: _operands([5] * 2, d=128, kv_heads=8, s=1024, group=group))
    run = functools.partial(_run, implementation="mosaic_gpu")
    compiled = compile_for("h100", run, *specs, donate_argnums=(1, 2))
    nbytes = specs[1].size * 2
    assert alias_bytes(compiled) == 2 * nbytes
    assert not large_copies(compiled, nbytes // 2)


@pytest.mark.deviceless
@pytest.mark.parametrize("t", [1, 3])
def test_the_cache_of_one_row_stays_where_it_is(t):
    from ..deviceless import alias_bytes, compile_for, large_copies

    spec = jax.ShapeDtypeStruct
    cache = spec((1, 32, 4096, 128), jnp.bfloat16)
    new = spec((1, t, 32, 128), jnp.bfloat16)
    compiled = compile_for("h100", append, cache, new, spec((1,), jnp.int32), donate_argnums=0)
    nbytes = cache.size * 2
    assert alias_bytes(compiled) == nbytes
    assert not large_copies(compiled, nbytes // 32)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("d", "batch"),
    [
        # Each value occurs once; other combinations are `soak`.
        pytest.param(d, batch, marks=() if (d, batch) in kept else pytest.mark.soak)
        for kept in [{(64, 128), (128, 64), (256, 2)}]
        for d in (64, 128, 256)
        for batch in (2, 64, 128)
    ],
)
def test_the_largest_groups_compile_without_spills(d, batch, monkeypatch, capfd):
    from ..deviceless import compile_for

    specs = jax.eval_shape(lambda: _operands([5] * batch, d=d, kv_heads=2, s=2048, group=16))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for("h100", functools.partial(_run, implementation="mosaic_gpu"), *specs)
    spills = re.findall(r"(\d+) bytes spill stores", capfd.readouterr().out)
    assert spills, "ptxas said nothing"
    assert set(spills) == {"0"}


H200 = Plan.for_kind("NVIDIA H200", (9, 0))
SOAK = pytest.mark.soak


def _doubled():
    """Measured shapes with twice the query heads, for which these measurements are the nearest."""
    shapes = [dict(e.shape) for e in H200.table if e.op == "decode_attention"]
    return [shape | {"h": 2 * shape["h"]} for shape in shapes]


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "shape",
    [
        # The longest cache and the most rows for each number of KV heads; others are a grid.
        pytest.param(
            shape, marks=() if extreme in ((1, 8320, 32), (1, 32896, 8), (16, 1152, 8)) else SOAK
        )
        for shape in _doubled()
        for extreme in [(shape["b"], shape["s"], shape["hkv"])]
    ],
    ids=str,
)
def test_shipped_configurations_have_room_for_larger_groups(shape, monkeypatch, capfd):
    from ..deviceless import compile_for

    choice = H200.choose("decode_attention", **shape)
    assert (choice.implementation, choice.source) == ("mosaic_gpu", "nearest")
    b, kv_heads, d = shape["b"], shape["hkv"], shape["d"]
    spec = jax.ShapeDtypeStruct
    cache = spec((b, kv_heads, shape["s"], d), jnp.bfloat16)
    qkv = spec((b, 1, kv_heads, shape["h"] // kv_heads + 2, d), jnp.bfloat16)
    cos_sin = (spec((b, 1, d // 2), jnp.float32),) * 2
    run = functools.partial(_run, implementation=None, plan=H200)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for("h100", run, qkv, cache, cache, spec((b,), jnp.int32), cos_sin)
    assert set(re.findall(r"(\d+) bytes spill stores", capfd.readouterr().out)) == {"0"}


@pytest.mark.deviceless
def test_three_blocks_share_a_multiprocessor(monkeypatch, capfd):
    """With heads enough to fill the device, small blocks hide each other's start and end."""
    from ..deviceless import compile_for

    specs = jax.eval_shape(lambda: _operands([5] * 8, d=128, kv_heads=32, s=1024, group=1))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_for("h100", functools.partial(_run, implementation="mosaic_gpu"), *specs)
    # Barriers are last in shared memory, and their addresses are computed in order.
    begins = capfd.readouterr().out.rpartition("mbarrier.init")[0]
    last_barrier = int(re.findall(r"add\.s32\s+%r\d+, %r\d+, (\d+);", begins)[-1])
    assert last_barrier + 8 <= 228 * 1024 // 3 - 1024
