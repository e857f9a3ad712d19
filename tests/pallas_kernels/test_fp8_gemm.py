"""Products in fp8 and the rounding of activations: interpreted, compiled, and on a GPU.

The interpreter multiplies no operand in registers, so there the codes of a weight are unpacked by
XLA's operations and lie in shared memory, and XLA rounds the activations. It knows no clusters.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fdjax.pallas_kernels.bricks import pack_bricks
from fdjax.pallas_kernels.dispatch import resolve
from fdjax.pallas_kernels.gemm import MATMUL, matmul
from fdjax.pallas_kernels.gemm.hopper import fp8_gemm, tall_gemm
from fdjax.pallas_kernels.gemm.hopper.fp8_gemm import (
    FP8_GEMM,
    Fp8GemmConfig,
    Fp8Tile,
    matmul_fp8,
)
from fdjax.pallas_kernels.gemm.hopper.tall_gemm import TallGemmConfig
from fdjax.pallas_kernels.hopper.fragments import in_byte_order
from fdjax.pallas_kernels.hopper.rounded_rows import rounded_rows
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat

from . import oracle
from .test_decode_mosaic import INTERPRET
from .test_quantised import EPS, LAYER, Case, exact_weight, relaid
from .test_quantised import _operands as operands_of
from .test_tall import spilled_bytes
from .tolerance import assert_matmul

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

Case = functools.partial(Case, "fp8", layout="bricks")
H100 = Plan.for_kind("a GPU", (9, 0))


def rounded(x):
    """x [M,K] in fp8 with a scale for each row, as float64."""
    x = np.asarray(x, np.float32)
    assert np.isfinite(x).all()
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30))
    codes = (x * (np.float32(448) / largest)).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * (largest / np.float32(448)).astype(np.float64)


def values_of(codes, scales):
    """The values [M,K] of the codes of rows as float64."""
    codes = np.asarray(codes).astype(np.float64)
    codes = codes[:, np.argsort(in_byte_order(np.arange(codes.shape[1])))]
    with np.errstate(invalid="ignore"):
        return codes * np.asarray(scales).astype(np.float64)[:, None]


def check(case, config, product=matmul_fp8, **options):
    """Run a case and compare with the oracle, to which the same codes of x are given."""
    operands = operands_of(case)
    w, x = operands["w"], operands["x"]
    one = jax.tree.map(lambda a: a[LAYER], w) if case.layer else w
    named = {name: operands[name] for name in ("bias", "residual") if name in operands}
    norm = RMSNorm(operands["scale"], EPS) if "scale" in operands else None
    y = product(
        x,
        relaid(w, case.layout),
        layer=LAYER if case.layer else None,
        norm=norm,
        gate=case.gate,
        **named,
        dtype=jnp.dtype(case.dtype),
        config=config,
        **options,
    )
    in_xla, is_fp8 = "interpret" in options, case.kind == "fp8"
    rounded_x = values_of(*rounded_rows(jnp.asarray(x), norm, kind=case.kind, in_xla=in_xla))
    assert_matmul(
        np.asarray(y),
        oracle.matmul(rounded_x, exact_weight(one), gate=case.gate, **named),
        # Tensor cores add fp8 products with as many bits. Sums of int8 are exact.
        dtype="bfloat16" if is_fp8 else "float32",
        result=case.dtype,
        k=case.k,
        normed=case.norm and is_fp8,
        fused=bool(named) or case.gate is not None,
        quantised=is_fp8,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(wide=5), r"wide must be in 1\.\.4, got 5"),
        (dict(block_m=96), "block_m must be 64 or 128, got 96"),
        (dict(stages=1), "stages must be at least 2, got 1"),
        (dict(split=9), r"split must be in 1\.\.8, got 9"),
    ],
    ids=str,
)
def test_wrong_tilings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^fp8_gemm: {message}$"):
        Fp8GemmConfig(**wrong)


def test_a_gate_must_fit_into_registers():
    case = Case(128, m=136, k=128, n=64, gate="silu")
    with pytest.raises(NotImplementedError, match="has no registers for a gate"):
        check(case, Fp8GemmConfig(wide=3), interpret=INTERPRET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(m=64), "takes at least 65 rows, got 64"),
        (dict(fp8=64), "takes groups of multiples of 128, or of all rows, got 64"),
        (dict(itemsize=4), "needs bfloat16 or float16, got float32"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_do(change, message):
    form = WeightFormat("fp8", 128, layout="bricks", rounded_activations=True)
    shape = dict(m=256, k=4096, n=4096, itemsize=2, gate=0) | form.key
    assert FP8_GEMM.refusal(shape, form.features) is None
    assert re.fullmatch(message, FP8_GEMM.refusal(shape | change, form.features))


def test_it_runs_only_where_activations_may_be_rounded():
    form = WeightFormat("fp8", 128, layout="bricks")
    for m, allowed, config in (
        (64, True, TallGemmConfig),
        (65, True, Fp8GemmConfig),
        (65, False, TallGemmConfig),
        (8192, True, Fp8GemmConfig),
        (8192, False, TallGemmConfig),
    ):
        one = dataclasses.replace(form, rounded_activations=allowed)
        shape = dict(m=m, k=4096, n=4096, itemsize=2, gate=0, fused=0) | one.key
        chosen, _ = resolve(MATMUL, H100, None, one.features, **shape)
        assert (chosen.name, chosen.config) == ("mosaic_gpu", config)


def test_only_weights_in_8_bits_allow_it():
    with pytest.raises(ValueError, match="int4 has no rounded_activations"):
        WeightFormat("int4", 128, rounded_activations=True)
    for kind in ("fp8", "int8"):
        form = WeightFormat(kind, 128, rounded_activations=True)
        assert str(form) == f"{kind} by 128 (W8A8)"
        assert str(dataclasses.replace(form, rounded_activations=False)) == f"{kind} by 128"


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("k", "n"), [(4096, 12288), (11008, 4096), (4096, 14336), (512, 128)])
def test_every_tiling_that_may_be_chosen_fits(k, n, gate):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for m in (65, 129, 256, 512, 4096):
        key = dict(m=m, k=k, n=n * (1 + gate), gate=int(gate))
        tried = fp8_gemm.FP8_GEMM.candidates(key)
        assert Fp8GemmConfig.for_shape(m, k, n, gate=gate) in tried
        for config in tried:
            x = jax.ShapeDtypeStruct((-(-m // 8) * 8, k), jnp.float8_e4m3fn)
            scales = jax.ShapeDtypeStruct((1, 1, 1 + gate, n), jnp.float32)
            tile = Fp8Tile(
                {"x": x, "scales": scales, "residual": shape((m, n))},
                kind="fp8",
                group=k,
                gate="silu" if gate else None,
                activation=None,
                dtype=jnp.dtype(jnp.bfloat16),
                config=config,
                interpreted=False,
            )
            tile.scratch()
            assert tile.stages >= min(2, tile.steps)


# The rounding of activations.


def hostile(m, k, dtype):
    x = np.random.default_rng(0).normal(size=(m, k)) * 3
    x[0] = 0
    x[1, 5], x[2, 7], x[3, k - 1] = np.nan, np.inf, -np.inf
    x[4] *= 1e-20
    x[5, 0] = 3e38 if dtype == "bfloat16" else 6e4
    return x.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_rounded_as_numpy_does(dtype):
    x = hostile(9, 192, dtype)
    codes, scales = jax.jit(functools.partial(rounded_rows, in_xla=True))(x)
    assert codes.dtype == jnp.float8_e4m3fn
    values = values_of(codes, scales)
    damaged = np.arange(9)[~np.isfinite(x.astype(np.float32)).all(axis=1)]
    np.testing.assert_array_equal(np.isnan(values).any(axis=1).nonzero()[0], damaged)
    kept = np.delete(np.arange(9), damaged)
    np.testing.assert_allclose(values[kept], rounded(x[kept]), rtol=1e-6)  # of the scales


def test_codes_meet_the_values_of_x_in_their_order():
    """Products as the tensor cores form them, of the bytes that each thread holds."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 64)).astype(ml_dtypes.float8_e4m3fn)
    x = rng.standard_normal(64)
    words = pack_bricks(jnp.asarray(weight.view(np.uint8)), "fp8")
    words = np.asarray(words).reshape(2, 128, 4).swapaxes(0, 1).reshape(128, 4, 2).copy()
    # Of two words, bytes 0, 2, 4, 6 are a register, and 1, 3, 5, 7 another.
    lefts = words.view(np.uint8).reshape(128, 4, 4, 2).transpose(0, 1, 3, 2).copy()
    lefts = lefts.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ordered = in_byte_order(x)
    got = np.zeros(64)
    for thread in range(128):
        warp, row, quarter = thread // 32, thread % 32 // 4, thread % 4
        for sixteen in range(4):  # an instruction takes two of them
            first = 16 * sixteen + 4 * quarter
            for column in range(2):
                product = lefts[thread, sixteen, column] @ ordered[first : first + 4]
                got[16 * warp + row + 8 * column] += product
    np.testing.assert_allclose(got, x @ weight.astype(np.float64), atol=1e-12)


INTERPRETED = [
    (Case(128, m=136, k=384, n=192, residual=True, bias=True), Fp8GemmConfig(2, 128, 3)),
    (Case(128, m=136, k=256, n=192, residual=True, layer=True), Fp8GemmConfig(4, 64, 2)),
    # K is no multiple of a step, and M no multiple of 8.
    (Case(320, m=130, k=320, n=64, gate="silu", norm=True, layer=True), Fp8GemmConfig(1, 64, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted_without_races(case, config):
    check(case, config, interpret=INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize("k", [128, 640])
def test_interpreted_blocks_with_several_tiles(k, monkeypatch):
    """The scales of x and the residual of a tile come when those before have been used."""
    monkeypatch.setattr(tall_gemm, "MULTIPROCESSORS", 2)
    case = Case(128, m=150, k=k, n=192, residual=True, bias=True)
    check(case, Fp8GemmConfig(2, 64, 3), interpret=INTERPRET)


def _spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(4096, m=512, k=4096, n=12288, norm=True), None),
        (Case(128, m=512, k=4096, n=12288, bias=True, residual=True), Fp8GemmConfig(4)),
        (Case(4096, m=4096, k=4096, n=11008, gate="silu", layer=True), None),
        (Case(11008, m=256, k=11008, n=4096, residual=True), None),
        (Case(320, m=130, k=320, n=64, gate="silu"), None),
    ],
    ids=str,
)
def test_compiles_without_spills_or_waits(case, config, monkeypatch, capfd):
    # Numbers that are used outside of the loops over K.
    assert spilled_bytes(matmul_fp8, case, config, monkeypatch, capfd) <= 48


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k", [64, 320, 4096, 11008, 16384, 16448])
def test_rows_on_a_gpu_are_those_of_xla(k, dtype):
    x = jnp.asarray(hostile(137, k, dtype))
    scale = jax.random.uniform(jax.random.key(1), (k,), dtype, minval=0.5)
    for norm in (None, RMSNorm(scale, EPS), LayerNorm(scale, None, EPS)):
        got, want = (
            jax.tree.map(
                np.asarray, jax.jit(functools.partial(rounded_rows, in_xla=in_xla))(x, norm)
            )
            for in_xla in (False, True)
        )
        values, exact = (values_of(*both) for both in (got, want))
        np.testing.assert_array_equal(np.isnan(values).any(1), np.isnan(exact).any(1))
        kept = ~np.isnan(exact).any(axis=1)
        exact = np.abs(exact[kept])
        off = np.abs(np.abs(values[kept]) - exact)
        # Scales may differ in their last bit, and with it codes that lie between two others. With a
        # norm, the largest value may differ by one unit of its dtype.
        least = 1e-5 * exact.max(axis=1, keepdims=True) + 1e-30
        assert (off <= exact / 7 + least).all()
        assert norm is not None or np.mean(off > 1e-6 * exact + 1e-30) < 1e-3


ON_A_GPU = [
    *INTERPRETED,
    *(
        (Case(128, m=m, k=1024, n=448, residual=True, bias=True, layer=True), config)
        for m, config in (
            (129, None),
            (200, Fp8GemmConfig(2, 64, 4, 3)),
            (250, Fp8GemmConfig(3, 128, 4, 2)),
            (512, Fp8GemmConfig(4, 128, 4, 4)),
            (300, Fp8GemmConfig(3, 64)),
            (300, Fp8GemmConfig(1)),
        )
    ),
    # Blocks with several tiles.
    *(
        (Case(128, m=520, k=k, n=4160, residual=True, bias=True, layer=True), config)
        for k, config in ((384, None), (1024, Fp8GemmConfig(2, 64)), (384, Fp8GemmConfig(4)))
    ),
    (Case(256, m=270, k=256, n=5504, gate="silu"), None),
    (Case(1024, m=513, k=1024, n=192, gate="gelu", norm=True), None),
    (Case(1024, m=264, k=1024, n=192, gate="silu", bias=True), Fp8GemmConfig(2, 128, 2, 8)),
    (Case(256, m=192, k=512, n=320, dtype="float16"), None),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), ON_A_GPU, ids=str)
def test_products_on_a_gpu_are_those_of_the_oracle(case, config):
    check(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("m", [129, 512])
def test_all_candidates_agree_on_a_gpu(m, gate):
    case = Case(4096, m=m, k=4096, n=1024, gate="silu" if gate else None)
    for config in FP8_GEMM.candidates(dict(m=m, k=case.k, n=case.n * (1 + gate), gate=gate)):
        check(case, config)


@pytest.mark.gpu
def test_errors_on_a_gpu_do_not_grow_with_k():
    """All values are positive, so that sums are large beside what is added to them."""
    errors = {}
    for k in (1024, 14336):
        case = Case(k, m=136, k=k, n=128, scales="float32")
        operands = operands_of(case)
        x, w = np.abs(operands["x"]), relaid(operands["w"], "bricks")
        y = matmul_fp8(x, w, dtype=jnp.dtype(jnp.float32))
        weight = exact_weight(operands["w"])
        exact = oracle.matmul(np.asarray(x, np.float64), weight).value
        same_codes = oracle.matmul(values_of(*rounded_rows(jnp.asarray(x))), weight).value
        y = np.asarray(y).astype(np.float64)
        of_sums, total = (
            np.linalg.norm(y - want) / np.linalg.norm(want) for want in (same_codes, exact)
        )
        errors[k] = total
        print(json.dumps({"k": k, "of sums": of_sums, "total": total}))
        assert of_sums < 5e-3
    assert errors[14336] < 1.2 * errors[1024]


@pytest.mark.gpu
def test_it_runs_by_name_on_a_gpu():
    case = Case(128, m=160, k=256, n=128)
    operands = operands_of(case)
    q = dataclasses.replace(relaid(operands["w"], "bricks"), rounded_activations=True)
    y, want = (
        np.asarray(jax.jit(functools.partial(matmul, implementation=name))(operands["x"], q))
        for name in ("mosaic_gpu", "xla")
    )
    error = np.linalg.norm(y.astype(np.float64) - want.astype(np.float64))
    assert 1e-3 < error / np.linalg.norm(want.astype(np.float64)) < 0.05
