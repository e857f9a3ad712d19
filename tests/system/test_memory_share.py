"""The share of a GPU's memory that JAX takes."""

import os

import pytest

from fdjax.system.memory_share import memory_is_configured, memory_share

GB = 10**9


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A function that makes `nvidia-smi` print a text."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def prints(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)

    return prints


def share(needed: int | None) -> float:
    with memory_share(needed_bytes=needed):
        found = float(os.environ["XLA_CLIENT_MEM_FRACTION"])
    assert not memory_is_configured()
    return found


def test_as_much_as_is_needed_on_the_smallest_gpu(nvidia_smi):
    nvidia_smi("143771, Disabled\n81559, [N/A]")
    assert share(20 * GB) == pytest.approx(20 * GB / (81559 * 2**20))
    assert share(80 * GB) == share(None) == 0.9


@pytest.mark.parametrize("text", ["81559, Enabled", "[N/A], [N/A]", "No devices were found", ""])
def test_the_default_where_the_memory_is_not_known(nvidia_smi, text):
    nvidia_smi(text)
    assert share(20 * GB) == 0.9


def test_the_default_without_a_driver(nvidia_smi):
    assert share(20 * GB) == 0.9


def test_what_the_user_says_goes_first(nvidia_smi, monkeypatch):
    nvidia_smi("81559, Disabled")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.4")
    with memory_share(needed_bytes=GB):
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.4"
    with memory_share(0.7, needed_bytes=GB):
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.7"
