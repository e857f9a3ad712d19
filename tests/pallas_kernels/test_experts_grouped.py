"""The grouped product of experts: sorting, interpreted without races, compiled, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.experts import Routing, moe, moe_reference, route
from fdjax.pallas_kernels.experts.hopper import grouped
from fdjax.pallas_kernels.experts.hopper.grouped import moe_grouped, sorted_by_expert
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, random_quantised

from . import oracle
from .test_experts import assert_moe
from .test_experts_mosaic import case, interpret

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

H100 = Plan(device_kind="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))


@pytest.fixture
def few_blocks(monkeypatch):
    """Give each block several tiles, and interpret no idle blocks, which takes most of the time."""
    # The interpreter of JAX 0.11 wants a block to wait for all arrivals, also for the last ones.
    if jax.__version_info__ >= (0, 12):
        monkeypatch.setattr(grouped, "MULTIPROCESSORS", 3)


def random_experts(m, count, chosen, idle=0.0):
    """Experts [M,k] of rows, some of which choose none."""
    rng = np.random.default_rng(m)
    experts = np.stack([rng.permutation(count)[:chosen] for _ in range(m)]).astype(np.int32)
    experts[rng.random(m) < idle] = count
    return experts


@pytest.mark.parametrize(
    ("m", "count", "chosen", "idle"),
    [(1, 4, 2, 0.0), (40, 5, 2, 0.3), (300, 8, 8, 0.0), (500, 128, 3, 0.5), (7, 60, 4, 1.0)],
)
def test_pairs_are_sorted_by_expert(m, count, chosen, idle):
    experts = random_experts(m, count, chosen, idle)
    groups = jax.device_get(jax.jit(sorted_by_expert, static_argnums=1)(experts, count))
    has_expert = experts < count
    places = groups.places[has_expert]
    assert len(set(places.tolist())) == len(places)
    assert (groups.places[~has_expert] == len(groups.rows)).all()
    row = np.broadcast_to(np.arange(m)[:, None], experts.shape)[has_expert]
    np.testing.assert_array_equal(groups.rows[places], row)
    seen = {}
    for expert, first, rows in groups.tiles[: groups.count[0]]:
        assert first % 8 == 0 and rows > 0
        seen |= dict.fromkeys(range(first, first + min(rows, 128)), expert)
    # The places of the pairs are the rows of the tiles, and each is in a tile of its expert.
    assert {p: seen[p] for p in places.tolist()} == seen
    np.testing.assert_array_equal([seen[p] for p in places.tolist()], experts[has_expert])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "gate"),
    [
        pytest.param(
            *(dict(m=40, experts=5, width=192), "silu"),  # two pieces of columns
            marks=pytest.mark.soak,
        ),
        (dict(m=140, experts=2, biased=True, hidden=192), "clamped_swiglu"),  # partial tiles
    ],
    ids=str,
)
def test_interpreted_without_races(sizes, gate, few_blocks):
    arrays = case(**sizes)
    routing = Routing(len(arrays["down"]), 2, normalised=True)
    names = [name for name in arrays if name not in ("x", "logits")]
    weights = [arrays[name] for name in names]

    def run(x, logits):
        return moe_grouped(x, *route(logits, routing), *weights, gate=gate)

    y = interpret(run, arrays["x"], arrays["logits"])
    assert_moe(y, oracle.moe(**arrays, routing=routing, gate=gate), "bfloat16")


@pytest.mark.slow
def test_interpreted_with_rows_that_choose_nothing(few_blocks):
    """They get 0, and an expert that nobody chooses may be NaN."""
    arrays = case(40)
    experts = np.where(np.arange(40)[:, None] % 3 == 0, 6, [[2, 4]]).astype(np.int32)
    weights = jnp.full((40, 2), 0.5)
    idle = jnp.array([0, 1, 3, 5])
    gate_up, down = (arrays[name].at[idle].set(jnp.nan) for name in ("gate_up", "down"))
    y = interpret(moe_grouped, arrays["x"], experts, weights, gate_up, down, gate="silu")
    logits = jnp.zeros((40, 6)).at[:, jnp.array([2, 4])].set(50.0)
    exact = oracle.moe(**arrays | {"logits": logits}, routing=Routing(6, 2, True), gate="silu")
    live = (np.arange(40) % 3 > 0)[:, None]
    assert_moe(y, type(exact)(live * exact.value, live * exact.magnitude), "bfloat16")


@pytest.mark.deviceless
@pytest.mark.parametrize("form", [None, WeightFormat("fp4", 32, scales="float8_e8m0fnu")], ids=str)
def test_compiles_without_spills(form, monkeypatch, capfd):
    """The sizes of Qwen3-30B-A3B, and of gpt-oss-20b, whose experts are dequantised first."""
    from deviceless import compile_for, kernel_names

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    array, m = jax.ShapeDtypeStruct, 1024
    width, hidden, count, chosen = (2048, 768, 128, 8) if form is None else (2880, 2880, 32, 4)
    shapes = (width, 2, hidden), (hidden, width)
    if form is None:
        weights = [array((count, *shape), jnp.bfloat16) for shape in shapes]
    else:
        empty = [functools.partial(form.empty, shape, (count,)) for shape in shapes]
        weights = [jax.eval_shape(make) for make in empty]
    run = functools.partial(moe, routing=Routing(count, chosen), gate="silu", plan=H100)
    operands = array((m, width), jnp.bfloat16), array((m, count), jnp.float32), *weights
    names = kernel_names(compile_for("h100", run, *operands))
    assert [name for name in names if "grouped" in name] == [
        "moe_grouped_up_kernel",
        "moe_grouped_down_kernel",
    ]
    printed = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in printed
    assert not [
        line for line in printed.splitlines() if "spill" in line and " 0 bytes sp" not in line
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("m", [33, 128, 1000])
def test_on_a_gpu(m, quantised):
    """The reference in fp32 stands for the oracle, which would take minutes on the host."""
    arrays = case(m, experts=16, width=512, hidden=320, biased=True)
    routing = Routing(16, 4, normalised=True)
    dense = dict(arrays)
    if quantised:
        form = WeightFormat("fp4", 32, scales="float8_e8m0fnu")
        for i, name in enumerate(("gate_up", "down")):
            empty = form.empty(arrays[name].shape[1:], (16,))
            arrays[name] = random_quantised(jax.random.key(i), empty, 512**-0.5)
            dense[name] = jax.vmap(functools.partial(dequantise, dtype="float32"))(arrays[name])
    run = functools.partial(moe, routing=routing, gate="silu", implementation="mosaic_gpu")
    y = np.asarray(jax.jit(run)(**arrays), np.float32)
    reference = jax.jit(functools.partial(moe_reference, routing=routing, gate="silu"))
    want = np.asarray(reference(**dense))
    assert np.sqrt(np.mean((y - want) ** 2)) < 2**-7 * np.sqrt(np.mean(want**2))
    # A row's bits do not depend on the others.
    some = {name: arrays[name][:33] if name in ("x", "logits") else a for name, a in arrays.items()}
    np.testing.assert_array_equal(np.float32(jax.jit(run)(**some)), y[:33])
