"""The memory planner: exact counts, and estimates close to the compiler's numbers."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fdjax
from fdjax import lm as lm_module
from fdjax.cli.main import main
from fdjax.engine import memory
from fdjax.engine.engine import compiler_options
from fdjax.engine.memory import (
    check_load,
    largest_batch,
    longest_context,
    plan_memory,
    plan_up_to,
    workspace_bytes,
)
from fdjax.engine.schedule import call_tokens, covered_slots, prefill_calls
from fdjax.engine.scheduler import StateShape
from fdjax.engine.sequence import Request, RequestState
from fdjax.engine.state import init_cache, init_pool, page_bytes, start
from fdjax.engine.step import decode_steps, prompt_logits
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors
from fdjax.system import device_memory
from fdjax.text.tokenizer import Tokenizer

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf" / "configs"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0), implementation="xla")
KERNELS = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))


@functools.cache
def model(name, layers=None, plan=H100):
    data = json.loads((CONFIGS / f"{name}.new.json").read_text(encoding="utf-8"))
    if layers:
        data |= {"num_hidden_layers": layers}
    return describe(parse_config(data), dtype="bfloat16", plan=plan)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("batch", "max_len"), [(1, 1), (3, 1280), (8, 4097)])
def test_weights_and_cache_are_counted_to_the_byte(batch, max_len):
    m = model("llama-3-8b")
    plan = plan_memory(m, batch=batch, max_len=max_len)
    assert plan.weight_bytes == nbytes(m.abstract_params)
    state = jax.eval_shape(lambda: start(init_cache(m, batch, covered_slots(max_len))))
    assert plan.cache_bytes == nbytes([state.kv, state.ids])
    assert plan.total_bytes == plan.weight_bytes + plan.cache_bytes + plan.workspace_bytes


def test_the_cache_of_devices_that_divide_tokens_is_counted_to_the_byte():
    data = json.loads((CONFIGS / "llama-3-8b.new.json").read_text(encoding="utf-8"))
    config = parse_config(data | {"num_key_value_heads": 2})
    divided = dataclasses.replace(KERNELS, divide_tokens=True)
    m = describe(config, plan=divided, tensor_parallel=8).local
    plan = plan_memory(m, batch=3, max_len=1300)
    pool = jax.eval_shape(lambda: init_pool(m, 3 * 3))  # 4 devices: 512 tokens a page
    assert plan.cache_bytes == nbytes(pool) + 4 * 3 * covered_slots(1300)
    assert memory.pool_pages(m, rows=3, context=1300, pool_bytes=10**9) == 1 + 3 * 3


def test_rows_in_pages_take_no_more_than_their_pages():
    """Rows of 781 tokens take 7 pages of 128, not the 1 024 slots of a row in one piece."""
    data = json.loads((CONFIGS / "llama-2-7b.new.json").read_text(encoding="utf-8"))
    m = describe(parse_config(data), plan=Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0)))
    plan = plan_memory(m, batch=100, max_len=781, prompt_tokens=764)
    pool = jax.eval_shape(lambda: init_pool(m, 100 * 7))
    assert plan.cache_bytes == nbytes(pool) + 4 * 100 * covered_slots(781)
    assert plan.total_bytes < 63.76e9


@given(
    name=st.sampled_from(["llama-2-7b", "llama-3.2-1b"]),
    batch=st.integers(1, 64),
    max_len=st.integers(1, 20_000),
    memory_bytes=st.integers(0, 80 * 10**9),
)
@settings(max_examples=40)
def test_largest_and_longest_fit_and_one_more_does_not(name, batch, max_len, memory_bytes):
    m = model(name)

    def fits(batch, max_len):
        return plan_up_to(m, batch=batch, max_len=max_len).total_bytes <= memory_bytes

    most = largest_batch(m, max_len=max_len, memory_bytes=memory_bytes)
    assert most == 0 or fits(most, max_len)
    assert not fits(most + 1, max_len)
    longest = longest_context(m, batch=batch, memory_bytes=memory_bytes)
    assert longest == 0 or fits(batch, longest)
    assert not fits(batch, longest + 128)


@given(
    batch=st.integers(1, 70),
    fewer=st.integers(1, 70),
    max_len=st.sampled_from([64, 320, 700, 3000]),
)
@settings(max_examples=60)
def test_what_is_planned_for_rows_is_enough_for_fewer(batch, fewer, max_len):
    """A call takes all of 8 rows of 700 tokens, and 4 rows of 9."""
    m = model("llama-3.2-1b")
    need = plan_memory(m, batch=min(batch, fewer), max_len=max_len).total_bytes
    assert plan_up_to(m, batch=batch, max_len=max_len).total_bytes >= need


def test_a_model_loaded_for_rows_runs_fewer(small_device):
    m = model("llama-3.2-1b")
    small_device(plan_memory(m, batch=9, max_len=700).total_bytes)
    with pytest.raises(MemoryError, match="load: must fit into"):
        check_load(m, max_batch=9, max_len=700)
    small_device(plan_memory(m, batch=8, max_len=700).total_bytes + 2**26)
    check_load(m, max_batch=9, max_len=700)


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40), spare=st.integers(0, 9))
@settings(max_examples=40)
def test_no_call_is_larger_than_foreseen(lengths, spare):
    batch = len(lengths) + spare
    calls = prefill_calls(dict(enumerate([7] * n for n in lengths)), batch)
    largest = max(call.tokens.size for call in calls)
    assert largest <= max(call_tokens(n, batch) for n in range(1, max(lengths) + 1, 64))


@pytest.mark.parametrize("name", ["batch", "max_len", "prompt_tokens", "slots"])
@pytest.mark.parametrize("value", [0, -5, 1.5, True, "2"])
def test_what_is_not_positive_is_named(name, value):
    message = f"memory: {name} must be a positive integer, got {value!r}"
    with pytest.raises(ValueError, match=message):
        plan_memory(model("llama-2-7b"), **{"max_len": 1, "prompt_tokens": 1, name: value})


# load


@pytest.fixture
def small_device(monkeypatch):
    """Sets the free bytes of a device. Loading anything on it fails the test."""

    def set_free(free):
        monkeypatch.setattr(memory, "free_memory_bytes", lambda _: free)

    return set_free


@pytest.fixture
def never_loaded(monkeypatch):
    def load_params(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(lm_module, "load_params", load_params)


@pytest.mark.parametrize(
    ("free", "options", "numbers"),
    [
        (7 * 10**6, {}, ["weights of 7.411 MB", "7.000 MB"]),
        (17 * 10**6, {"max_batch": 64, "max_len": 512}, ["64 x 512", "cache 84.", "17.000 MB"]),
        (10**8, {"max_len": 512, "gpu_memory_utilization": 0.1}, ["1 x 512", "10.000 MB"]),
    ],
)
def test_too_much_is_refused_with_the_numbers(small_device, never_loaded, free, options, numbers):
    small_device(free)
    with pytest.raises(MemoryError) as error:
        fdjax.load("tiny", compilation_cache=False, **options)
    assert [n for n in numbers if n not in str(error.value)] == []
    assert str(error.value).startswith("load: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be positive, got 0"),
        ({"max_batch": 1.5}, "max_batch must be an integer, got 1.5"),
        ({"max_len": -1}, "max_len must be positive, got -1"),
        ({"gpu_memory_utilization": 0.0}, "must be above 0 and at most 1, got 0.0"),
        ({"gpu_memory_utilization": 90}, "must be above 0 and at most 1, got 90"),
        ({"gpu_memory_utilization": float("nan")}, "got nan"),
        ({"gpu_memory_utilization": "0.5"}, "must be above 0 and at most 1, got '0.5'"),
        ({"max_batch": True}, "max_batch must be an integer, got True"),
        ({"gpu_memory_utilization": True}, "must be above 0 and at most 1, got True"),
    ],
)
def test_what_cannot_be_meant_is_refused(never_loaded, options, message):
    with pytest.raises(ValueError, match=message):
        fdjax.load("tiny", compilation_cache=False, **options)


def test_utilization_becomes_the_longest_context(small_device):
    m = model("llama-2-7b")
    small_device(20 * 10**9)
    max_len, budget = check_load(m, max_batch=4, gpu_memory_utilization=0.9)
    assert budget == 18 * 10**9
    assert max_len == longest_context(m, batch=4, memory_bytes=budget)
    small_device(80 * 10**9)
    assert check_load(m, gpu_memory_utilization=0.9) == (4096, 72 * 10**9)
    assert check_load(m, max_len=64, gpu_memory_utilization=0.5) == (64, 40 * 10**9)
    assert check_load(m) == (None, 80 * 10**9)


def test_where_memory_is_unknown_nothing_is_refused(small_device):
    small_device(None)
    assert check_load(model("llama-2-7b"), gpu_memory_utilization=0.9) == (None, None)


def test_what_other_models_hold_is_not_free():
    @dataclasses.dataclass
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

    assert device_memory.free_memory_bytes(Device()) == 70


@functools.cache
def one_layer():
    """A model of one small layer and its weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 128, "num_hidden_layers": 1}
    data = {"model_type": "llama", "max_position_embeddings": 4096, **sizes}
    m = describe(parse_config(data), dtype="float32", plan=Plan())
    return m, random_params(m)


def in_one_piece(*args, **limits):
    """A model whose rows do not consist of pages."""
    lm = LM(*args, **limits)
    lm.engine.paged = False
    return lm


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_a_batch_is_no_larger_than_it_may_be():
    lm = in_one_piece(*one_layer(), max_batch=3)
    alone = [lm.generate([5 + i], max_new_tokens=3, eos_token_id=None).tokens[0] for i in range(7)]
    out = lm.generate([[5 + i] for i in range(7)], max_new_tokens=3, eos_token_id=None)
    assert lm.engine.reusable.state.kv[0][0].shape[0] == 3
    assert out.tokens == alone


def shape(engine, *lengths, new=100):
    config = GenerationConfig(max_new_tokens=new).filled()
    requests = [Request(np.full(n, 5, np.int32), config) for n in lengths]
    return engine.shape_for([RequestState(request, Tokenizer()) for request in requests])


def test_a_cache_is_as_small_as_memory_asks_for():
    m, params = one_layer()
    sizes = {"batch": 1, "max_len": 700, "prompt_tokens": 600}
    tight, wide = (plan_memory(m, **sizes, slots=slots).total_bytes for slots in (768, 2048))
    for budget, slots in ((None, 2048), (wide, 2048), (wide - 1, 768), (tight, 768)):
        engine = in_one_piece(m, params, memory_bytes=budget).engine
        assert shape(engine, 600) == StateShape(1, slots)
    lm = in_one_piece(m, params, memory_bytes=tight - 1)
    with pytest.raises(MemoryError, match=r"generate: must fit into .* for 1 x 700 tokens"):
        lm.generate([5] * 600, max_new_tokens=100)
    assert lm.engine.reusable is None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_what_does_not_fit_at_once_waits():
    m, params = one_layer()
    four = plan_memory(m, batch=4, max_len=700, prompt_tokens=600, slots=768).total_bytes
    engine = in_one_piece(m, params, memory_bytes=four).engine
    assert shape(engine, *[600] * 4) == StateShape(4, 768)
    assert shape(engine, *[600] * 9) == StateShape(4, 768, limited=True)
    prompts = [[5 + i] * (1 + 12 * i) for i in range(10)]
    four = plan_memory(m, batch=4, max_len=114, prompt_tokens=109, slots=128).total_bytes
    lm = in_one_piece(m, params, memory_bytes=four)
    options = {"max_new_tokens": 5, "eos_token_id": None}
    out = lm.generate(prompts, **options)
    assert lm.engine.reusable.state.batch == 4
    assert out.tokens == [lm.generate(prompt, **options).tokens[0] for prompt in prompts]


def test_a_pool_takes_what_memory_has_left():
    m, params = one_layer()
    for pages in (11, 40, 200):
        few = plan_memory(m, batch=256, max_len=4096, slots=2048)
        room = m.weight_bytes + few.workspace_bytes + int(pages / 0.95 * page_bytes(m)) + 999
        engine = LM(m, params, memory_bytes=room).engine
        count = engine._most_pages(2048)
        assert pages * 0.96 - 1 <= count <= pages


def test_rows_that_leave_no_memory_for_pages():
    """A row fits alone, but not beside the workspace of all the rows that may run at once."""
    m, params = one_layer()
    room = 4 * 10**6
    assert plan_memory(m, batch=1, max_len=128).total_bytes < room
    says = (
        "128 tokens of cache must fit into 0 pages of 128, .*, which weights, other arrays and the "
        "workspace of 256 rows leave of the memory; give a smaller max_batch or max_len"
    )
    with pytest.raises(MemoryError, match=f"^generate: {says}"):
        shape(LM(m, params, memory_bytes=room).engine, 60, new=60)
    limits = {"max_batch": 1, "max_len": 128, "memory_bytes": room}
    assert shape(LM(m, params, **limits).engine, 60, new=60).rows == 1
    # No more than 256 rows run at once.
    room = m.weight_bytes + plan_memory(m, batch=256, max_len=4096, slots=512).total_bytes
    engines = (LM(m, params, max_batch=n, memory_bytes=room).engine for n in (None, 256, 10_000))
    (count,) = {engine._most_pages(512) for engine in engines}
    assert count > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_a_pool_of_few_pages():
    """They are enough for one of these answers, not for two."""
    few = LM(*one_layer(), max_batch=4)
    few.engine._most_pages = lambda slots: 4
    prompts = [[5 + i] * (20 * i + 20) for i in range(5)]
    options = {"max_new_tokens": 200, "eos_token_id": None}
    out = few.generate(prompts, **options)
    assert few.engine.pool.count == 4
    few.engine.pool.check([])
    with pytest.raises(MemoryError, match="generate: 512 tokens of cache must fit into 3 pages"):
        few.generate([5] * 400, max_new_tokens=100)
    # After the error, alone, and with nothing of it in the cache.
    few.release()
    assert few.generate(prompts[3], **options).tokens == out.tokens[3:4]


def test_the_command_line_says_what_would_fit(capsys):
    assert main(["info", "--memory", "1GiB", "--context", "256", "--batch", "2"]) == 0
    text = capsys.readouterr().out
    assert "memory        1.1 GB" in text
    assert "for 2 x 256 tokens" in text


@pytest.mark.parametrize("size", ["", "0", "-1GB", "80 parsecs", "GB", "1TB", "inf", "9" * 400])
def test_a_size_that_is_none_is_misuse(capsys, size):
    with pytest.raises(SystemExit) as error:
        main(["info", "--memory", size])
    assert error.value.code == 2
    assert "--memory" in capsys.readouterr().err


# The compiler's numbers


def sampling_of(batch):
    rows = per_row([GenerationConfig()] * batch, batch)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows)


def temp_bytes_of_prefill(m, batch, slots, rows, width):
    from deviceless import compile_for, temp_bytes

    def run(params, state, tokens, lengths, offsets, index):
        index = None if rows == batch else index
        return prompt_logits(m, params, state, tokens, lengths, offsets, index)

    state = jax.eval_shape(lambda: start(init_cache(m, batch, slots)))
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    args = m.abstract_params, state, tokens, row, row, row
    options = compiler_options(prompt_logits)
    return temp_bytes(compile_for("h100", run, *args, donate_argnums=1, compiler_options=options))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("plan", "batch", "length", "rows", "width", "name"),
    [
        # The hardest cases run for one model. All else is part of a grid.
        pytest.param(*case, name, marks=() if name == chosen else pytest.mark.soak)
        for chosen, *case in (
            (None, H100, 1, 2048, 1, 1024),
            (None, H100, 4, 2048, 4, 1024),
            ("llama-2-7b", H100, 32, 2048, 8, 1024),
            ("llama-3-8b", H100, 16, 512, 16, 512),
            ("llama-3-8b", KERNELS, 1, 2048, 1, 1024),
            ("llama-2-7b", KERNELS, 32, 2048, 8, 1024),
        )
        for name in ("llama-2-7b", "llama-3-8b")
    ],
    ids=lambda value: "kernels" if value is KERNELS else "xla" if value is H100 else None,
)
def test_workspace_is_that_of_the_compiler(name, plan, batch, length, rows, width):
    """Three layers in full size: XLA reuses the buffers of one layer in the next."""
    m = model(name, layers=3, plan=plan)
    temp = temp_bytes_of_prefill(m, batch, length, rows, width)
    planned = workspace_bytes(m, batch, length, length)
    # The whole model must fit. The workspace is a few percent of it.
    whole = plan_memory(model(name), batch=batch, max_len=length)
    assert abs(planned - temp) <= 0.01 * whole.total_bytes
    assert temp <= 1.02 * planned


@pytest.mark.parametrize("plan", [H100, KERNELS, Plan()], ids=["xla", "kernels", "cpu"])
def test_quantised_weights_take_room_for_the_largest_when_it_is_dequantised(plan):
    m = model("llama-2-7b", 1, plan)
    form = WeightFormat("int4", 128)
    weights = {
        ("blocks", 0, *linear.path, "weight"): form
        for linear in m.config.blocks[0].linears.values()
    }
    quantised = describe(m.config.with_formats(weights), dtype="bfloat16", plan=plan)
    more = workspace_bytes(quantised, 1, 128, 512) - workspace_bytes(m, 1, 128, 512)
    assert more == 2 * 4096 * 2 * 11008
    assert plan_memory(quantised, batch=1, max_len=512).weight_bytes < m.weight_bytes


@pytest.mark.deviceless
def test_a_long_prompt_takes_no_more_workspace_than_a_short_one():
    m = model("llama-3-8b", layers=2, plan=KERNELS)
    short, long = (temp_bytes_of_prefill(m, 1, slots, 1, 1024) for slots in (2**14, 2**17))
    assert long <= 1.05 * short


def test_the_mailbox_of_two_devices_is_planned():
    """Two halves of 2 bytes for each value of the largest sum."""

    def workspace(plan, devices):
        data = json.loads((CONFIGS / "llama-3-8b.new.json").read_text(encoding="utf-8"))
        m = describe(parse_config(data), plan=plan, tensor_parallel=devices)
        return workspace_bytes(m.local, 1, 4096, 4096)

    by_xla = KERNELS.with_xla("all_reduce")
    assert workspace(KERNELS, 2) - workspace(by_xla, 2) == 2 * 2 * 4096 * 4096
    for devices in (1, 4):
        assert workspace(KERNELS, devices) == workspace(by_xla, devices)


@pytest.mark.deviceless
@pytest.mark.parametrize("batch", [pytest.param(8, marks=pytest.mark.soak), 64])
def test_decoding_takes_less_than_is_planned(batch):
    from deviceless import compile_for, temp_bytes

    m = model("llama-3-8b", layers=2)

    def run(params, state, sampling, n):
        processors = Processors(edit=True, sample=True, truncate=True, logprobs=True)
        return decode_steps(m, params, state, sampling, n, max_steps=32, processors=processors)

    state = jax.eval_shape(lambda: start(init_cache(m, batch, 2048)))
    args = m.abstract_params, state, sampling_of(batch), jax.ShapeDtypeStruct((), jnp.int32)
    options = compiler_options(decode_steps)
    compiled = compile_for("h100", run, *args, donate_argnums=1, compiler_options=options)
    assert temp_bytes(compiled) <= workspace_bytes(m, batch, 128, 2048)


@pytest.mark.gpu
def test_the_peak_is_what_was_planned():
    m = model("llama-3.2-1b", plan=Plan.for_device())
    lm = LM(m, random_params(m), memory_bytes=device_memory.free_memory_bytes())
    prompts = np.random.default_rng(0).integers(0, m.config.vocab_size, (16, 2000)).tolist()
    lm.generate(prompts, max_new_tokens=48, eos_token_id=None)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    plan = plan_memory(m, batch=16, max_len=2048, slots=2048)
    assert plan.cache_bytes + plan.weight_bytes <= peak
