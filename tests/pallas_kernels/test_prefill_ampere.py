"""The Ampere kernel of prefill attention: interpreted, compiled for an A100, and run on newer GPUs.

On newer GPUs it runs as on Ampere, with cp.async and mma, which they also have.
"""

import concurrent.futures
import ctypes
import functools
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.mosaic.gpu import utils as mosaic_gpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention import (
    alibi_slopes,
    append_prefill_attention,
    prefill_attention,
)
from fdjax.pallas_kernels.attention import prefill_ampere as module
from fdjax.pallas_kernels.attention.prefill_ampere import PrefillAmpereConfig, prefill_ampere
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.plan import Plan

from . import oracle
from .oracle import NO_MASKS
from .tolerance import assert_attention, assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

try:
    InterpretParams = plgpu.InterpretGPUParams
except AttributeError:  # JAX 0.11.2
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

SMALL = PrefillAmpereConfig(block_q=64, block_kv=32)
LARGE = PrefillAmpereConfig(block_q=128, held=False)
EVERY_MASK = dict(window=300, soft_cap=20.0, alibi=alibi_slopes(8))


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel in the interpreter, with replacements for mma and cp.async.

    Copies finish at once, so a buffer that is filled too early gives a wrong result.
    """

    def copy(src, dst):
        dst[...] = src[...]

    def mma(acc, a, b):
        return acc + lax.dot(a, b, preferred_element_type=jnp.float32)

    monkeypatch.setattr(module, "_copy", copy)
    monkeypatch.setattr(module, "_as_left", lambda x: x)
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda n: None)
    monkeypatch.setattr(plgpu, "mma", mma)
    return functools.partial(prefill_ampere, interpret=InterpretParams(detect_races=True))


@pytest.fixture
def as_ampere(monkeypatch):
    """Makes Mosaic treat any GPU as one of compute capability 8.0."""
    monkeypatch.setattr(mosaic_gpu_utils, "_infer_arch", lambda: (8, 0))


def _operands(lengths, offsets, *, t, heads=2, kv_heads=1, s=136, d=64, dtype="bfloat16"):
    """q, k, v, lengths, offsets; NaN past the lengths."""
    rng = np.random.default_rng(0)
    b = len(lengths)
    lengths, offsets = np.asarray(lengths, np.int32), np.asarray(offsets, np.int32)
    q = rng.normal(size=(b, t, heads, d))
    k, v = rng.normal(size=(2, b, kv_heads, s, d))
    dead = np.arange(s)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (np.where(dead, np.nan, a) for a in (k, v))
    return *(a.astype(jnp.dtype(dtype)) for a in (q, k, v)), lengths, offsets


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


def test_interpreted(interpreted):
    """Ragged rows at offsets, a row without queries, a last block that repeats slots."""
    operands = _operands([133, 70, 0], [3, 60, 0], t=130)
    _check(operands, interpreted, config=SMALL)


@pytest.mark.slow
def test_interpreted_with_every_mask(interpreted):
    masks = dict(window=50, soft_cap=5.0, alibi=alibi_slopes(2))
    _check(_operands([130], [60], t=70), interpreted, config=LARGE, masks=masks)


def test_unsupported_cases_raise():
    for case, message in (
        (dict(d=96), "mosaic_gpu on Ampere needs D of 64, 128 or 256, got 96"),
        (dict(dtype=jnp.float32), "mosaic_gpu needs bfloat16 or float16, got float32"),
    ):
        shape = dict(d=64, dtype=jnp.bfloat16) | case
        q = jnp.zeros((1, 16, 2, shape["d"]), shape["dtype"])
        k = jnp.zeros((1, 1, 64, shape["d"]), shape["dtype"])
        lengths, offsets = jnp.array([[16], [0]], jnp.int32)
        with pytest.raises(NotImplementedError, match=f"^prefill_attention: {message}"):
            prefill_attention(
                *(q, k, k, lengths, offsets),
                spec=AttentionSpec(1.0),
                implementation="mosaic_gpu",
                plan=Plan("NVIDIA A100-SXM4-80GB", (8, 0)),
            )


@pytest.mark.parametrize("config", [dict(block_q=96), dict(block_kv=48)])
def test_impossible_configs_raise(config):
    with pytest.raises(ValueError, match=r"^prefill_attention: "):
        PrefillAmpereConfig(**config)


@pytest.mark.slow
def test_interpreted_without_causality(interpreted):
    """With fewer slots than a block, and with a window."""
    operands = _operands([20], [0], t=64, s=24)
    _check(operands, interpreted, config=SMALL, masks=dict(causal=False))
    operands = _operands([100], [0], t=64)
    _check(operands, interpreted, config=SMALL, masks=dict(causal=False, window=30))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_interpreted_recomputation(interpreted):
    """Scores of 800 in the last row of one tile, and of -800 in all rows of another."""
    q, k, v, lengths, offsets = _operands([130, 20], [2, 0], t=128)
    q[0, 127], k[0, 0, 128] = 10.0, 10.0
    q[1, :, 1], k[1, 0, :20] = 10.0, -10.0
    o = _check((q, k, v, lengths, offsets), interpreted, config=SMALL)
    np.testing.assert_array_equal(o[0, 127], np.broadcast_to(v[0, 0, 128], o[0, 127].shape))


@pytest.fixture(scope="module")
def alone():
    """Run a function in another process, because Mosaic compiles for a process's first device."""
    context = multiprocessing.get_context("spawn")
    path = [*sys.path, str(Path(__file__).parents[2])]  # inherited by the process
    with (
        mock.patch.object(sys, "path", path),
        concurrent.futures.ProcessPoolExecutor(1, context) as pool,
    ):
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def _with_ptxas(**case):
    """The kernels of a case, and what ptxas prints meanwhile."""
    with tempfile.TemporaryFile() as file:
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTXAS="1"):
                names = _kernels_of(**case)
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        return names, file.read().decode()


def _kernels_of(t, h, kv_heads, s, d, *, config=None, masks=NO_MASKS, dtype=jnp.bfloat16):
    from ..deviceless import compile_for, kernel_names

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    attend = functools.partial(prefill_ampere, spec=AttentionSpec(d**-0.5, **masks), config=config)
    cache, row = spec(1, kv_heads, s, d), spec(1, dtype=jnp.int32)
    return kernel_names(compile_for("a100", attend, spec(1, t, h, d), cache, cache, row, row))


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "spilled_bytes"),
    [
        pytest.param(dict(t=4096, h=32, kv_heads=32, s=4096, d=128), 0, marks=pytest.mark.soak),
        pytest.param(dict(t=512, h=32, kv_heads=8, s=8192, d=128), 0, marks=pytest.mark.soak),
        (dict(t=4096, h=32, kv_heads=8, s=131072, d=128), 200),
        pytest.param(
            dict(t=1000, h=8, kv_heads=8, s=1000, d=128, dtype=jnp.float16),
            0,
            marks=pytest.mark.soak,
        ),
        (dict(t=1000, h=8, kv_heads=2, s=1000, d=128, masks=EVERY_MASK), 0),
        (dict(t=4096, h=32, kv_heads=8, s=4096, d=64), 0),
        (dict(t=1000, h=8, kv_heads=4, s=1000, d=256), 64),
    ],
    ids=str,
)
def test_compiles_for_an_a100(alone, case, spilled_bytes):
    names, said = alone(_with_ptxas, **case)
    assert names == ["prefill_attention"]
    assert "'sm_80'" in said
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert spills, "ptxas said nothing"
    assert max(map(int, spills)) <= spilled_bytes


def _kernels_of_ops(capability):
    from ..deviceless import compile_for, kernel_names

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    plan = Plan.for_kind("NVIDIA A100-SXM4-80GB", capability)
    options = dict(spec=AttentionSpec(0.1), implementation="mosaic_gpu", plan=plan)
    cache, row = spec(1, 2, 256, 128), spec(1, dtype=jnp.int32)
    attend = functools.partial(prefill_attention, **options)
    attention = compile_for("a100", attend, spec(1, 128, 8, 128), cache, cache, row)
    angle = spec(1, 128, 64, dtype=jnp.float32)
    append = functools.partial(append_prefill_attention, **options)
    chunk = compile_for(
        "a100",
        append,
        *(spec(1, 128, 2, 6, 128), cache, cache, row, row),
        kwargs=dict(rotation=(angle, angle)),
    )
    return kernel_names(attention), kernel_names(chunk)


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_a_plan_for_ampere_takes_this_kernel(alone, capability):
    assert alone(_kernels_of_ops, capability) == (["prefill_attention"], ["prefill_attention"])


@pytest.mark.gpu
@pytest.mark.usefixtures("as_ampere")
@pytest.mark.parametrize(
    ("d", "masks", "dtype"),
    [
        (64, {}, "bfloat16"),
        (128, {}, "bfloat16"),
        (256, {}, "bfloat16"),
        (128, {}, "float16"),
        (128, dict(causal=False), "bfloat16"),
        (64, EVERY_MASK, "float16"),
        (128, EVERY_MASK, "bfloat16"),
        (128, dict(window=100), "bfloat16"),
        (128, dict(causal=False, window=100), "bfloat16"),
    ],
    ids=str,
)
def test_many_tiles(d, masks, dtype):
    """Several tiles and blocks, ragged, at offsets, with sizes that are not multiples of a tile."""
    lengths, offsets = [712, 301, 0, 555], [215, 0, 0, 100]
    shape = dict(t=497, heads=8, kv_heads=2, s=712, d=d)
    _check(_operands(lengths, offsets, **shape, dtype=dtype), prefill_ampere, masks=masks)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_ampere")
@pytest.mark.parametrize("row", [0, 63, 64, 127, 299])
@pytest.mark.parametrize("size", [300.0, -300.0])
def test_one_row_out_of_range(row, size):
    """Scores far above and below, in any row; rows of other tiles keep their bits."""
    q, k, v, *rest = _operands([304], [4], t=300, heads=4, kv_heads=4, s=304, d=128)
    k[:] = np.abs(k)
    run = functools.partial(prefill_ampere, spec=AttentionSpec(0.1))
    clean, _ = run(q, k, v, *rest)
    q[0, row, 2] = size
    _check((q, k, v, *rest), prefill_ampere)
    far, _ = run(q, k, v, *rest)
    others = np.arange(300) // 128 != row // 128
    assert_same_bits(np.asarray(far)[:, others], np.asarray(clean)[:, others])


@pytest.mark.gpu
@pytest.mark.usefixtures("as_ampere")
@pytest.mark.parametrize("config", [SMALL, LARGE], ids=str)
def test_many_configs(config):
    operands = _operands([520, 200], [0, 77], t=256, heads=4, kv_heads=4, s=520, d=128)
    _check(operands, prefill_ampere, config=config)


def _check_rows_of_a_stack(run):
    """Uses rows of one layer of a stack in another order; other rows and layers are NaN."""
    q, k, v, *rest = _operands([100, 37], [50, 0], t=50)
    run = functools.partial(run, spec=AttentionSpec(0.1), config=SMALL)
    alone = run(q, k, v, *rest)
    stacks = np.full((2, 2, 5, *k.shape[1:]), np.nan, k.dtype)
    stacks[:, 1, [3, 0]] = k, v
    rows = np.array([3, 0], np.int32)
    for one, of_stack in zip(alone, run(q, *stacks, *rest, layer=1, rows=rows), strict=True):
        assert_same_bits(one, of_stack)


@pytest.mark.slow
def test_interpreted_rows_of_a_stack(interpreted):
    _check_rows_of_a_stack(interpreted)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_ampere")
def test_rows_of_a_stack():
    _check_rows_of_a_stack(prefill_ampere)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_ampere")
@pytest.mark.parametrize("d", [64, 128])
def test_many_reruns_have_the_same_bits(d):
    operands = _operands([2048, 1000], [0, 0], t=2048, heads=16, kv_heads=4, s=2048, d=d)
    q, *rest = jax.device_put(operands)
    attend = functools.partial(prefill_ampere, spec=AttentionSpec(0.1))
    first = jax.jit(attend)(q, *rest)

    def differs(i, count):
        again = attend(q + 0 * i.astype(q.dtype), *rest)
        wrong = [jnp.any(a != b) for a, b in zip(first, again, strict=True)]
        return count + jnp.sum(jnp.stack(wrong), dtype=jnp.int32)

    assert jax.jit(lambda: jax.lax.fori_loop(0, 300, differs, jnp.int32(0)))() == 0
