"""Options of NCCL are set once, and the environment's own value stays."""

import os

import pytest

from fdjax.engine.mesh import Place
from fdjax.system.nccl import advise, allow_in_graphs


@pytest.mark.parametrize("value", [None, "1"])
def test_the_environment_decides_first(value, monkeypatch):
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(name, value or "")
    if value is None:
        monkeypatch.delenv(name)
    allow_in_graphs()
    assert os.environ[name] == (value or "0")


@pytest.mark.parametrize("count", [1, 2])
def test_a_place_of_several_devices_sets_them(count, monkeypatch):
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    Place((object(),) * count)
    assert (name in os.environ) == (count > 1)


def test_advice_if_a_graph_is_refused():
    refused, other = RuntimeError("Failed to instantiate CUDA graph: x"), RuntimeError("x")
    advise(refused)
    advise(other)
    (note,) = refused.__notes__
    assert "NCCL_GRAPH_MIXING_SUPPORT=0" in note
    assert not hasattr(other, "__notes__")
