"""Damaged entries of JAX's compilation cache, in real processes."""

import os
import subprocess
import sys

import pytest

from fdjax.system.compiled_programs import damaged_entries

# Three programs. Each is found in JAX's cache or not, printed as "cut miss, emptied hit".
PROCESS = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from fdjax.system import platform

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
platform.enable_compilation_cache(Path(sys.argv[1]))
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
programs = {"cut": jnp.sin, "emptied": jnp.cos, "flipped": jnp.tan}
x = jnp.arange(3.0)
for name, function in programs.items():
    def program(x):
        return function(x) + 1
    program.__name__ = name
    found.clear()
    jax.jit(program)(x).block_until_ready()
    hit = "/jax/compilation_cache/cache_hits" in found
    print(name, "hit" if hit else "miss")
"""


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {"cut": lambda data: data[:-100], "emptied": lambda _: b"", "flipped": flipped}


@pytest.fixture
def process(tmp_path):
    """Run it; returns (hits and misses, JAX's warnings)."""

    def process():
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", PROCESS, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split(), done.stderr.count("Error reading persistent")

    return process


def test_a_damaged_entry_is_written_anew(process, tmp_path):
    missed, hit = ([word for name in DAMAGE for word in (name, found)] for found in ("miss", "hit"))
    assert process() == (missed, 0)
    assert damaged_entries(tmp_path) == []
    for name, damage in DAMAGE.items():
        (path,) = tmp_path.glob(f"jit_{name}-*")
        path.write_bytes(damage(path.read_bytes()))
    assert [p.name.split("-")[0] for p in damaged_entries(tmp_path)] == [
        "jit_cut",
        "jit_emptied",
        "jit_flipped",
    ]
    assert process() == (missed, 3)
    assert damaged_entries(tmp_path) == []
    assert process() == (hit, 0)
