"""The dataflow table: how it is measured, written, read and explained. Most times are made up."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.matmul import summary
from fdjax.bench.record import Measurement
from fdjax.bench.timing import Timing
from fdjax.cli.main import main
from fdjax.models import LinearShape, describe, layers_shape, parse_config
from fdjax.pallas_kernels.gemm import FlatGemmConfig, linear_chain, matmul
from fdjax.pallas_kernels.gemm.hopper.fp8_gemm import Fp8GemmConfig
from fdjax.pallas_kernels.gemm.hopper.int8_gemm import Int8GemmConfig
from fdjax.pallas_kernels.gemm.hopper.linear_chain import CHAIN_CANDIDATES
from fdjax.pallas_kernels.gemm.hopper.packed_gemm import PackedGemmConfig
from fdjax.pallas_kernels.gemm.hopper.tall_gemm import TallGemmConfig
from fdjax.pallas_kernels.layers import DecodeLayersConfig
from fdjax.pallas_kernels.plan import (
    KERNEL_REVISIONS,
    Choice,
    Plan,
    as_entry,
    read_table,
    shipped_table_path,
)
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.system import platform
from fdjax.tools import tune
from fdjax.tools.tune import measure_chain, measure_matmul
from fdjax.tools.tune_table import explain, table_entry, table_in_use, table_of, write_table

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

H100 = "NVIDIA H100 80GB HBM3"
CHAINS = CHAIN_CANDIDATES
GOOD, FAST, WRONG, TOO_LARGE = (FlatGemmConfig(64, 64, stages) for stages in (2, 3, 4, 5))
PLAIN = LinearShape(128, 256)


def _tied_with_post_norms(config):
    blocks = tuple(dataclasses.replace(block, post_norms=True) for block in config.blocks)
    return dataclasses.replace(config, tie_embeddings=True, blocks=blocks)


LAYERS = [
    PLAIN,
    LinearShape(128, 256, norm=True),
    LinearShape(128, 256, residual=True),
    LinearShape(128, 256, gate=True, norm=True),
    LinearShape(128, 192, norm=True, result="float32"),
    LinearShape(128, 256, gate=True, norm=True, weight=WeightFormat("int4", 32, layout="bricks")),
]
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


def _timing(us: float) -> Timing:
    return Timing.from_samples([[us, us]], "cupti")


@pytest.fixture
def fake(monkeypatch):
    """The kernel computes with XLA. Times come from `us`, by configuration; None is XLA."""
    us = {None: 20.0, GOOD: 15.0, FAST: 10.0, WRONG: 1.0, TOO_LARGE: 1.0}
    us |= dict.fromkeys(CHAINS, 75.0) | {"xla": 80.0, CHAINS[1]: 70.0, "off": {}}

    def kernel(*, config, dtype, **operands):
        if config == TOO_LARGE:
            raise NotImplementedError("matmul: no room")
        y = matmul(**operands, preferred_element_type=dtype)
        return y + jnp.asarray(config == WRONG, dtype)

    def chain(*args, config, **operands):
        if us[config] is None:
            raise NotImplementedError("linear_chain: sizes")
        x, y = linear_chain(*args, **operands)
        return x, y + jnp.asarray(us["off"].get(config, 0), y.dtype)

    def one_by_one(*args, plan, **operands):
        return linear_chain(*args, **operands)

    def compile_(fn, args):
        try:
            jax.eval_shape(fn, *args)
        except NotImplementedError:
            return None
        return fn

    def measure(fn, args_sets, *, runs):
        assert runs == 3
        weights = [args[0]["w"] if len(args) == 1 else args[2]["gate_up"] for args in args_sets]
        assert len(set(map(id, weights))) == len(args_sets) > 1
        if len(args_sets[0]) > 1:
            return _timing(us[fn.args[0] or "xla"])
        config = fn.keywords["config"] if isinstance(fn, functools.partial) else None
        return _timing(us[config])

    monkeypatch.setattr(tune, "_run", kernel)
    monkeypatch.setattr(tune, "chain_mosaic", chain)
    monkeypatch.setattr(tune, "linear_chain", one_by_one)
    monkeypatch.setattr(tune, "_compile", compile_)
    monkeypatch.setattr(tune, "measure", measure)
    return us


def _measure(shapes, rows, configs=(GOOD, FAST, WRONG, TOO_LARGE), **keys):
    return list(measure_matmul(shapes, rows, runs=3, configs=lambda shape, m: configs, **keys))


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_fastest_that_is_right_is_chosen(fake, layer):
    said = []
    (entry,) = _measure([layer], [3], report=said.append)
    assert entry == {
        "op": "matmul",
        "shape": {
            "m": 3,
            "k": 128,
            "n": layer.n,
            "itemsize": 2,
            "gate": int(layer.gate),
            "fused": int(layer != PLAIN),
            **(layer.weight.key if layer.weight else {}),
        },
        "implementation": "mosaic_gpu",
        "config": dataclasses.asdict(FAST),
        "microseconds": {"xla": 20.0, "mosaic_gpu": 10.0},
    }
    assert len(said) == 2
    assert said[0].startswith(f"{layer} M=3 {WRONG}: error ")
    assert said[1] == f"{layer} M=3: mosaic_gpu {{'xla': 20.0, 'mosaic_gpu': 10.0}}"


CHAIN = {"m": 2, "k": 128, "width": 128, "hidden": 192, "n": 256, "itemsize": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("us", "best"),
    [
        pytest.param({}, CHAINS[1], marks=pytest.mark.slow),
        pytest.param({CHAINS[0]: 60.0}, CHAINS[0], marks=pytest.mark.slow),
        ({"xla": 70.5}, None),
        ({"off": {CHAINS[1]: 10.0}}, CHAINS[0]),
        ({"off": dict.fromkeys(CHAINS, 10.0)}, None),
    ],
    ids=str,
)
def test_the_fastest_chain_that_is_right_is_chosen(fake, us, best):
    fake |= us
    said = []
    (entry,) = measure_chain(parse_config(LLAMA), [2], runs=3, report=said.append)
    implementation = "mosaic_gpu" if best else "xla"
    right = [fake[config] for config in CHAINS if config not in fake["off"]]
    times = {"xla": fake["xla"], "mosaic_gpu": min(right, default=None)}
    assert entry == {
        "op": "linear_chain",
        "shape": CHAIN,
        "implementation": implementation,
        "config": best and dataclasses.asdict(best),
        "microseconds": times,
    }
    *wrong, last = said
    assert last == f"linear_chain M=2: {implementation} {times}"
    assert [line.split(": error ")[0] for line in wrong] == [
        f"linear_chain M=2 {config}" for config in fake["off"]
    ]


@pytest.mark.parametrize("config", [LLAMA | {"attention_bias": True}, LLAMA | {"mlp_bias": True}])
def test_chains_have_no_place_for_biases(fake, config):
    assert not list(measure_chain(parse_config(config), [2], runs=3))


@pytest.mark.slow
def test_no_chain_is_measured_that_cannot_run(fake, monkeypatch):
    fake[CHAINS[0]] = None
    assert not list(measure_chain(parse_config(LLAMA), [2], runs=3))
    fake[CHAINS[0]] = 75.0
    assert list(measure_chain(parse_config(LLAMA), [2], runs=3))
    monkeypatch.setattr(tune, "can_chain", lambda device: False)
    assert not list(measure_chain(parse_config(LLAMA), [2], runs=3))


@pytest.mark.parametrize(("xla_us", "implementation"), [(9.95, "xla"), (10.0, "mosaic_gpu")])
def test_a_kernel_of_a_product_must_not_lose(fake, xla_us, implementation):
    fake[None] = xla_us
    (entry,) = _measure([PLAIN], [1])
    assert entry["implementation"] == implementation
    assert (entry["config"] is None) == (implementation == "xla")
    assert entry["microseconds"] == {"xla": xla_us, "mosaic_gpu": 10.0}


@pytest.mark.parametrize("configs", [(), (WRONG, TOO_LARGE)], ids=["none", "none right"])
def test_xla_runs_where_no_kernel_does(fake, configs):
    (entry,) = _measure([PLAIN], [1], configs)
    assert (entry["implementation"], entry["config"]) == ("xla", None)
    assert entry["microseconds"] == {"xla": 20.0, "mosaic_gpu": None}


@pytest.mark.slow
def test_a_layer_is_measured_once_for_each_m(fake):
    entries = _measure([PLAIN, LAYERS[1], PLAIN], [1, 8])
    assert [(e["shape"]["m"], e["shape"]["fused"]) for e in entries] == [
        *((1, 0), (8, 0)),
        *((1, 1), (8, 1)),
    ]


def test_xla_is_timed_on_this_device():
    """Times are real, but there is no kernel."""
    (entry,) = measure_matmul([LAYERS[3]], [2], runs=2, configs=lambda shape, m: [])
    assert entry["microseconds"]["xla"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layer",
    [
        LinearShape(1024, 4096, norm=True),
        LinearShape(1024, 8192, gate=True, norm=True),
        LinearShape(4096, 8192, residual=True, weight=WeightFormat("int8", 64, layout="bricks")),
    ],
    ids=str,
)
def test_kernels_are_timed_on_this_device(layer):
    said = []
    entries = list(measure_matmul([layer], [1, 12], runs=2, report=said.append))
    assert all(entry["microseconds"]["mosaic_gpu"] for entry in entries)
    assert len(said) == 2, said  # no candidate was wrong


@pytest.mark.slow
def test_a_table_is_read_as_it_was_measured(fake, tmp_path):
    entries = _measure(LAYERS[:4], [1, 8])
    fake[None] = 1.0
    entries += _measure([LAYERS[3]], [16])
    table = table_of(entries, "some commit")
    assert table["provenance"]["commit"] == "some commit"
    path = tmp_path / "new folder" / "table.json"
    write_table(table, path)
    assert json.loads(path.read_text()) == table
    assert len(read_table(path)) == len(entries)
    assert sum('"op"' in line for line in path.read_text().splitlines()) == len(entries)
    plan = Plan.for_kind("a GPU of this test", (9, 0), table=path)
    config = tuple(sorted(dataclasses.asdict(FAST).items()))
    for shape in LAYERS[:4]:
        measured = plan.choose("matmul", **shape.key(8, 2))
        assert measured == Choice("mosaic_gpu", config, source="table")
        assert plan.choose("matmul", **shape.key(5, 2)) == Choice(
            "mosaic_gpu", config, source="nearest"
        )
        assert plan.choose("matmul", **shape.key(5, 4)).source == "heuristic"
    assert plan.choose("matmul", **LAYERS[3].key(16, 2)) == Choice("xla", source="table")
    assert plan.choose("matmul", **LAYERS[3].key(9, 2)) == Choice("xla", source="nearest")


def test_a_table_tells_the_kernels_of_plain_and_quantised_weights_apart():
    shape = {"m": 8, "k": 4096, "n": 4096, "itemsize": 2, "gate": 0, "fused": 0}
    row = {"op": "matmul", "implementation": "mosaic_gpu", "microseconds": {}}
    row |= {"shape": shape | {"int4": 128}, "config": dataclasses.asdict(PackedGemmConfig(2))}
    entry = as_entry(row, KERNEL_REVISIONS, "a table")
    assert PackedGemmConfig(**dict(entry.choice.config)) == PackedGemmConfig(2)
    for config, problem in (({"wide": 9}, "wide must be in"), ({"tall": 1}, "tall")):
        with pytest.raises(ValueError, match=f"a config must be valid for matmul.*{problem}"):
            as_entry(row | {"config": config}, KERNEL_REVISIONS, "a table")


def test_the_layers_of_a_decoder_as_it_calls_them():
    config = parse_config(LLAMA)
    assert config.linear_shapes == {
        "qkv": LinearShape(128, 256, norm=True),
        "out": LinearShape(128, 128, residual=True),
        "gate_up": LinearShape(128, 384, gate=True, norm=True),
        "down": LinearShape(192, 128, residual=True),
        "head": LinearShape(128, 320, norm=True, result="float32"),
    }
    tied = _tied_with_post_norms(config).linear_shapes
    assert list(tied) == ["qkv", "out", "gate_up", "down"]
    assert not tied["out"].fused
    assert not tied["down"].fused


def test_a_decoder_looks_up_what_was_measured_for_it(monkeypatch):
    """The keys of `linear_shapes` are those with which the model asks its plan."""
    asked = set()

    def choose(self, op, features, **shape):
        if op == "matmul":
            asked.add(tuple(sorted(shape.items())))
        return Choice("xla", source="heuristic")

    model = describe(parse_config(LLAMA), plan=Plan())
    monkeypatch.setattr(Plan, "choose", choose)
    from fdjax import forward

    tokens = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    jax.eval_shape(functools.partial(forward, model), model.abstract_params, tokens)
    shapes = model.config.linear_shapes.values()
    assert asked == {tuple(sorted(shape.key(5, 2).items())) for shape in shapes}


@pytest.mark.parametrize(
    "shape",
    [
        LinearShape(4096, 4096, residual=True),
        LinearShape(4096, 12288, norm=True),
        LinearShape(4096, 28672, gate=True, norm=True),
        LinearShape(2048, 2048),
        LinearShape(4096, 32000, norm=True, result="float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [1, 64, 128])
def test_candidates_fill_the_device_once(shape, m):
    configs = tune.candidates(shape, m)
    assert len(configs) > 1
    for config in configs:
        columns = shape.n // 2 if shape.gate else shape.n
        assert columns / config.block_n * config.split * -(-m // config.block_m) >= 48


def test_quantised_weights_have_the_candidates_of_all_kernels_that_run():
    weight = WeightFormat("int4", 128, layout="bricks")
    shape = LinearShape(4096, 4096, residual=True, weight=weight)
    kernels = {m: {type(config) for config in tune.candidates(shape, m)} for m in (1, 32, 33, 128)}
    assert kernels == {
        1: {PackedGemmConfig},
        32: {PackedGemmConfig, TallGemmConfig},
        33: {TallGemmConfig},
        128: {TallGemmConfig},
    }


@pytest.mark.parametrize(
    ("kind", "rounds", "config"),
    [
        *(("fp8", True, Fp8GemmConfig), ("fp8", False, None)),
        *(("int8", True, Int8GemmConfig), ("int8", False, None)),
    ],
)
def test_activations_are_rounded_only_where_they_may_be(kind, rounds, config):
    weight = WeightFormat(kind, 4096, layout="bricks", rounded_activations=rounds)
    shape = LinearShape(4096, 4096, weight=weight)
    kernels = {m: {type(config) for config in tune.candidates(shape, m)} for m in (64, 65, 512)}
    more = {TallGemmConfig, config} - {None}
    assert kernels == {64: {TallGemmConfig}, 65: more, 512: more}


def test_a_configuration_runs_with_its_own_kernel(monkeypatch):
    ran = []
    kernels = [
        dataclasses.replace(i, run=functools.partial(lambda i, **given: ran.append((i, given)), i))
        for i in tune.MATMUL
    ]
    monkeypatch.setattr(tune, "MATMUL", kernels)
    for i in kernels:
        if i.config:
            tune._run(config=i.config(), x=1)
    assert [i.config for i, _ in ran] == [i.config for i in kernels if i.config]
    assert ran[0][1] == {"x": 1, "batch_invariant": False, "config": ran[0][0].config()}


def test_weights_beyond_the_device_have_no_candidate():
    assert tune.candidates(LinearShape(4096, 128256, norm=True), 1) == []


def _entry(shape, m, implementation, xla_us, kernel_us):
    return {
        "op": "matmul",
        "shape": shape.key(m, 2),
        "implementation": implementation,
        "config": None,
        "microseconds": {"xla": xla_us, "mosaic_gpu": kernel_us},
    }


@pytest.fixture
def table():
    entries = [
        _entry(PLAIN, 1, "xla", 9.0, 10.0),
        _entry(PLAIN, 2, "mosaic_gpu", 11.54, 10.0),
        _entry(PLAIN, 8, "mosaic_gpu", 12.0, 10.06),
        _entry(PLAIN, 64, "xla", 20.0, None),
        _entry(LAYERS[1], 1, "mosaic_gpu", 12.0, 11.0),
        _entry(LAYERS[1], 8, "xla", 12.0, 13.0),
        _entry(LAYERS[1], 16, "mosaic_gpu", 14.0, 13.0),
        _entry(LAYERS[3], 1, "xla", 14.0, 15.0),
        {"op": "decode_attention", "shape": {"b": 1}, "implementation": "cudnn"},
    ]
    environment = {"device_kind": "a GPU", "versions": {"jax": "0.11.2"}, "date": "2026-11-21T08"}
    return {"schema": 1, "provenance": environment, "entries": entries}


def test_explain_shows_the_inflection_points(table):
    shapes = {"one": PLAIN, "qkv": LAYERS[1], "gate_up": LAYERS[3], "head": LAYERS[4]}
    assert explain(table, shapes, "bfloat16").splitlines() == [
        "a GPU, JAX 0.11.2, 2026-11-21",
        "bfloat16, microseconds on the device, * is what runs",
        "",
        "one [128,256]: mosaic_gpu from M1 = 2 to M2 = 8, else xla",
        "           M       1       2       8      64",
        "         xla    9.0*   11.5    12.0    20.0*",
        "  mosaic_gpu   10.0    10.0*   10.1*      -",
        "",
        "qkv [128,256] norm: mosaic_gpu from M1 = 1 to M2 = 16 but at M = 8, else xla",
        "           M       1       8      16",
        "         xla   12.0    12.0*   14.0",
        "  mosaic_gpu   11.0*   13.0    13.0*",
        "",
        "gate_up [128,2,128] norm gate: xla at every M",
        "           M       1",
        "         xla   14.0*",
        "  mosaic_gpu   15.0",
        "",
        "head [128,192] norm: not measured, xla",
    ]
    assert explain(table, {"one": PLAIN}, "float32").endswith("one [128,256]: not measured, xla")


def test_explain_needs_no_provenance_and_no_times(table):
    del table["provenance"], table["entries"][0]["microseconds"]
    text = explain(table, {"one": PLAIN}, "bfloat16")
    assert text.startswith("unknown device, JAX unknown, undated\n")
    assert "         xla      -*" in text


@pytest.mark.parametrize("date", [None, 20261121, {}], ids=str)
def test_explain_takes_any_date(table, date):
    table["provenance"]["date"] = date
    assert explain(table, {"one": PLAIN}, "bfloat16").startswith(f"a GPU, JAX 0.11.2, {date}\n")


@pytest.mark.parametrize(
    "times", [None, [1.0], {"xla": "x"}, {"xla": 10**400}, {"xla": []}], ids=str
)
def test_a_table_with_wrong_times_is_not_explained(table, tmp_path, times):
    table["entries"] = [table["entries"][0] | {"microseconds": times}]
    write_table(table, tmp_path / "table.json")
    with pytest.raises(ValueError, match=r"dataflow table .*: microseconds must be numbers from 0"):
        table_in_use("cpu", tmp_path / "table.json")


def test_the_shipped_table_covers_the_models_it_was_made_for():
    plan = Plan.for_kind(H100, (9, 0))
    table = table_in_use(H100)
    assert table["provenance"]["device_kind"] == H100
    for width, mlp in ((4096, 11008), (5120, 13824)):
        heads = width // 128
        llama = LLAMA | {"hidden_size": width, "intermediate_size": mlp, "vocab_size": 32000}
        llama |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        for shape in parse_config(llama).linear_shapes.values():
            for m in (1, 3, 8, 13, 16):
                choice = plan.choose("matmul", **shape.key(m, 2))
                assert choice.source in ("table", "nearest"), shape
            assert plan.choose("matmul", **shape.key(2048, 2)) == Choice("xla", source="heuristic")


@pytest.mark.parametrize(
    ("plan", "dtype", "problem"),
    [
        (
            Plan.for_kind("NVIDIA A100-SXM4-80GB", (8, 0)),
            "bfloat16",
            "tune: the kernels need an NVIDIA GPU of compute capability 9.0 (H100, H200), got "
            "'NVIDIA A100-SXM4-80GB'",
        ),
        (
            Plan.for_kind(H100, (9, 0)),
            "float32",
            "tune: the kernels multiply bfloat16 or float16, got float32",
        ),
    ],
)
def test_what_cannot_be_tuned(plan, dtype, problem):
    with pytest.raises(NotImplementedError) as error:
        tune.tune(describe(parse_config(LLAMA), dtype=dtype, plan=plan))
    assert str(error.value) == problem


class TestCommandLine:
    """`fdjax tune`."""

    @pytest.fixture
    def run(self, monkeypatch, tmp_path, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))

        def run(*argv):
            try:
                code = main(argv)
            except SystemExit as stopped:
                code = stopped.code
            return code, *capsys.readouterr()

        return run

    @pytest.fixture
    def on_a_gpu(self, monkeypatch, fake):
        def layers(model, *, report):
            chosen = model.plan.choose("linear_chain", **CHAIN | {"m": 8})
            assert chosen == Choice(
                "mosaic_gpu", tuple(sorted(dataclasses.asdict(CHAINS[1]).items())), source="table"
            )
            report("decode_layers")
            shape = layers_shape(model.config, 8, 256, 2)
            yield table_entry("decode_layers", shape, {None: 2.0, DecodeLayersConfig(): 1.0})

        plan = Plan.for_kind("a GPU of this test", (9, 0))
        monkeypatch.setattr(platform, "default_backend", lambda: "gpu")
        monkeypatch.setattr(Plan, "for_device", lambda **keys: plan)
        monkeypatch.setattr(tune, "candidates", lambda shape, m: [FAST])
        measured = functools.partial(
            measure_matmul, rows=(1, 8), runs=3, configs=lambda shape, m: [FAST]
        )
        monkeypatch.setattr(tune, "measure_matmul", measured)
        chained = functools.partial(measure_chain, rows=(1, 8), runs=3)
        monkeypatch.setattr(tune, "measure_chain", chained)
        monkeypatch.setattr(tune, "measure_layers", layers)

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [["config.json"], ["--config", "config.json"]], ids=str)
    def test_measures_and_writes(self, run, on_a_gpu, how, tmp_path):
        code, out, err = run("tune", *how, "--output", "sub/table.json")
        assert code == 0, err
        assert "gate_up [128,2,192] norm gate: mosaic_gpu from M1 = 1 to M2 = 8, else xla" in out
        assert err.count("fdjax: ") == 13
        ops = [entry.op for entry in read_table(tmp_path / "sub/table.json")]
        assert ops == ["matmul"] * 10 + ["linear_chain"] * 2 + ["decode_layers"]
        code, again, err = run("tune", *how, "--explain", "--table", "sub/table.json")
        assert (code, again, err) == (0, out, "")

    def test_explains_the_table_that_is_shipped(self, run):
        code, out, err = run(
            "tune", "config.json", "--explain", "--table", str(shipped_table_path(H100))
        )
        assert (code, err) == (0, "")
        assert out.startswith(f"{H100}, JAX ")
        assert out.count("not measured, xla") == 5

    @pytest.mark.parametrize(
        ("argv", "code", "problem"),
        [
            ([], 2, "tune: needs an NVIDIA GPU, JAX sees none"),
            (["no.json", "--explain"], 1, "no.json: no such file"),
            (["config.json", "--explain"], 1, "tune: no table is shipped for 'cpu'"),
            (["--table", "x.json"], 2, "tune: --table needs --explain"),
            (
                ["config.json", "--explain", "--table", "config.json"],
                1,
                "dataflow table config.json: schema must be 1, got None",
            ),
        ],
        ids=str,
    )
    def test_errors_take_one_line(self, run, argv, code, problem):
        assert run("tune", *argv) == (code, "", f"fdjax: error: {problem}\n")

    @pytest.mark.parametrize(
        "argv",
        [
            ["config.json", "--config", "config.json"],
            ["config.json", "--explain", "--output", "x"],
        ],
        ids=str,
    )
    def test_options_that_exclude_each_other(self, run, argv):
        code, out, err = run("tune", *argv)
        assert (code, out) == (2, "")
        assert "not allowed with argument" in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("command", [["generate", "hi"], ["info"], ["bench"]], ids=str)
    def test_other_commands_take_the_table(self, run, command):
        code, _, err = run(*command, "--table", "config.json")
        assert code == 1
        assert err.endswith("error: dataflow table config.json: schema must be 1, got None\n")


def test_the_benchmark_sums_up_and_counts_where_xla_was_chosen():
    def row(case, implementation, us):
        timing = dataclasses.asdict(_timing(us)) if us else None
        return Measurement(case, implementation, ok=us is not None, timing=timing)

    rows = [
        row("7B qkv M=1", "xla", 30.0),
        row("7B qkv M=16", "xla", 40.0),
        row("7B qkv M=16", "mosaic_gpu", 20.0),
        row("7B out M=32", "xla", 10.0),
        row("7B out M=32", "mosaic_gpu", 20.0),
        row("7B norm, qkv M=2", "xla", 40.0),
        row("7B norm, qkv M=2", "mosaic_gpu", 32.0),
        row("7B norm, qkv M=4", "xla", None),
    ]
    text = summary(rows)
    assert "7B qkv                   1.000" in text
    assert text.splitlines()[-3:] == [
        "plain, M = 1 to 12: 1.000 geometric mean of 1, least 1.000; xla chosen at 1",
        "plain, M = 16 to 64: 1.000 geometric mean of 2, least 0.500; xla chosen at 0",
        "fused, M = 1 to 16: 1.250 geometric mean of 1, least 1.250; xla chosen at 0",
    ]
