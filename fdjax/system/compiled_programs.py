"""Entries of JAX's compilation cache that are damaged: found, and written anew.

A full disk cuts an entry or leaves it empty, a bad one flips its bits. JAX warns of an entry that
it cannot read, compiles, and keeps the file, so every later process would do the same.
"""

import functools
import inspect
from pathlib import Path

import jax
import jax.monitoring
from jax._src import compilation_cache

_SUFFIX = "-cache"
# JAX records it when it has compiled a program and is about to write its entry.
_WRITES = "/jax/compilation_cache/cache_misses"
# A setting with which JAX compiles once more to compare with the entry.
_COMPARES = "jax_compilation_cache_check_contents"
# Of JAX, from the one that records the event to the one that names the entry.
_FRAMES = 3
_ZSTD = b"\x28\xb5\x2f\xfd"


@functools.cache
def write_damaged_anew() -> None:
    """From now on, JAX replaces an entry that it could not read."""
    jax.monitoring.register_event_listener(_make_way)


def _make_way(event: str, **_) -> None:
    """Remove the file of the entry that JAX writes: if there is one, JAX could not read it."""
    folder = jax.config.jax_compilation_cache_dir
    if event != _WRITES or not folder or "://" in folder or jax.config.values.get(_COMPARES):
        return
    # JAX tells the name of the entry to nobody.
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame and frame.f_back
        if frame and "cache_key" in frame.f_locals:
            Path(folder, frame.f_locals["cache_key"] + _SUFFIX).unlink(missing_ok=True)
            return


def damaged_entries(folder: Path) -> list[Path]:
    """The entries in a folder that JAX cannot read, as far as their compression tells."""
    return [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if _is_damaged(path.read_bytes())]


def _is_damaged(entry: bytes) -> bool:
    try:
        return not compilation_cache.decompress_executable(entry)
    except Exception:  # of zlib or of zstd, whichever JAX has
        return not entry.startswith(_ZSTD)
