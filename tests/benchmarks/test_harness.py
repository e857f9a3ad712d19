"""The benchmark scripts: they run on a CPU, refuse wrong results, and draw the existing records."""

import dataclasses
import json
import pickle
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fdjax
from benchmarks import (
    accuracy,
    ahead,
    calibration,
    end_to_end,
    kernels,
    matmul,
    memory,
    peers,
    runtime,
    tensor_parallel,
    unfused,
)
from fdjax.bench import record as records
from fdjax.bench.record import Measurement, Record
from fdjax.bench.timing import Timing
from fdjax.engine.state import StackedCache
from fdjax.models import decoder
from fdjax.pallas_kernels.layers import decode_layers
from fdjax.pallas_kernels.plan import Plan

ROOT = Path(__file__).resolve().parents[2]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
}
CEILING = {
    "read_gb_per_s": 1e3,
    "read_kernel": "none",
    "matmul_tflop_per_s": None,
    "trusted": None,
    "reason": None,
    "clock": "host",
}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("{}", "model_type is missing"),
        (json.dumps(CONFIG | {"hidden_size": 0}), "hidden_size"),
    ],
)
def test_a_config_that_describes_no_model_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit:
        end_to_end.main([str(path)])
    err = capsys.readouterr().err
    assert exit.value.code == 2
    assert err.count("\n") == 1 and message in err


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_record_that_is_none_is_one_line(tmp_path, capsys, text):
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit:
        end_to_end.main(["--of", str(path)])
    err = capsys.readouterr().err
    assert exit.value.code == 2
    assert err.count("\n") == 1 and str(path) in err


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def quick_ceiling(monkeypatch):
    from fdjax.bench import ceiling

    monkeypatch.setattr(ceiling, "measure_ceiling", lambda *a, **k: dict(CEILING))


# End to end


@pytest.mark.slow
def test_a_model_beside_its_peers(config, quick_ceiling, monkeypatch, tmp_path, capsys):
    """Points beyond the model's context, a plan that cannot run here and a peer that fails."""

    def measure(config, points, names, **options):
        assert (options["new_tokens"], options["runs"]) == (3, 2)
        for batch, prompt in points:
            yield "hf eager", batch, prompt, peers.Samples([50.0, 60.0], [7.0, 8.0], 1.5)
            yield "hf static, compiled", batch, prompt, peers.Samples(problem="Error: no")

    monkeypatch.setattr(peers, "run_apart", measure)
    output = tmp_path / "record.json"
    options = "--points 1x70 --plans fdjax cudnn --new-tokens 3 --runs 2 --dtype float32"
    options = [*options.split(), "--peers", "hf eager", "hf static, compiled"]
    code = end_to_end.main([str(config), *options, "--output", str(output)])
    assert code == 1
    record = records.read(output)
    found = {(r.case, r.implementation): r for r in record.rows}
    ours, eager = (found["decode step B1 P70", name] for name in ("fdjax", "hf eager"))
    assert ours.ok and ours.gb_per_s > 0 and ours.timing["runs"] == 2
    assert (eager.timing["median_us"], eager.bytes) == (7.5, ours.bytes)
    assert found["first token B1 P70", "hf eager"].timing["median_us"] == 55
    cudnn = found["decode step B1 P70", "cudnn"]
    assert (cudnn.ok, cudnn.timing) == (None, None) and "float32" in cudnn.reason
    compiled = found["decode step B1 P70", "hf static, compiled"]
    assert (compiled.ok, compiled.reason) == (False, "Error: no")
    assert record.costs["seconds of the first call, B1 P70 fdjax"] > 0
    percentiles = [record.costs[f"ms of a step, p{n} of chunks, B1 P70 fdjax"] for n in (50, 99)]
    assert 0 < percentiles[0] <= percentiles[1]
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["config"]["model"] == "small.json"
    assert out.startswith("ms ")


def test_wrong_results_get_no_time(config, quick_ceiling, monkeypatch, tmp_path):
    from fdjax.bench import model

    stats = fdjax.Stats(8, 2, 1.0, 1.0, decode_bytes=10, decode_steps=1)
    result = fdjax.GenerateResult([[1, 2]], None, ["length"], [[0.0, 0.0]], stats)
    monkeypatch.setattr(fdjax.LM, "generate", lambda *a, **k: result)
    argv = [str(config), *"--points 1x8 --plans fdjax --new-tokens 2 --runs 1".split()]
    for error, code in ((0.01, 0), (0.2, 1), (float("nan"), 1)):
        monkeypatch.setattr(model, "_decoding_error", lambda *a, error=error: error)
        assert end_to_end.main([*argv, "--output", str(tmp_path / "r.json")]) == code
        rows = records.read(tmp_path / "r.json").rows
        assert [row.ok for row in rows] == [code == 0] * 2
        assert all(bool(row.timing) == row.ok for row in rows)
    assert "log-probabilities off by nan" in rows[0].reason


def test_what_does_not_fit_is_left_out(config, quick_ceiling, monkeypatch, capsys):
    from fdjax.system import device_memory as planner

    monkeypatch.setattr(planner, "free_memory_bytes", lambda: 10**5)
    assert end_to_end.main([str(config), "--points", "64x64", "--plans", "fdjax"]) == 1
    out, err = capsys.readouterr()
    assert "fdjax B64 P64: must fit into" in err
    assert json.loads(out.splitlines()[-1])["rows"] == []


@pytest.mark.parametrize("point", ["8", "0x4", "4x0", "axb", "1x2x3", "-1x4"])
def test_a_point_is_a_batch_and_a_prompt_length(config, point, capsys):
    with pytest.raises(SystemExit):
        end_to_end.parse_args([str(config), f"--points={point}"])
    assert "BATCHxPROMPT" in capsys.readouterr().err


def test_there_are_no_peers_without_their_libraries(monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.missing() == "torch is not installed"
    assert peers.main(['{"names": ["gpt-fast"]}']) == 0
    assert capsys.readouterr().out == "no peers: torch is not installed\n"


def run_peers(monkeypatch, tmp_path, script):
    """Results of `run_apart` if this script is the process."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(peers.sys, "executable", str(program))
    return list(peers.run_apart(Path("c.json"), [(1, 8), (2, 8)], ["gpt-fast"], runs=1))


def test_peers_run_in_a_process_of_their_own(monkeypatch, tmp_path, capsys):
    samples = peers.Samples([1.0, 2.0], [3.0], 4.0)
    results = [("gpt-fast", batch, 8, samples) for batch in (1, 2)]
    monkeypatch.setattr(peers, "missing", lambda names: None)
    monkeypatch.setattr(peers, "measure", lambda config, points, names, runs: iter(results))
    asked = {"config": "c.json", "points": [[1, 8], [2, 8]], "names": ["gpt-fast"], "runs": 1}
    assert peers.main([json.dumps(asked)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    script = f"echo '{first}'; echo compiling; echo '{second}'"
    assert run_peers(monkeypatch, tmp_path, script) == results
    assert capsys.readouterr().err == "compiling\n"
    # A process that dies loses only what it has not measured.
    found = run_peers(monkeypatch, tmp_path, f"echo '{first}'; exit 3")
    assert found[0] == results[0]
    assert found[1][:3] == results[1][:3]
    assert found[1][3].problem == "the process of the peers ended with 3"


def test_a_slow_down_of_a_tenth_is_flagged(tmp_path):
    from fdjax.bench.__main__ import main

    for name, factor in (("old.json", 1), ("new.json", 1.1)):
        row = row_of("decode step B1 P1024", "fdjax", [5000.0 * factor, 5010.0 * factor])
        records.write(record_of([row], {"model": "m.json"}), tmp_path / name)
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert main(["compare", old, new]) == 1
    assert main(["compare", old, old]) == 0


def test_tokens_can_be_held_against_the_likeliest(monkeypatch):
    """It needs no log-probabilities of decoding, and makes no more calls than the time allows.

    No call has the prompts of another, which the cache would hold already.
    """
    from fdjax.bench import model

    likeliest = np.zeros((1, 2, 128), np.float32)
    likeliest[0, :, 7] = 3
    calls, tokens = [], []

    def generate(self, prompts, **options):
        calls.append(options | {"prompts": str(prompts)})
        stats = fdjax.Stats(8, 2, 1.0, 1.0, decode_bytes=10, decode_steps=1)
        return fdjax.GenerateResult(tokens, None, ["length"] * 2, None, stats)

    monkeypatch.setattr(fdjax.LM, "generate", generate)
    description = fdjax.describe(fdjax.parse_config(CONFIG), dtype="float32")
    lm = fdjax.LM(description, fdjax.models.random_params(description))
    options = {"batch": 2, "prompt_tokens": 4, "new_tokens": 2, "check": "tokens"}
    for answer, error in (([7, 7], 0), ([7, 6], 1.5)):
        tokens[:] = [answer] * 2
        calls.clear()
        rows, _ = model.model_rows(
            lm, **options, runs=5, seconds=0, logits=lambda lm, ids, n: likeliest
        )
        assert [row.error for row in rows] == [pytest.approx(error)] * 2
        assert [row.ok for row in rows] == [error == 0] * 2
        assert len(calls) == 3 and "return_logprobs" not in calls[0]
        assert len({call["prompts"] for call in calls}) == 3


@pytest.mark.slow
def test_one_pass_is_padded_for_the_kernels():
    """A named plan never falls back, and its prefill kernel does not support odd lengths."""
    from fdjax.bench.one_pass import one_pass, one_pass_program

    model = fdjax.describe(fdjax.parse_config(CONFIG), dtype="float32")
    lm = fdjax.LM(model, fdjax.models.random_params(model))
    ids = jax.numpy.arange(11)[None]
    want = fdjax.forward(lm.model, lm.params, ids, last=3)
    np.testing.assert_allclose(one_pass(lm, ids, 3), want, rtol=1e-5, atol=1e-5)

    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0), implementation="mosaic_gpu")
    wide = fdjax.parse_config(CONFIG | {"hidden_size": 256})
    model = fdjax.describe(wide, dtype="bfloat16", plan=plan)
    shape = jax.ShapeDtypeStruct((1, 255), "int32")
    out = one_pass_program.eval_shape(model, model.abstract_params, shape, last=128)
    assert out.shape == (1, 128, 128)


def test_a_model_with_quantised_weights(config):
    args = [str(config), "--weights", "int4:32", "--head", "int8"]
    model = end_to_end.read_model(end_to_end.parse_args(args))
    assert {str(weight) for _, weight in model.config.blocks[0].formats} == {"int4 by 32"}
    assert str(model.config.head_format) == f"int8 by {model.config.width}"
    args = end_to_end.parse_args([str(config), "--weights", "w8a8"])
    formats = dict(end_to_end.read_model(args).config.blocks[0].formats).values()
    assert {str(form) for form in formats} == {"int8 by 64 (W8A8)"}
    for wrong in ("int3:32", "int4:", "int4:x"):
        with pytest.raises(SystemExit):
            end_to_end.parse_args([str(config), "--weights", wrong])


@pytest.mark.parametrize("name", end_to_end.PLANS)
def test_plans_do_without_what_they_are_named_for(name):
    """Also without kernels that a table has for several operations at once."""
    plan = Plan.for_kind("NVIDIA H200", (9, 0))
    plan = dataclasses.replace(plan, named=tuple(end_to_end.PLANS[name].items()))
    chain = dict(m=1, k=4096, width=4096, hidden=11008, n=12288, itemsize=2)
    runs = {
        "launch": plan.choose("decode_layers", **chain, hkv=32, d=128, s=1024),
        "chain": plan.choose("linear_chain", **chain),
    }
    want = {
        "fdjax": {"launch", "chain"},
        "int8 cache": {"launch", "chain"},
        "int8 cache without launch": {"chain"},
        "without unified maximum": {"chain"},
        "without launch": {"chain"},
        "without attention": {"chain"},
    }
    assert {k for k, choice in runs.items() if choice.implementation != "xla"} == want.get(
        name, set()
    )


def test_xla_takes_the_place_of_cudnn_for_what_it_lacks():
    device = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    configs = ROOT / "tests" / "fixtures" / "hf" / "configs"
    for name, attention in (("bloom-7b1", "xla"), ("opt-6.7b", "cudnn")):
        config = fdjax.models.parse_config(json.loads((configs / f"{name}.old.json").read_text()))
        found = end_to_end.named(device, fdjax.models.describe(config), "cudnn")
        assert found == end_to_end.PLANS["cudnn"] | dict.fromkeys(
            ("decode_attention", "prefill_attention"), attention
        )


def test_plans_share_stacked_weights(config, quick_ceiling, monkeypatch):
    """The weights are stacked once, and nobody holds the original arrays."""
    from fdjax.bench import model

    def rows(lm, **options):
        weights = lm.params["blocks"][1]["mlp"]["down"]["weight"]
        places.append(weights.unsafe_buffer_pointer())
        stacked.append(lm.engine.stacked_params is not None)
        return [], {}

    places, stacked = [], []
    plan = dataclasses.replace(Plan.for_device(), named=(("decode_layers", "mosaic_gpu"),))
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    monkeypatch.setattr(Plan, "for_device", lambda: plan)
    monkeypatch.setitem(end_to_end.PLANS, "fdjax", {"decode_layers": "mosaic_gpu"})
    monkeypatch.setattr(model, "model_rows", rows)
    plans = ["fdjax", "without launch", "without chain"]
    end_to_end.main([str(config), "--dtype", "float32", "--points", "1x8", "--plans", *plans])
    assert stacked == [True, False, False]
    assert len(set(places)) == 1


def test_plans_share_the_weights_and_leave_nothing(config, quick_ceiling, monkeypatch):
    """A model is freed with its cache before the next one is made. The weights are made once."""
    from fdjax.bench import model
    from fdjax.weights import stacked

    made, before = [], []

    def random_params(description, *args, **options):
        made.append(description)
        return genuine(description, *args, **options)

    def rows(lm, **options):
        assert not any(ref() for ref in before)
        before.append(weakref.ref(lm))
        lm.params["embed"].block_until_ready()
        if len(before) == 2:
            raise RuntimeError("out of memory")
        return [], {}

    genuine = stacked.random_params
    monkeypatch.setattr(stacked, "random_params", random_params)
    monkeypatch.setattr(model, "model_rows", rows)
    end_to_end.main([str(config), "--points", "1x8", "2x8"])
    assert (len(made), len(before)) == (1, 6)


def test_a_summary_is_of_the_best_peer(tmp_path, capsys):
    rows = [
        row_of(f"decode step B{b} P8", name, [us * (1 + (b == 16))])
        for b in (1, 4, 16)
        for name, us in (
            ("fdjax", 1e3 * b),
            ("xla", 2e3 * b),
            ("cudnn", (1.21e3, 1e3, 1e3)[(b > 1) + (b > 4)] * b),
            ("without fusion", 1.0),
        )
    ]
    rows.append(Measurement("decode step B64 P8", "fdjax", False, reason="no"))
    assert end_to_end.ratios(rows) == {
        "decode step B1 P8": pytest.approx(1.21),
        "decode step B4 P8": 1,
        "decode step B16 P8": 1,
    }
    records.write(record_of(rows, {"model": "m.json"}), tmp_path / "r.json")
    assert end_to_end.main(["--of", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "decode step: 1.100 geometric mean of 2 up to batch 8" in out
    assert "decode step: 1.000 least of 3, decode step B4 P8" in out
    with pytest.raises(SystemExit):
        end_to_end.parse_args([])


@pytest.mark.parametrize("trusted", [True, None])  # None, because nothing is known about the device
@pytest.mark.parametrize(("after", "moved"), [(1e3, False), (992, False), (1011, True)])
def test_a_ceiling_that_moved_is_flagged(config, monkeypatch, capsys, after, moved, trusted):
    from fdjax.bench import ceiling, model

    reads = iter((1e3, after))
    row = row_of("decode step B1 P8", "fdjax", [1e3])

    def measure_ceiling(*args, **options):
        return dict(CEILING, trusted=trusted, read_gb_per_s=next(reads))

    monkeypatch.setattr(ceiling, "measure_ceiling", measure_ceiling)
    monkeypatch.setattr(model, "model_rows", lambda *a, **k: ([row], {}))
    moved = moved and trusted is not None
    assert end_to_end.main([str(config), "--points", "1x8", "--plans", "fdjax"]) == int(moved)
    assert ("NOT TRUSTED: moved: 1000 to 1011 GB/s" in capsys.readouterr().out) == moved


def test_what_was_loaded_is_not_called_compiling():
    costs = {"seconds of compiling, B1 P8 fdjax": 0.1, "ms of a step, B1 P8 fdjax": 1.0}
    assert end_to_end._with_loads_named(costs, 0) == costs
    loaded = {"seconds of compiling, 2 programs loaded, B1 P8 fdjax": 0.1}
    loaded["ms of a step, B1 P8 fdjax"] = 1.0
    assert end_to_end._with_loads_named(costs, 2) == loaded


def test_no_point_begins_when_the_time_is_up(config, quick_ceiling, capsys):
    argv = [str(config), *"--points 1x8 2x8 --plans fdjax --seconds 0".split()]
    assert end_to_end.main(argv) == 1
    assert capsys.readouterr().err.count("no time left for fdjax B") == 2


# Programs compiled ahead


@pytest.fixture(
    params=[pytest.param((), marks=pytest.mark.soak), (("decode_layers", "mosaic_gpu"),)],
    ids=["layers", "one launch"],
)
def named(request, monkeypatch):
    """A plan forces these implementations. XLA runs the layers that one launch would run."""

    def by_xla(*args, plan, **options):
        return decode_layers(*args, **options, implementation="xla")

    monkeypatch.setattr(decoder, "decode_layers", by_xla)
    return request.param


@pytest.mark.slow
def test_programs_compiled_ahead_are_those_that_run(tmp_path, named):
    """Programs are compiled from shapes alone, then found and loaded. A missing one is compiled."""
    config = fdjax.parse_config(CONFIG | {"num_hidden_layers": 2})
    plan = Plan(batch_invariant=True)
    plain = fdjax.describe(config, dtype="float32", plan=plan)
    plan = dataclasses.replace(plan, named=named)
    description = fdjax.describe(config, dtype="float32", plan=plan)
    prompts = [[1, 2, 3], [4, 5]]
    options = {"max_new_tokens": 3, "eos_token_id": None}
    compiler = ahead.Compiler(tmp_path)
    params = compiler.params(description)
    assert not any(any(a.strides) for a in jax.tree.leaves(params))
    lm = fdjax.LM(description, params, make_engine=compiler.engine("xla"))
    assert not any(any(a.strides) for a in jax.tree.leaves(lm.params))
    assert lm.generate(prompts, **options).tokens == [[0] * 3] * 2
    assert lm.generate(prompts, **options).tokens == [[0] * 3] * 2
    files = list(tmp_path.glob("*.executable"))
    assert len(files) == 3

    params = fdjax.models.random_params(description)
    want = fdjax.LM(plain, params).generate(prompts, **options).tokens

    def loaded():
        executables = ahead.Executables(tmp_path)
        lm = fdjax.LM(description, params, make_engine=executables.engine("xla"))
        for _ in range(2):
            result = lm.generate(prompts, **options)
            assert result.tokens == want
        assert result.stats.compile_seconds == 0
        assert isinstance(lm.engine.reusable.state.kv, StackedCache)
        return executables, lm.program_counts()

    executables, compiled = loaded()
    assert (executables.loaded, executables.missing) == (3, [])
    assert not any(compiled.values())
    files[0].write_bytes(pickle.dumps((b"damaged", 0)))
    files[1].unlink()
    files[2].unlink()
    executables, compiled = loaded()
    assert (executables.loaded, len(executables.missing)) == (0, 3)
    assert compiled == {"prefill": 1, "first_tokens": 1, "decode_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_processes_compile_all_that_is_measured(
    config, quick_ceiling, monkeypatch, tmp_path, capsys, caplog, jobs
):
    """If one process fails, nothing can be loaded, and the run goes on."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if jobs == 1:
        monkeypatch.setattr(ahead, "ROOT", tmp_path)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "benchmarks").mkdir()
        (tmp_path / "benchmarks" / "__init__.py").touch()
    else:
        monkeypatch.chdir(ROOT)
    output = tmp_path / "record.json"
    options = "--points 1x8 --plans fdjax --new-tokens 3 --runs 1 --dtype float32 --check tokens"
    argv = [str(config), *options.split(), "--compile-jobs", str(jobs), "--output", str(output)]
    caplog.set_level("INFO", logger="fdjax")
    assert end_to_end.main(argv) == 0
    err = capsys.readouterr().err
    record = records.read(output)
    names = " ".join(record.costs)
    if jobs == 1:
        assert "2 of 2 processes failed" in err and err.count("not compiled ahead: fdjax ") == 4
        assert "seconds of compiling, B1 P8 fdjax" in record.costs
    else:
        assert "not compiled ahead" not in err and "failed" not in err
        assert "compiling" not in caplog.text
        assert "4 programs in 2 processes" in names
        assert "seconds of compiling, 4 programs loaded, B1 P8 fdjax" in record.costs
    assert all(row.ok for row in record.rows)


# Without fusion


@pytest.mark.parametrize("neighbours", [(), ("norm", "gate"), ("norm", "bias"), ("residual",)])
def test_unfused_products_are_the_kernel_alone(monkeypatch, neighbours):
    import jax.numpy as jnp

    from fdjax.pallas_kernels.gemm import matmul
    from fdjax.pallas_kernels.norm import RMSNorm
    from fdjax.pallas_kernels.plan import Plan

    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    operands = {
        "norm": RMSNorm(draw(64), 1e-6),
        "gate": "silu",
        "bias": draw(128),
        "residual": draw(2, 1, 128),
    }
    fused = {name: operands[name] for name in neighbours}
    x, w = draw(2, 1, 64), draw(64, *((2,) if "gate" in fused else ()), 128)
    ran = []

    def kernel(x, w, *, dtype, config):
        ran.append(w.shape)
        return matmul(x, w, preferred_element_type=dtype)

    monkeypatch.setattr(unfused, "matmul_flat_gemm", kernel)
    plan = Plan(named=(("matmul", "mosaic_gpu"),))
    y = unfused.unfused_matmul(x, w, plan=plan, **fused)
    np.testing.assert_allclose(y, matmul(x, w, **fused), rtol=2e-5, atol=2e-5)
    assert ran == [(64, 256 if "gate" in fused else 128)]
    # XLA chooses its own fusions.
    y = unfused.unfused_matmul(x, w, plan=Plan(), **fused)
    np.testing.assert_array_equal(y, matmul(x, w, plan=Plan(), **fused))
    assert len(ran) == 1


@pytest.mark.slow
def test_unfused_attention_is_attention(monkeypatch):
    import jax.numpy as jnp

    from fdjax.engine import step
    from fdjax.models import decoder_block
    from fdjax.pallas_kernels.attention import AttentionSpec, append_decode_attention

    rng = np.random.default_rng(0)
    qkv, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 1, 2, 3, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    )
    cos_sin = tuple(jnp.asarray(rng.normal(size=(2, 1, 4)), jnp.float32) for _ in range(2))
    lengths = jnp.array([3, 16], jnp.int32)
    for rotation in (cos_sin, None):
        args = {"rotation": rotation, "spec": AttentionSpec(0.3, window=9)}
        want = append_decode_attention(qkv, k, v, lengths, **args)
        got = unfused.unfused_append_decode_attention(qkv, k, v, lengths, **args)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)
    before = decoder_block.matmul, step.append_decode_attention
    with unfused.unfused():
        assert decoder_block.matmul is unfused.unfused_matmul
    assert before == (decoder_block.matmul, step.append_decode_attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans",
    [
        # On a CPU, the programs of the others are those of the first.
        ["fdjax", "without unified maximum", "without fusion"],
        pytest.param(["breakdown"], marks=pytest.mark.soak),
    ],
    ids=["distinct", "all"],
)
def test_the_breakdown_is_measured(config, quick_ceiling, tmp_path, plans):
    output = tmp_path / "record.json"
    options = "--points 1x8 --new-tokens 3 --runs 1 --dtype float32"
    options += " --check tokens"  # another test checks log-probabilities
    argv = [str(config), *options.split(), "--plans", *plans, "--output", str(output)]
    assert end_to_end.main(argv) == 0
    rows = records.read(output).rows
    measured = list(end_to_end.BREAKDOWN) if plans == ["breakdown"] else plans
    assert [r.implementation for r in rows if r.case[0] == "d"] == measured
    assert all(row.ok for row in rows)


def test_breakdown_names_all_that_do_without_something(config):
    args = end_to_end.parse_args([str(config), "--plans", "breakdown"])
    assert tuple(args.plans) == end_to_end.BREAKDOWN


# Memory


@pytest.mark.slow
def test_memory_as_planned_and_measured(config, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "CHUNKS", (128,))
    monkeypatch.setattr(memory, "rows_of_call", lambda width, batch: 1)
    output = tmp_path / "memory.json"
    argv = [str(config), "--points", "1x8", "--new-tokens", "2", "--dtype", "float32"]
    assert memory.main([*argv, "--output", str(output)]) == 0
    data = json.loads(output.read_text())
    (peak,), (temporary,) = data["peaks"], data["temporaries"]
    parts = [peak[f"{part}_bytes"] for part in ("weight", "cache", "workspace")]
    assert sum(parts) == peak["planned_bytes"]
    assert peak["ok"] is True
    assert temporary["temp_bytes"] > 0
    assert temporary["paper_bytes"] == 128 * (2 * 64 + 64) * 4
    assert "1 x 8+2" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (1.029, True), (1.05, False)])
def test_a_peak_must_be_near_the_plan(config, monkeypatch, factor, ok):
    """The allocator's number is made up. The model only has to answer."""

    class Answered:
        tokens = ((1, 2),)

    class Model:
        def __init__(self, *args, **kwargs):
            self.engine = SimpleNamespace(paged=True)

        def generate(self, prompts, **options):
            assert not self.engine.paged
            return Answered

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": int(plan.total_bytes / factor)}

    m = fdjax.describe(fdjax.parse_config(CONFIG), dtype="float32")
    plan = memory.plan_memory(m, batch=1, max_len=10, prompt_tokens=8, slots=128)
    monkeypatch.setattr(memory, "LM", Model)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device()])
    (row,) = memory.peaks(m, {}, [(1, 8)], 2, None)
    assert row["ok"] is ok
    (row,) = memory.peaks(m, {}, [(1, 8)], 2, plan.total_bytes - 1)
    assert row["ok"] is None


# Accuracy


def test_the_reference_is_of_the_embedded_model():
    ids, tokens = accuracy.read_reference()
    assert len(ids) == len(tokens) == accuracy.PROMPTS
    assert len(set(map(tuple, ids))) > 0.99 * accuracy.PROMPTS
    assert ids == accuracy.prompts()
    assert all(0 < len(row) <= accuracy.NEW_TOKENS for row in tokens)


def test_the_reference_of_other_weights_is_refused(monkeypatch):
    monkeypatch.setattr(accuracy, "_digest", lambda: "other")
    with pytest.raises(ValueError, match="must be made with the weights"):
        accuracy.read_reference()


@pytest.mark.slow
def test_answers_are_those_of_transformers(tmp_path):
    output = tmp_path / "accuracy.json"
    assert accuracy.main(["--prompts", "16", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(r["dtype"], r["prompts"]) for r in rows] == [("float32", 16), ("bfloat16", 16)]
    assert rows[0]["answers_that_differ"] == 0


def test_a_difference_says_how_close_the_tokens_were(monkeypatch):
    import jax.numpy as jnp

    logits = np.zeros((1, 8 + accuracy.NEW_TOKENS, 6), np.float32)
    logits[0, 3, 4], logits[0, 3, 5] = 2.0, 2.0 - 3 / 64  # an ulp at 2 is 1/64

    def forward(model, params, ids, lengths):
        asked = (ids[0, :5] == jnp.asarray([1, 2, 3, 4, 0])).all() & (lengths[0] == 4)
        return jnp.where(asked, logits, logits[..., ::-1] + jnp.float32(9))

    monkeypatch.setattr(fdjax, "forward", forward)
    exact = dataclasses.make_dataclass("LM", [("model", str, "m"), ("params", tuple, ())])()
    ids = [[1, 2, 3], [1] * 8]
    (found,) = accuracy.differences(exact, ids, [[4, 4, 1], [5]], [[4, 5], [5]])
    assert dataclasses.astuple(found) == (0, 1, 4, 5, pytest.approx(3))
    (found,) = accuracy.differences(exact, ids, [[4], [5]], [[4, 4], [5]])
    assert (found.position, found.want, found.got) == (1, None, 4)


# Kernels


def test_kernels_run_in_processes_of_their_own(monkeypatch, tmp_path, capsys):
    ran = []

    class Done:
        def __init__(self, command):
            ran.append(command[2:])
            self.returncode = int("matmul" in command[2])

    monkeypatch.setattr(kernels.subprocess, "run", Done)
    monkeypatch.setattr(kernels, "backend", lambda: "gpu")
    argv = ["--only", "B1", "--output", str(tmp_path), "--commit", "c"]
    assert kernels.main([*argv, "--scripts", "matmul", "decode_attention"]) == 1
    assert ran == [
        [f"benchmarks.{n}", "--only", "B1", "--output", str(tmp_path / f"{n}.json"), *argv[-2:]]
        for n in ("matmul", "decode_attention")
    ]
    assert "failed: matmul" in capsys.readouterr().err


def test_kernels_are_not_started_on_a_cpu(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(kernels.subprocess, "check_output", lambda *_, **__: "cpu\n")
    monkeypatch.setattr(kernels.subprocess, "run", ran.append)
    assert (kernels.main([]), ran) == (2, [])
    assert capsys.readouterr() == ("", "kernels: needs an NVIDIA GPU, JAX sees none\n")


def test_products_that_are_cut_off_keep_what_they_have(monkeypatch, tmp_path):
    def measure_layer(name, *args):
        if name == "7B out":
            raise KeyboardInterrupt
        return [row_of(f"{name} M=1", "xla", [10.0], bytes=10**6)]

    monkeypatch.setattr(matmul, "measure_layer", measure_layer)
    monkeypatch.setattr(matmul, "measure_ceiling", lambda **k: dict(CEILING))
    with pytest.raises(KeyboardInterrupt):
        matmul.main(["--output", str(tmp_path / "r.json")])
    (row,) = records.read(tmp_path / "r.json").rows
    assert (row.case, row.gb_per_s) == ("7B qkv M=1", pytest.approx(100))


def test_records_name_no_folder_of_a_machine():
    files = [*ROOT.glob("benchmarks/results/**/*.json"), *ROOT.glob("pallas_kernels/tables/*.json")]
    assert len(files) > 20
    for path in files:
        assert not re.search(r"[\s\"'=]/\w+/", path.read_text(encoding="utf-8")), path


# Figures


def row_of(case, implementation, us, **fields):
    timing = dataclasses.asdict(Timing.from_samples([us], "host"))
    return Measurement(case, implementation, True, timing=timing, **fields)


def record_of(rows, config):
    environment = {"device_kind": "cpu", "device_count": 1}
    return Record(environment, config, {"before": dict(CEILING)}, rows).finish()


_PERCENTILES = {"p50": 10.0, "p90": 20.0, "p99": 30.0}
SERVING = {
    "config": {"hidden_size": 64},
    "requests": {"count": 6},
    "bound": {"new_tokens_per_s": 900.0},
    "throughput": [{"state": {"rows": 4}, "timed_calls": [{"new_tokens_per_s": 400.0}]}],
    "arrivals": [
        {
            "rate": 1.0,
            "first_token_ms": _PERCENTILES,
            "ms_per_token": _PERCENTILES,
            "largest_gap_ms": 99.0,
        }
    ],
}


@pytest.fixture
def results(tmp_path):
    """A folder with one record of every kind."""
    folder = tmp_path / "results"
    names = ("fdjax", "xla", "cudnn", "without flat GEMM", "hf eager", "hf static, compiled")
    rows = [
        row_of(f"{case} B{b} P{p}", name, [1e3 * (1 + i) * (10 if case[0] == "f" else 1) * b**0.2])
        for i, name in enumerate(names)
        for b in (1, 8)
        for p in (128, 1024)
        for case in ("first token", "decode step")
    ]
    records.write(record_of(rows, {"model": "llama-2-7b.old.json"}), folder / "llama2_7b.json")
    rows = [
        row_of(f"{name} M={m}", implementation, [us + m], bytes=10**6)
        for name in ("7B qkv", "7B norm, qkv", "8B qkv")
        for m in (1, 8, 64)
        for implementation, us in (("xla", 40), ("mosaic_gpu", 35))
    ]
    records.write(record_of(rows, {}), folder / "matmul.json")
    for op in ("decode_attention", "prefill_attention"):
        rows = [
            row_of(f"B{b} H32 S1024 D128", name, [us * b], bytes=10**8, flops=10**10)
            for b in (1, 8)
            for name, us in (("mosaic_gpu", 50), ("synchronised", 55), ("cudnn", 60))
        ]
        records.write(record_of(rows, {}), folder / f"{op}.json")
    rows = [
        row_of(f"K={k} N={n}", f"block_n={b}", [n / b + b / 4])
        for k in (4096, 12288)
        for n in (1024, 8192)
        for b in (64, 128, 256)
    ]
    records.write(record_of(rows, {}), folder / "block_n.json")
    rows = [
        row_of(f"naive B1 H32 Hkv32 S{s} D128", name, [us * s])
        for s in (512, 1024)
        for name, us in (("mosaic_gpu", 1), ("naive", 3))
    ]
    records.write(record_of(rows, {}), folder / "prefill_attention_naive.json")
    us = {"attention": 1.0, "GEMM": 2.0, "other": 0.5}
    rows = [{"batch": 16, "prompt_tokens": p, "us": us} for p in (128, 1024)]
    data = {"config": {"model": "llama-2-7b.old.json"}, "runtime": rows}
    (folder / "runtime_llama2_7b.json").write_text(json.dumps(data))
    peak = {"batch": 1, "prompt_tokens": 1024, "peak_bytes": 15 * 10**9, "ok": True}
    peak |= {"weight_bytes": 13 * 10**9, "cache_bytes": 10**9, "workspace_bytes": 10**9}
    left_out = {"batch": 64, "prompt_tokens": 16384, "ok": None}
    long = peak | {"prompt_tokens": 2048, "peak_bytes": 16 * 10**9, "planned_bytes": 16 * 10**9}
    peak["planned_bytes"] = 15 * 10**9
    data = {"config": {"model": "llama-2-7b.json"}, "peaks": [peak, long, left_out]}
    (folder / "memory.json").write_text(json.dumps(data))
    (folder / "serving.json").write_text(json.dumps({"serving": SERVING}))
    ends = [[-3.0, -4.0], [5.0, 6.0]]
    data = {"model": "tiny", "scores_99_99": {"calibration": ends, "held out": ends}}
    data["score_density"] = {"centres": [-1.0, 0.0, 1.0], "layers": [[0.1, 0.8, 0.1]] * 2}
    (folder / "calibration.json").write_text(json.dumps(data))
    (folder / "dispatch.json").write_text("{}")
    return folder


@pytest.fixture
def tables(tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    folder.mkdir()
    entries = [
        {
            "op": "matmul",
            "shape": {"m": m, "k": 4096, "n": n, "itemsize": 2, "gate": 0, "fused": m % 2},
            "implementation": "xla" if m > 16 else "mosaic_gpu",
            "config": None,
            "microseconds": {"xla": 40.0, "mosaic_gpu": 36.0 + m / 8},
        }
        for m in (1, 8, 64)
        for n in (4096, 12288)
    ]
    for name, rows in (("RESULTS", entries), ("another_device", [])):
        (folder / f"{name}.json").write_text(json.dumps({"schema": 1, "entries": rows}))
    return folder


def test_a_ratio_is_of_one_run(results, monkeypatch, tmp_path):
    """A later record of some implementations does not change the ratios of the others."""
    plots = plots_module(monkeypatch)
    rows = [
        row_of("decode step B1 P128", name, [us])
        for name, us in (("fdjax", 400), ("xla", 500), ("without fusion", 800))
    ]
    config = {"model": "llama-2-7b.old.json"}
    records.write(record_of(rows, config), results / "llama2_7b_later.json")
    found = plots.Results(results, tmp_path)
    titles = [axes.get_title() for axes in plots.speed_up(found).axes]
    cells = {
        axes.get_title().split(" over ")[0].split("\n")[1]: [t.get_text() for t in axes.texts]
        for axes in plots.speed_up(found).axes
    }
    assert titles[0] == "llama-2-7b\nover xla"
    assert cells["over xla"] == ["1.25x", "2.00x", "2.00x", "2.00x"]
    assert cells["over cudnn"] == ["3.00x"] * 4
    both = [
        (axes.get_title(), [c.get_label() for c in axes.collections])
        for axes in plots.first_and_each(found).axes
    ]
    every = ["fdjax", "xla", "cudnn", "hf eager", "hf static, compiled"]
    assert both[:2] == [("llama-2-7b B1 P1024", every), ("llama-2-7b B1 P128", every)]
    bars = plots.breakdown(found).axes[0].containers
    lengths = {c.get_label(): [bar.get_width() for bar in c] for c in bars}
    assert lengths["without fusion"] == [0.8] and lengths["fdjax"][0] == 0.4
    assert lengths["without flat GEMM"] == pytest.approx([4, 4 * 8**0.2, 4 * 8**0.2])


def test_the_grid_of_the_papers_is_drawn(monkeypatch, tmp_path):
    """FD++ Fig. 10 and FD++Next Fig. 12 from one record. Sizes that did not fit are left blank."""
    plots = plots_module(monkeypatch)
    rows = [
        row_of(f"{case} B{b} P{p}", name, [us * b])
        for b, p in end_to_end.GRID
        if b * p <= 2**16
        for name, us in (("fdjax", 100), ("xla", 130), ("cudnn", 110))
        for case in ("first token", "decode step")
    ]
    rows.append(Measurement("decode step B64 P4096", "xla", False, reason="out of memory"))
    records.write(record_of(rows, {"model": "llama-2-7b.json"}), tmp_path / "grid.json")
    found = plots.Results(tmp_path, tmp_path)
    by_peer = plots.speed_up(found).axes
    assert [axes.get_title() for axes in by_peer] == [
        "llama-2-7b\nover xla",
        "llama-2-7b\nover cudnn",
    ]
    assert [len(axes.texts) for axes in by_peer] == [22, 22]
    panels = plots.throughput(found).axes
    assert [axes.get_title().split()[-1] for axes in panels] == ["128", "1024", "4096", "16384"]
    assert [len(line.get_xdata()) for axes in panels for line in axes.lines] == [7] * 6 + [
        5
    ] * 3 + [3] * 3


def test_cases_of_a_benchmark_may_be_in_several_records(monkeypatch, tmp_path):
    plots = plots_module(monkeypatch)
    for name, case in (("", "D128"), ("_d64", "D64"), ("_recompute", "recompute 1 heads D128")):
        rows = [row_of(case, peer, [100], flops=10**9) for peer in ("mosaic_gpu", "cudnn")]
        records.write(record_of(rows, {}), tmp_path / f"prefill_attention{name}.json")
    (axes,) = plots.attention(plots.Results(tmp_path, tmp_path)).axes
    assert sorted(label.get_text() for label in axes.get_yticklabels()) == ["D128", "D64"]


def test_a_table_is_of_the_device_of_the_records(tables, monkeypatch, tmp_path):
    plots = plots_module(monkeypatch)
    for name, entries in (("results", 6), ("another_device", 0)):
        assert len(plots.Results(tmp_path / name, tables).table["entries"]) == entries
    assert plots.Results(tmp_path / "unknown", tables).table is None


@pytest.mark.slow
def test_figures_are_drawn_from_records(results, tables, monkeypatch, tmp_path, capsys):
    plots = plots_module(monkeypatch)
    write_with_and_without_attention(results)
    monkeypatch.setattr(plots.Results.__init__, "__defaults__", (tables,))
    monkeypatch.chdir(tmp_path)
    assert plots.main(["--results", str(results)]) == 0
    assert not (results / "figures").exists()
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    # test_segments.py and test_plots.py draw these.
    others = "segment_", "beams_", "tensor_parallel"
    elsewhere = [name for name in plots.FIGURES if name.startswith(others)]
    here = plots.FIGURES.keys() - elsewhere
    assert drawn == {f"{name}.{suffix}" for name in here for suffix in ("png", "svg")}
    said = capsys.readouterr().out
    assert said.count("no record") == len(elsewhere) == 6
    first = (tmp_path / "figures" / "memory.svg").read_text()
    assert "weights" in first or "<path" in first


def test_a_figure_without_a_record_is_left_out_and_said(monkeypatch, tmp_path, capsys):
    plots = plots_module(monkeypatch)
    monkeypatch.setattr(plots.Results.__init__, "__defaults__", (tmp_path,))
    folder = tmp_path / "drawn"
    assert plots.main(["--results", str(tmp_path), "--output", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{n}: no record yet" for n in plots.FIGURES]
    assert list(folder.iterdir()) == []


def write_with_and_without_attention(folder):
    rows = [
        row_of(f"{case} B{b} P512", name, [1e3 * us])
        for b in (1, 8)
        for name, us in (("fdjax", 4), ("without attention", 5))
        for case in ("first token", "decode step")
    ]
    of_512 = {"model": "llama-2-7b.old.json"}
    records.write(record_of(rows, of_512), folder / "headline_llama2_7b_1x512.json")


def test_a_headline_figure_has_the_default_path_alone(results, monkeypatch, tmp_path):
    """Measurements of the headline command replace those of an earlier record."""
    plots = plots_module(monkeypatch)
    write_with_and_without_attention(results)
    config = {"model": "llama-2-7b.old.json"}
    for name, us in (("end_to_end_one_launch", 7e3), ("headline_llama2_7b_1x1024", 5e3)):
        rows = [
            row_of(f"{case} B1 P1024", variant, [us * scale])
            for case in ("first token", "decode step")
            for variant, scale in (("fdjax", 1), ("gpt-fast", 2), ("without launch", 3))
        ]
        records.write(record_of(rows, config), results / f"{name}.json")
    steps, _ = plots.headline(plots.Results(results, tmp_path)).axes
    bars = {c.get_label(): [bar.get_width() for bar in c] for c in steps.containers}
    assert bars == {"fdjax": [5.0, 4.0, 4.0], "gpt-fast": [10.0]}


def test_prefill_is_compared_by_prompt_length(results, monkeypatch, tmp_path):
    plots = plots_module(monkeypatch)
    (axes,) = plots.prefill_speed_up(plots.Results(results, tmp_path)).axes
    speeds = {line.get_label(): [*line.get_ydata()] for line in axes.lines}
    assert speeds["xla"] == [2, 2] and speeds["cudnn"] == [3, 3]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("mosaic_gpu_decode_attention_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("mosaic_gpu_flat_gemm_kernel", "GEMM"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        ("gemm_fusion_dot_12", "GEMM"),
        ("chain_kernel_mosaic_gpu_kernel", "GEMM"),
        ("loop_add_fusion", "other"),
    ],
)
def test_a_kernel_is_of_a_part_by_its_name(kernel, part):
    us = runtime.by_part({kernel: 2.0, "copy": 1.0})
    assert us == {"attention": 0, "GEMM": 0, "other": 1.0} | {part: 2.0 + (part == "other")}


@pytest.mark.slow
def test_run_time_is_of_a_gpu(config):
    with pytest.raises(SystemExit, match="takes an NVIDIA GPU"):
        runtime.main([str(config), *"--lengths 8 --batch 1 --new-tokens 2 --dtype float32".split()])


def test_densities_are_of_each_layer():
    """Each density adds up to one, over the bins that have a score."""
    scores = np.zeros((2, 3, calibration.BINS), np.int64)
    middle = calibration.BINS // 2
    scores[0, :, middle] = 5
    scores[1, 1, middle + 8] = 7
    found = calibration.density(scores)
    width = np.diff(found["centres"])
    assert len(found["centres"]) == 3
    sums = (np.asarray(found["layers"]) * width[0]).sum(axis=1)
    np.testing.assert_allclose(sums, 1, rtol=1e-3)
    assert found["layers"][0][0] > 0 == found["layers"][1][0]


def plots_module(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import plots

    return plots


def test_points_without_room_for_new_tokens_are_refused_before_weights_are_made():
    with pytest.raises(SystemExit, match="--points: prompts and 64 new tokens must fit into 4096"):
        tensor_parallel.main(["--points", "1x16", "1x4096"])
