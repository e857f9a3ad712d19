"""A Ctrl-C that comes where Python or JAX would lose it is heeded all the same."""

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
    """Also where these tests run with Ctrl-C ignored."""
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


def test_one_that_became_another_error():
    message = "Cache keys should be comparable. The error was:\nTraceback\nKeyboardInterrupt: \n"
    with pytest.raises(KeyboardInterrupt), interrupts.delivered():
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="another"), interrupts.delivered():
        raise RuntimeError("another")


def test_other_ignored_exceptions_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Finalised:
        def __del__(self):
            raise ValueError("lost")

    with interrupts.delivered():
        Finalised()
    assert [type(unraisable.exc_value) for unraisable in told] == [ValueError]


def test_nothing_stays_behind():
    before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with interrupts.delivered():
        signal.setitimer(signal.ITIMER_REAL, 60)
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_where_ctrl_c_is_ignored_it_stays_so():
    """As in the background of a script."""
    code = "import signal, time; from fdjax.system import interrupts\n"
    code += "with interrupts.delivered():\n  signal.raise_signal(signal.SIGINT); time.sleep(0.1)"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60, check=False)
    assert done.returncode == 0
