"""The report of `fdjax info` about published models."""

import dataclasses
import json
from pathlib import Path

import pytest

from fdjax.engine.memory import plan_memory
from fdjax.models import describe, parse_config
from fdjax.pallas_kernels.plan import Plan
from fdjax.system.device_memory import device_memory_bytes
from fdjax.tools import info
from fdjax.tools.info import ModelInfo, model_info

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))


def model(name: str, dtype: str | None = None, plan: Plan | None = None):
    config = parse_config(json.loads((FIXTURES / "configs" / f"{name}.new.json").read_text()))
    return describe(config, dtype=dtype, plan=plan)


# 2 · layers · KV heads · head dim · bytes
@pytest.mark.parametrize(
    ("name", "dtype", "weight_bytes", "kv_bytes_per_token"),
    [
        ("llama-2-7b", "bfloat16", 2 * 6_738_415_616, 524_288),
        ("llama-2-7b", "float32", 4 * 6_738_415_616, 1_048_576),
        ("llama-2-13b", "float16", 2 * 13_015_864_320, 819_200),
        ("llama-2-70b", "bfloat16", 2 * 68_976_648_192, 327_680),
        ("llama-3-8b", None, 2 * 8_030_261_248, 131_072),
        ("llama-3-70b", None, 2 * 70_553_706_496, 327_680),
        ("llama-3.1-8b", None, 2 * 8_030_261_248, 131_072),
        ("llama-3.2-1b", None, 2 * 1_235_814_400, 32_768),
    ],
)
def test_sizes_of_published_models(name, dtype, weight_bytes, kv_bytes_per_token, arrays_made):
    described = model(name, dtype, H100)
    facts = model_info(described)
    assert facts.weight_bytes == weight_bytes
    assert facts.kv_bytes_per_token == kv_bytes_per_token
    assert facts.dtype == (dtype or "bfloat16")
    assert facts.family == "llama"
    assert facts.parameters * (4 if dtype == "float32" else 2) == weight_bytes
    assert facts.device == "NVIDIA H100 80GB HBM3"
    # The report allocates nothing.
    assert arrays_made() == 0


def test_what_fits_is_what_the_planner_says(monkeypatch):
    monkeypatch.setattr(info, "device_memory_bytes", lambda: 80 * 10**9)
    llama = model("llama-3-8b")
    facts = model_info(llama, batch=2, slots=4096)
    assert facts.device_bytes == 80 * 10**9
    assert facts.memory == plan_memory(llama, batch=2, max_len=4096)
    for batch, fits in ((facts.largest_batch, True), (facts.largest_batch + 1, False)):
        total = plan_memory(llama, batch=batch, max_len=4096).total_bytes
        assert (total <= facts.device_bytes) == fits
    text = str(facts)
    for part in (
        "memory        80.0 GB",
        str(facts.memory),
        f"2 rows of {facts.longest_context:,}",
    ):
        assert part in text


def test_the_pool_is_that_of_the_engine():
    """The tokens of all rows together, which a pool of pages holds."""
    llama = model("llama-3-8b", plan=H100)
    facts = model_info(llama, memory_bytes=72 * 10**9)
    left = 72 * 10**9 - llama.weight_bytes
    used = facts.pool_tokens * facts.kv_bytes_per_token
    assert facts.pool_tokens % 128 == 0 and 0.85 * left < used < left
    assert f"{facts.pool_tokens:,} tokens of all rows together" in str(facts)
    in_pieces = dataclasses.replace(H100, named=(("decode_attention", "xla"),))
    assert model_info(model("llama-3-8b", plan=in_pieces), memory_bytes=10**11).pool_tokens is None
    assert model_info(llama, memory_bytes=10**10).pool_tokens == 0


@pytest.mark.slow
def test_devices_that_divide_tokens_hold_more_of_them():
    data = json.loads((FIXTURES / "configs" / "llama-3-8b.new.json").read_text())
    few = parse_config(data | {"num_key_value_heads": 2})
    facts = {
        divide: model_info(
            describe(few, plan=dataclasses.replace(H100, divide_tokens=divide), tensor_parallel=8),
            memory_bytes=8 * 10**9,
            slots=8192,
        )
        for divide in (True, False)
    }
    divided, whole = facts[True], facts[False]
    assert whole.kv_bytes_per_token == 4 * divided.kv_bytes_per_token == 16384
    assert 3.9 < divided.longest_context / whole.longest_context <= 4
    assert 3.9 < divided.pool_tokens / whole.pool_tokens <= 4
    assert divided.pool_tokens % 512 == 0
    assert "KV heads      4 devices have the same one, and divide its tokens" in str(divided)
    assert "and each holds all of its tokens: the plan does not divide them" in str(whole)
    windows = parse_config(data | {"model_type": "mistral", "sliding_window": 4096})
    plan = dataclasses.replace(H100, divide_tokens=True)
    facts = model_info(describe(windows, plan=plan, tensor_parallel=16), slots=8192)
    assert "2 devices have the same one, and each holds" in facts.repeated_heads
    assert facts.repeated_heads.endswith("layer 0 has window")
    ampere = Plan.for_kind("NVIDIA A100-SXM4-80GB", (8, 0))
    ampere = dataclasses.replace(ampere, divide_tokens=True)
    facts = model_info(describe(few, plan=ampere, tensor_parallel=8), slots=8192)
    assert facts.repeated_heads.endswith("rows are in one piece")
    assert facts.kv_bytes_per_token == whole.kv_bytes_per_token
    facts = model_info(describe(few, plan=H100, tensor_parallel=2))
    assert facts.repeated_heads is None
    sums = [line for line in str(facts).splitlines() if line.startswith("all_reduce")]
    assert [line.split() for line in sums] == [
        ["all_reduce", f"M={m}", "[4096]", "of", "2", "devices", "mosaic_gpu", "heuristic"]
        for m in (1, 512)
    ]


def test_too_little_memory_and_unknown_memory_are_told(monkeypatch):
    facts = model_info(model("llama-3-8b"), memory_bytes=10**10)
    assert (facts.largest_batch, facts.longest_context) == (0, 0)
    assert "fits          no" in str(facts)
    monkeypatch.setattr(info, "device_memory_bytes", lambda: None)
    facts = model_info(model("llama-3-8b"))
    assert (facts.device_bytes, facts.largest_batch, facts.longest_context) == (None, None, None)
    assert "fits " not in str(facts)


def test_the_memory_of_a_device_is_its_allocators_limit_or_the_machines():
    @dataclasses.dataclass
    class Device:
        platform: str
        stats: dict | None

        def memory_stats(self):
            return self.stats

    assert device_memory_bytes(Device("gpu", {"bytes_limit": 123})) == 123
    assert device_memory_bytes(Device("gpu", None)) is None
    assert device_memory_bytes(Device("gpu", {})) is None
    machine = device_memory_bytes(Device("cpu", None))
    assert 10**8 < machine < 10**15
    here = device_memory_bytes()
    assert here is None or here > 0


@pytest.mark.parametrize("plan", [None, H100], ids=["here", "H100"])
def test_info_is_json_and_a_table(plan):
    facts = model_info(model("llama-3.2-1b", plan=plan), batch=8, slots=1024)
    data = json.loads(json.dumps(facts.asdict()))
    assert set(data) == {field.name for field in dataclasses.fields(ModelInfo)}
    assert [tuple(row) for row in data["choices"]] == list(facts.choices)
    assert data["parameters"] == 1_235_814_400
    assert data["max_position_embeddings"] == 131_072
    text = str(facts)
    for part in ("1,235,814,400", "2.472 GB in bfloat16", "32,768 bytes per token", "131,072 tok"):
        assert part in text
    for op, shape, run, why in facts.choices:
        assert any(all(word in line for word in (op, shape, run, why)) for line in text.split("\n"))


def test_choices_are_those_of_the_plan_at_the_models_shapes():
    facts = model_info(model("llama-3-8b", plan=H100), batch=8, slots=16384)
    assert [shape for op, shape, _, _ in facts.choices if op == "matmul"] == [
        "qkv M=8 [4096,6144]",
        "out M=8 [4096,4096]",
        "gate_up M=8 [4096,28672]",
        "down M=8 [14336,4096]",
        "head M=8 [4096,128256]",
    ]
    layers, chain, decode, prefill, limits = (c for c in facts.choices if c[0] != "matmul")
    assert layers[:2] == ("decode_layers", "M=8 S=16384 all layers of a decode step")
    assert layers[2:] == ("xla", "heuristic")
    assert chain == ("linear_chain", "M=8 out, gate_up, down, next qkv", "mosaic_gpu", "table")
    assert decode[:2] == ("decode_attention", "B=8 T=1 H=32 Hkv=8 S=16384 D=128")
    assert prefill[0] == "prefill_attention"
    assert limits == ("truncate", "B=8 V=128256 top-k, top-p", "mosaic_gpu", "heuristic")
    assert {c[2] for c in facts.choices} <= {"xla", "cudnn", "mosaic_gpu"}
    sizes = {"b": 8, "t": 1, "h": 32, "hkv": 8, "s": 16384, "d": 128, "itemsize": 2, "masks": 0}
    choice = H100.choose("decode_attention", **sizes)
    assert decode[2:] == (choice.implementation, choice.source)


def test_choices_name_what_was_forced():
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0), implementation="xla")
    facts = model_info(model("llama-3.2-1b", plan=plan))
    assert {c[2:] for c in facts.choices if "head" not in c[1]} == {("xla", "named")}


def test_nobody_chose_where_there_is_no_choice():
    facts = model_info(model("llama-3.2-1b", plan=H100))
    (head,) = (c for c in facts.choices if "head" in c[1])
    assert head[2:] == ("xla", "only")


def test_the_context_is_the_default_for_slots():
    facts = model_info(model("llama-3.2-1b"))
    assert all("S=131072" in shape for op, shape, _, _ in facts.choices if "attention" in op)


@pytest.mark.parametrize(("batch", "slots"), [(8, 1024), (5, 512), (8, 16384), (16, 1024)])
def test_one_launch_is_told_in_place_of_what_it_runs(batch, slots):
    plan = Plan.for_kind("NVIDIA H200", (9, 0))
    described = model("llama-3-8b", plan=plan)
    facts = model_info(described, batch=batch, slots=slots)
    (layers, *_), others = facts.choices, [c[:2] for c in facts.choices[1:]]
    assert layers[:2] == ("decode_layers", f"M={batch} S={slots} all layers of a decode step")
    launched = described.one_launch(batch, slots)
    assert launched == (batch <= 8 and slots <= 1024)
    assert (layers[2] == "mosaic_gpu") == launched
    assert layers[3] == ("table" if slots == 1024 and launched else layers[3])
    head = ("matmul", f"head M={batch} [4096,128256]")
    if launched:
        prefill = "prefill_attention", f"B={batch} T=512 H=32 Hkv=8 S={slots} D=128"
        assert others == [head, prefill, ("truncate", f"B={batch} V=128256 top-k, top-p")]
    else:
        assert {op for op, _ in others} >= {"linear_chain", "decode_attention"}
        assert [op for op, _ in others].count("matmul") == 5
    line = next(line for line in str(facts).splitlines() if line.startswith("decode_layers"))
    assert all(word in line for word in layers)


def test_no_launch_is_told_of_what_it_cannot_run():
    facts = model_info(model("gemma-2-9b", plan=Plan.for_kind("NVIDIA H200", (9, 0))))
    assert "decode_layers" not in {op for op, *_ in facts.choices}
