"""Damaged and swapped entries of JAX's compilation cache, of real processes."""

import os
import shutil
import subprocess
import sys

import pytest

from fdjax.system.compiled_programs import damaged_entries

# Programs with right results, each found in JAX's cache or not, as "cut miss, emptied hit".
PROCESS = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fdjax.system import platform

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
platform.enable_compilation_cache(Path(sys.argv[1]))
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
programs = {"cut": jnp.sin, "emptied": jnp.cos, "flipped": jnp.tan}
programs |= {"one": jnp.sinh, "other": jnp.cosh}
x = jnp.arange(3.0)
for name, function in programs.items():
    def program(x):
        return function(x) + 1
    program.__name__ = name
    found.clear()
    out = jax.jit(program)(x)
    assert np.allclose(out, getattr(np, function.__name__)(np.arange(3.0)) + 1)
    hit = "/jax/compilation_cache/cache_hits" in found
    print(name, "hit" if hit else "miss")
"""


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {"cut": lambda data: data[:-100], "emptied": lambda _: b"", "flipped": flipped}


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Run it → ({name: "hit" or "miss"}, what JAX warned of)."""

    # Otherwise the package would keep to this folder, which all tests share.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def process():
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", PROCESS, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        found = dict(line.split() for line in done.stdout.splitlines())
        return found, done.stderr.count("Error reading persistent")

    return process


@pytest.mark.slow
def test_an_entry_that_is_not_as_it_was_written_is_written_anew(process, tmp_path):
    def entry(name):
        (path,) = tmp_path.glob(f"jit_{name}-*")
        return path

    def damage():
        for name, change in DAMAGE.items():
            entry(name).write_bytes(change(entry(name).read_bytes()))

    def damaged():
        return [path.name.split("-")[0].removeprefix("jit_") for path in damaged_entries(tmp_path)]

    missed = dict.fromkeys([*DAMAGE, "one", "other"], "miss")
    hit = dict.fromkeys(missed, "hit")
    assert process() == (missed, 0)
    assert damaged() == []
    damage()
    one = entry("one").read_bytes()
    entry("one").write_bytes(entry("other").read_bytes())
    entry("other").write_bytes(one)
    assert damaged() == list(missed)
    assert process() == (missed, 0)
    assert damaged() == []
    # Entries of which nothing was noted, as of JAX without this package.
    shutil.rmtree(tmp_path / "fdjax" / "entries")
    damage()
    assert damaged() == list(DAMAGE)
    assert process() == (hit | dict.fromkeys(DAMAGE, "miss"), 3)
    assert damaged() == []
    assert process() == (hit, 0)
