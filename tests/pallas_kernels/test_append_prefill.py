"""RoPE, write and attention of a prefill chunk equal the three ops one after another."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import (
    alibi_slopes,
    append_prefill_attention,
)
from fdjax.pallas_kernels.attention.cache import quantise
from fdjax.pallas_kernels.attention.hopper.prefill_front import write_chunk_mosaic
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import NAMES
from fdjax.pallas_kernels.rope import Rope

from .test_append import GPU, cos_sin_at, reference, rotated
from .test_decode_mosaic import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Tokens of a tile that the Mosaic kernel writes.
TILE = 64


def _operands(
    live, offsets, rows=None, *, batch=None, t=128, group=2, kv_heads=2, s=256, d=64, rope_dim=None
):
    """qkv, caches, lengths, offsets, (cos, sin), rows; unfilled slots are NaN."""
    rng = np.random.default_rng(0)
    r = len(live)
    rows = np.arange(r) if rows is None else np.array(rows, int)
    b = r if batch is None else batch
    qkv, *caches = (
        rng.normal(size=shape).astype(jnp.bfloat16)
        for shape in ((r, t, kv_heads, group + 2, d), *((b, kv_heads, s, d),) * 2)
    )
    filled = np.full(b, s)
    filled[rows] = np.where(np.array(live) > 0, offsets, s)
    filled = (np.arange(s)[None] < filled[:, None])[:, None, :, None]
    caches = [np.where(filled, cache, np.nan).astype(jnp.bfloat16) for cache in caches]
    live, offsets = np.array(live, np.int32), np.array(offsets, np.int32)
    lengths = np.where(live > 0, offsets + live, 0).astype(np.int32)
    positions = offsets[:, None] + np.arange(t, dtype=np.int32)[None]
    cos_sin = cos_sin_at(positions, Rope(rope_dim or d, 10000.0))
    return qkv, *caches, lengths, offsets, cos_sin, rows.astype(np.int32)


def _check(operands, o, k_cache, v_cache, **masks):
    """Check o and the caches; o may be None, to check only the caches."""
    qkv, k_before, v_before, lengths, offsets, cos_sin, rows = operands
    q, k, v = rotated(qkv, cos_sin)
    t = qkv.shape[1]
    kept = []
    for before, new, after in ((k_before, k, k_cache), (v_before, v, v_cache)):
        want, after = np.float32(before), np.float32(after)
        for i, row in enumerate(rows):
            live = max(lengths[i] - offsets[i], 0)
            written = slice(offsets[i], offsets[i] + live)
            padding = slice(written.stop, offsets[i] + min(-(-live // TILE) * TILE, t))
            want[row, :, written] = np.float32(new)[i, :live].swapaxes(0, 1)
            want[row, :, padding] = after[row, :, padding]
        np.testing.assert_allclose(after, want, atol=0.02, rtol=0.01)
        kept.append(np.nan_to_num(want[rows]))
    if o is not None:
        spec = AttentionSpec(qkv.shape[-1] ** -0.5, **masks)
        want, _ = reference(np.float32(q), *kept, lengths, offsets, spec=spec)
        np.testing.assert_allclose(np.float32(o), want, atol=0.03, rtol=0.03)


@functools.partial(jax.jit, static_argnames=("implementation", "whole", "masks"))
def _run(
    qkv, k, v, lengths, offsets, cos_sin, rows, layer=None, *, implementation, whole=False, masks=()
):
    return append_prefill_attention(
        qkv,
        k,
        v,
        lengths,
        offsets,
        rotation=cos_sin,
        layer=layer,
        rows=None if whole else rows,
        spec=AttentionSpec(qkv.shape[-1] ** -0.5, **dict(masks)),
        implementation=implementation,
    )


SHAPES = [
    dict(live=[100], offsets=[0]),
    dict(live=[1, 128, 0], offsets=[64, 3, 5], rows=[2, 0, 3], batch=4),
    dict(live=[65, 128], offsets=[128, 0], d=128, group=1),
    dict(live=[65, 128], offsets=[128, 0], d=128, group=8),
    dict(live=[65, 30], offsets=[1, 0], t=70, rope_dim=32),
]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_three_ops(implementation, shape):
    operands = _operands(**shape)
    _check(operands, *_run(*operands, implementation=implementation))


@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_masks_and_all_rows(implementation):
    masks = (("window", 70), ("soft_cap", 5.0), ("alibi", alibi_slopes(4)))
    operands = _operands([100, 64], [130, 0])
    out = _run(*operands, implementation=implementation, whole=True, masks=masks)
    _check(operands, *out, **dict(masks))


LAYERS = 3


def _in_stacks(layer, *caches):
    """Each cache as one layer of a stack whose other layers are NaN."""
    stacks = [np.full((LAYERS, *c.shape), np.nan, jnp.bfloat16) for c in caches]
    for stack, cache in zip(stacks, caches, strict=True):
        stack[layer] = cache
    return stacks


def _check_stacked(run, operands, layer):
    """run(*operands, layer) must give the same bits as with the layer's caches alone."""
    want, *wanted_caches = run(*operands, None)
    qkv, k, v, *rest = operands
    got, *stacks = run(qkv, *_in_stacks(layer, k, v), *rest, np.int32(layer))
    for a, b in zip((got, *stacks), (want, *_in_stacks(layer, *wanted_caches)), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("implementation", ["xla", *GPU])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_a_layer_of_a_stack(implementation, shape, layer):
    run = functools.partial(_run, implementation=implementation)
    _check_stacked(run, _operands(**shape), layer)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("batch", [0, 2])
def test_no_rows(implementation, batch):
    operands = _operands([], [], [], batch=batch)
    o, *caches = _run(*operands, implementation=implementation)
    assert (o.shape, o.dtype) == ((0, 128, 4, 64), jnp.bfloat16)
    for after, before in zip(caches, operands[1:3], strict=True):
        np.testing.assert_array_equal(np.float32(after), np.float32(before))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_interpreted_without_races(shape):
    operands = _operands(**shape)
    qkv, k, v, lengths, offsets, cos_sin, rows = operands
    q, *caches = write_chunk_mosaic(
        qkv, k, v, lengths, offsets, *cos_sin, rows=rows, interpret=INTERPRET
    )
    _check(operands, None, *caches)
    for i, live in enumerate(lengths - offsets):
        want = np.float32(rotated(qkv, cos_sin)[0])[i, : max(live, 0)]
        np.testing.assert_allclose(np.float32(q)[i, : max(live, 0)], want, atol=0.02, rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_interpreted_in_a_stack(layer):
    def run(qkv, k, v, lengths, offsets, cos_sin, rows, layer):
        return write_chunk_mosaic(
            *(qkv, k, v, lengths, offsets, *cos_sin),
            rows=rows,
            layer=layer,
            interpret=INTERPRET,
        )

    _check_stacked(run, _operands([65, 128], [64, 3], rows=[2, 0], batch=3), layer)


def _check_codes(operands, write):
    """write(*operands) with caches in int8 must keep the codes of `quantise`, and other slots."""
    qkv, *caches, lengths, offsets, cos_sin, rows = operands
    caches = [jax.jit(quantise)(jnp.nan_to_num(cache)) for cache in caches]
    q, *after = write(qkv, *caches, lengths, offsets, cos_sin, rows)
    rotated_q, *new = rotated(qkv, cos_sin)
    for cache, got, want in zip(caches, after, map(jax.jit(quantise), new), strict=True):
        untouched = np.ones(cache.shape[:-1], bool)
        for i, row in enumerate(rows):
            live = lengths[i] - offsets[i]
            if live <= 0:
                continue
            padded = min(-(-live // TILE) * TILE, qkv.shape[1])
            untouched[row, :, offsets[i] : offsets[i] + padded] = False
            written = row, slice(None), slice(offsets[i], offsets[i] + live)
            np.testing.assert_allclose(
                got.scales[written], want.scales[i, :live].swapaxes(0, 1), rtol=1e-2
            )
            # q and k are rounded to bfloat16 before they are rounded to codes.
            codes = np.int32(got.codes[written]) - np.int32(want.codes[i, :live].swapaxes(0, 1))
            assert abs(codes).max() <= 1 and (codes != 0).mean() < 0.02
            if q is not None:
                np.testing.assert_allclose(
                    np.float32(q)[i, :live], np.float32(rotated_q)[i, :live], atol=0.02, rtol=0.01
                )
        for a, b in ((got.codes, cache.codes), (got.scales, cache.scales)):
            np.testing.assert_array_equal(np.asarray(a)[untouched], np.asarray(b)[untouched])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_interpreted_codes(shape):
    def write(qkv, k, v, lengths, offsets, cos_sin, rows):
        return write_chunk_mosaic(
            *(qkv, k, v, lengths, offsets, *cos_sin), rows=rows, interpret=INTERPRET
        )

    _check_codes(_operands(**shape), write)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_codes_on_a_gpu(shape):
    def write(qkv, k, v, lengths, offsets, cos_sin, rows):
        run = functools.partial(_run, implementation="mosaic_gpu")
        return None, *run(qkv, k, v, lengths, offsets, cos_sin, rows)[1:]

    _check_codes(_operands(**shape), write)


def test_offsets_that_do_not_fit_raise():
    qkv, cache = jnp.zeros((2, 8, 2, 3, 64)), jnp.zeros((2, 2, 8, 64))
    lengths = jnp.full(2, 8, jnp.int32)
    for offsets in (jnp.zeros(3, jnp.int32), jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.zeros(2)):
        got = f"{offsets.dtype} {list(offsets.shape)}"
        message = re.escape(f"offsets must be signed integers [2], got {got}")
        with pytest.raises(ValueError, match=f"append_prefill_attention: {message}"):
            append_prefill_attention(qkv, cache, cache, lengths, offsets, spec=AttentionSpec(1.0))


def test_rows_that_do_not_fit_raise():
    qkv, cache = jnp.zeros((1, 8, 2, 3, 64)), jnp.zeros((4, 2, 8, 64))
    zeros = jnp.zeros((1,), jnp.int32)
    for rows, message in ((None, "disagree on B or D"), (jnp.zeros((2,), jnp.int32), "rows must")):
        with pytest.raises(ValueError, match=f"append_prefill_attention: .*{message}"):
            append_prefill_attention(
                qkv, cache, cache, zeros, zeros, rows=rows, spec=AttentionSpec(1.0)
            )


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("group", "stacked", "int8"),
    [
        # Each value occurs once; other combinations are a grid.
        pytest.param(
            *case, marks=() if case in ((1, False, True), (4, True, False)) else pytest.mark.soak
        )
        for case in itertools.product((1, 4), (False, True), (False, True))
    ],
)
def test_the_caches_stay_where_they_are(group, stacked, int8):
    from ..deviceless import alias_bytes, compile_for, large_copies

    def make():
        operands = _operands([64, 1], [0, 5], rows=[3, 1], batch=4, d=128, kv_heads=8, group=group)
        qkv, *caches = operands[:3]
        rest, layer = operands[3:], ()
        if stacked:
            caches, layer = _in_stacks(1, *caches), (np.int32(1),)
        if int8:
            caches = map(quantise, caches)
        return qkv, *caches, *rest, *layer

    run = functools.partial(_run, implementation="mosaic_gpu")
    compiled = compile_for("h100", run, *jax.eval_shape(make), donate_argnums=(1, 2))
    nbytes = 4 * 8 * 256 * (132 if int8 else 256)
    assert alias_bytes(compiled) == 2 * nbytes * (LAYERS if stacked else 1)
    assert not large_copies(compiled, nbytes // 8)
