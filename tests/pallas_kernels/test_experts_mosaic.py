"""The kernels of chosen experts: interpreted without races, and on a GPU at the sizes of models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.experts import (
    Routing,
    moe,
    moe_features,
    moe_key,
    moe_reference,
    route,
)
from fdjax.pallas_kernels.experts.hopper.chosen import (
    CANDIDATES,
    PACKED_CANDIDATES,
    MoeConfig,
    moe_chosen,
    slot_tables,
)
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, in_layout, random_quantised

from . import oracle
from .test_experts import assert_moe, operands, spoiled
from .tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

try:
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
except ImportError:  # it has no public name, and its place differs between versions
    get_races = None

WIDE = MoeConfig(128, 64, 2, 128, 64, 2)
DEEP = MoeConfig(64, 128, 3, 64, 128, 3)
# The interpreter has no clusters.
ALONE = MoeConfig(sums=0)
SMALL = {"experts": 6, "width": 128, "hidden": 64}


def case(m, *, dtype="bfloat16", biased=False, **sizes):
    """Operands of `moe` by name, in sizes that the kernels support."""
    x, logits, gate_up, down, _ = operands(m, dtype=dtype, **SMALL | sizes)
    arrays = {"x": x, "logits": logits, "gate_up": gate_up, "down": down}
    if biased:
        rng = np.random.default_rng(1)
        for name, like in (("gate_up_bias", gate_up[:, 0]), ("down_bias", down[:, 0])):
            arrays[name] = jnp.asarray(rng.normal(size=like.shape), dtype)
    return arrays


def kernels(x, logits, gate_up, down, gate_up_bias=None, down_bias=None, *, routing, **options):
    chosen = route(logits, routing)
    return moe_chosen(x, *chosen, gate_up, down, gate_up_bias, down_bias, **options)


def interpret(function, *args, **options) -> np.ndarray:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = jax.device_get(function(*args, **options))
    assert get_races is None or not get_races().races_found
    return y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "chosen", "gate", "config"),
    [
        pytest.param(  # goes around the ring
            *(dict(m=1, width=320), 2, "silu", ALONE), marks=pytest.mark.soak
        ),
        (
            dict(m=3, biased=True, width=192, experts=2),
            1,
            "clamped_swiglu",
            DEEP,
        ),  # K ends within a tile
        pytest.param(  # padded rows, partial tiles
            *(dict(m=12, width=192, hidden=192, experts=2), 1, "gelu", WIDE),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(m=32), 6, "silu", None, marks=pytest.mark.soak),
        pytest.param(dict(m=8, dtype="float16"), 3, "gelu_tanh", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_interpreted_without_races(sizes, chosen, gate, config):
    arrays = case(**sizes)
    routing = Routing(len(arrays["down"]), chosen, normalised=True)
    y = interpret(kernels, **arrays, routing=routing, gate=gate, config=config)
    exact = oracle.moe(**arrays, routing=routing, gate=gate)
    assert y.dtype == arrays["x"].dtype
    assert_moe(y, exact, str(y.dtype))


@pytest.mark.slow
def test_interpreted_with_rows_that_choose_nothing():
    """They get 0. An expert that only they would choose, and one that nobody does, may be NaN."""
    arrays, routing = case(5), Routing(6, 1)
    experts = jnp.array([[6], [5], [2], [5], [6]], jnp.int32)
    weights = jnp.array([[jnp.nan], [0.5], [1.0], [2.0], [1.0]])
    gate_up, down = (a.at[jnp.array([0, 1])].set(jnp.nan) for a in operands_of(arrays))
    y = interpret(moe_chosen, arrays["x"], experts, weights, gate_up, down, gate="silu")
    logits = jnp.zeros((5, 6)).at[jnp.arange(5), experts[:, 0]].set(50.0)
    exact = oracle.moe(**arrays | {"logits": logits}, routing=routing, gate="silu")
    scale = np.array([0.0, 0.5, 1.0, 2.0, 0.0])[:, None]
    assert_moe(y, type(exact)(scale * exact.value, scale * exact.magnitude), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(64, marks=pytest.mark.soak), 12])
def test_one_row_finds_its_experts(count):
    """With ties: the logits are whole numbers, all negative. A row that is not live gets 0."""
    arrays, routing = case(1, experts=count), Routing(count, 4, normalised=True)
    logits = arrays["logits"] = arrays["logits"].round() - 9
    chosen = route(logits, routing)
    run = functools.partial(interpret, moe_chosen, gate="silu", config=ALONE)
    run = functools.partial(run, arrays["x"])
    y = run(*chosen, *operands_of(arrays), logits=logits, live=jnp.array([True]))
    assert_moe(y, oracle.moe(**arrays, routing=routing, gate="silu"), "bfloat16")
    np.testing.assert_array_equal(run(*chosen, *operands_of(arrays)), y)
    # As `route` and `only_live` make them for a row that is not live.
    chosen = jnp.full_like(chosen[0], count), chosen[1]
    assert not run(*chosen, *operands_of(arrays), logits=logits, live=jnp.array([False])).any()


def operands_of(arrays):
    return arrays["gate_up"], arrays["down"]


@pytest.mark.parametrize("m", [1, 2, 9, 32])
def test_slots_are_the_distinct_experts(m):
    rng = np.random.default_rng(m)
    for count, chosen in ((8, 2), (3, 3), (128, 8)):
        experts = np.stack([rng.permutation(count)[:chosen] for _ in range(m)]).astype(np.int32)
        experts[rng.random(m) < 0.3] = count
        slots, pairs = jax.device_get(jax.jit(slot_tables, static_argnums=1)(experts, count))
        assert slots.shape == (min(count, m * chosen),) and pairs.shape == (*slots.shape, 32)
        live = slots[slots >= 0]
        assert sorted(live) == np.unique(experts[experts < count]).tolist()
        want = [
            [next((i * chosen + j for j in range(chosen) if row[j] == one), -1) for one in live]
            for i, row in enumerate(experts)
        ]
        np.testing.assert_array_equal(pairs[slots >= 0].T[:m], want)
        assert (pairs[:, m:] == -1).all()


HOPPER = Plan(device_kind="some Hopper", compute_capability=(9, 0))


def test_it_runs_on_hopper_in_the_configuration_of_a_table():
    routing = Routing(128, 8, normalised=True)
    key = moe_key(8, 2048, 768, routing, 2)
    features = moe_features(routing, "silu", biases=False)
    assert HOPPER.choose("moe", features, **key) == Choice("mosaic_gpu", source="heuristic")
    for plan in (Plan(), Plan("some Ampere", (8, 0)), HOPPER.with_xla("moe")):
        assert plan.choose("moe", features, **key).implementation == "xla"
    config = tuple(sorted(dataclasses.asdict(WIDE).items()))
    choice = Choice("mosaic_gpu", config, source="table")
    entry = Entry("moe", tuple(sorted(key.items())), choice)
    plan = dataclasses.replace(HOPPER, table=(entry,))
    assert plan.choose("moe", features, **key) == choice
    run = functools.partial(moe, routing=routing, gate="silu", plan=plan)
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = (8, 2048), (8, 128), (128, 2048, 2, 768), (128, 768, 2048)
    traced = str(jax.make_jaxpr(run)(*map(bf16, shapes)))
    assert "moe_up_kernel" in traced and "moe_down_kernel" in traced


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (dict(m=2, hidden=96), "needs E and F that are multiples of 64, got 128 and 96"),
        (dict(m=2, dtype="float32"), "needs bfloat16 or float16, got float32"),
    ],
    ids=str,
)
def test_sizes_that_it_cannot_do(sizes, says):
    run = functools.partial(
        moe, routing=Routing(6, 2), gate="silu", implementation="mosaic_gpu", plan=HOPPER
    )
    with pytest.raises(NotImplementedError, match=f"moe: mosaic_gpu {says}"):
        jax.eval_shape(run, **case(**sizes))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (WeightFormat("int4", 32), "cannot do weight.layout.plain"),
        (WeightFormat("int4", 16, layout="bricks"), "takes groups of 32, .* got 16"),
    ],
    ids=str,
)
def test_formats_that_it_cannot_do(form, says):
    run = functools.partial(
        moe, routing=Routing(6, 2), gate="silu", implementation="mosaic_gpu", plan=HOPPER
    )
    arrays = case(2) | {"gate_up": form.empty((128, 2, 64), (6,))}
    with pytest.raises(NotImplementedError, match=f"moe: mosaic_gpu {says}"):
        jax.eval_shape(run, **arrays)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(up_n=192), "up_n must be 64 or 128, got 192"),
        (dict(down_k=32), "down_k must be 64, 128, 192 or 256, got 32"),
        (dict(down_stages=1), "down_stages must be at least 2, got 1"),
    ],
)
def test_configs_that_cannot_be(change, says):
    with pytest.raises(ValueError, match=f"moe: {says}"):
        MoeConfig(**change)


# E, F, X, k.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "OLMoE": (2048, 1024, 64, 8),
}


@functools.cache
def model_weights(name):
    width, hidden, count, _ = MODELS[name]
    keys = jax.random.split(jax.random.key(0))
    shapes = (count, width, 2, hidden), (count, hidden, width)
    made = (
        jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
        for key, shape in zip(keys, shapes, strict=True)
    )
    return tuple(made)


def model_rows(name, m):
    width, _, count, chosen = MODELS[name]
    x, logits = (jax.random.normal(jax.random.key(m), (m, n), jnp.float32) for n in (width, count))
    return x.astype(jnp.bfloat16), logits, Routing(count, chosen, normalised=True)


@functools.partial(jax.jit, static_argnames=("routing", "config", "gate"))
def on_device(x, logits, gate_up, down, *, routing, config=None, gate="silu"):
    return kernels(x, logits, gate_up, down, routing=routing, gate=gate, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 16, 32])
@pytest.mark.parametrize("name", MODELS)
def test_models_on_a_gpu(name, m):
    """The reference in fp32 stands for the oracle, which would take minutes on the host."""
    x, logits, routing = model_rows(name, m)
    weights = model_weights(name)
    y = np.asarray(on_device(x, logits, *weights, routing=routing), np.float32)
    reference = jax.jit(functools.partial(moe_reference, routing=routing, gate="silu"))
    want = np.asarray(reference(x, logits, *weights))
    # Hidden values, results of experts and the sum are each rounded to 8 bits.
    assert np.sqrt(np.mean((y - want) ** 2)) < 2**-7 * np.sqrt(np.mean(want**2))
    assert np.abs(y - want).max() < 2**-6 * np.abs(want).max()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CANDIDATES[1], CANDIDATES[3]], ids=str)
def test_bits_on_a_gpu_depend_on_neither_rows_nor_tiling(config):
    """Experts that nobody chose are NaN in the smaller batches."""
    x, logits, routing = model_rows("OLMoE", 32)
    weights = model_weights("OLMoE")
    want = np.asarray(on_device(x, logits, *weights, routing=routing))
    assert_same_bits(on_device(x, logits, *weights, routing=routing, config=config), want)
    for rows in ([5], [31, 0, 7], list(range(4, 17))):
        at = jnp.array(rows)
        experts, _ = route(logits[at], routing)
        idle = jnp.ones(64, bool).at[experts.reshape(-1)].set(False)[:, None, None]
        gate_up = jnp.where(idle[..., None], jnp.bfloat16(jnp.nan), weights[0])
        down = jnp.where(idle, jnp.bfloat16(jnp.nan), weights[1])
        y = on_device(x[at], logits[at], gate_up, down, routing=routing, config=config)
        assert_same_bits(y, want[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_all_rows_on_one_expert_on_a_gpu(config):
    arrays, routing = case(32, width=320, hidden=192), Routing(6, 1)
    arrays["logits"] = arrays["logits"].at[:, 4].set(50.0)
    y = on_device(**arrays, routing=routing, config=config)
    assert_moe(y, oracle.moe(**arrays, routing=routing, gate="silu"), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["clamped_swiglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_biases_and_gates_on_a_gpu(gate, dtype):
    arrays, routing = case(17, biased=True, dtype=dtype, hidden=192), Routing(6, 3)
    y = jax.jit(functools.partial(kernels, routing=routing, gate=gate))(**arrays)
    assert_moe(y, oracle.moe(**arrays, routing=routing, gate=gate), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "MXFP4"])
@pytest.mark.parametrize("live", [True, False])
def test_a_single_row_on_a_gpu(form, live):
    """One row: the kernels find the experts, and sum their results and the residual."""
    width, hidden = 640, 384
    arrays = case(1, biased=True, experts=12, width=width, hidden=hidden)
    arrays["logits"] -= 9.0
    dense = dict(arrays)
    if form:
        for name, shape in (("gate_up", (width, 2, hidden)), ("down", (hidden, width))):
            arrays[name], dense[name] = packed(FORMATS[form], shape, 0, experts=12)
    routing, residual = Routing(12, 4, normalised=True), 1 + arrays["x"]
    options = {"routing": routing, "gate": "clamped_swiglu", "implementation": "mosaic_gpu"}
    y = jax.jit(lambda arrays: moe(**arrays, **options, live=jnp.array([live])))(arrays)
    both = jax.jit(
        lambda arrays: moe(**arrays, **options, live=jnp.array([live]), residual=residual)
    )(arrays)
    assert_same_bits(both, residual + y)
    if not live:
        assert not y.any()
        return
    assert_moe(y, oracle.moe(**dense, routing=routing, gate="clamped_swiglu"), "bfloat16")


FORMATS = {
    "int4": WeightFormat("int4", 64, scales="bfloat16"),
    "int4 with zeros": WeightFormat("int4", 32, zeros=True),
    "int8": WeightFormat("int8", 128),
    "fp8": WeightFormat("fp8", 64, scales="bfloat16"),
    "MXFP4": WeightFormat("fp4", 32, scales="float8_e8m0fnu"),
    "fp4": WeightFormat("fp4", 32, scales="bfloat16"),
}


def packed(form, shape, seed, experts=6):
    """Random weights in bricks, with scales that differ, and what they are in fp32."""
    keys = jax.random.split(jax.random.key(seed))
    q = random_quantised(keys[0], form.empty(shape, (experts,)), shape[0] ** -0.5)
    steps = jax.random.randint(keys[1], q.scales.shape, -2, 2).astype(jnp.float32)
    scales = q.scales.astype(jnp.float32) * jnp.exp2(steps)
    q = dataclasses.replace(q, scales=scales.astype(q.scales.dtype))
    dense = jax.vmap(lambda one: dequantise(one, "float32"))(q)
    return in_layout(q, "bricks"), dense


def quantised_case(m, form, *, width=640, hidden=384, dtype="bfloat16"):
    """Operands of `moe` in bricks, and the same with dequantised weights."""
    arrays = case(m, width=width, hidden=hidden, dtype=dtype, biased=True)
    shapes = {"gate_up": (width, 2, hidden), "down": (hidden, width)}
    both = {name: packed(form, shape, i) for i, (name, shape) in enumerate(shapes.items())}
    own = arrays | {name: q for name, (q, _) in both.items()}
    return own, arrays | {name: dense for name, (_, dense) in both.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 32])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_quantised_experts_on_a_gpu(form, m):
    """Experts that nobody chose have scales and codes that are NaN."""
    arrays, dense = quantised_case(m, form)
    routing, gate = Routing(6, 2, normalised=True), "clamped_swiglu"
    arrays["logits"] = dense["logits"] = dense["logits"].at[:, jnp.array([0, 3])].set(-1e9)
    for name in ("gate_up", "down"):
        arrays[name] = spoiled(arrays[name], 0, 3)
    run = jax.jit(functools.partial(kernels, routing=routing, gate=gate))
    assert_moe(run(**arrays), oracle.moe(**dense, routing=routing, gate=gate), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("config", PACKED_CANDIDATES, ids=str)
def test_tilings_of_quantised_experts_on_a_gpu(config):
    run = jax.jit(functools.partial(kernels, routing=Routing(6, 3), gate="silu", config=config))
    for form in (FORMATS["MXFP4"], FORMATS["int4 with zeros"]):
        arrays, dense = quantised_case(9, form)
        exact = oracle.moe(**dense, routing=Routing(6, 3), gate="silu")
        assert_moe(run(**arrays), exact, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("form", [FORMATS["int4"], FORMATS["MXFP4"]], ids=["int4", "MXFP4"])
def test_one_quantised_weight_in_fp16_on_a_gpu(form):
    arrays, dense = quantised_case(5, form, dtype="float16")
    routing = Routing(6, 2)
    for name in ("gate_up", "down"):
        half = dense[name].astype(jnp.float16)
        run = jax.jit(functools.partial(kernels, routing=routing, gate="silu"))
        exact = oracle.moe(**dense | {name: half}, routing=routing, gate="silu")
        assert_moe(run(**arrays | {name: half}), exact, "float16")


@pytest.mark.gpu
def test_reruns_on_a_gpu_have_the_same_bits():
    x, logits, routing = model_rows("Qwen3-30B-A3B", 32)
    weights = model_weights("Qwen3-30B-A3B")

    @jax.jit
    def differing(x, logits, gate_up, down):
        def run(x):
            options = {"routing": routing, "gate": "silu"}
            return kernels(x, logits, gate_up, down, **options)

        first = run(x)

        def compare(i, count):
            # The input depends on i, so that the run is not moved out of the loop.
            again = run(x + (0 * i).astype(x.dtype))
            return count + (again != first).any().astype(jnp.int32)

        return jax.lax.fori_loop(0, 300, compare, jnp.int32(0))

    assert differing(x, logits, *weights) == 0
