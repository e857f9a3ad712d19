"""Reports of compilations: in the log and in `Stats`."""

import concurrent.futures
import gc
import io
import logging
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax.engine import step
from fdjax.engine.engine import compiler_options
from fdjax.engine.program import Program
from fdjax.engine.results import Timer, bytes_of_params
from fdjax.engine.sequence import Chunk

pytestmark = pytest.mark.usefixtures("quick_compiles")


def doubled(x):
    time.sleep(0.01)  # while it is traced
    return 2 * x


def load():
    """An LM that has compiled nothing."""
    case = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3_gqa_tied"
    return fdjax.load(str(case), dtype="float32", compilation_cache=False, progress=False)


# The function that JAX calls to compile a traced module.
_COMPILE = (jax._src.compiler, "compile_or_get_cached")


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "fdjax")
    return caplog


def test_each_set_of_shapes_is_told_once(log):
    program = Program(doubled, lambda x: f"doubling of {x.shape[0]}")
    for n, compiles in ((3, True), (3, False), (5, True), (3, False)):
        log.clear()
        assert program(jnp.arange(n, dtype=jnp.int32)).tolist() == list(range(0, 2 * n, 2))
        assert (program.compile_seconds >= 0.01) if compiles else program.compile_seconds == 0
        assert [record.compiling for record in log.records] == [True, False] * compiles
        assert all(f"doubling of {n}" in message for message in log.messages)
    assert program.compilations == 2


@pytest.mark.parametrize("traced", [False, True])
def test_a_compilation_that_was_interrupted_is_told_again(log, monkeypatch, traced):
    program = Program(doubled, lambda x: f"doubling of {x.shape[0]}")
    program(jnp.zeros(3))
    log.clear()
    five = jnp.zeros(5)  # which is compiled, too
    with monkeypatch.context() as patch:
        patch.setattr(*(_COMPILE if traced else (time, "sleep")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            program(five)
    assert log.messages == ["compiling doubling of 5"]
    for n, compiles in ((3, False), (5, True), (5, False)):
        log.clear()
        program(jnp.zeros(n))
        assert [record.compiling for record in log.records] == [True, False] * compiles
        assert bool(program.compile_seconds) == compiles
    assert program.compilations == 2


class Terminal(io.StringIO):
    """Standard error of a process that runs in a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("traced", [False, True])
def test_a_terminal_shows_what_is_compiled_for_as_long(monkeypatch, traced):
    monkeypatch.setattr(sys, "stderr", Terminal())
    logging.getLogger("fdjax").setLevel(logging.NOTSET)
    program = Program(doubled, lambda x: f"doubling of {x.shape[0]}")
    for _ in "12":
        program(jnp.zeros(3))
    notice = " [compiling doubling of 3]"
    back = "\b" * len(notice)
    shown = notice + back + " " * len(back) + back
    assert sys.stderr.getvalue() == shown
    five = jnp.zeros(5)  # which is compiled, too
    with monkeypatch.context() as patch:
        patch.setattr(*(_COMPILE if traced else (time, "sleep")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            program(five)
    assert sys.stderr.getvalue() == shown + shown.replace("3", "5")


def test_what_is_logged_or_seen_by_no_one_is_not_shown(monkeypatch, log):
    program = Program(doubled, str)
    monkeypatch.setattr(sys, "stderr", Terminal())
    program(jnp.zeros(3))
    assert sys.stderr.getvalue() == ""
    log.set_level(logging.WARNING, "fdjax")
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        program(jnp.zeros(4 if stderr else 5))
        assert stderr is None or stderr.getvalue() == ""
    assert program.compilations == 3


def test_the_garbage_collector_rests_only_while_there_is_something_to_compile(monkeypatch):
    resting = []

    def function(x):
        resting.append(not gc.isenabled())
        return x

    program = Program(function, str)
    program(jnp.zeros(3))
    assert gc.isenabled()
    program.lower(jnp.zeros(4))
    assert gc.isenabled()
    five = jnp.zeros(5)  # which is compiled, too
    with monkeypatch.context() as patch:
        patch.setattr(*_COMPILE, interrupt)
        with pytest.raises(KeyboardInterrupt):
            program(five)
    assert gc.isenabled()
    gc.disable()
    try:
        program(jnp.zeros(6))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert resting == [True] * 4


def test_another_thread_that_compiles_is_not_waited_for():
    compiling, go_on = threading.Event(), threading.Event()

    def function(x):
        if x.size == 5:
            compiling.set()
            assert go_on.wait(60)
        return x

    program = Program(function, lambda x: f"{x.size}")
    program(jnp.zeros(3))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (program(jnp.zeros(5)), program.compile_seconds))
        assert compiling.wait(60)
        program(jnp.zeros(3))
        assert program.compile_seconds == 0
        go_on.set()
        assert other.result()[1] > 0
    assert program.compilations == 2


@pytest.mark.slow
def test_the_first_call_of_a_shape_tells_what_it_compiles(log):
    lm = load()
    log.clear()
    options = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    first = lm.generate([[5] * 30, [6] * 140], **options).stats
    messages = [m for m in log.messages if m.startswith("compiled")]
    prefill, choice, decode = messages
    assert prefill.startswith("compiled prefill of 4 x 128 tokens, cache of 32 x ")
    assert choice.startswith("compiled first tokens of 4 rows, vocabulary of 320 in ")
    assert decode.startswith("compiled 32 decode steps, cache of 2 x ")
    seconds = [float(message.split()[-2]) for message in messages]
    assert first.compile_seconds == pytest.approx(sum(seconds), abs=0.16)
    assert first.compile_seconds > first.decode_seconds
    assert f"({first.compile_seconds:.2f} s of it compiling)" in str(first)
    log.clear()
    # Nothing of these is in the cache, which would make their calls smaller.
    second = lm.generate([[7] * 30, [8] * 140], **options).stats
    assert second.compile_seconds == 0
    assert "compiling" not in str(second)
    assert not log.messages
    # Another number of prompts needs decode steps of its own. Prompts share the programs.
    lm.generate([[i] * 30 for i in (9, 10, 11)], **options)
    (compiled,) = (m for m in log.messages if m.startswith("compiled"))
    assert compiled.startswith("compiled 32 decode steps, cache of 4 x ")


def test_compiling_is_neither_prefill_nor_decoding(monkeypatch):
    lm = load()
    clock = types.SimpleNamespace(perf_counter=iter([0.0, 10.0, 15.0, 16.0]).__next__)
    monkeypatch.setattr("fdjax.engine.results.time", clock)
    timer = Timer(lm.model, bytes_of_params(lm.params))
    for seconds in (8.0, 4.0, 0.0):
        tokens = np.zeros((1, 2), np.int32)
        timer.chunk(Chunk(tokens, compile_seconds=seconds, is_first=seconds == 8.0))
    stats = timer.stats([])
    assert (stats.prefill_seconds, stats.decode_seconds, stats.compile_seconds) == (2, 2, 12)
    assert stats.seconds == 16
    assert stats.ms_per_token == 500
    assert stats.chunk_ms_per_token == (500, 500)


def test_what_the_environment_says_of_cuda_graphs_holds(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    name, options = "xla_gpu_enable_command_buffer", compiler_options(step.decode_steps)
    assert "WHILE" in options[name]
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=")
    assert compiler_options(step.decode_steps).keys() == options.keys() - {name}
