"""Products in int8 and the rounding of activations: interpreted, compiled, and on a GPU.

See `test_fp8_gemm`, whose kernel shares most of this one's code.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.dispatch import resolve
from fdjax.pallas_kernels.gemm import MATMUL, matmul
from fdjax.pallas_kernels.gemm.hopper import tall_gemm
from fdjax.pallas_kernels.gemm.hopper.int8_gemm import (
    INT8_GEMM,
    Int8GemmConfig,
    Int8Tile,
    matmul_int8,
)
from fdjax.pallas_kernels.gemm.hopper.tall_tiling import TallGemmConfig
from fdjax.pallas_kernels.hopper.fragments import in_byte_order
from fdjax.pallas_kernels.hopper.rounded_rows import rounded_rows
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat

from . import test_fp8_gemm
from .test_decode_mosaic import INTERPRET
from .test_fp8_gemm import hostile, values_of
from .test_quantised import EPS, Case, relaid
from .test_quantised import _operands as operands_of
from .test_tall import spilled_bytes

pytestmark = pytest.mark.usefixtures("quick_on_cpu")


def of_columns(k, **options):
    """A case with one scale for each column."""
    return Case("int8", k, k=k, layout="bricks", **options)


check = functools.partial(test_fp8_gemm.check, product=matmul_int8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(wide=5), r"wide must be in 1\.\.4, got 5"),
        (dict(block_m=72), "block_m must be a multiple of 16 up to 256, got 72"),
        (dict(stages=1), "stages must be at least 2, got 1"),
        (dict(split=9), r"split must be in 1\.\.8, got 9"),
    ],
    ids=str,
)
def test_wrong_tilings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^int8_gemm: {message}$"):
        Int8GemmConfig(**wrong)


def test_sums_must_fit_into_registers():
    with pytest.raises(NotImplementedError, match="has no registers for 2 x 144 rows of sums"):
        check(of_columns(128, m=136, n=64, gate="silu"), Int8GemmConfig(3, 144), interpret=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(m=64), "takes at least 65 rows, got 64"),
        (dict(int8=128), "takes one scale for each column, got groups of 128"),
        (dict(k=1 << 18, int8=1 << 18), "takes K of up to 131072, got 262144"),
        (dict(itemsize=4), "needs bfloat16 or float16, got float32"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_do(change, message):
    form = WeightFormat("int8", 4096, layout="bricks", rounded_activations=True)
    shape = dict(m=256, k=4096, n=4096, itemsize=2, gate=0) | form.key
    assert INT8_GEMM.refusal(shape, form.features) is None
    assert re.fullmatch(message, INT8_GEMM.refusal(shape | change, form.features))
    zeros = dataclasses.replace(form, zeros=True)
    assert INT8_GEMM.refusal(shape, zeros.features)
    fp8 = dataclasses.replace(form, kind="fp8")
    assert INT8_GEMM.refusal(
        dict(m=256, k=4096, n=4096, itemsize=2, gate=0) | fp8.key, fp8.features
    )


def test_prompts_of_checkpoints_that_round_activations_run_it():
    form = WeightFormat("int8", 4096, layout="bricks", rounded_activations=True)
    kept = dataclasses.replace(form, rounded_activations=False)
    plan = Plan.for_kind("a GPU", (9, 0))

    def config_of(m, form):
        shape = dict(m=m, k=4096, n=4096, itemsize=2, gate=0, fused=0) | form.key
        return resolve(MATMUL, plan, None, form.features, **shape)[0].config

    assert config_of(65, form) is config_of(4096, form) is Int8GemmConfig
    assert config_of(64, form) is not Int8GemmConfig
    assert config_of(256, kept) is TallGemmConfig


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("k", "n"), [(4096, 12288), (11008, 4096), (4096, 14336), (512, 128)])
def test_every_tiling_that_may_be_chosen_fits(k, n, gate):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for m in (65, 129, 256, 512, 4096):
        tried = INT8_GEMM.candidates(dict(m=m, k=k, n=n * (1 + gate), gate=int(gate)))
        assert Int8GemmConfig.for_shape(m, k, n, gate=gate) in tried
        for config in tried:
            x = jax.ShapeDtypeStruct((-(-m // 8) * 8, k), jnp.int8)
            scales = jax.ShapeDtypeStruct((1, 1, 1 + gate, n), jnp.float32)
            tile = Int8Tile(
                {"x": x, "scales": scales, "residual": shape((m, n))},
                kind="int8",
                group=k,
                gate="silu" if gate else None,
                activation=None,
                dtype=jnp.dtype(jnp.bfloat16),
                config=config,
                interpreted=False,
            )
            tile.scratch()
            assert tile.tile_m % 16 == 0  # what tensor cores take
            assert tile.stages >= min(2, tile.steps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_rounded_as_numpy_does(dtype):
    x = hostile(9, 192, dtype)
    codes, scales = jax.jit(lambda x: rounded_rows(x, kind="int8", in_xla=True))(x)
    assert codes.dtype == jnp.int8
    exact = x.astype(np.float32)
    damaged = ~np.isfinite(exact).all(axis=1)
    np.testing.assert_array_equal(np.isnan(scales), damaged)
    exact = exact[~damaged]
    scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True), np.float32(1e-30)) / 127
    values = values_of(codes, scales)[~damaged]
    assert (np.abs(values - exact) <= 0.5001 * scale).all()
    assert np.abs(np.asarray(codes)[~damaged].astype(int)).max() == 127


def test_codes_meet_the_values_of_x_in_their_order():
    """Threads hold the bytes of int8 in the places of those of fp8."""
    x = np.arange(64)
    np.testing.assert_array_equal(in_byte_order(x)[:8], [0, 1, 8, 9, 2, 3, 10, 11])


INTERPRETED = [
    (of_columns(192, m=136, n=192, residual=True, bias=True), Int8GemmConfig(2, 80, 3)),
    # Steps: an even number. Two columns of bricks for a warpgroup.
    (of_columns(256, m=80, n=256, residual=True, layer=True), Int8GemmConfig(4, 48, 2)),
    (of_columns(320, m=66, n=64, gate="silu", norm=True, layer=True), Int8GemmConfig(1, 80, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted_without_races(case, config):
    check(case, config, interpret=INTERPRET)


@pytest.mark.slow
def test_interpreted_blocks_with_several_tiles(monkeypatch):
    monkeypatch.setattr(tall_gemm, "MULTIPROCESSORS", 2)
    case = of_columns(384, m=150, n=192, residual=True, bias=True)
    check(case, Int8GemmConfig(2, 64, 3), interpret=INTERPRET)


def _spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (of_columns(4096, m=512, n=12288, norm=True), None),
        (of_columns(4096, m=4096, n=11008, gate="silu", layer=True), None),
        (of_columns(11008, m=256, n=4096, residual=True), None),
        (of_columns(4096, m=512, n=12288, bias=True), Int8GemmConfig(2, 256, 6)),
        (of_columns(4096, m=129, n=12288), None),
        (of_columns(320, m=130, n=64, gate="silu", dtype="float16"), None),
        (of_columns(320, m=66, n=64, gate="silu"), Int8GemmConfig(1, 80, 2)),
    ],
    ids=str,
)
def test_compiles_without_spills_or_waits(case, config, monkeypatch, capfd):
    # Numbers that are used outside of the loops over K.
    assert spilled_bytes(matmul_int8, case, config, monkeypatch, capfd) <= 48


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k", [64, 320, 4096, 16384])
def test_rows_on_a_gpu_are_those_of_xla(k, dtype):
    x = jnp.asarray(hostile(137, k, dtype))
    scale = jax.random.uniform(jax.random.key(1), (k,), dtype, minval=0.5)
    for norm in (None, RMSNorm(scale, EPS)):
        rows = functools.partial(rounded_rows, kind="int8")
        (codes, scales), (want, want_scales) = (
            jax.tree.map(np.asarray, jax.jit(functools.partial(rows, in_xla=in_xla))(x, norm))
            for in_xla in (False, True)
        )
        np.testing.assert_allclose(scales, want_scales, rtol=1e-2 if norm else 1e-6)
        kept = np.isfinite(want_scales)
        off = np.abs(codes[kept].astype(int) - want[kept].astype(int))
        assert off.max() <= 1 + (norm is not None)
        assert norm is not None or np.mean(off > 0) < 1e-3


ON_A_GPU = [
    *INTERPRETED,
    *(
        (of_columns(1024, m=m, n=448, residual=True, bias=True, layer=True), config)
        for m, config in (
            (129, None),
            (200, Int8GemmConfig(2, 80, 4, 3)),
            (250, Int8GemmConfig(3, 128, 4, 2)),
            (512, Int8GemmConfig(2, 256, 4, 4)),
            (300, Int8GemmConfig(1)),
        )
    ),
    (of_columns(384, m=520, n=4160, residual=True, bias=True), Int8GemmConfig(2, 64)),
    (of_columns(1024, m=513, n=192, gate="gelu", norm=True), None),
    (of_columns(512, m=192, n=320, dtype="float16"), None),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), ON_A_GPU, ids=str)
def test_products_on_a_gpu_are_those_of_the_oracle(case, config):
    check(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("m", [129, 512])
def test_all_candidates_agree_on_a_gpu(m, gate):
    case = of_columns(4096, m=m, n=1024, gate="silu" if gate else None)
    for config in INT8_GEMM.candidates(dict(m=m, k=case.k, n=case.n * (1 + gate), gate=gate)):
        check(case, config)


@pytest.mark.gpu
def test_activations_lose_little_on_a_gpu():
    operands = operands_of(of_columns(256, m=128, n=128))
    x, q = operands["x"], relaid(operands["w"], "bricks")
    y = np.asarray(matmul_int8(x, q, dtype=jnp.float32))
    want = np.asarray(matmul(x, q, implementation="xla", preferred_element_type=jnp.float32))
    assert np.sqrt(np.mean((y - want) ** 2)) < 0.02 * np.sqrt(np.mean(want**2))
