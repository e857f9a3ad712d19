"""`matmul` with quantised weights: every implementation against the oracle, on the same cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.pallas_kernels.gemm import linear_chain, matmul
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.pallas_kernels.quantised import (
    BITS,
    QTensor,
    WeightFormat,
    dequantise,
    in_layout,
    pack,
    random_quantised,
    unpack,
)

from . import oracle, quantised_oracle
from .implementations import MATMUL
from .tolerance import assert_matmul, assert_same_bits, assert_within, tolerance

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

EPS = 1e-5
KINDS = ["int4", "int8", "fp8", "fp4"]
OF_KERNELS = KINDS[:3]
LAYERS, LAYER = 3, 1


def quantised(kind, group, k, *outs, zeros=False, scales="float32", seed=0, stack=()):
    """A random weight of a standard deviation near K ** -0.5; all codes and zero points occur."""
    rng = np.random.default_rng(seed)
    groups = k // group
    codes = rng.integers(0, 2 ** BITS[kind], (*stack, k, *outs))
    size = {"int4": 5.0, "int8": 80.0, "fp8": 100.0, "fp4": 3.0}[kind] * k**0.5
    if kind == "fp8":
        codes = np.where((codes & 127) == 127, 0, codes)  # NaN
    s = (rng.uniform(0.5, 1.5, (*stack, groups, *outs)) / size).astype(jnp.dtype(scales))
    z = None
    if zeros:
        top = 16 if kind == "int4" else 256
        z = rng.choice([0, 1, top // 2, top - 1, top], s.shape).astype(jnp.dtype(scales))
    words = np.stack([pack(c, kind) for c in codes.reshape(-1, k, *outs)])
    return QTensor(words.reshape(*stack, -1, *outs), s, z, kind, group, (k, *outs))


def exact_weight(q: QTensor) -> np.ndarray:
    return quantised_oracle.dequantised(q)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 8, 63, 64])
def test_codes_are_packed_with_the_first_in_the_lowest_bits(kind, k):
    bits = BITS[kind]
    codes = np.random.default_rng(k).integers(0, 2**bits, (k, 2, 3), dtype=np.uint8)
    words = np.asarray(pack(codes, kind))
    assert words.dtype == np.int32
    assert_same_bits(quantised_oracle.codes_of(words, bits, k).astype(np.uint8), codes)
    assert_same_bits(np.asarray(unpack(words, kind, k)), codes)
    whole = words.view(np.uint32)[-1, 0, 0]
    rest = k % (32 // bits)
    assert rest == 0 or whole >> np.uint32(rest * bits) == 0  # missing rows are zero bits


@pytest.mark.parametrize("scales", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "zeros"),
    [
        *(("int4", False), ("int4", True), ("int8", False), ("int8", True), ("fp8", False)),
        ("fp4", False),
    ],
)
def test_dequantised_weights_are_exact(kind, zeros, scales):
    for group, k, outs in ((32, 96, (5,)), (64, 64, (2, 3)), (21, 63, (4,)), (63, 63, (1,))):
        q = quantised(kind, group, k, *outs, zeros=zeros, scales=scales)
        for dtype in ("float32", "bfloat16", "float16"):
            # In float64, a scale times a code is exact. In fp32 it is rounded once before.
            want = exact_weight(q).astype(np.float32).astype(jnp.dtype(dtype))
            assert_same_bits(np.asarray(dequantise(q, dtype)), want, f"{group} {k} {dtype}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outs", [(192,), (2, 64)])
def test_bricks_hold_the_same_weight(kind, outs):
    q = quantised(kind, 64, 128, *outs)
    bricks = in_layout(q, "bricks")
    assert_same_bits(
        np.asarray(dequantise(bricks, "float32")), np.asarray(dequantise(q, "float32"))
    )
    assert_same_bits(np.asarray(in_layout(bricks, "plain").words), q.words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zeros", [False, True])
def test_random_weights_have_mean_zero_and_the_deviation_that_was_asked_for(kind, zeros):
    empty = WeightFormat(kind, 64, zeros=zeros and kind.startswith("int")).empty((256, 512))
    values = np.asarray(dequantise(random_quantised(jax.random.key(0), empty, 0.02), "float32"))
    assert abs(values.mean()) < 5 * 0.02 / values.size**0.5
    assert values.std() == pytest.approx(0.02, rel=0.02)


def test_a_stack_in_bricks():
    empty = WeightFormat("fp4", 32).empty((128, 2, 64), (3,))
    stack = random_quantised(jax.random.key(0), empty, 1.0)
    bricks = in_layout(stack, "bricks")
    for i in range(3):
        one, its = (jax.tree.map(lambda a, i=i: a[i], q) for q in (stack, bricks))
        assert_same_bits(its.words, in_layout(one, "bricks").words)
    assert_same_bits(in_layout(bricks, "plain").words, stack.words)


def test_a_thread_holds_its_rows_and_columns_of_a_brick():
    """The order that the PTX manual gives for the left operand of wgmma.m64nNk16."""
    codes = np.random.default_rng(0).integers(0, 16, (64, 64))
    q = QTensor(pack(codes, "int4"), np.ones((1, 64), "f"), None, "int4", 64, (64, 64))
    words = np.asarray(in_layout(q, "bricks").words).view(np.uint32).reshape(128, 4)
    for thread, instruction, register, pair in np.ndindex(128, 4, 4, 2):
        row = instruction * 16 + register // 2 * 8 + thread % 4 * 2 + pair
        column = thread // 32 * 16 + register % 2 * 8 + thread % 32 // 4
        code = words[thread, instruction] >> np.uint32(4 * register + 16 * pair) & np.uint32(15)
        assert code == codes[row, column]


def test_rotations_of_a_word_of_fp4_in_a_brick_are_small_bf16():
    """Code r at register r is that of int4, and its value is smaller by 2^126."""
    codes = np.random.default_rng(1).integers(0, 16, (64, 64))
    in_int4, words = (
        np.asarray(in_layout(QTensor(pack(codes, kind), *rest), "bricks").words).view(np.uint32)
        for kind in ("int4", "fp4")
        for rest in [(np.ones((1, 64), "f"), None, kind, 64, (64, 64))]
    )
    second = words << np.uint32(2) & 0x80C080C0 | words >> np.uint32(6) & 0x01000100
    rotated = words >> np.uint32(4) | words << np.uint32(28)
    registers = [words << np.uint32(6) & 0x81C081C0, second]
    registers += [words & 0x81C081C0, rotated & 0x81C081C0]
    for register, bits in enumerate(registers):
        for pair in (0, 16):
            small = (bits >> np.uint32(pair) & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16)
            code = in_int4 >> np.uint32(4 * register + pair) & 15
            want = quantised_oracle.E2M1_VALUES[code]
            np.testing.assert_array_equal(small.astype(np.float64) * 2.0**126, want)


def test_bricks_need_whole_bricks():
    with pytest.raises(ValueError, match=r"multiples of 64, got \[96, 64\]"):
        in_layout(quantised("int4", 32, 96, 64), "bricks")


def test_every_code_of_fp8_has_its_value():
    codes = np.arange(256, dtype=np.uint8)[:, None]
    q = QTensor(pack(codes, "fp8"), np.ones((1, 1), np.float32), None, "fp8", 256, (256, 1))
    np.testing.assert_array_equal(
        np.asarray(dequantise(q, "float32"))[:, 0], quantised_oracle.e4m3_values()
    )


def test_every_code_of_fp4_and_every_exponent_of_its_scales():
    codes = np.arange(16, dtype=np.uint8)[:, None]
    scales = np.arange(1, 255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    words, exponents = pack(codes.repeat(254, axis=1), "fp4"), np.arange(1, 255) - 127.0
    q = QTensor(words, scales[None], None, "fp4", 16, (16, 254))
    want = quantised_oracle.E2M1_VALUES[:, None] * 2.0**exponents
    # The largest overflow, and halves of the smallest are flushed to zero on some devices.
    held = np.abs(want) <= np.finfo(np.float32).max
    held &= (want == 0) | (np.abs(want) >= np.finfo(np.float32).tiny)
    got = np.asarray(dequantise(q, "float32"))
    np.testing.assert_array_equal(got[held], want[held].astype(np.float32))
    assert held.mean() > 0.98


@dataclasses.dataclass(frozen=True)
class Case:
    """A weight [K,N] of a kind by groups, and what is fused; `layer`: the weights are stacked."""

    kind: str = "int4"
    group: int = 32
    m: int = 5
    k: int = 128
    n: int = 72
    zeros: bool = False
    scales: str = "float32"
    dtype: str = "bfloat16"
    norm: bool = False
    bias: bool = False
    gate: str | None = None
    residual: bool = False
    layer: bool = False
    layout: str = "plain"

    def __str__(self):
        differ = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in differ) or "default"

    @property
    def op_name(self) -> str:
        return "matmul"

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.kind, self.group, self.zeros, self.scales, self.layout)

    @property
    def request(self) -> tuple[dict[str, int], frozenset[str]]:
        """The request to a plan for this case."""
        fused = {name for name in ("norm", "bias", "gate", "residual") if getattr(self, name)}
        gate = int(self.gate is not None)
        shape = dict(m=self.m, k=self.k, n=self.n * (1 + gate), gate=gate, fused=int(bool(fused)))
        shape |= {"itemsize": jnp.dtype(self.dtype).itemsize, self.kind: self.group}
        return shape, frozenset(fused) | self.format.features


def _operands(case: Case) -> dict:
    rng = np.random.default_rng(1)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * rng.normal(size=shape)).astype(jnp.dtype(case.dtype))

    columns = (2, case.n) if case.gate else (case.n,)
    weight = dict(zeros=case.zeros, scales=case.scales, stack=(LAYERS,) if case.layer else ())
    operands = {
        "x": normal(case.m, case.k),
        "w": quantised(case.kind, case.group, case.k, *columns, **weight),
    }
    if case.norm:
        operands["scale"] = normal(case.k, scale=0.2, mean=1.0)
    if case.bias:
        operands["bias"] = normal(*columns)
    if case.residual:
        operands["residual"] = normal(case.m, case.n)
    return operands


def relaid(q: QTensor, layout: str) -> QTensor:
    """The weight, or stack of weights, in another layout."""
    convert = functools.partial(in_layout, layout=layout)
    return jax.vmap(convert)(q) if q.stack else convert(q)


def _matmul(operands, *, implementation, gate, layer, layout="plain", plan=None):
    operands = dict(operands)
    operands["w"] = relaid(operands["w"], layout)
    if "scale" in operands:
        operands["norm"] = RMSNorm(operands.pop("scale"), EPS)
    keywords = {"gate": gate, "layer": layer, "implementation": implementation, "plan": plan}
    return matmul(operands.pop("x"), operands.pop("w"), **keywords, **operands)


def _check(implementation, case: Case, plan=None) -> None:
    operands = _operands(case)
    static = {"implementation": implementation.name, "gate": case.gate, "plan": plan}
    static["layout"] = case.layout
    run = implementation.jit(_matmul, layer=LAYER if case.layer else None, **static)
    if implementation.cannot(case):
        with pytest.raises(NotImplementedError, match=r"^matmul: .*weight\."):
            run(operands)
        return
    w = operands["w"]
    if case.layer:
        w = jax.tree.map(lambda a: a[LAYER], w)
    exact = dict(operands) | {"w": exact_weight(w), "gate": case.gate}
    if "scale" in exact:
        exact["norm"] = (exact.pop("scale"), EPS)
    assert_matmul(
        run(operands),
        oracle.matmul(exact.pop("x"), exact.pop("w"), **exact),
        dtype=case.dtype,
        result=case.dtype,
        k=case.k,
        normed=case.norm,
        fused=case.bias or case.gate is not None or case.residual,
        quantised=True,
    )


CASES = [
    *(
        Case(kind, group, k=256, zeros=zeros)
        for kind in OF_KERNELS
        for group in (32, 64, 128, 256)
        for zeros in ([False, True] if kind != "fp8" else [False])
    ),
    *(Case(kind, dtype="float32", scales="bfloat16", n=65) for kind in OF_KERNELS),
    Case(dtype="float16", scales="float16", zeros=True),
    Case(m=1, k=63, n=65, group=21),
    Case(m=130, n=1),
    *(Case(kind, norm=True, gate="silu") for kind in OF_KERNELS),
    Case(zeros=True, bias=True, residual=True),
    Case("int8", norm=True, bias=True, gate="gelu", residual=True, zeros=True),
    *(Case(kind, layer=True) for kind in OF_KERNELS),
    Case(layer=True, gate="silu", norm=True, zeros=True),
    Case("fp8", 64, 1, k=128, n=128, norm=True, layout="bricks"),
    Case("fp4", 32, norm=True, gate="silu"),
    Case("fp4", 32, layer=True),
    Case("int4", 32, k=128, n=64, zeros=True, gate="silu", layer=True, layout="bricks"),
]
# For the kernel. A CPU takes seconds for each.
BRICKS = [
    *(Case(kind, 128, k=256, n=128, layout="bricks") for kind in OF_KERNELS),
    *(
        Case("int4", group, k=512, n=64, zeros=True, layout="bricks")
        for group in (32, 64, 256, 512)
    ),
    Case("int8", 64, k=192, n=192, scales="bfloat16", dtype="float16", layout="bricks"),
    Case("int8", 320, 33, k=320, n=128, zeros=True, layout="bricks"),
    Case("fp8", 576, 1, k=576, n=1024, bias=True, residual=True, norm=True, layout="bricks"),
    *(
        Case(kind, 64, m, 256, 192, gate="silu", norm=True, bias=True, layout="bricks")
        for kind, m in (("int4", 1), ("int8", 12), ("fp8", 40), ("int4", 128))
    ),
    *(
        Case("int4", 128, m, 1024, 512, residual=True, layer=True, layout="bricks")
        for m in (9, 49, 100)
    ),
    Case("int4", 64, 7, 256, 64, True, gate="gelu", layer=True, residual=True, layout="bricks"),
    Case(m=200, k=256, n=64, layout="bricks"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", MATMUL)
def test_products_are_those_of_the_oracle(implementation, case):
    _check(implementation, case)


@pytest.mark.parametrize("case", BRICKS, ids=str)
@pytest.mark.parametrize("implementation", MATMUL[1:])
def test_products_on_a_gpu_are_those_of_the_oracle(implementation, case):
    _check(implementation, case)


@pytest.mark.parametrize(
    "case", [Case(), Case("int8", zeros=True, gate="silu", norm=True)], ids=str
)
def test_a_row_has_the_same_bits_in_every_batch(case):
    operands = _operands(dataclasses.replace(case, m=7))
    plan = Plan(batch_invariant=True)
    run = jax.jit(
        functools.partial(_matmul, implementation=None, gate=case.gate, layer=None, plan=plan)
    )
    whole = np.asarray(run(operands))
    for i in range(7):
        row = np.asarray(run(operands | {"x": operands["x"][i : i + 1]}))
        assert_same_bits(row[0], whole[i])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    groups=st.integers(1, 6),
    group=st.sampled_from([1, 3, 8, 16, 32, 64, 128]),
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    zeros=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_products_of_any_shape(kind, groups, group, m, n, zeros, dtype):
    zeros = zeros and kind.startswith("int")
    implementation = MATMUL[0].values[0]
    _check(implementation, Case(kind, group, m, groups * group, n, zeros, dtype=dtype))


def test_scales_of_zero_give_zeros_and_the_largest_codes_are_exact():
    x = np.ones((2, 64), np.float32)
    for kind, code, value in (("int4", 15, 15 - 16), ("int8", 255, -1), ("fp8", 0x7E, 448)):
        codes = np.full((64, 3), code, np.uint8)
        scales = np.array([[0, 1, 2.0**-30]], np.float32)
        zeros = None if kind == "fp8" else np.full((1, 3), code + 1, np.float32)
        q = QTensor(pack(codes, kind), scales, zeros, kind, 64, (64, 3))
        y = np.asarray(matmul(x, q))
        np.testing.assert_array_equal(y, [[0, 64 * value, 64 * value * 2.0**-30]] * 2)


def test_a_scale_that_is_not_finite_reaches_only_its_columns():
    q = quantised("int4", 32, 64, 4)
    scales = np.array(q.scales)
    scales[1, 2] = np.nan
    y = np.asarray(matmul(np.ones((1, 64), np.float32), dataclasses.replace(q, scales=scales)))
    assert np.isnan(y[0, 2]) and np.isfinite(np.delete(y[0], 2)).all()


WRONG = {
    "words of another K": (dict(words=np.zeros((7, 4), np.int32)), "words must be"),
    "unsigned words": (dict(words=np.zeros((8, 4), np.uint32)), "words must be int32"),
    "scales of another group": (dict(scales=np.ones((1, 4), np.float32)), "scales must be"),
    "integer scales": (dict(scales=np.ones((2, 4), np.int32)), "scales must be floating"),
    "zeros of another shape": (dict(zeros=np.ones((2, 3), np.float32)), "zeros must be"),
    "a group that does not divide K": (dict(group=48), "group must divide K = 64, got 48"),
    "a stack": (dict(scales=np.ones((2, 2, 4), np.float32)), "axes before"),
    "an unknown kind": (dict(kind="int3"), "kind must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_do_not_fit_together_are_refused(name):
    change, message = WRONG[name]
    q = dataclasses.replace(quantised("int4", 32, 64, 4), **change)
    with pytest.raises(ValueError, match=message):
        matmul(np.ones((1, 64), np.float32), q)


def test_shapes_that_disagree_are_refused():
    q = quantised("int4", 32, 64, 4)
    with pytest.raises(ValueError, match=r"x \[1, 32\] and w \[64, 4\] disagree on K"):
        matmul(np.ones((1, 32), np.float32), q)
    with pytest.raises(ValueError, match=r"w must be \[K,2,N\]"):
        matmul(np.ones((1, 64), np.float32), q, gate="silu")
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.2, got 3"):
        matmul(np.ones((1, 64), np.float32), quantised("int4", 32, 64, 4, stack=(3,)), layer=3)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_for_plain_weights_refuse_quantised_ones(kind):
    """Also where a table has an entry for a plain weight of the same shape."""
    shape = dict(m=8, k=4096, n=4096, itemsize=2, gate=0, fused=0)
    choice = Choice("mosaic_gpu", source="table")
    plan = Plan.for_kind("a GPU", (9, 0))
    plan = dataclasses.replace(plan, table=(Entry("matmul", tuple(sorted(shape.items())), choice),))
    weight = WeightFormat(kind, 128)
    assert plan.choose("matmul", **shape).implementation == "mosaic_gpu"
    asked = plan.choose("matmul", weight.features, **shape, **weight.key)
    assert asked.implementation == "xla"
    q = weight.empty((4096, 4096))
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu cannot do weight.{kind}"):
        matmul(jnp.zeros((8, 4096), jnp.bfloat16), q, implementation="mosaic_gpu")


def test_bricks_run_through_their_kernel_on_hopper_where_it_fits():
    plan = Plan.for_kind("a GPU", (9, 0))

    def chosen(plan=plan, group=128, m=8, itemsize=2, **format):
        shape = dict(m=m, k=4096, n=4096, itemsize=itemsize, gate=0, fused=0)
        weight = WeightFormat("int4", group, layout="bricks", **format)
        return plan.choose("matmul", weight.features, **shape, **weight.key).implementation

    assert chosen() == chosen(m=128) == chosen(group=32, zeros=True) == "mosaic_gpu"
    assert chosen(m=129) == "mosaic_gpu"
    assert chosen(itemsize=4) == chosen(group=16) == chosen(m=129, group=16) == "xla"
    assert chosen(Plan.for_kind("a GPU", (8, 0))) == chosen(Plan.for_kind("cpu", None)) == "xla"


def test_plans_tell_kinds_and_groups_apart():
    shape = dict(m=8, k=4096, n=4096, itemsize=2, gate=0, fused=0)
    measured = WeightFormat("int4", 128)
    key = tuple(sorted((shape | measured.key).items()))
    plan = Plan(table=(Entry("matmul", key, Choice("xla", source="table")),))

    def source(weight):
        return plan.choose("matmul", weight.features, **shape, **weight.key).source

    assert source(measured) == "table"
    assert source(WeightFormat("int4", 128, zeros=True)) == "table"
    for other in (WeightFormat("int4", 64), WeightFormat("int8", 128), WeightFormat("fp8", 128)):
        assert source(other) == "heuristic"
    assert plan.choose("matmul", **shape).source == "heuristic"


def test_kernels_for_several_products_refuse_quantised_weights():
    q = quantised("int8", 64, 64, 64)
    x = jnp.zeros((1, 64), jnp.float32)
    norm = RMSNorm(jnp.ones((64,), jnp.float32), EPS)
    with pytest.raises(NotImplementedError, match="linear_chain: cannot do weights in int8"):
        linear_chain(
            *(x, x, None, 0),
            out=q,
            mlp_norm=norm,
            gate_up=jnp.zeros((64, 2, 64)),
            down=jnp.zeros((64, 64)),
            next_norm=norm,
            following=jnp.zeros((64, 64)),
            gate="silu",
        )


def test_bounds_of_the_tests_reject_a_wrong_zero_point():
    """An int4 product whose zero is off by one in a single group is outside the tolerance."""
    case = Case(k=256, group=64)
    operands = _operands(case)
    w = operands["w"]
    zeros = np.full(w.scales.shape, 8, np.float32)
    zeros[2] += 1
    wrong = np.asarray(matmul(operands["x"], dataclasses.replace(w, zeros=zeros)))
    exact = oracle.matmul(operands["x"], exact_weight(w))
    row = tolerance(case.dtype, case.k)
    with pytest.raises(AssertionError, match="wrong"):
        assert_within(wrong, exact.value, (row.sum + 2 * row.rounding) * exact.magnitude)
