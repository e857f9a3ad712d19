"""`fdjax tune` for mixtures of experts: what it tries, checks and writes."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import pytest

from fdjax.bench.timing import Timing
from fdjax.models import parse_config
from fdjax.pallas_kernels.experts.hopper.chosen import CANDIDATES, MOE_CHOSEN, PACKED_CANDIDATES
from fdjax.pallas_kernels.experts.xla import MOE_XLA
from fdjax.pallas_kernels.plan import KERNEL_REVISIONS, Plan, as_entry
from fdjax.pallas_kernels.quantised import BRICKS, QTensor, WeightFormat
from fdjax.tools import tune_experts
from fdjax.tools.tune_experts import measure_experts

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf" / "configs"
MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu")


def small(name, **changes):
    data = json.loads((CONFIGS / f"{name}.old.json").read_text(encoding="utf-8"))
    data |= {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, **changes}
    return parse_config(data)


def gpt_oss(formats=True):
    types = ["sliding_attention", "full_attention"]
    config = small("gpt-oss-20b", layer_types=types, num_local_experts=6)
    paths = [("blocks", i, "mlp", "experts", part) for i in (0, 1) for part in ("gate_up", "down")]
    return config.with_formats(dict.fromkeys(paths, MX)) if formats else config


def first_two(shape):
    return MOE_CHOSEN.candidates(shape)[:2]


@pytest.fixture
def us(monkeypatch):
    """The kernels compute with XLA. Times are by configuration; None is XLA."""
    times: dict = {None: 20.0, "wrong": None}

    def kernels(*args, config, **options):
        assert all(q.layout == BRICKS for q in args if isinstance(q, QTensor))
        return MOE_XLA.run(*args, config=None, **options) + 2.0 * (config == times["wrong"])

    def compile_(block, config, args):
        implementation = MOE_XLA if config is None else tune_experts.MOE_CHOSEN
        run = functools.partial(tune_experts._run, implementation=implementation, block=block)
        jax.eval_shape(functools.partial(run, config=config), *args)
        return functools.partial(jax.jit(run, static_argnames="config"), config=config)

    def measure(fn, sets, *, runs):
        assert runs == 3 and len({id(args[0]["logits"]) for args in sets}) == len(sets)
        return Timing.from_samples([[times[fn.keywords["config"]]] * 2], "cupti")

    def cold_sets(make, nbytes):
        return [make(seed) for seed in range(2)]

    monkeypatch.setattr(tune_experts, "cold_sets", cold_sets)
    fake = dataclasses.replace(MOE_CHOSEN, run=kernels, candidates=first_two)
    monkeypatch.setattr(tune_experts, "MOE_CHOSEN", fake)
    monkeypatch.setattr(tune_experts, "_compile", compile_)
    monkeypatch.setattr(tune_experts, "measure", measure)
    return times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tried", "key"),
    [
        (small("mixtral-8x7b"), CANDIDATES, {"experts": 8, "chosen": 2}),
        pytest.param(
            *(gpt_oss(), PACKED_CANDIDATES, {"experts": 6, "chosen": 4, "fp4": 32}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mixtral", "gpt-oss"],
)
def test_the_fastest_that_is_right_is_chosen(us, config, tried, key):
    us |= {c: 10.0 + i for i, c in enumerate(tried)} | {"wrong": tried[0]}
    said = []
    (entry,) = measure_experts(config, [3], runs=3, report=said.append)
    assert entry == {
        "op": "moe",
        "shape": {"m": 3, "width": 128, "hidden": 64, "itemsize": 2, **key},
        "implementation": "mosaic_gpu",
        "config": dataclasses.asdict(tried[1]),
        "microseconds": {"xla": 20.0, "mosaic_gpu": 11.0},
    }
    assert len(said) == 2 and f"{tried[0]}: error" in said[0]
    found = as_entry(entry, KERNEL_REVISIONS, "test")
    plan = Plan(device_kind="some Hopper", compute_capability=(9, 0), table=(found,))
    (block,) = {block.experts: block for block in config.blocks}.values()
    looked_up, features = tune_experts._lookup(block, 3, "bfloat16", BRICKS)
    assert plan.choose("moe", features, **looked_up) == found.choice


def test_nothing_is_measured_that_the_kernels_cannot_run(us):
    assert list(measure_experts(small("llama-3-8b"), [1], runs=3)) == []
    assert list(measure_experts(small("mixtral-8x7b"), [33], runs=3)) == []
    assert list(measure_experts(small("mixtral-8x7b", intermediate_size=96), [1], runs=3)) == []


@pytest.mark.slow
def test_xla_remains_where_it_is_as_fast(us):
    us |= dict.fromkeys(CANDIDATES, 19.9)
    (entry,) = measure_experts(small("mixtral-8x7b"), [1], runs=3)
    assert (entry["implementation"], entry["config"]) == ("xla", None)
