"""The kernel for more than 32 rows of x and quantised weights: interpreted, compiled, and on a GPU.

The interpreter multiplies no operand in registers and knows no inline
code, so there the weights of a product are unpacked by XLA's operations and lie in shared memory.
It knows no clusters either.
"""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.dispatch import resolve
from fdjax.pallas_kernels.gemm import MATMUL, matmul
from fdjax.pallas_kernels.gemm.hopper import tall_gemm
from fdjax.pallas_kernels.gemm.hopper.packed_gemm import PackedGemmConfig
from fdjax.pallas_kernels.gemm.hopper.tall_gemm import TALL_GEMM, TallGemmConfig, matmul_tall
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, in_layout, random_quantised

from . import oracle
from .test_decode_mosaic import INTERPRET
from .test_quantised import EPS, LAYER, Case, exact_weight, relaid
from .test_quantised import _operands as operands_of
from .tolerance import assert_matmul

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

Case = functools.partial(Case, layout="bricks")
CROWDED = TallGemmConfig(3, 256)


def check(case, config, **options):
    """Run a case and compare with the oracle."""
    operands = operands_of(case)
    w = operands["w"]
    one = jax.tree.map(lambda a: a[LAYER], w) if case.layer else w
    named = {name: operands[name] for name in ("bias", "residual") if name in operands}
    scale = operands.get("scale")
    y = matmul_tall(
        operands["x"],
        relaid(w, case.layout),
        layer=LAYER if case.layer else None,
        norm=None if scale is None else RMSNorm(scale, EPS),
        gate=case.gate,
        **named,
        dtype=jnp.dtype(case.dtype),
        config=config,
        **options,
    )
    exact = {"gate": case.gate, "norm": None if scale is None else (scale, EPS)} | named
    assert_matmul(
        np.asarray(y),
        oracle.matmul(operands["x"], exact_weight(one), **exact),
        dtype=case.dtype,
        result=case.dtype,
        k=case.k,
        normed=case.norm,
        fused=bool(named) or case.gate is not None,
        quantised=True,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(wide=5), "wide must be in 1..4, got 5"),
        (dict(block_m=100), "block_m must be a multiple of 8 up to 256, got 100"),
        (dict(block_m=264), "block_m must be a multiple of 8 up to 256, got 264"),
        (dict(deep=3), "deep must be 1, 2 or 4, got 3"),
        (dict(stages=1), "stages must be at least 2, got 1"),
        (dict(split=9), "split must be in 1..8, got 9"),
    ],
    ids=str,
)
def test_wrong_tilings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^tall_gemm: {message}$"):
        TallGemmConfig(**wrong)


@pytest.mark.parametrize(
    ("m", "gate", "config"),
    [
        (96, "silu", TallGemmConfig(4)),
        (128, "silu", TallGemmConfig(3)),
        (256, None, CROWDED),
        (200, None, TallGemmConfig(3, 200, 1)),  # of one instruction
    ],
    ids=str,
)
def test_sums_must_fit_into_registers(m, gate, config):
    case = Case(m=m, k=128, n=64, gate=gate)
    rows = f"{1 + (gate is not None)} x {m} rows"
    with pytest.raises(NotImplementedError, match=f"has no registers for {rows} of sums"):
        check(case, config)


def _scratch(m, k, n, *, gate, config, kind="int8", residual=True, zeros=True):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    factors = jax.ShapeDtypeStruct((1, k // 128, 1 + gate, n), jnp.float32)
    operands = {"x": shape((-(-m // 8) * 8, k)), "scales": factors}
    operands |= {"zeros": factors} if zeros else {}
    operands |= {"residual": shape((m, n))} if residual else {}
    tile = tall_gemm.TallTile(
        operands,
        kind=kind,
        group=128,
        gate="silu" if gate else None,
        activation=None,
        dtype=jnp.dtype(jnp.bfloat16),
        config=config,
        interpreted=False,
    )
    tile.scratch()
    return tile


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("k", "n"), [(4096, 12288), (11008, 4096), (4096, 14336), (512, 128)])
def test_the_default_tiling_fits_at_every_shape(k, n, gate):
    for m in (9, 16, 32, 33, 64, 65, 128, 129, 250, 512, 1000, 4096):
        config = TallGemmConfig.for_shape(m, k, n, bits=8, gate=gate)
        tile = _scratch(m, k, n, gate=gate, config=config)
        assert tile.stages >= 2
        assert tile.tile_m <= config.block_m
        assert tile.tile_m * tile.tiles_m >= m


@pytest.mark.parametrize("m", [9, 32, 33, 64, 128, 136, 512, 4096])
@pytest.mark.parametrize("gate", [0, 1])
def test_candidates_fit(m, gate):
    shape = dict(m=m, k=4096, n=4096 * (1 + gate), gate=gate, int4=128)
    tried = tall_gemm.candidates(shape)
    assert len(tried) >= 5
    for config in tried:
        tile = _scratch(
            m, 4096, 4096, gate=gate, config=config, kind="int4", residual=False, zeros=False
        )
        rows = [end - first for first, end in tile.shares]
        assert sum(rows) == tile.tile_m
        assert all(size % 8 == 0 for size in rows)


@pytest.mark.parametrize(
    ("n", "want"),
    [
        (
            4096,
            {
                8: (PackedGemmConfig, "nearest"),
                10: (PackedGemmConfig, "nearest"),
                13: (TallGemmConfig, "nearest"),
                16: (TallGemmConfig, "table"),
                24: (PackedGemmConfig, "nearest"),
                32: (PackedGemmConfig, "table"),
                33: (TallGemmConfig, "nearest"),
                40: (TallGemmConfig, "table"),
                8192: (TallGemmConfig, "heuristic"),
            },
        ),
        # The kernel that was measured takes no 8 rows.
        (2048, {8: (PackedGemmConfig, "heuristic"), 12: (TallGemmConfig, "nearest")}),
        # Not measured, with few and with many columns.
        (4160, {m: (PackedGemmConfig, "heuristic") for m in (1, 16, 17, 32)}),
        (
            8192,
            {
                16: (PackedGemmConfig, "heuristic"),
                17: (TallGemmConfig, "heuristic"),
                32: (TallGemmConfig, "heuristic"),
            },
        ),
        # Blocks would run in two waves.
        (28672, {m: (PackedGemmConfig, "heuristic") for m in (16, 32)}),
    ],
    ids=["measured", "one measured", "few columns", "many columns", "more columns"],
)
def test_each_number_of_rows_has_one_kernel(n, want):
    """Kernels for quantised weights share a name. No measurement of one is used for another."""
    weight = WeightFormat("int4", 128, layout="bricks")
    sizes = dict(k=4096, itemsize=2, gate=0, fused=0) | weight.key

    def entry(m, n, config):
        config = tuple(sorted(dataclasses.asdict(config).items()))
        choice = Choice("mosaic_gpu", config, source="table")
        return Entry("matmul", tuple(sorted((sizes | {"m": m, "n": n}).items())), choice)

    few, tall = PackedGemmConfig(), TallGemmConfig()
    table = [entry(m, 4096, config) for m, config in {12: few, 16: tall, 32: few, 40: tall}.items()]
    table.append(entry(14, 2048, tall))
    plan = dataclasses.replace(Plan.for_kind("a GPU", (9, 0)), table=tuple(table))
    for m, (config, source) in want.items():
        found = plan.choose("matmul", weight.features, m=m, n=n, **sizes)
        assert (found.implementation, found.source) == ("mosaic_gpu", source)
        given = resolve(MATMUL, plan, None, weight.features, m=m, n=n, **sizes)
        assert given[0].config is (config if given[0].config else None)
        assert source == "heuristic" or type(given[1]) is config


@pytest.mark.parametrize(
    ("k", "n", "gate", "split"),
    [
        (11008, 4096, False, 2),
        (14336, 4096, False, 2),
        (4096, 12288, False, 2),
        (8192, 2048, False, 4),  # two would leave half of the multiprocessors without a block
        (4096, 11008, True, 1),
        (4096, 22016, False, 1),
        (1024, 1024, False, 1),  # too few rows to share
    ],
)
def test_blocks_that_share_k_are_as_few_as_fill_the_device(k, n, gate, split):
    for m in (1, 8, 32):
        assert PackedGemmConfig.for_shape(m, k, n, gate=gate).split == split


@pytest.mark.parametrize(
    ("m", "group", "itemsize", "message"),
    [
        (8, 128, 2, "takes at least 9 rows, got 8"),
        (64, 48, 2, "takes groups of 32 or of multiples of 64, got 48"),
        (64, 64, 4, "needs bfloat16 or float16, got float32"),
    ],
)
def test_refuses_what_it_cannot_do(m, group, itemsize, message):
    weight = WeightFormat("int4", group, layout="bricks")
    shape = dict(m=m, k=4096, n=4096, itemsize=itemsize, gate=0) | weight.key
    assert re.fullmatch(message, TALL_GEMM.refusal(shape, weight.features))


# The interpreter runs each warpgroup in a thread of XLA's pool, which has one for each core. If all
# of these wait for another warpgroup, it never runs.
_CORES = int(os.environ.get("NPROC", os.cpu_count() or 1))
INTERPRETED = [
    # Two tiles of rows and ragged columns; units of 64 rows of the weight hold two groups.
    (Case(m=72, k=320, n=192, zeros=True, residual=True, bias=True), TallGemmConfig(2, 64, 2, 3)),
    # Groups that begin within a step, M that is no multiple of 8, one layer of several.
    (
        Case("int8", 192, 33, k=384, n=64, zeros=True, gate="silu", norm=True, layer=True),
        TallGemmConfig(1, 64, 2, 2),
    ),
]
MORE_INTERPRETED = [
    (Case("fp8", 64, 20, k=256, n=128, scales="bfloat16"), TallGemmConfig(4, 64, 4, 2)),
    (Case("int4", 256, 200, k=256, n=128, residual=True, layer=True), TallGemmConfig(2, 128, 2, 3)),
    # Units of 32 rows.
    (Case(m=128, k=256, n=320, zeros=True, scales="float16"), TallGemmConfig(4, 128, 2, 3)),
    (Case(m=60, k=192, n=192, gate="gelu", residual=True, bias=True), TallGemmConfig(3, 64, 2, 4)),
    (Case("int8", 64, 49, k=64, n=64, dtype="float16"), TallGemmConfig(2, 64, 2, 2)),
    # One scale, and one zero, for each column.
    (
        Case("int8", 192, 33, k=192, n=64, zeros=True, gate="silu", bias=True, layer=True),
        TallGemmConfig(1, 64, 2, 2),
    ),
    (Case("fp8", 128, 40, k=128, n=128, residual=True), TallGemmConfig(2, 64, 2, 2)),
    # Steps of one unit: an odd and an even number of them.
    (Case(m=40, k=192, n=128, residual=True, zeros=True), TallGemmConfig(2, 64, 1, 3)),
    (Case("int8", 256, 40, k=256, n=64), TallGemmConfig(1, 64, 1, 2)),
    # Two columns of bricks for a warpgroup, whose residuals come in one tile or in two.
    (Case(m=140, k=256, n=448, residual=True, bias=True), TallGemmConfig(4, 144, 2, 3)),
    (Case("int8", 64, 24, k=192, n=256, residual=True), TallGemmConfig(4, 24, 1, 4)),
]


def _interpreted(case, config):
    too_few = pytest.mark.skipif(config.warpgroups >= max(3, _CORES), reason="needs four cores")
    marks = () if (case, config) == INTERPRETED[0] else (pytest.mark.slow, too_few)
    return pytest.param(case, config, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config"),
    [_interpreted(*both) for both in INTERPRETED + MORE_INTERPRETED],
    ids=str,
)
def test_interpreted_without_races(case, config):
    check(case, config, interpret=INTERPRET)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        # The last tile of a block and the first of the next are in the same place before copies.
        (Case(m=72, k=192, n=320, residual=True, bias=True, layer=True), (2, 24, 2, 2)),
        (Case("int8", 64, 40, k=320, n=320, gate="silu"), (2, 16, 1, 3)),
        (Case("fp8", 64, 40, k=64, n=320, residual=True), (2, 16, 1, 2)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_interpreted_blocks_with_several_tiles(case, config, monkeypatch):
    monkeypatch.setattr(tall_gemm, "MULTIPROCESSORS", 2)
    check(case, TallGemmConfig(*config), interpret=INTERPRET)


def test_interpreted_in_fp32_with_scales_of_nan_elsewhere():
    """NaN in another layer, and in other columns, reaches no result."""
    case = Case(m=40, k=128, n=128, layer=True)
    operands = operands_of(case)
    scales = np.array(operands["w"].scales)
    scales[LAYER, :, 64] = np.nan
    scales[LAYER - 1] = scales[LAYER + 1] = np.nan
    w = dataclasses.replace(operands["w"], scales=scales)
    y = np.asarray(
        matmul_tall(
            operands["x"],
            relaid(w, "bricks"),
            layer=LAYER,
            dtype=jnp.float32,
            config=TallGemmConfig(2, 64, 2, 2),
            interpret=INTERPRET,
        )
    )
    assert np.isnan(y[:, 64]).all()
    one = jax.tree.map(lambda a: a[LAYER], operands["w"])
    want = operands["x"].astype(np.float32) @ np.asarray(dequantise(one, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(np.delete(y, 64, 1), np.delete(want, 64, 1), rtol=1e-4, atol=1e-4)


def _spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(group=128, m=64, k=4096, n=22016, scales="float16"), None),
        (Case(group=128, m=32, k=4096, n=11008, gate="silu"), None),
        (Case("int8", 4096, 16, k=4096, n=12288, layer=True), None),
        (Case("int8", 4096, 512, k=4096, n=11008, gate="silu"), None),
        (Case("int8", 11008, 256, k=11008, n=4096, zeros=True, residual=True), None),
        (Case("fp8", 4096, 512, k=4096, n=12288), None),
        (Case(group=128, m=128, k=4096, n=12288, scales="bfloat16"), None),
        (Case(group=128, m=256, k=11008, n=4096, residual=True), None),
        (Case(group=128, m=512, k=4096, n=11008, gate="silu", norm=True), None),
        (Case(group=128, m=64, k=4096, n=11008, gate="silu", layer=True), None),
        (Case(m=128, k=4096, n=4096, zeros=True), TallGemmConfig(4, 128)),
        (Case(m=200, k=4096, n=4096, zeros=True, bias=True), TallGemmConfig(2, 128, 2, 4, 2)),
        (Case("int8", 192, 100, k=4608, n=4096, zeros=True), TallGemmConfig(3, 128, 2, 3, 3)),
        (Case("fp8", 64, 33, k=4096, n=4096, dtype="float16"), TallGemmConfig(4, 64, 2, 4, 8)),
        # The most rows of one instruction.
        (Case("int8", 4096, 384, k=4096, n=12288), TallGemmConfig(3, 192, 1)),
        (Case("int8", 4096, 4096, k=4096, n=28672), TallGemmConfig(2, 256, 1)),
        (Case(group=128, m=4096, k=4096, n=28672, scales="bfloat16"), None),
    ],
    ids=str,
)
def test_compiles_without_spills_or_waits(case, config, monkeypatch, capfd):
    # A number that is used outside of the loops over K.
    assert spilled_bytes(matmul_tall, case, config, monkeypatch, capfd) <= 8


def spilled_bytes(product, case, config, monkeypatch, capfd):
    """Compile a product. Returns the bytes of registers that the compiler put into memory.

    It also says if there are products of the tensor cores that it does not overlap.
    """
    from deviceless import compile_for

    columns = (2, case.n) if case.gate else (case.n,)
    stack = (3,) if case.layer else ()
    operands = {
        "w": jax.eval_shape(lambda: case.format.empty((case.k, *columns), stack)),
        "layer": _spec(dtype="int32") if case.layer else None,
        "norm": RMSNorm(_spec(case.k, dtype=case.dtype), 1e-5) if case.norm else None,
        "bias": _spec(*columns) if case.bias else None,
        "residual": _spec(case.m, case.n) if case.residual else None,
    }
    run = functools.partial(product, gate=case.gate, dtype=jnp.dtype(case.dtype), config=config)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for("h100", run, _spec(case.m, case.k, dtype=case.dtype), kwargs=operands)
    report = capfd.readouterr().out
    assert "wgmma.mma_async instructions are serialized" not in report
    return max(map(int, re.findall(r"(\d+) bytes spill stores", report)))


# On a GPU.

ON_A_GPU = [
    *((Case(kind, 128, 64, k=256, n=128), None) for kind in ("int4", "int8", "fp8")),
    *(both for both in (*INTERPRETED, *MORE_INTERPRETED)),
    *(
        (Case(group=128, m=m, k=1024, n=448, residual=True, bias=True, layer=True), config)
        for m, config in (
            (40, TallGemmConfig(2, 64, 2, 4, 3)),
            (64, TallGemmConfig(4, 64, 2, 4, 8)),
            (72, TallGemmConfig(3, 128, 2, 3, 2)),
            (128, TallGemmConfig(3, 128, 2, 3, 2)),
            (250, TallGemmConfig(2, 128, 2, 4, 4)),
            (300, TallGemmConfig(4, 128, 2, 4)),
            (512, TallGemmConfig(2, 128, 2, 6)),
            (129, TallGemmConfig(4, 136, 1, 6)),
            (500, TallGemmConfig(2, 256, 1, 5)),
        )
    ),
    # Blocks with several tiles.
    *(
        (Case(kind, 64, 520, k=320, n=4160, residual=True, bias=True, layer=True), config)
        for kind in ("int4", "int8")
        for config in (None, TallGemmConfig(2, 64, 2, 4), TallGemmConfig(4, 136, 1, 4))
    ),
    (Case("fp8", 64, 260, k=64, n=5504, gate="silu", zeros=False), TallGemmConfig(2, 88, 1, 2)),
    *(
        (Case(m=m, k=1024, n=192, zeros=True, gate="silu", norm=True), config)
        for m, config in ((64, TallGemmConfig(4, 64, 2, 4, 2)), (128, TallGemmConfig(2, 128)))
    ),
    (Case("fp8", 64, 100, k=512, n=320, dtype="float16"), None),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), ON_A_GPU, ids=str)
def test_products_on_a_gpu_are_those_of_the_oracle(case, config):
    check(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("m", [9, 32, 64, 128, 256, 512])
def test_all_candidates_agree_on_a_gpu(m, gate):
    case = Case(group=128, m=m, k=4096, n=1024, gate="silu" if gate else None)
    shape = dict(m=m, k=case.k, n=case.n * (1 + gate), gate=gate, int4=128)
    for config in tall_gemm.candidates(shape):
        check(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "form",
    [
        WeightFormat("int4", 32, scales="bfloat16"),
        WeightFormat("int4", 64, zeros=True, scales="float16"),
        WeightFormat("int8", 256, zeros=True),
        WeightFormat("fp8", 128, scales="float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [1, 2])
def test_weights_on_a_gpu_have_the_bits_of_dequantised_ones(form, dtype, split):
    plain = random_quantised(jax.random.key(0), form.empty((256, 192)), 0.02)
    factors = jax.random.uniform(jax.random.key(1), plain.scales.shape, minval=0.5, maxval=1.5)
    plain = dataclasses.replace(
        plain, scales=(factors * plain.scales.astype(jnp.float32)).astype(plain.scales.dtype)
    )
    x = jnp.eye(256, dtype=dtype)
    config = TallGemmConfig(3, 128, 2, 3, split)
    y = matmul_tall(x, in_layout(plain, "bricks"), dtype=jnp.dtype(dtype), config=config)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(dequantise(plain, dtype)))


@pytest.mark.gpu
def test_it_runs_by_name_on_a_gpu():
    case = Case(group=128, m=64, k=256, n=128)
    operands = operands_of(case)
    q = relaid(operands["w"], "bricks")
    y, want = (
        np.asarray(jax.jit(functools.partial(matmul, implementation=name))(operands["x"], q))
        for name in ("mosaic_gpu", "xla")
    )
    np.testing.assert_allclose(y.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.02)
