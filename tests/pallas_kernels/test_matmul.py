"""`matmul`: the reference and every implementation against the oracle, on the same cases."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.pallas_kernels.activations import UNGATED
from fdjax.pallas_kernels.gemm import ACTIVATIONS, matmul, matmul_reference
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.plan import Plan

from . import oracle
from .implementations import BATCH_INVARIANT, MATMUL, across
from .tolerance import assert_matmul, assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

EPS = 1e-5
INVARIANT = Plan(batch_invariant=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """M, K, N and what is fused.

    `layer` is None, "static" or "traced"; `norm` is False, True for RMSNorm, "layer" or "layer
    without bias".
    """

    m: int = 5
    k: int = 63
    n: int = 65
    dtype: str = "float32"
    norm: bool | str = False
    bias: bool = False
    gate: str | None = None
    activation: str | None = None
    residual: bool = False
    layer: str | None = None
    result: str | None = None
    leading: tuple[int, ...] | None = None

    def __str__(self):
        differ = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in differ) or "default"

    @property
    def op_name(self) -> str:
        return "matmul"

    @property
    def request(self) -> tuple[dict[str, int], frozenset[str]]:
        """The request to a plan for this case."""
        names = "norm", "bias", "gate", "activation", "residual"
        fused = {name for name in names if getattr(self, name)}
        if isinstance(self.norm, str):
            fused = fused - {"norm"} | {"layer_norm"}
        gate = int(self.gate is not None)
        itemsize = jnp.dtype(self.dtype).itemsize
        shape = dict(m=self.m, k=self.k, n=self.n * (1 + gate), itemsize=itemsize)
        return shape | dict(gate=gate, fused=int(bool(fused))), frozenset(fused)


LAYERS, LAYER = 3, 1


def _operands(case: Case, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * rng.normal(size=shape)).astype(jnp.dtype(case.dtype))

    leading = (case.m,) if case.leading is None else case.leading
    columns = (2, case.n) if case.gate else (case.n,)
    stack = (LAYERS,) if case.layer else ()
    operands = {
        "x": normal(*leading, case.k),
        "w": normal(*stack, case.k, *columns, scale=case.k**-0.5),
    }
    if case.norm:
        operands["scale"] = normal(case.k, scale=0.2, mean=1.0)
    if isinstance(case.norm, str):
        operands["x"] += np.asarray(1.0, operands["x"].dtype)  # LayerNorm takes away the mean
        operands["shift"] = normal(case.k, scale=0.2) if case.norm == "layer" else None
    if case.bias:
        operands["bias"] = normal(*columns)
    if case.residual:
        operands["residual"] = normal(*leading, case.n)
    return operands


def _matmul(operands, layer=None, *, implementation, gate, activation, result, static_layer, plan):
    operands = dict(operands)
    x, w = operands.pop("x"), operands.pop("w")
    if "shift" in operands:
        operands["norm"] = LayerNorm(operands.pop("scale"), operands.pop("shift"), EPS)
    elif "scale" in operands:
        operands["norm"] = RMSNorm(operands.pop("scale"), EPS)
    if implementation == "reference":
        return matmul_reference(x, w, gate=gate, activation=activation, **operands)
    return matmul(
        x,
        w,
        layer=static_layer if layer is None else layer,
        gate=gate,
        activation=activation,
        preferred_element_type=result,
        implementation=implementation,
        plan=plan,
        **operands,
    )


def _run(implementation, case: Case, operands: dict, plan: Plan | None = None) -> np.ndarray:
    leading = operands["x"].shape[:-1]
    if implementation.is_reference:  # takes [M,K] and one layer
        rows = {n: operands[n] for n in ("x", "residual") if n in operands}
        operands = operands | {n: a.reshape(-1, a.shape[-1]) for n, a in rows.items()}
        operands["w"] = operands["w"][LAYER] if case.layer else operands["w"]
    fn = implementation.jit(
        _matmul,
        implementation=implementation.name,
        gate=case.gate,
        activation=case.activation,
        result=case.result,
        static_layer=LAYER if case.layer == "static" else None,
        plan=plan,
    )
    y = fn(operands, np.int32(LAYER)) if case.layer == "traced" else fn(operands)
    return y.reshape(*leading, case.n) if implementation.is_reference else y


def _exact(case: Case, operands: dict) -> oracle.Exact:
    operands = dict(operands)
    x, w = operands.pop("x"), operands.pop("w")
    if "scale" in operands:
        shift = (operands.pop("shift"),) if "shift" in operands else ()
        operands["norm"] = (operands.pop("scale"), EPS, *shift)
    kinds = {"gate": case.gate, "activation": case.activation}
    return oracle.matmul(x, w[LAYER] if case.layer else w, **kinds, **operands)


def _check(implementation, case: Case, seed: int = 0, plan: Plan | None = None) -> None:
    """The result must be right, or the call must raise if the implementation cannot do it."""
    operands = _operands(case, seed)
    if implementation.cannot(case):
        with pytest.raises(NotImplementedError, match=r"^matmul: "):
            _run(implementation, case, operands, plan)
        return
    y = _run(implementation, case, operands, plan)
    result = "float32" if implementation.is_reference else case.result or case.dtype
    assert y.dtype == jnp.dtype(result)
    assert_matmul(
        y,
        _exact(case, operands),
        dtype=implementation.computes_in(case.dtype),
        result=result,
        k=case.k,
        normed=bool(case.norm),
        fused=bool(case.bias or case.gate or case.activation or case.residual),
    )


SHAPES = [
    *(Case(m, dtype=dtype) for dtype in ("float32", "bfloat16") for m in (1, 2, 7, 64, 200)),
    Case(m=33, dtype="float16"),
    Case(m=128, k=64, n=128, dtype="bfloat16"),
    Case(m=1, k=1, n=1),
    Case(m=3, k=257, n=31, dtype="bfloat16"),
    Case(m=8, k=512, n=1, dtype="float16"),
    Case(m=100, k=1, n=130),
]
EPILOGUES = [
    Case(norm=norm, bias=bias, gate=gate, residual=residual, dtype=dtype)
    for norm, bias, gate, residual in itertools.product(
        (False, True), (False, True), (None, *ACTIVATIONS), (False, True)
    )
    for dtype in ("float32", "bfloat16")
    # All dtypes compute the same; half precision adds a few roundings.
    if dtype == "float32" or (residual and gate in (None, "silu"))
]
ALL = dict(norm=True, bias=True, gate="silu", residual=True)
UP = dict(norm="layer", bias=True, activation="gelu_tanh")
VARIANTS = [
    Case(**UP),
    Case(norm="layer without bias", residual=True),
    Case(dtype="bfloat16", leading=(2, 3), layer="traced", **UP),
    Case(dtype="bfloat16", result="float32", norm="layer", gate="silu"),
    *(Case(activation=name, bias=True, residual=True) for name in UNGATED),
    Case(layer="static"),
    Case(layer="traced", dtype="bfloat16"),
    Case(layer="traced", **ALL),
    Case(layer="static", dtype="bfloat16", **ALL),
    Case(leading=(2, 3)),
    Case(leading=(2, 3), dtype="bfloat16", **ALL),
    Case(leading=(2, 1, 3), bias=True),
    Case(leading=()),
    Case(leading=(), **ALL),
    Case(leading=(1, 1), layer="traced", dtype="bfloat16", norm=True),
    Case(dtype="bfloat16", result="float32"),
    Case(dtype="bfloat16", result="float32", **ALL),
    Case(dtype="float16", result="float32", bias=True),
    Case(dtype="float32", result="bfloat16", residual=True),
    Case(dtype="float32", result="bfloat16"),
    Case(dtype="float16", **ALL),
]
# Sizes that tensor core kernels support: K and N are whole tiles, but not whole blocks.
TILES = [
    *(Case(m, k=256, n=192, dtype="bfloat16", **UP) for m in (1, 6, 7, 12, 30, 32, 33)),
    Case(2, k=1024, n=128, dtype="bfloat16", norm="layer", gate="silu"),
    Case(5, k=320, n=128, dtype="bfloat16", norm="layer without bias", residual=True),
    Case(5, k=320, n=128, dtype="float16", result="float32", layer="traced", norm="layer"),
    *(Case(3, k=64, n=64, dtype="bfloat16", bias=True, activation=name) for name in UNGATED),
    *(Case(m, k=192, n=192, dtype="bfloat16") for m in (1, 7, 8, 9, 12, 33, 49, 64, 65, 200)),
    *(Case(m, k=2112, n=320, dtype="bfloat16", **ALL) for m in (2, 20)),
    *(Case(3, k=64, n=64, dtype="bfloat16", gate=gate) for gate in ACTIVATIONS),
    Case(5, k=320, n=128, dtype="bfloat16", bias=True, gate="gelu"),
    Case(5, k=320, n=128, dtype="bfloat16", norm=True, layer="traced"),
    Case(5, k=320, n=128, dtype="bfloat16", layer="static", **ALL),
    Case(16, k=4096, n=128, dtype="bfloat16", residual=True),
    Case(16, k=4096, n=128, dtype="bfloat16", result="float32", norm=True),
    Case(16, k=256, n=192, dtype="float16", **ALL),
    Case(9, k=256, n=192, dtype="float16", result="float32", bias=True),
    Case(k=128, n=64, dtype="bfloat16", leading=(2, 3), **ALL),
    Case(1, k=2880, n=32, dtype="bfloat16", result="float32", norm=True, bias=True),
    Case(6, k=2048, n=8, dtype="bfloat16", result="float32", norm="layer"),
]


OFTEN, LESS_OFTEN = ((EPILOGUES + VARIANTS)[i::2] for i in range(2))


@across(MATMUL, SHAPES + TILES, quick=OFTEN, more=LESS_OFTEN)
def test_against_the_oracle(implementation, case):
    _check(implementation, case)


LONG = [
    Case(m=3, k=4096, n=24, dtype=dtype, result=result)
    for dtype in ("float32", "bfloat16", "float16")
    for result in dict.fromkeys(("float32", dtype))
]


@across(MATMUL, LONG)
def test_accumulates_in_fp32(implementation, case):
    """TF32, or a sum in half precision, would be off by far more than the table allows."""
    _check(implementation, case)


@pytest.mark.parametrize("implementation", MATMUL)
def test_each_layer_has_its_own_weight(implementation):
    case = Case(layer="traced", dtype="bfloat16", m=2, k=64, n=128)
    operands = _operands(case)
    operands["w"][[0, 2]] = np.nan
    assert_same_bits(
        _run(implementation, case, operands), _run(implementation, case, _operands(case))
    )


@pytest.mark.parametrize("implementation", MATMUL)
def test_rows_are_independent(implementation):
    case = Case(m=6, k=128, n=64, dtype="bfloat16", **ALL)
    operands = _operands(case)
    clean = _run(implementation, case, operands)
    operands["x"][2], operands["x"][4] = np.nan, np.inf
    others = [0, 1, 3, 5]
    assert_same_bits(_run(implementation, case, operands)[others], clean[others])


@pytest.mark.parametrize("implementation", MATMUL)
@pytest.mark.parametrize("plan", [None, INVARIANT], ids=["plain", "batch_invariant"])
def test_no_rows(implementation, plan):
    case = Case(m=0, k=64, n=64, dtype="bfloat16", **ALL)
    assert _run(implementation, case, _operands(case), plan).shape == (0, case.n)


@pytest.mark.parametrize("implementation", MATMUL)
def test_reruns_are_bitwise_equal(implementation):
    case = Case(m=64, k=4160, n=128, dtype="bfloat16", **ALL)
    first = _run(implementation, case, _operands(case))
    _run(implementation, case, _operands(case, seed=1))
    assert_same_bits(_run(implementation, case, _operands(case)), first)


@pytest.mark.parametrize("implementation", MATMUL)
@settings(max_examples=20)
@given(
    m=st.sampled_from([3, 130]),
    fused=st.sampled_from([Case(**ALL), Case(layer="traced", bias=True, dtype="bfloat16")]),
    invariant=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_operands(implementation, m, fused, invariant, seed):
    case = dataclasses.replace(fused, m=m, k=48, n=24)
    _check(implementation, case, seed, INVARIANT if invariant else None)


DTYPES = ("float32", "bfloat16", "float16")
SOME_ROWS = {1, 2, 5, 7, 8, 9, 15, 16, 17, 32, 33, 65, 127, 129, 200}


@pytest.mark.parametrize(
    ("m", "dtype"),
    [
        # Numbers of rows around those at which something changes, with the dtypes in turn; other
        # combinations are `soak`.
        pytest.param(
            m, dtype, marks=pytest.mark.slow if m in SOME_ROWS and i % 3 == j else pytest.mark.soak
        )
        for i, m in enumerate([*range(1, 34), 63, 65, 96, 127, 129, 191, 199, 200])
        for j, dtype in enumerate(DTYPES)
    ],
)
@pytest.mark.parametrize("implementation", [p for p in MATMUL if not p.marks])
def test_every_number_of_rows(implementation, m, dtype):
    _check(implementation, Case(m, k=129, n=70, dtype=dtype))
    _check(implementation, Case(m, k=129, n=70, dtype=dtype, **ALL), plan=INVARIANT)


FUSED = [
    Case(k=256, n=96),
    Case(k=257, n=33, **ALL),
    Case(k=257, n=33, dtype="bfloat16", layer="traced", norm=True),
]


def _of_rows(operands: dict, rows) -> dict:
    """The same operands with only some rows of x."""
    picked = {name: operands[name][rows] for name in ("x", "residual") if name in operands}
    return operands | picked


@pytest.mark.parametrize("case", FUSED, ids=str)
@pytest.mark.parametrize("implementation", BATCH_INVARIANT)
@pytest.mark.usefixtures("full_compiles")
class TestBatchInvariant:
    """Within each phase, a row's bits do not depend on the rest of the batch."""

    def test_decode_batches(self, implementation, case):
        operands = _operands(dataclasses.replace(case, m=64))
        full = _run(implementation, case, operands, INVARIANT)
        for rows in (slice(63, 64), slice(3, 8)):
            part = _run(implementation, case, _of_rows(operands, rows), INVARIANT)
            assert_same_bits(part, full[rows], str(rows))

    def test_decode_order(self, implementation, case):
        operands = _operands(dataclasses.replace(case, m=64))
        order = np.random.default_rng(1).permutation(64)
        full = _run(implementation, case, operands, INVARIANT)
        assert_same_bits(
            _run(implementation, case, _of_rows(operands, order), INVARIANT), full[order]
        )

    def test_prefill_chunks(self, implementation, case):
        operands = _operands(dataclasses.replace(case, m=512))
        full = _run(implementation, case, operands, INVARIANT)
        for rows in (slice(0, 128), slice(384, 512), slice(0, 200)):
            part = _run(implementation, case, _of_rows(operands, rows), INVARIANT)
            assert_same_bits(part, full[rows], str(rows))

    def test_leading_axes(self, implementation, case):
        operands = _operands(dataclasses.replace(case, m=12))
        flat = _run(implementation, case, operands, INVARIANT)
        cube = {n: a.reshape(3, 4, -1) for n, a in operands.items() if n in ("x", "residual")}
        y = _run(implementation, case, operands | cube, INVARIANT)
        assert_same_bits(y.reshape(flat.shape), flat)


X, W = jnp.ones((2, 64)), jnp.ones((64, 32))
GATED, STACK = jnp.ones((64, 2, 32)), jnp.ones((3, 64, 32))


@pytest.mark.parametrize(
    ("x", "w", "keys", "message"),
    [
        (X, GATED, dict(gate="relu"), "gate must be one of silu, gelu, gelu_tanh, got 'relu'"),
        (X, jnp.ones(64), {}, "w must be [K,N], got [64]"),
        (X, STACK, {}, "w must be [K,N], got [3, 64, 32]"),
        (X, W, dict(gate="silu"), "w must be [K,2,N], got [64, 32]"),
        (X, W, dict(layer=0), "w must be [L,K,N], got [64, 32]"),
        (X, STACK, dict(layer=0, gate="silu"), "w must be [L,K,2,N], got [3, 64, 32]"),
        (jnp.ones((1, 256)), W, {}, "x [1, 256] and w [64, 32] disagree on K"),
        (jnp.ones((2, 3)), STACK, dict(layer=1), "x [2, 3] and w [3, 64, 32] disagree on K"),
        (X, STACK, dict(layer=3), "layer must be in 0..2, got 3"),
        (X, STACK, dict(layer=np.int32(3)), "layer must be in 0..2, got 3"),
        (jnp.ones((2, 0)), jnp.ones((0, 32)), {}, "K must be at least 1, got 0"),
        (
            X,
            jnp.ones((64, 3, 32)),
            dict(gate="silu"),
            "with gate, w must be [K,2,N], got [64, 3, 32]",
        ),
        (X, W.astype(jnp.bfloat16), {}, "x is float32 but w is bfloat16"),
        (X, W, dict(norm=RMSNorm(jnp.ones(63), 1e-5)), "norm.scale must be [64], got [63]"),
        (X, W, dict(bias=jnp.ones(31)), "bias must be [32], got [31]"),
        (X, W, dict(bias=jnp.ones((1, 32))), "bias must be [32], got [1, 32]"),
        (X, GATED, dict(bias=jnp.ones(32), gate="silu"), "bias must be [2, 32], got [32]"),
        (X, W, dict(residual=jnp.ones((1, 32))), "residual must be [2, 32], got [1, 32]"),
        (
            jnp.ones((2, 3, 64)),
            W,
            dict(residual=jnp.ones((6, 32))),
            "residual must be [2, 3, 32], got [6, 32]",
        ),
    ],
)
def test_operands_that_do_not_fit(x, w, keys, message):
    with pytest.raises(ValueError) as error:
        matmul(x, w, **keys)
    assert str(error.value) == f"matmul: {message}"


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("cudnn", "no 'cudnn' implementation"),
        ("mosaic_gpu", "mosaic_gpu needs bfloat16 or float16, got float32"),
    ],
)
@pytest.mark.parametrize("how", ["argument", "plan"])
def test_a_named_implementation_never_falls_back(implementation, message, how):
    if how == "argument":
        keys = dict(implementation=implementation)
    else:
        keys = dict(plan=Plan(named=(("matmul", implementation),)))
    with pytest.raises(NotImplementedError, match=f"^matmul: {message}"):
        jax.eval_shape(lambda x, w: matmul(x, w, **keys), X, W)


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_few_rows_on_a_cpu_are_not_in_one_chain(transposed):
    """The error of a chain of 4096 additions is four times as large."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1, 4096)), rng.normal(size=(4096, 512)) / 64
    x, w = x.astype(np.float32), w.astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    product = jax.jit(lambda x, w: matmul(x, w.T if transposed else w, transposed=transposed))
    error = np.asarray(product(x, w.T.copy() if transposed else w)) - exact
    assert np.sqrt(np.mean(error**2)) < (6e-7 if transposed else 2e-7)


@pytest.mark.parametrize("keys", [{}, {"transposed": True}])
def test_products_are_whole_on_a_gpu(keys):
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1, 64), (64, 32))]
    traced = jax.jit(functools.partial(matmul, **keys)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert "contracting_dims = [1] x [0]" in text and "stablehlo.reduce" not in text


@pytest.mark.parametrize(("rows", "blocks"), [(1, True), (4, True), (5, False)])
def test_sums_of_blocks_take_little_memory(rows, blocks):
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((rows, 4096), (4096, 32000))]
    text = jax.jit(matmul).trace(*shapes).lower(lowering_platforms=("cpu",)).as_text()
    assert ("stablehlo.reduce" in text) == blocks


def test_a_kernel_reads_no_transposed_weight():
    x, w = jnp.ones((1, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="mosaic_gpu cannot do transposed"):
        jax.eval_shape(
            lambda x, w: matmul(x, w.T, transposed=True, implementation="mosaic_gpu"), x, w
        )


def test_an_unknown_implementation():
    with pytest.raises(ValueError) as error:
        matmul(X, W, implementation="triton")
    assert str(error.value) == (
        "matmul: implementation must be one of xla, cudnn, mosaic_gpu, got 'triton'"
    )


@pytest.mark.parametrize("name", UNGATED)
def test_activations_have_no_derivative_of_their_own(name):
    """Pallas cannot lower a function with its own derivative for Mosaic GPU."""
    assert "custom_jvp" not in str(jax.make_jaxpr(UNGATED[name])(jnp.ones(4)))
