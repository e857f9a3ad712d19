"""A model that two processes share, each with one CPU device, gives the answers of one device."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import sharing_devices
from fdjax.engine import mesh
from fdjax.engine.mesh import Place

from .test_tensor_parallel import LOGPROBS_BAR, TESTS, assert_same

SCRIPT = TESTS / "sharing_processes.py"
PATH = "hf/llama3_gqa_tied"
SECONDS = 100
# What would part the processes, and its error.
DIFFERENT = "the processes that share a model must make the same calls with the same arguments"
REFUSED = {
    "prompts": f"ValueError: generate: {DIFFERENT}",
    "options": f"ValueError: generate: {DIFFERENT}",
    "submit": "NotImplementedError: submit: a model that spans processes runs nothing",
    "thread": "NotImplementedError: generate: a model that spans processes takes the calls of one",
    "watch": "NotImplementedError: generate: a watch sees the devices of one process only",
    "aborted": "RuntimeError: generate: an earlier call failed or was interrupted",
}


@contextlib.contextmanager
def started(function, *arguments, **options):
    """Two processes that share a model. They end with this block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT), function, json.dumps([*arguments, options]), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([*command, str(i)], cwd=TESTS.parent, **pipes))
            for i in (0, 1)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()


def lines(output):
    """What a process printed, without the lines of Gloo, which connects the processes."""
    return [line for line in output.splitlines() if not line.startswith("[Gloo]")]


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one_device(quick_compiles):
    """One test, because the processes compile for longer than all of its checks take."""
    reports = []
    with started("answers", PATH, 1, "SIGKILL") as processes:
        for process in processes:
            out, errors = process.communicate(timeout=SECONDS)
            assert process.returncode != 0, errors[-3000:]
            report, *end = lines(out)
            reports.append(json.loads(report))
            # At the end, process 1 kills itself. The other one notices.
            if process is processes[0]:
                assert end == ['"JaxRuntimeError"']
                assert "another task died" in errors
            else:
                assert not end and process.returncode == -signal.SIGKILL

    first, second = (report["same"] for report in reports)
    assert first == second  # the same bits, and the same seeds where none was given
    drawn, again = first["drawn"]
    assert drawn != again
    assert first["later"][:-1] == first["greedy"]["tokens"]
    lm = sharing_devices.load(PATH, 1)
    assert_same(first["greedy"], sharing_devices.generated(lm, sharing_devices.PROMPTS[:-1]))
    scores = lm.score(sharing_devices.PROMPTS).logprobs
    for found, want in zip(first["score"], scores, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=LOGPROBS_BAR)

    # Process 1 has less memory, and was told that a cache of 64 pages does not fit.
    assert first["bytes"] == [6 * 10**9] * 2
    assert first["pages"] == 48

    for rank, (report, other) in enumerate(zip(reports, ("generate", "score"), strict=True)):
        assert report["own"] == {"ranks": [rank], "bytes": first["weight_bytes"]}
        for what, error in (REFUSED | {"calls": f"ValueError: {other}: {DIFFERENT}"}).items():
            assert report["refused"].pop(what).startswith(error)
        assert not report["refused"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("victim", "sent", "report"),
    # A process that is stopped keeps its connections, as a host that vanishes does.
    [(1, "SIGKILL", ['"JaxRuntimeError"']), (0, "SIGSTOP", [])],
)
def test_a_process_notices_that_the_other_died(victim, sent, report):
    with started("ends", PATH, victim, sent) as processes:
        out, errors = processes[1 - victim].communicate(timeout=SECONDS)
    assert processes[1 - victim].returncode != 0
    assert lines(out) == report
    assert "another task died" in errors


def devices(monkeypatch, *counts):
    """Processes with so many devices each; this one is the first."""
    found = [
        [SimpleNamespace(process_index=i, id=n) for n in range(count)]
        for i, count in enumerate(counts)
    ]
    monkeypatch.setattr(jax, "process_count", lambda: len(counts))
    monkeypatch.setattr(jax, "local_device_count", lambda: counts[0])
    monkeypatch.setattr(jax, "local_devices", lambda process_index=0: found[process_index])


@pytest.mark.parametrize(
    ("counts", "ranks", "of_each"),
    [((4, 4), 4, {0: 4}), ((4, 4), 6, {0: 3, 1: 3}), ((2, 2, 2), 6, {0: 2, 1: 2, 2: 2})],
)
def test_every_process_contributes_the_same_number(monkeypatch, counts, ranks, of_each):
    devices(monkeypatch, *counts)
    place = Place.for_ranks(ranks)
    assert Counter(device.process_index for device in place.devices) == of_each
    assert place.spans_processes == (len(of_each) > 1)


@pytest.mark.parametrize(
    ("counts", "ranks", "message"),
    [
        ((2,), 4, "needs 4 devices, found 2; .* call jax.distributed.initialize in each of them"),
        ((2, 2), 3, "needs 3 devices, the same number of each process, found 2, 2 in 2 processes"),
        ((2, 2), 6, "needs 6 devices, .* found 2, 2 in 2 processes"),
        ((2, 4), 4, "needs 4 devices, .* found 2, 4 in 2 processes"),
    ],
)
def test_too_few_devices_are_an_error(monkeypatch, counts, ranks, message):
    devices(monkeypatch, *counts)
    with pytest.raises(ValueError, match=f"^load: tensor_parallel {message}"):
        Place.for_ranks(ranks)


def test_calls_agree_if_only_addresses_differ(monkeypatch):
    """Each process has its own functions."""
    devices(monkeypatch, 1, 1)
    place, sent = Place.for_ranks(2), []
    monkeypatch.setattr(
        mesh, "_of_all", lambda data: sent.append(data) or [b"".join(sent)[:32], data]
    )
    for _ in range(2):
        assert place.agree("generate", [lambda: 0, 5]) == int.from_bytes(sent[0][16:])
    with pytest.raises(ValueError, match="the same arguments"):
        place.agree("generate", [lambda: 0, 6])
