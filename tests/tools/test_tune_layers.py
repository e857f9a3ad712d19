"""The measurement of all layers in one launch is right. Programs are real, times are made up."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from any_size import ANY_SIZE
from fdjax.engine.mesh import Place
from fdjax.models import decoder, describe, layers_shape, parse_config, random_params
from fdjax.pallas_kernels.layers import DecodeLayersConfig
from fdjax.pallas_kernels.layers.decode_layers import layers_key
from fdjax.pallas_kernels.layers.hopper import decode_layers as hopper_layers
from fdjax.pallas_kernels.plan import Choice, Plan, as_entry
from fdjax.tools import tune_layers
from fdjax.tools.tune_layers import measure_layers, tolerance_of
from fdjax.tools.tune_table import table_entry

FIRST, SECOND = CANDIDATES = hopper_layers.LAYERS_CANDIDATES[:2]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}
STEPS, RUNS = 2, 3

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Compiled programs by kernel. Tests share them, because the times are made up.
_compiled = {}


def model(**changes):
    return describe(parse_config(LLAMA | changes), plan=Plan(implementations=ANY_SIZE))


@pytest.fixture
def fake(monkeypatch):
    """The kernel computes with XLA, and a clock reports the given time of a step.

    Returns:
      A dict with the microseconds of a step by configuration, where None is layer by layer. Its
      keys "cannot" and "wrong" hold configurations, and "calls" those of the calls in their order.
    """
    fake = {None: 20.0, FIRST: 15.0, SECOND: 10.0, "cannot": (), "wrong": (), "calls": []}
    now = 0.0
    genuine, compile_ = decoder.decode_layers, tune_layers._compile

    def kernel(x, k, *operands, plan, **options):
        key = layers_key(len(x), operands[-1], k.shape, k.shape[3]) | {"itemsize": x.dtype.itemsize}
        choice = plan.choose("decode_layers", **key)
        assert (choice.implementation, choice.source) == ("mosaic_gpu", "table")
        config = DecodeLayersConfig(**dict(choice.config))
        if config in fake["cannot"]:
            raise NotImplementedError("decode_layers: sizes")
        x, k, v = genuine(x, k, *operands, implementation="xla", **options)
        return x + jnp.asarray(config in fake["wrong"], x.dtype), k, v

    def timed(config, program):
        def run(*args):
            nonlocal now
            out = program(*args)
            first = len(fake["calls"]) < 2 or fake["calls"][-2:] != [config] * 2
            fake["calls"].append(config)
            now += STEPS * fake[config] * 1e-6 * (100 if first else 1)
            return out

        return run

    def compiled(planned, shape, weights, lengths, steps):
        kernels = fake["wrong"], fake["cannot"], tuple(weights)
        key = planned.config, planned.dtype, tuple(sorted(shape.items())), steps, kernels
        if key not in _compiled:
            _compiled[key] = compile_(planned, shape, weights, lengths, steps)
        return {config: timed(config, program) for config, program in _compiled[key].items()}

    monkeypatch.setattr(decoder, "decode_layers", kernel)
    monkeypatch.setattr(tune_layers, "_compile", compiled)
    monkeypatch.setattr(hopper_layers, "LAYERS_CANDIDATES", CANDIDATES)
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(tune_layers, "time", clock)
    return fake


def measured(described=None, rows=(2,), slots=(128,)):
    """(entries, lines reported)."""
    reports = []
    described = described or model()
    entries = measure_layers(described, rows, slots, steps=STEPS, runs=RUNS, report=reports.append)
    return list(entries), reports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({}, SECOND),
        pytest.param({"wrong": (SECOND,)}, FIRST, marks=pytest.mark.soak),
        ({FIRST: 9.0}, FIRST),
        pytest.param({None: 9.99}, None, marks=pytest.mark.soak),
        ({None: 10.0}, SECOND),  # the kernel wins a tie
        ({"wrong": CANDIDATES}, None),
        ({"cannot": (SECOND,)}, FIRST),
    ],
    ids=str,
)
def test_the_fastest_that_is_right_is_chosen(fake, times, best):
    fake |= times
    (entry,), reports = measured()
    implementation = "mosaic_gpu" if best else "xla"
    left = [c for c in CANDIDATES if c not in fake["wrong"] + fake["cannot"]]
    least = min((fake[config] for config in left), default=None)
    assert entry == {
        "op": "decode_layers",
        "shape": layers_shape(model().config, 2, 128, 2),
        "implementation": implementation,
        "config": best and dataclasses.asdict(best),
        "microseconds": pytest.approx({"xla": fake[None], "mosaic_gpu": least}),
    }
    *wrong, last = reports
    assert last.startswith(f"decode_layers M=2 S=128: {implementation} {{'xla': ")
    assert [line.split(": error ")[0] for line in wrong] == [
        f"decode_layers M=2 S=128 {config}" for config in fake["wrong"]
    ]
    # Two passes over all, except for those with wrong results.
    order = [config for config, _ in itertools.groupby(fake["calls"])]
    first = [c for c in (None, *CANDIDATES) if c not in fake["cannot"]]
    assert order == [*first, None, *left]
    assert fake["calls"].count(None) == 2 * (RUNS + 2)


def test_more_layers_may_differ_more():
    assert tolerance_of(1) == tolerance_of(32) == 0.05
    assert tolerance_of(128) == pytest.approx(0.1)
    assert 0.0536 < tolerance_of(40) < 0.06


@pytest.mark.slow
def test_a_plan_looks_up_what_was_measured(fake):
    described = model()
    entries, reports = measured(described, rows=(1, 4), slots=(128,))
    assert [entry["shape"]["m"] for entry in entries] == [1, 4]
    assert len(reports) == 2
    table = tuple(as_entry(e, {"decode_layers": 1}, "test") for e in entries)
    planned = describe(described.config, plan=Plan(table=table, implementations=ANY_SIZE))
    assert planned.one_launch_possible
    config = tuple(sorted(dataclasses.asdict(SECOND).items()))
    for m, source in ((4, "table"), (3, "nearest"), (8, "heuristic")):
        choice = planned.plan.choose("decode_layers", **layers_shape(described.config, m, 128, 2))
        assert choice.source == source
        assert choice == Choice("xla", source=source) or (m < 5 and choice.config == config)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"attention_bias": True},
        LLAMA | {"mlp_bias": True},
        LLAMA | {"model_type": "mistral", "sliding_window": 64},
    ],
    ids=["attention bias", "mlp bias", "window"],
)
def test_what_the_kernel_has_not_is_not_measured(fake, config):
    described = describe(parse_config(config), plan=Plan(implementations=ANY_SIZE))
    assert measured(described) == ([], [])


@pytest.mark.slow
def test_no_launch_is_measured_that_cannot_run(fake, monkeypatch):
    fake["cannot"] = CANDIDATES
    assert measured() == ([], [])
    assert not fake["calls"]
    fake["cannot"] = ()
    monkeypatch.setattr(tune_layers, "can_chain", lambda device: False)
    assert measured() == ([], [])
    monkeypatch.setattr(tune_layers, "can_chain", lambda device: True)
    assert len(measured()[0]) == 1


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_left_out(fake, monkeypatch):
    described = model()
    room = tune_layers.plan_memory(described, batch=1, max_len=256, slots=256).total_bytes
    monkeypatch.setattr(Place, "free_memory_bytes", lambda place: room)
    entries, reports = measured(described, rows=(1, 64), slots=(256,))
    assert [entry["shape"]["m"] for entry in entries] == [1]
    assert reports[1].startswith("decode_layers M=64 S=256: no room for ")
    monkeypatch.setattr(tune_layers, "stack_layers", lambda *args, **options: None)
    assert measured(described) == ([], ["decode_layers: no room to stack the weights"])
    weights = described.weight_bytes
    monkeypatch.setattr(Place, "free_memory_bytes", lambda place: weights - 1)
    monkeypatch.setattr(tune_layers, "random_stacked_params", None)
    (entries, (line,)) = measured(described)
    assert not entries
    assert line.startswith("decode_layers: no room for weights of ")


def test_both_ways_start_from_the_same_keys_and_values():
    described = model()
    apart, stacked = (tune_layers._random_cache(described, 2, 128, s) for s in (False, True))
    for i, (k, v) in enumerate(apart):
        np.testing.assert_array_equal(k, stacked.k[i])
        np.testing.assert_array_equal(v, stacked.v[i])
        assert not jnp.array_equal(k, v)
    assert not jnp.array_equal(*stacked.k[:2])


@pytest.mark.slow
def test_every_step_is_the_same_one():
    """Many steps give the result of one step, at the same lengths."""
    described = model()
    params, lengths = random_params(described), jnp.array([64, 3])
    for stacked in (False, True):
        weights = params
        if stacked:
            planned = tune_layers._planned(
                described, FIRST, layers_shape(described.config, 2, 128, 2)
            )
            weights = params | {"blocks": tune_layers.stack_layers(planned, params)}
        plain = describe(described.config, plan=Plan(implementations=ANY_SIZE))
        one, two = (
            jax.jit(tune_layers._layers, static_argnums=(0, 1, 2))(
                plain, stacked, steps, tune_layers._random_cache(described, 2, 128, stacked), *args
            )
            for steps, args in ((1, (weights, lengths)), (2, (weights, lengths)))
        )
        jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    ("op", "xla_us", "implementation"),
    [
        ("decode_layers", 10.0, "mosaic_gpu"),
        ("decode_layers", 9.99, "xla"),
        ("linear_chain", 10.09, "xla"),
        ("linear_chain", 10.1, "mosaic_gpu"),
        ("matmul", 9.99, "xla"),
        ("matmul", 10.0, "mosaic_gpu"),
    ],
)
def test_what_a_kernel_must_gain(op, xla_us, implementation):
    shape = {"m": 1}
    assert table_entry(op, shape, {None: xla_us, FIRST: 10.0, SECOND: 11.0}) == {
        "op": op,
        "shape": shape,
        "implementation": implementation,
        "config": dataclasses.asdict(FIRST) if implementation == "mosaic_gpu" else None,
        "microseconds": {"xla": xla_us, "mosaic_gpu": 10.0},
    }
    none = table_entry(op, shape, {None: xla_us})
    assert (none["implementation"], none["config"]) == ("xla", None)
    assert none["microseconds"] == {"xla": xla_us, "mosaic_gpu": None}
