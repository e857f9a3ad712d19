"""A Ctrl-C works even where Python or JAX would lose it."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from fdjax.system import interrupts


@pytest.fixture(autouse=True)
def interruptible():
    """It works even if these tests run with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_once(calls):
    if not calls:
        calls.append(None)
        signal.raise_signal(signal.SIGINT)


def wait():
    time.sleep(5)
    pytest.fail("the interrupt was lost")


def test_in_a_callback_of_the_garbage_collector():
    calls = []

    def callback(phase, info):
        interrupt_once(calls)

    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.delivered():
            gc.collect()
            wait()
    finally:
        gc.callbacks.remove(callback)
    assert calls


def test_in_a_finaliser():
    class Finalised:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        Finalised()
        wait()


def test_lost_without_a_trace():
    """As where code in C clears it."""
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        wait()


def test_lost_just_before_the_end():
    with (
        pytest.raises(KeyboardInterrupt),
        interrupts.delivered(),
        contextlib.suppress(KeyboardInterrupt),
    ):
        signal.raise_signal(signal.SIGINT)


def test_cleaning_up_is_not_interrupted_again():
    cleaned = False
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            with contextlib.suppress(ValueError):
                raise ValueError
            time.sleep(0.2)
            cleaned = True
    assert cleaned


def test_code_that_handles_one_goes_on():
    handled = 0
    with interrupts.delivered():
        for _ in range(2):
            try:
                with interrupts.delivered():
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                handled += 1
        time.sleep(0.2)
    assert handled == 2


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_one_that_became_another_error(kind):
    message = "Cache keys should be comparable. The error was:\nTraceback\nKeyboardInterrupt: \n"
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        raise kind(message)
    with pytest.raises(kind, match="another"), interrupts.delivered():
        raise kind("another")


def test_in_an_import_it_waits_for_the_end(tmp_path, monkeypatch):
    """Some modules turn it into an ImportError. A module in C++ ends the process."""
    code = "import signal\nsignal.raise_signal(signal.SIGINT)\ndone = True"
    (tmp_path / "imported_once.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        import imported_once  # noqa: F401

        wait()
    assert sys.modules["imported_once"].done


def test_what_holds_it_ends_first():
    ended = False
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            ended = True
        wait()
    assert ended


# Ctrl-C while a module is imported or JAX starts.
INTERRUPTED = """
import signal, sys
from fdjax.__main__ import main

class Finder:
    def find_spec(name, path, target=None):
        if name == MODULE:
            signal.raise_signal(signal.SIGINT)

MODULE = sys.argv.pop(1)
sys.meta_path.insert(0, Finder)
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module",
    [
        "argparse",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("jax_plugins", "numpy", "jax", "fdjax.lm")
        ),
    ],
)
def test_the_command_line_ends_without_a_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED, module, "generate", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert not done.stderr.strip()


def test_other_ignored_exceptions_are_told_as_before(monkeypatch):
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)

    class Finalised:
        def __del__(self):
            raise ValueError("lost")

    with interrupts.delivered():
        Finalised()
    assert [type(unraisable.exc_value) for unraisable in unraised] == [ValueError]


def test_nothing_stays_behind():
    before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        signal.raise_signal(signal.SIGINT)
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_where_ctrl_c_is_ignored_it_stays_so():
    """As for a script in the background."""
    code = "import signal, time; from fdjax.system import interrupts\n"
    code += "with interrupts.delivered():\n  signal.raise_signal(signal.SIGINT); time.sleep(0.1)"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60, check=False)
    assert done.returncode == 0
