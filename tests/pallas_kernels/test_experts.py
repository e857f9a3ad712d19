"""`moe` against the float64 oracle: routing rules, ties, experts that nobody or all rows choose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.experts import ROUTING_FEATURES, Routing, moe, moe_reference, route
from fdjax.pallas_kernels.experts.xla import MOE_XLA, moe_xla, tile_rows
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import (
    QTensor,
    WeightFormat,
    dequantise,
    random_quantised,
)
from marks import slow_unless_fast

from . import oracle
from .implementations import PLATFORMS, on
from .tolerance import assert_same_bits, assert_within, tolerance

pytestmark = pytest.mark.usefixtures("quick_compiles")


def soak(*values):
    """A case that says little more than those beside it."""
    return pytest.param(*values, marks=pytest.mark.soak)


RULES = {
    "plain": {},
    "normalised": {"normalised": True},
    "sigmoid": {"sigmoid": True, "normalised": True, "scale": 2.5},
    "sigmoid alone": {"sigmoid": True},
    "biased": {"sigmoid": True, "biased": True, "normalised": True},
    "groups": dict(
        sigmoid=True, biased=True, normalised=True, scale=1.8, groups=3, chosen_groups=2
    ),
    "groups of a softmax": {"groups": 2, "chosen_groups": 1},
}


def operands(m, experts=6, width=20, hidden=12, dtype="float32", seed=0):
    """x, logits, gate_up, down and a bias."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    return (
        normal(m, width),
        normal(m, experts).astype(jnp.float32),
        normal(experts, width, 2, hidden, scale=width**-0.5),
        normal(experts, hidden, width, scale=hidden**-0.5),
        normal(experts).astype(jnp.float32),
    )


def run(x, logits, gate_up, down, bias=None, *, live=None, plan=None, **options):
    return jax.jit(functools.partial(moe, plan=plan, **options))(
        x, logits, gate_up, down, bias=bias, live=live
    )


INVARIANT = Plan(batch_invariant=True)


@pytest.mark.parametrize("implementation", PLATFORMS)
@pytest.mark.parametrize("plan", [None, INVARIANT], ids=["any", "invariant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [1, soak(7), soak(40), 150])
def test_against_float64(m, dtype, plan, implementation):
    x, logits, gate_up, down, _ = operands(m, dtype=dtype, seed=m)
    routing = Routing(6, 2, normalised=True)
    exact = oracle.moe(x, logits, gate_up, down, routing=routing, gate="silu")
    with on(implementation.platform):
        y = run(x, logits, gate_up, down, routing=routing, gate="silu", plan=plan)
    assert y.dtype == x.dtype
    assert_moe(y, exact, dtype)
    if dtype == "float32":
        y = moe_reference(x, logits, gate_up, down, routing=routing, gate="silu")
        assert_moe(y, exact, dtype)


def assert_moe(y, exact, dtype):
    """Each product rounds its operands and its result; `magnitude` bounds what this changes."""
    one = tolerance(dtype, 32)
    bound = (4 * one.sum + 4 * one.rounding) * exact.magnitude
    assert_within(y, exact.value, bound + one.rounding * np.abs(exact.value), "moe")


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["gelu", soak("gelu_tanh")])
@pytest.mark.parametrize("rule", slow_unless_fast(RULES, {"biased", "groups of a softmax"}))
def test_every_rule_of_routing(rule, gate):
    routing = Routing(6, 2, **RULES[rule])
    *arrays, bias = operands(33, seed=3)
    bias = bias if routing.biased else None
    exact = oracle.moe(*arrays, bias=bias, routing=routing, gate=gate)
    for plan in (None, INVARIANT):
        assert_moe(run(*arrays, bias, routing=routing, gate=gate, plan=plan), exact, "float32")
    y = moe_reference(*arrays, bias=bias, routing=routing, gate=gate)
    assert_moe(y, exact, "float32")


def test_the_rules_have_every_feature():
    used = frozenset().union(*(Routing(6, 2, **rule).features for rule in RULES.values()))
    assert used == ROUTING_FEATURES


def test_a_softmax_over_the_chosen_is_normalised():
    logits = operands(50)[1]
    _, weights = route(logits, Routing(6, 3, normalised=True))
    best = np.sort(np.asarray(logits, np.float64), axis=1)[:, :2:-1]
    want = np.exp(best) / np.exp(best).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@pytest.mark.parametrize("rule", ["plain", "sigmoid"])
def test_of_equal_logits_the_lower_index_is_chosen(rule):
    logits = jnp.array([[0.0, 1.0, 1.0, 1.0, 0.5, 1.0], [2.0] * 6, [-1e30] * 6])
    experts, weights = jax.jit(lambda a: route(a, Routing(6, 3, **RULES[rule])))(logits)
    np.testing.assert_array_equal(experts, [[1, 2, 3], [0, 1, 2], [0, 1, 2]])
    assert np.isfinite(weights).all()


def test_logits_that_one_softmax_rounds_to_equal_scores_stay_in_order():
    """The scores of the last two are both 0 in fp32."""
    experts, _ = route(jnp.array([[200.0, -10.0, -5.0]]), Routing(3, 2))
    np.testing.assert_array_equal(experts, [[0, 2]])


def biases(experts=6, width=20, hidden=12, seed=5):
    rng = np.random.default_rng(seed)
    shapes = {"gate_up_bias": (experts, 2, hidden), "down_bias": (experts, width)}
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [pytest.param(None, marks=pytest.mark.slow), INVARIANT])
@pytest.mark.parametrize("gate", [soak("silu"), "clamped_swiglu"])
def test_biases_and_the_clamped_gate(gate, plan):
    x, logits, gate_up, down, _ = operands(17)
    arrays = 6 * x, logits, gate_up, down  # some results exceed the limit
    options = {"routing": Routing(6, 2, normalised=True), "gate": gate, **biases()}
    exact = oracle.moe(*arrays, **options)
    assert_moe(run(*arrays, plan=plan, **options), exact, "float32")
    assert_moe(moe_reference(*arrays, **options), exact, "float32")


KINDS = {
    "int4": WeightFormat("int4", 16, zeros=True),
    "int8": WeightFormat("int8", 32),
    "fp8": WeightFormat("fp8", 16),
    "fp4": WeightFormat("fp4", 32, scales="float8_e8m0fnu"),
}


def slow_unless_fp4():
    return [kind if kind == "fp4" else soak(kind) for kind in KINDS]


@functools.cache
def quantised_weights(kind):
    keys = jax.random.split(jax.random.key(0))
    empty = [KINDS[kind].empty(shape, (6,)) for shape in ((64, 2, 32), (32, 64))]
    return [random_quantised(*pair, 0.15) for pair in zip(keys, empty, strict=True)]


def quantised_operands(m, kind):
    """Operands of `moe` with quantised weights, and the weights dequantised."""
    x, logits, *_ = operands(m, width=64, hidden=32)
    weights = quantised_weights(kind)
    dense = [jax.vmap(lambda w: dequantise(w, "float32"))(w) for w in weights]
    return x, logits, weights, dense


@pytest.mark.parametrize(
    ("kind", "m", "plan"),
    [
        pytest.param("fp4", 3, INVARIANT, marks=pytest.mark.slow),
        *(soak(kind, 3, INVARIANT) for kind in ("int4", "int8", "fp8")),
        soak("fp4", 140, INVARIANT),
        soak("fp4", 3, None),
        *(
            soak(kind, m, plan)
            for kind in ("int4", "int8", "fp8")
            for m, plan in ((140, INVARIANT), (3, None), (140, None))
        ),
    ],
)
def test_quantised_experts_give_the_bits_of_dequantised_ones(kind, m, plan):
    x, logits, weights, dense = quantised_operands(m, kind)
    assert 0.05 < np.std(dense[0]) < 0.5
    options = {"routing": Routing(6, 2), "gate": "silu", "plan": plan}
    y = run(x, logits, *weights, **options)
    exact = oracle.moe(x, logits, *dense, routing=options["routing"], gate="silu")
    assert_moe(y, exact, "float32")
    assert_same_bits(y, run(x, logits, *dense, **options))


@pytest.mark.slow
def test_only_one_of_both_weights_is_quantised():
    x, logits, weights, dense = quantised_operands(3, "int4")
    options = {"routing": Routing(6, 2), "gate": "silu"}
    want = run(x, logits, *dense, **options)
    assert_same_bits(run(x, logits, weights[0], dense[1], **options), want)
    assert_same_bits(run(x, logits, dense[0], weights[1], **options), want)


def spoiled(q: QTensor, *experts: int) -> QTensor:
    """Weights with NaN in the scales and codes of some experts."""
    at = jnp.array(experts)
    scales = q.scales.at[at].set(jnp.nan)
    zeros = None if q.zeros is None else q.zeros.at[at].set(jnp.nan)
    words = q.words.at[at].set(-1)  # in fp8, all codes are NaN
    return dataclasses.replace(q, words=words, scales=scales, zeros=zeros)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_unless_fp4())
@pytest.mark.parametrize("m", [5, soak(130)])
def test_scales_of_an_expert_that_nobody_chose_may_be_nan(kind, m):
    x, logits, weights, _ = quantised_operands(m, kind)
    logits = logits.at[:, jnp.array([0, 4])].set(-1e9)
    options = {"routing": Routing(6, 2), "gate": "silu", "plan": INVARIANT}
    want = run(x, logits, *weights, **options)
    assert np.isfinite(want).all()
    nan = [spoiled(w, 0, 4) for w in weights]
    assert_same_bits(run(x, logits, *nan, **options), want)
    # The rows that choose it get NaN, and no others.
    logits = logits.at[1, 4].set(1e9)
    y = np.asarray(run(x, logits, *nan, **options))
    assert np.isnan(y[1]).all()
    assert_same_bits(np.delete(y, 1, axis=0), np.delete(np.asarray(want), 1, axis=0))


@pytest.mark.parametrize("m", [soak(3), soak(200)])
def test_all_rows_on_one_quantised_expert(m):
    x, logits, weights, dense = quantised_operands(m, "fp4")
    logits = logits.at[:, 5].set(50.0)
    options = {"routing": Routing(6, 1), "gate": "silu"}
    exact = oracle.moe(x, logits, *dense, **options)
    assert_moe(
        run(x, logits, *(spoiled(w, 0, 1, 2, 3, 4) for w in weights), **options), exact, "float32"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q: {"scales": q.scales[:, 1:]}, r"w\.scales must be \[6, 2, 2, 32\]"),
        (lambda q: {"words": q.words[:, :-1]}, r"w\.words must be \[6, 8, 2, 32\]"),
        (lambda q: {"words": q.words[:5]}, r"w\.words must be \[6, 8, 2, 32\]"),
        (lambda q: {"words": q.words.astype(jnp.float32)}, r"w\.words must be int32"),
        (lambda q: {"group": 48}, "group must divide K = 64"),
    ],
    ids=["scales", "words", "experts", "dtype", "group"],
)
def test_quantised_weights_that_do_not_fit(change, says):
    x, logits, *_ = operands(2, width=64, hidden=32)
    gate_up, down = quantised_weights("fp4")
    gate_up = dataclasses.replace(gate_up, **change(gate_up))
    with pytest.raises(ValueError, match=f"moe: {says}"):
        moe(x, logits, gate_up, down, routing=Routing(6, 2), gate="silu")


@pytest.mark.parametrize("keys", [{}, {"plan": INVARIANT}, {"implementation": "mosaic_gpu"}])
def test_no_rows(keys):
    x, logits, gate_up, down, _ = operands(2)
    for residual in (None, x[:0]):
        options = {"routing": Routing(6, 2), "gate": "silu", "residual": residual}
        y = moe(x[:0], logits[:0], gate_up, down, **options, **keys)
        assert (y.shape, y.dtype) == ((0, x.shape[1]), x.dtype)


def test_one_bias_alone():
    x, logits, gate_up, down, _ = operands(2)
    options = {"routing": Routing(6, 2), "gate": "silu"}
    with pytest.raises(ValueError, match="must be given together"):
        moe(x, logits, gate_up, down, down_bias=biases()["down_bias"], **options)
    with pytest.raises(ValueError, match=r"down_bias must be \[6, 20\]"):
        moe(x, logits, gate_up, down, **biases() | {"down_bias": jnp.zeros((6, 12))}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, INVARIANT], ids=["any", "invariant"])
@pytest.mark.parametrize("m", [soak(1), 5, 130])
def test_weights_of_an_expert_that_nobody_chose_are_not_read(m, plan):
    x, logits, gate_up, down, _ = operands(m)
    logits = logits.at[:, jnp.array([0, 4])].set(-1e9)
    options = {"routing": Routing(6, 2), "gate": "silu", "plan": plan}
    want = run(x, logits, gate_up, down, **options)
    for nobodys in (0, 4):
        gate_up, down = (a.at[nobodys].set(jnp.nan) for a in (gate_up, down))
    assert_same_bits(run(x, logits, gate_up, down, **options), want)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, INVARIANT], ids=["any", "invariant"])
def test_rows_that_are_not_live_read_no_expert(plan):
    x, logits, gate_up, down, _ = operands(7)
    logits = logits.at[:, 0].set(-1e9)
    options = {"routing": Routing(6, 2), "gate": "silu", "plan": plan}
    live = jnp.array([True, False, True, True, False, True, True])
    want = np.where(live[:, None], run(x, logits, gate_up, down, **options), 0.0)
    # Only rows that are not live choose the expert that is NaN.
    logits = logits.at[:, 0].set(jnp.where(live, -1e9, 1e9))
    gate_up, down = (a.at[0].set(jnp.nan) for a in (gate_up, down))
    assert_same_bits(run(x, logits, gate_up, down, live=live, **options), want)
    nothing = run(x, logits, gate_up, down, live=jnp.zeros(7, bool), **options)
    assert_same_bits(nothing, np.zeros_like(x))


@pytest.mark.parametrize("m", [soak(1), 3, soak(64), 200])
def test_all_rows_on_one_expert(m):
    x, logits, gate_up, down, _ = operands(m)
    logits = logits.at[:, 5].set(50.0)
    routing = Routing(6, 1)
    exact = oracle.moe(x, logits, gate_up, down, routing=routing, gate="silu")
    assert_moe(run(x, logits, gate_up, down, routing=routing, gate="silu"), exact, "float32")


def test_a_residual_is_added_to_the_rounded_result():
    """Whether an implementation adds it, as one whose `can` names it does, or `moe` itself."""
    x, logits, gate_up, down, _ = operands(4, dtype="bfloat16")
    arrays, residual = (x, logits, gate_up, down), 3 + x
    options = {"routing": Routing(6, 2), "gate": "silu"}
    y = run(*arrays, **options)
    assert_same_bits(run(*arrays, **options, residual=residual), residual + y)

    def fused(*operands, residual, **keywords):
        return 2 * residual

    own = dataclasses.replace(MOE_XLA, name="own", run=fused, can=MOE_XLA.can | {"residual"})
    plan = Plan(implementations=(own,), named=(("moe", "own"),))
    assert_same_bits(moe(*arrays, **options, residual=residual, plan=plan), 2 * residual)


def test_all_experts_of_every_row():
    *arrays, _ = operands(9)
    routing = Routing(6, 6, normalised=True)
    exact = oracle.moe(*arrays, routing=routing, gate="silu")
    assert_moe(run(*arrays, routing=routing, gate="silu"), exact, "float32")


def test_a_row_of_nan_spoils_no_other_row():
    x, logits, gate_up, down, _ = operands(9)
    options = {"routing": Routing(6, 2), "gate": "silu", "plan": INVARIANT}
    want = run(x, logits, gate_up, down, **options)
    x, logits = x.at[4].set(jnp.nan), logits.at[4].set(jnp.nan)
    y = np.asarray(run(x, logits, gate_up, down, **options))
    assert np.isnan(y[4]).all()
    assert_same_bits(np.delete(y, 4, axis=0), np.delete(np.asarray(want), 4, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((6, 20, 12), (1, 2, 9, 40, 127)),
        soak((32, 64, 48), (1, 3, 17, 100)),
        ((6, 20, 12), (128, 200)),
        soak((32, 512, 256), (1, 2, 8, 33, 127)),
        soak((5, 33, 7), (129, 300)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
@pytest.mark.usefixtures("full_compiles")
def test_bits_of_a_row_do_not_depend_on_the_others(sizes, rows, dtype):
    experts, width, hidden = sizes
    x, logits, gate_up, down, _ = operands(max(rows), experts, width, hidden, dtype)
    options = {"routing": Routing(experts, 2, True), "gate": "silu", "plan": INVARIANT}
    want = np.asarray(run(x, logits, gate_up, down, **options))
    rng = np.random.default_rng(0)
    for m in rows:
        some = rng.permutation(max(rows))[:m]
        assert_same_bits(run(x[some], logits[some], gate_up, down, **options), want[some], f"M{m}")


@pytest.mark.parametrize("tile", [1, soak(2), 8, soak(64)])
def test_tiles_of_any_height(tile):
    x, logits, gate_up, down, _ = operands(21)
    routing = Routing(6, 2)
    exact = oracle.moe(x, logits, gate_up, down, routing=routing, gate="silu")
    chosen = route(logits, routing)
    assert_moe(moe_xla(x, *chosen, gate_up, down, gate="silu", tile=tile), exact, "float32")


def test_the_height_of_tiles():
    routing = Routing(8, 2)
    assert [tile_rows(m, routing, False) for m in (1, 4, 16, 100, 4096)] == [1, 2, 8, 32, 128]
    assert {tile_rows(m, routing, True) for m in range(1, 128)} == {8}
    assert {tile_rows(m, routing, True) for m in (128, 4096)} == {32}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logits": (5, 7)}, r"logits must be \[5, 6\] for 6 experts beside x \[5, 20\]"),
        ({"gate_up": (6, 20, 12)}, r"gate_up must be \[6, 20, 2, 12\]"),
        ({"gate_up": (5, 20, 2, 12)}, r"gate_up must be \[6, 20, 2, 12\]"),
        ({"down": (6, 12, 21)}, r"down must be \[6, 12, 20\]"),
        ({"down": (6, 12)}, r"x and down must be \[M,E\] and \[X,F,E\]"),
        ({"bias": (6,)}, "bias must be given if routing.biased, which is False"),
        ({"live": (6,)}, r"live must be \[5\], got \[6\]"),
        (
            {"residual": (5, 21)},
            r"residual must be float32 \[5, 20\] like x, got float32 \[5, 21\]",
        ),
    ],
    ids=str,
)
def test_shapes_that_disagree(changes, says):
    x, logits, gate_up, down, _ = operands(5)
    arrays = {"x": x, "logits": logits, "gate_up": gate_up, "down": down}
    arrays |= {name: jnp.zeros(shape) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=says):
        moe(**arrays, routing=Routing(6, 2), gate="silu")


def test_what_it_cannot_do():
    x, logits, gate_up, down, _ = operands(5)
    options = {"routing": Routing(6, 2), "gate": "silu"}
    with pytest.raises(ValueError, match="one floating-point dtype, got bfloat16, float32"):
        moe(x.astype(jnp.bfloat16), logits, gate_up, down, **options)
    with pytest.raises(ValueError, match="gate must be one of silu"):
        moe(x, logits, gate_up, down, **options | {"gate": "relu"})
    with pytest.raises(NotImplementedError, match="no 'cudnn' implementation"):
        moe(x, logits, gate_up, down, **options, implementation="cudnn")
    with pytest.raises(ValueError, match=r"gate_up must be \[6, 20, 2, 12\].*got \[20, 2, 12\]"):
        moe(x, logits, WeightFormat("int4", 4).empty((20, 2, 12)), down, **options)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chosen": 0}, "must choose 1 to 6 of the experts, got 0"),
        ({"chosen": 7}, "must choose 1 to 6 of the experts, got 7"),
        ({"groups": 4}, "groups of the same size"),
        ({"groups": 2, "chosen_groups": 3}, "must choose 1 to 2 of the groups"),
        ({"groups": 6, "chosen_groups": 6}, "must have 2 or more each"),
        ({"groups": 3, "chosen": 3}, "1 groups of 2 experts must have"),
    ],
    ids=str,
)
def test_routing_that_makes_no_sense(fields, says):
    with pytest.raises(ValueError, match=says):
        Routing(**{"experts": 6, "chosen": 2} | fields)


def test_a_rule_that_nobody_knows_is_refused():
    @dataclasses.dataclass(frozen=True)
    class NewRouting(Routing):
        rule_nobody_knows: bool = False

    x, logits, gate_up, down, _ = operands(5)
    with pytest.raises(NotImplementedError, match="cannot do rule_nobody_knows"):
        moe(
            *(x, logits, gate_up, down),
            routing=NewRouting(6, 2, rule_nobody_knows=True),
            gate="silu",
        )
