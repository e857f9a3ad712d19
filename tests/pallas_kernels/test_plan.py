"""Tests which implementation a plan chooses and why, and that ops run it."""

import dataclasses
import functools
import json
import logging
import pickle
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fdjax.pallas_kernels import table as table_module
from fdjax.pallas_kernels.attention import AttentionSpec, decode_attention, prefill_attention
from fdjax.pallas_kernels.dispatch import Implementation, resolve
from fdjax.pallas_kernels.gemm import MATMUL, matmul
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import KERNEL_REVISIONS, Choice, Entry, Plan, read_table

H100 = "NVIDIA H100 80GB HBM3"
DECODE = dict(b=8, t=1, h=32, hkv=8, s=2048, d=128, itemsize=2, masks=0)
PREFILL = DECODE | dict(b=1, t=512)
GEMM = dict(m=8, k=4096, n=4096, itemsize=2, gate=0, fused=1)
OPS = {"decode_attention": DECODE, "prefill_attention": PREFILL, "matmul": GEMM}


def _write(path, entries, schema=1):
    rows = [
        dict(op=op, shape=shape, implementation=implementation)
        for op, shape, implementation in entries
    ]
    path.write_text(json.dumps(dict(schema=schema, entries=rows)))
    return path


def _h100(**keys) -> Plan:
    """The plan of an H100, without a table or with a test's table."""
    return Plan(device_kind=H100, compute_capability=(9, 0), **keys)


def _a100() -> Plan:
    return Plan(device_kind="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))


def test_plans_are_values(tmp_path):
    entries = [("decode_attention", DECODE, "cudnn")]
    one, other = (
        Plan(H100, (9, 0), table=read_table(_write(tmp_path / name, entries)))
        for name in ("one.json", "other.json")
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != dataclasses.replace(other, batch_invariant=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.device_kind = "cpu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.table[0].choice.implementation = "xla"


def test_equal_plans_are_traced_once():
    traces = []

    @functools.partial(jax.jit, static_argnames="plan")
    def step(x, w, plan):
        traces.append(plan)
        return matmul(x, w, plan=plan)

    x, w = jnp.ones((2, 8)), jnp.ones((8, 4))
    step(x, w, plan=Plan())
    step(x, w, plan=Plan())
    step(x, w, plan=dataclasses.replace(Plan(batch_invariant=True), batch_invariant=False))
    assert len(traces) == 1
    step(x, w, plan=Plan(batch_invariant=True))
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("op", "change", "expected"),
    [
        ("decode_attention", {}, "mosaic_gpu"),
        ("decode_attention", dict(t=2), "mosaic_gpu"),
        ("decode_attention", dict(masks=1), "mosaic_gpu"),
        ("decode_attention", dict(d=96), "cudnn"),
        ("decode_attention", dict(d=96, t=2), "xla"),
        ("decode_attention", dict(t=16, h=40), "mosaic_gpu"),
        ("prefill_attention", {}, "mosaic_gpu"),
        ("prefill_attention", dict(d=96, masks=1), "mosaic_gpu"),
        ("prefill_attention", dict(d=80), "cudnn"),
        ("prefill_attention", dict(s=1028), "cudnn"),
        ("decode_attention", dict(itemsize=4), "xla"),
        ("prefill_attention", dict(itemsize=4), "xla"),
        ("prefill_attention", dict(d=80, masks=1), "xla"),
        ("decode_attention", dict(d=100), "xla"),
        ("matmul", {}, "mosaic_gpu"),
        ("matmul", dict(m=32, k=512, n=512), "mosaic_gpu"),
        ("matmul", dict(m=1, k=896, n=9728, gate=1), "mosaic_gpu"),
        ("matmul", dict(m=33), "xla"),
        ("matmul", dict(k=4128), "xla"),
        ("matmul", dict(n=4128), "xla"),
        ("matmul", dict(n=4160, gate=1), "xla"),
        ("matmul", dict(itemsize=4), "xla"),
        ("matmul", dict(k=256), "xla"),
        ("matmul", dict(n=256), "xla"),
        ("matmul", dict(k=17408), "xla"),
        ("matmul", dict(n=128256), "xla"),
    ],
)
def test_an_h100_without_measurements(op, change, expected):
    choice = _h100().choose(op, **OPS[op] | change)
    assert choice == Choice(expected, source="heuristic")


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, "cudnn"), (dict(t=2), "xla"), (dict(masks=1), "xla"), (dict(itemsize=4), "xla")],
)
def test_an_a100_without_measurements(change, expected):
    choice = _a100().choose("decode_attention", **DECODE | change)
    assert choice == Choice(expected, source="heuristic")


@pytest.mark.parametrize("capability", [None, (7, 5)])
@pytest.mark.parametrize("op", OPS)
def test_elsewhere_xla_runs(op, capability):
    plan = Plan.for_kind("a device without measurements", capability)
    assert plan.choose(op, **OPS[op]) == Choice("xla", source="heuristic")


@pytest.mark.parametrize("op", ["decode_attention", "prefill_attention"])
def test_exact_then_nearest_then_heuristic(tmp_path, op):
    """The table has one entry, which differs from the heuristic's choice."""
    shape = OPS[op]
    guess = _h100().choose(op, **shape).implementation
    measured, size = "mosaic_gpu", 64
    entries = [
        (op, shape | dict(s=size), measured),
        (op, shape | dict(s=4 * size), "xla"),
        ("matmul", GEMM, "xla"),
    ]
    plan = _h100(table=read_table(_write(tmp_path / "table.json", entries)))

    def choose(size):
        return plan.choose(op, **shape | dict(s=size))

    assert choose(size) == Choice(measured, source="table")
    assert choose(4 * size) == Choice("xla", source="table")
    assert choose(size + 8) == Choice(measured, source="nearest")
    assert choose(3 * size) == Choice("xla", source="nearest")
    assert choose(7 * size) == Choice("xla", source="nearest")
    assert choose(16 * size) == Choice(guess, source="heuristic")


def test_rows_between_two_measurements_run_as_the_larger(tmp_path):
    """A tiling that was measured with fewer rows may have no room for these."""
    entries = [
        ("matmul", GEMM | dict(m=1), "xla"),
        ("matmul", GEMM | dict(m=4), "mosaic_gpu"),
        ("matmul", GEMM | dict(m=8), "mosaic_gpu"),
        ("matmul", GEMM | dict(m=16), "xla"),
    ]
    plan = _h100(table=read_table(_write(tmp_path / "table.json", entries)))

    def choose(m):
        return plan.choose("matmul", **GEMM | dict(m=m))

    kernel, xla = Choice("mosaic_gpu", source="nearest"), Choice("xla", source="nearest")
    assert {m: choose(m) for m in (2, 3, 5, 7)} == dict.fromkeys((2, 3, 5, 7), kernel)
    assert {m: choose(m) for m in (9, 11, 15)} == dict.fromkeys((9, 11, 15), xla)
    assert choose(4) == Choice("mosaic_gpu", source="table")
    assert choose(33) == choose(256) == Choice("xla", source="heuristic")
    assert choose(512) == Choice("mosaic_gpu", source="heuristic")  # another kernel


@pytest.mark.parametrize(
    "change", [dict(k=4160), dict(n=4160), dict(gate=1), dict(fused=0), dict(itemsize=4)], ids=str
)
def test_another_weight_is_not_near(tmp_path, change):
    table = read_table(_write(tmp_path / "table.json", [("matmul", GEMM, "mosaic_gpu")]))
    choice = _h100(table=table).choose("matmul", **GEMM | change)
    assert choice.source == "heuristic"


@pytest.mark.parametrize("tiles", [0, 1.5, True])
def test_calls_have_at_least_one_tile(tiles):
    with pytest.raises(ValueError, match=f"prompt_tiles must be a positive integer, got {tiles}"):
        Plan(prompt_tiles=tiles)


def test_a_plan_of_lists_is_a_plan_of_tuples():
    plan = Plan(named=[["matmul", "xla"]], only_xla=["linear_chain"], table=[])
    assert plan == Plan(named=(("matmul", "xla"),), only_xla=("linear_chain",))
    assert plan.choose("matmul", **GEMM) == Choice("xla", source="named")


@pytest.mark.parametrize("named", [("matmul", "xla"), {"matmul": "xla"}, [("matmul",)]], ids=str)
def test_named_must_hold_pairs(named):
    with pytest.raises(ValueError, match=r"^plan: named must hold pairs .*, got .*'matmul'"):
        Plan(named=named)


def test_a_named_implementation_overrides_the_table(tmp_path):
    table = read_table(_write(tmp_path / "table.json", [("matmul", GEMM, "mosaic_gpu")]))
    plan = _h100(named=(("matmul", "xla"),), table=table)
    assert plan.choose("matmul", **GEMM) == Choice("xla", source="named")


@pytest.mark.parametrize(
    "change",
    [
        *(dict(itemsize=4), dict(d=64), dict(d=120), dict(d=256), dict(masks=1), dict(t=2)),
        dict(b=8, t=2, d=64, itemsize=4),
        *(dict(s=2047), dict(hkv=16, h=64)),
    ],
    ids=str,
)
def test_what_cannot_run_here_is_not_near(tmp_path, change):
    """A measurement for bf16, D = 128, T = 1 must not send to cuDNN what cuDNN cannot do.

    It must not send a cache of odd length to a kernel, nor apply to another number of KV heads,
    which occupies the device differently.
    """
    table = read_table(_write(tmp_path / "table.json", [("decode_attention", DECODE, "cudnn")]))
    plan = _h100(table=table)
    near = plan.choose("decode_attention", **DECODE | dict(b=9, s=2048))
    assert near == Choice("cudnn", source="nearest")
    assert plan.choose("decode_attention", **DECODE | change).source == "heuristic"


def test_an_entry_with_other_keys_is_never_near(tmp_path):
    shape = {key: size for key, size in GEMM.items() if key != "itemsize"}
    table = read_table(_write(tmp_path / "table.json", [("matmul", shape, "mosaic_gpu")]))
    plan = _h100(table=table)
    assert plan.choose("matmul", **GEMM).source == "heuristic"


def test_the_order_of_keys_does_not_matter(tmp_path):
    reverse = dict(reversed(GEMM.items()))
    table = read_table(_write(tmp_path / "table.json", [("matmul", reverse, "mosaic_gpu")]))
    plan = _h100(table=table)
    assert plan.choose("matmul", **GEMM).source == "table"
    assert plan.choose("matmul", **reverse).source == "table"


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_a_table_of_another_schema(tmp_path, schema):
    path = _write(tmp_path / "table.json", [], schema)
    with pytest.raises(ValueError) as error:
        read_table(path)
    assert str(error.value) == f"dataflow table {path}: schema must be 1, got {schema!r}"


def test_a_table_without_a_schema(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"entries": []}')
    with pytest.raises(ValueError, match="schema must be 1, got None"):
        read_table(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be JSON, Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "schema must be 1, got None"),
        ('{"schema": 1}', "entries must follow schema 1, KeyError('entries')"),
        ('{"schema": 1, "entries": [{}]}', "entries must follow schema 1, KeyError('op')"),
        (
            '{"schema": 1, "entries": [3]}',
            "entries must follow schema 1, TypeError(\"'int' object is not subscriptable\")",
        ),
    ],
)
def test_a_file_that_is_no_table(tmp_path, text, problem):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_table(path)
    assert str(error.value) == f"dataflow table {path}: {problem}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "frobnicate"}, "op must be one of matmul, linear_chain, .* got 'frobnicate'"),
        ({"op": ["matmul"]}, "op must be one of"),
        ({"implementation": "cudnn"}, "'cudnn' does not implement matmul"),
        (
            {"op": "linear_chain", "implementation": "cudnn"},
            "'cudnn' does not implement linear_chain",
        ),
        (
            {"op": "decode_layers", "implementation": "cudnn"},
            "'cudnn' does not implement decode_layers",
        ),
        ({"shape": GEMM | {"m": "1"}}, "a shape must hold integers .*, got 'm': '1'"),
        ({"shape": GEMM | {"m": 2**63}}, "a shape must hold integers below 2.63, got 'm': 92"),
        ({"shape": GEMM | {"m": None, "k": 2.0}}, ".* got 'm': None, 'k': 2.0"),
        ({"config": {"stages": True}}, "a config must hold integers .*, got 'stages': True"),
        (
            {"config": {"blok_n": 64}},
            "a config must be valid for matmul, got {'blok_n': 64} for .* unexpected .* 'blok_n'",
        ),
        (
            {"config": {"block_n": 65}},
            "a config must be valid for matmul, got {'block_n': 65} for .*, flat_gemm: block_n",
        ),
        (
            {"op": "linear_chain", "config": {"shared": 0}},
            "a config must be valid for linear_chain, got {'shared': 0} for .*, linear_chain: must",
        ),
        (
            {"op": "decode_layers", "config": {"ahead": -1}},
            "a config must be valid for decode_layers, got {'ahead': -1} for .*: must",
        ),
        (
            {"op": "decode_layers", "config": {"stages": 2}},
            "a config must be valid for decode_layers, got .* for .* unexpected .* 'stages'",
        ),
        (
            {"op": "decode_attention", "shape": DECODE, "config": {"stages": 2}},
            "a config must be valid for decode_attention, got .* for .* missing .* 'splits'",
        ),
        (
            {"op": "prefill_attention", "shape": PREFILL, "config": {"stages": 2}},
            "'mosaic_gpu' for prefill_attention takes no config, got {'stages': 2}",
        ),
        (
            {"implementation": "xla", "config": {"block_n": 64}},
            "'xla' for matmul takes no config, got {'block_n': 64}",
        ),
    ],
    ids=str,
)
def test_a_table_with_an_entry_that_means_nothing(tmp_path, change, message):
    entry = dict(op="matmul", shape=GEMM, implementation="mosaic_gpu") | change
    path = tmp_path / "table.json"
    path.write_text(json.dumps(dict(schema=1, revisions=KERNEL_REVISIONS, entries=[entry])))
    with pytest.raises(ValueError, match=f"dataflow table .*table.json: {message}"):
        read_table(path)


def test_a_table_with_an_unknown_implementation(tmp_path):
    path = _write(tmp_path / "table.json", [("matmul", GEMM, "triton")])
    with pytest.raises(ValueError) as error:
        read_table(path)
    assert str(error.value) == (
        f"dataflow table {path}: matmul: implementation must be one of xla, cudnn, mosaic_gpu, "
        "got 'triton'"
    )


def test_a_shipped_table_is_found_by_device_kind(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    _write(tmp_path / "tables" / "NVIDIA_Test_GPU.json", [("matmul", GEMM, "mosaic_gpu")])
    monkeypatch.setattr(table_module, "__file__", str(tmp_path / "table.py"))
    plan = Plan.for_kind("NVIDIA Test GPU", (9, 0))
    assert plan.choose("matmul", **GEMM) == Choice("mosaic_gpu", source="table")
    assert Plan.for_kind("NVIDIA Other Test GPU", (9, 0)).table == ()


@pytest.mark.parametrize(("jax_version", "said"), [("0.1", 1), (jax.__version__, 0), (None, 0)])
def test_a_table_of_another_jax_is_used_with_a_warning(tmp_path, caplog, jax_version, said):
    entry = dict(op="matmul", shape=GEMM, implementation="xla")
    path = tmp_path / "table.json"
    provenance = dict(versions=dict(jax=jax_version))
    path.write_text(json.dumps(dict(schema=1, provenance=provenance, entries=[entry])))
    assert len(read_table(path)) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * said
    text = f"dataflow table {path}: measured with JAX 0.1, not {jax.__version__}"
    assert all(record.getMessage() == text for record in caplog.records)


@pytest.mark.parametrize(("measured_on", "said"), [("NVIDIA Other", 1), (H100, 0), (None, 0)])
def test_a_table_of_another_device_is_used_with_a_warning(tmp_path, caplog, measured_on, said):
    entry = dict(op="matmul", shape=GEMM | {"n": 64}, implementation="mosaic_gpu")
    path = tmp_path / "table.json"
    provenance = dict(device_kind=measured_on)
    path.write_text(json.dumps(dict(schema=1, provenance=provenance, entries=[entry])))
    plan = Plan.for_kind(H100, (9, 0), table=path)
    assert plan.choose("matmul", **GEMM | {"n": 64}).source == "table"
    text = f"dataflow table {path}: measured on NVIDIA Other, not {H100}"
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warned == [text] * said


def test_a_table_of_kernels_is_not_for_a_cpu(tmp_path):
    kernels = _write(tmp_path / "kernels.json", [("matmul", GEMM, "mosaic_gpu")])
    message = f"plan: the kernels in {re.escape(str(kernels))} need an NVIDIA GPU, got 'cpu'"
    with pytest.raises(NotImplementedError, match=message):
        Plan.for_kind("cpu", table=kernels)
    assert Plan.for_kind("cpu", table=_write(tmp_path / "xla.json", [("matmul", GEMM, "xla")]))


def test_a_given_table_comes_before_the_shipped_one(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    shipped = [("matmul", GEMM, "mosaic_gpu"), ("matmul", GEMM | dict(m=4), "mosaic_gpu")]
    _write(tmp_path / "tables" / "NVIDIA_Test_GPU_2.json", shipped)
    monkeypatch.setattr(table_module, "__file__", str(tmp_path / "table.py"))
    own = _write(tmp_path / "own.json", [("matmul", GEMM, "xla")])
    plan = Plan.for_kind("NVIDIA Test GPU 2", (9, 0), table=own)
    assert plan.choose("matmul", **GEMM) == Choice("xla", source="table")
    assert plan.choose("matmul", **GEMM | dict(m=4)) == Choice("mosaic_gpu", source="table")


def test_shipped_tables_can_be_read():
    folder = table_module.Path(table_module.__file__).parent / "tables"
    for path in folder.glob("*.json"):
        entries = read_table(path)
        assert any(entry.choice.config for entry in entries), path


def test_what_is_not_measured_is_logged(caplog):
    table = (Entry("matmul", tuple(sorted(GEMM.items())), Choice("xla", source="table")),)
    plan = Plan("a GPU of this test", (9, 0), table=table)
    with caplog.at_level(logging.DEBUG, logger="fdjax"):
        plan.choose("matmul", **GEMM)
        assert caplog.records == []
        plan.choose("matmul", **GEMM | dict(m=7))
        plan.choose("decode_attention", **DECODE)
    nearest, heuristic = (record.getMessage() for record in caplog.records)
    assert nearest.startswith("matmul {")
    assert "'m': 7" in nearest
    assert "nearest measured shape {" in nearest
    assert "'m': 8" in nearest
    assert heuristic.startswith("decode_attention {")
    assert heuristic.endswith(": no measurement, mosaic_gpu")


def _nothing():
    """The `run` of the implementations in these tests."""


_OP = (Implementation("some_op", "xla", _nothing),)


def test_unknown_implementations():
    message = "implementation must be one of xla, cudnn, mosaic_gpu, got 'triton'"
    with pytest.raises(ValueError, match=f"^matmul: {message}$"):
        Plan(named=(("matmul", "triton"),))
    with pytest.raises(
        ValueError, match=r"^plan: an op of named must be one of matmul, .*'matmull'$"
    ):
        Plan(named=(("matmull", "xla"),))
    with pytest.raises(
        ValueError, match=r"^plan: an op of only_xla must be one of matmul, .*'matmull'$"
    ):
        Plan().with_xla("matmull")
    with pytest.raises(ValueError, match=f"^some_op: {message}$"):
        resolve(_OP, Plan(), "triton")
    with pytest.raises(ValueError, match=f"^plan: {message}$"):
        Plan.for_kind(H100, (9, 0), implementation="triton")


def test_one_implementation_for_all_ops_that_have_it():
    xla = Plan.for_kind(H100, (9, 0), implementation="xla")
    named = Choice("xla", source="named")
    assert {op: xla.choose(op, **OPS[op]) for op in OPS} == dict.fromkeys(OPS, named)
    cudnn = Plan.for_kind(H100, (9, 0), implementation="cudnn")
    named = Choice("cudnn", source="named")
    assert cudnn.choose("decode_attention", **DECODE) == named
    assert cudnn.choose("prefill_attention", **PREFILL | dict(itemsize=4)) == named
    assert cudnn.choose("matmul", **GEMM | dict(m=2048)).implementation == "xla"


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ({}, "xla"),
        (dict(residual=True), "kernel"),
        (dict(norm=True), "kernel"),
        (dict(bias=True), "kernel"),
        (dict(norm=True, gate="silu"), "xla"),
    ],
    ids=str,
)
def test_matmul_asks_for_what_is_fused_with_it(tmp_path, keys, runs):
    """The table has one entry, for fused products without a gate. It must not apply to others."""
    shape = dict(m=8, k=128, n=128, itemsize=2, gate=0, fused=1)
    config = dict(block_n=64, block_k=64, stages=2, split=1)
    entry = dict(op="matmul", shape=shape, implementation="mosaic_gpu", config=config)
    data = dict(schema=1, revisions=KERNEL_REVISIONS, entries=[entry])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    asked = Choice("mosaic_gpu", tuple(sorted(config.items())), source="nearest")
    plan = _h100(table=read_table(path))
    assert plan.choose("matmul", **shape | dict(m=5)) == asked

    def product(x, w, vector, residual):
        return matmul(
            x,
            w,
            norm=RMSNorm(vector, 1e-5) if "norm" in keys else None,
            bias=vector if "bias" in keys else None,
            residual=residual if "residual" in keys else None,
            gate=keys.get("gate"),
            plan=plan,
        )

    columns = (2, 128) if "gate" in keys else (128,)
    shapes = [(5, 128), (128, *columns), (128,), (5, 128)]
    traced = jax.make_jaxpr(product)(*(jnp.zeros(s, jnp.bfloat16) for s in shapes))
    assert ("flat_gemm_kernel" in str(traced)) == (runs == "kernel")


def test_resolve_prefers_the_argument():
    plan = Plan(named=(("matmul", "cudnn"),))

    def runs(*arguments):
        return resolve(MATMUL, *arguments, **GEMM)[0].name

    assert runs(plan, "xla") == "xla"
    assert runs(None, None) == "xla"
    with pytest.raises(NotImplementedError, match=r"^matmul: no 'cudnn' implementation$"):
        runs(plan, None)


def test_the_plan_of_a_device():
    device = jax.devices("cpu")[0]
    plan = Plan.for_device(device)
    assert plan.device_kind == device.device_kind
    assert plan.compute_capability is None
    assert plan.batch_invariant

    with pytest.raises(TypeError, match=r"takes a jax\.Device, .* see for_kind"):
        Plan.for_device(H100)
    for wrong in (None, device):
        with pytest.raises(TypeError, match=r"for_kind: takes a name, .* see for_device"):
            Plan.for_kind(wrong)

    class Gpu:
        platform, device_kind, compute_capability = "gpu", H100, "9.0"

    plan = Plan.for_device(Gpu())
    assert (plan.device_kind, plan.compute_capability) == (H100, (9, 0))
    assert not plan.batch_invariant


@pytest.mark.gpu
def test_the_plan_of_this_gpu():
    device = jax.devices("gpu")[0]
    plan = Plan.for_device(device)
    assert plan.device_kind == device.device_kind
    assert plan.compute_capability >= (8, 0)
    assert not plan.batch_invariant


def _lowered(op, *shapes, platform="cpu", window=None, **keys) -> str:
    if op is not matmul:
        keys["spec"] = AttentionSpec(0.1, window=window)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    traced = jax.jit(functools.partial(op, **keys)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def _attention_shapes(dtype, t, d=128):
    cache = ((2, 8, 256, d), dtype)
    return [((2, t, 32, d), dtype), cache, cache, ((2,), "int32")]


@pytest.fixture
def cudnn_installed(monkeypatch):
    """Fakes cuDNN's version, which lowering needs and a machine without a GPU may lack."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


CUDNN = "__cudnn$fmhaSoftmax"


@pytest.mark.parametrize(
    ("op", "t"), [(decode_attention, 1), (prefill_attention, 128)], ids=["decode", "prefill"]
)
def test_attention_runs_what_the_plan_chose(cudnn_installed, op, t):
    lower = functools.partial(_lowered, op, platform="cuda")
    half, full = _attention_shapes("bfloat16", t), _attention_shapes("float32", t)
    assert CUDNN in lower(*half, plan=_a100())
    assert CUDNN in lower(*half, implementation="cudnn")
    for text in (
        lower(*full, plan=_a100()),
        lower(*half, plan=_a100(), window=100),
        lower(*half, plan=_a100(), implementation="xla"),
        lower(*half, plan=Plan.for_kind(H100, (9, 0), implementation="xla")),
        lower(*half),
        lower(*half, plan=Plan()),
    ):
        assert "custom_call" not in text
        assert "stablehlo.dot_general" in text


def test_the_cudnn_call_reads_the_cache_where_it_lies(cudnn_installed):
    """No transpose or copy of [B,Hkv,S,D] comes before the call."""
    text = _lowered(
        decode_attention,
        *_attention_shapes("bfloat16", 1),
        platform="cuda",
        implementation="cudnn",
    )
    cache = "tensor<2x8x256x128xbf16>"
    touching = [line for line in text.splitlines() if cache in line and "func" not in line]
    assert len(touching) == 1
    assert CUDNN in touching[0]


@pytest.mark.parametrize(
    ("op", "t"), [(decode_attention, 1), (decode_attention, 4), (prefill_attention, 128)]
)
def test_attention_on_hopper_is_the_kernel(op, t):
    shapes = _attention_shapes("bfloat16", t)
    text = _lowered(op, *shapes, platform="cuda", plan=_h100())
    assert "@mosaic_gpu" in text
    assert op.__name__ in text


@pytest.mark.parametrize("m", [4, 256])
def test_matmul_runs_what_the_plan_chose(m):
    lower = functools.partial(_lowered, matmul, ((m, 512), "bfloat16"), platform="cuda")
    weight = (512, 512), "bfloat16"
    text = lower(weight, plan=_h100())
    assert ("@mosaic_gpu" in text, "stablehlo.dot_general" in text) == (m == 4, m != 4)
    for keys in (dict(implementation="xla"), dict(plan=Plan()), {}):
        text = lower(weight, **keys)
        assert text.count("stablehlo.dot_general") == 1
        assert "stablehlo.while" not in text
        assert "custom_call" not in text
    assert "stablehlo.while" in lower(weight, plan=Plan(batch_invariant=True))
    assert "stablehlo.dynamic_slice" in lower(((3, 512, 512), "bfloat16"), layer=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp32_operands_are_never_multiplied_in_less(dtype):
    """Precision HIGHEST keeps a GPU from using TF32."""
    text = _lowered(matmul, ((4, 64), dtype), ((64, 32), dtype), implementation="xla")
    text += _lowered(decode_attention, *_attention_shapes(dtype, 1), implementation="xla")
    products = text.count("stablehlo.dot_general")
    assert products >= 3
    assert text.count("precision = [HIGHEST, HIGHEST]") == (products if dtype == "float32" else 0)


@pytest.mark.parametrize("implementation", ["cudnn", "mosaic_gpu"])
def test_kernels_need_a_gpu(implementation):
    with pytest.raises(NotImplementedError, match=f"plan: {implementation} needs an NVIDIA GPU"):
        Plan.for_kind("cpu", implementation=implementation)


@pytest.mark.parametrize("cores", [None, 132, 114, 16])
def test_kernels_that_wait_for_each_other_are_for_devices_with_room(cores):
    """On a part of an H100, as with MIG, some blocks of the chain would never begin."""
    device = SimpleNamespace(platform="gpu", device_kind=H100, compute_capability="9.0")
    if cores is not None:
        device.core_count = cores
    plan = Plan.for_device(device)
    shape = dict(m=1, k=4096, width=4096, hidden=11008, n=12288, itemsize=2)
    runs = ("mosaic_gpu", "table") if cores in (None, 132) else ("xla", "only")
    choice = plan.choose("linear_chain", **shape)
    assert (choice.implementation, choice.source) == runs
    assert plan.choose("linear_chain", **shape | {"hidden": 11000}).implementation == "xla"
    prompt = plan.choose("matmul", **GEMM | dict(m=512))
    assert prompt.implementation == ("mosaic_gpu" if cores in (None, 132) else "xla")
    forced = Plan.for_device(device, implementation="xla")
    assert forced.choose("linear_chain", **shape).implementation == "xla"
    device.device_kind = "NVIDIA H200"
    choice = Plan.for_device(device).choose("decode_layers", **shape, hkv=32, d=128, s=1024)
    assert (choice.implementation, choice.source) == runs


@pytest.mark.parametrize(
    ("named", "runs"),
    [
        ({}, "mosaic_gpu"),
        ({"decode_attention": "cudnn"}, "xla"),
        ({"matmul": "xla"}, "xla"),
        ({"linear_chain": "xla"}, "xla"),
        ({"matmul": "mosaic_gpu", "decode_attention": "mosaic_gpu"}, "mosaic_gpu"),
        ({"prefill_attention": "xla"}, "mosaic_gpu"),
        ({"matmul": "xla", "decode_layers": "mosaic_gpu"}, "mosaic_gpu"),
    ],
    ids=str,
)
def test_no_launch_stands_for_what_is_forced(named, runs):
    plan = Plan.for_kind("NVIDIA H200", (9, 0))
    plan = dataclasses.replace(plan, named=tuple(named.items()))
    shape = dict(m=1, k=4096, width=4096, hidden=11008, n=12288, itemsize=2, hkv=32, d=128, s=1024)
    assert plan.choose("decode_layers", **shape).implementation == runs


def test_longer_caches_on_an_h200_run_as_measured():
    """They use blocks of 64 slots with four stages. An H100 uses blocks of 128 with two."""
    plan = Plan.for_kind("NVIDIA H200", (9, 0))
    for s in (8320, 16384):
        choice = plan.choose("decode_attention", **DECODE | dict(b=1, s=s))
        config = dict(choice.config)
        assert (config["splits"], config["block_kv"], config["stages"]) == (8, 64, 4)
    other = plan.choose("decode_attention", **DECODE | dict(b=1, s=8320, hkv=16))
    assert (other.implementation, other.config) == ("mosaic_gpu", None)


def _outside(x, w, *, layer, norm, bias, gate, residual, dtype, config, batch_invariant):
    """A product as another package might implement it."""
    return jnp.full((len(x), w.shape[-1]), 42, dtype)


def _few_rows(shape):
    return None if shape["m"] <= 4 else f"takes up to 4 rows, got {shape['m']}"


OUTSIDE = Implementation("matmul", "outside", _outside, can=frozenset({"norm"}), fits=_few_rows)


def test_an_implementation_from_outside_the_package():
    """It can be chosen, named, refused and pickled, and it is part of the plan's value."""
    plan = Plan(implementations=(OUTSIDE, *Plan().implementations))
    x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
    assert (matmul(x, w, plan=plan) == 42).all()
    assert (matmul(x, w, plan=Plan()) == 8).all()
    assert plan.choose("matmul", **GEMM | {"m": 4}) == Choice("outside", source="heuristic")
    assert plan.choose("matmul", **GEMM).implementation == "xla"
    assert plan.choose("matmul", frozenset({"gate"}), **GEMM | {"m": 4}).implementation == "xla"
    five = jnp.ones((5, 8))
    assert (matmul(five, w, plan=plan) == 8).all()
    with pytest.raises(NotImplementedError, match=r"^matmul: outside takes up to 4 rows, got 5$"):
        matmul(five, w, plan=plan, implementation="outside")
    with pytest.raises(NotImplementedError, match=r"^matmul: outside cannot do bias$"):
        matmul(x, w, bias=jnp.ones(2), plan=plan, implementation="outside")
    assert plan != Plan() and hash(plan) != hash(Plan())
    assert repr(OUTSIDE) in repr(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    named = dataclasses.replace(plan, named=(("matmul", "outside"),))
    assert named.choose("matmul", **GEMM) == Choice("outside", source="named")


def test_what_cannot_run_is_not_taken_from_a_table(tmp_path):
    """An entry for a plain product does not apply to a fusion that the kernel cannot do."""
    row = dict(op="matmul", shape=GEMM | {"m": 4}, implementation="outside")
    data = dict(schema=1, entries=[row])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    implementations = (*Plan().implementations, OUTSIDE)
    table = table_module.read_entries(path, implementations)
    plan = Plan("a device", implementations=implementations, table=table)
    choose = functools.partial(plan.choose, "matmul", **GEMM | {"m": 4})
    assert choose() == Choice("outside", source="table")
    assert choose(frozenset({"bias"})).implementation == "xla"


def test_an_implementation_says_the_same_of_itself_in_every_process():
    """Its `repr` is part of the key of programs on disk."""
    assert "0x" not in repr(Plan())
