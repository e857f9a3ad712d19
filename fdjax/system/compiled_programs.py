"""Finds and replaces damaged entries of JAX's compilation cache.

A full disk leaves an entry cut or empty, and a bad disk flips bits. JAX warns about an entry that
it cannot read, compiles the program, and keeps the file. So every later process would do the same.
"""

import functools
import inspect
from pathlib import Path

import jax
import jax.monitoring
from jax._src import compilation_cache

_SUFFIX = "-cache"
# JAX records this event when it has compiled a program and is about to write its entry.
_WRITES = "/jax/compilation_cache/cache_misses"
# With this setting, JAX compiles a cached program again to compare it with the entry.
_COMPARES = "jax_compilation_cache_check_contents"
# Number of JAX's stack frames from the one that records the event to the one that holds the name.
_FRAMES = 3
_ZSTD = b"\x28\xb5\x2f\xfd"


@functools.cache
def write_damaged_anew() -> None:
    """Make JAX replace entries that it cannot read, for the rest of this process."""
    jax.monitoring.register_event_listener(_make_way)


def _make_way(event: str, **_) -> None:
    """Remove the file of the entry that JAX is about to write: JAX could not read it."""
    folder = jax.config.jax_compilation_cache_dir
    if event != _WRITES or not folder or "://" in folder or jax.config.values.get(_COMPARES):
        return
    # JAX has no way to ask for the name of the entry.
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame and frame.f_back
        if frame and "cache_key" in frame.f_locals:
            Path(folder, frame.f_locals["cache_key"] + _SUFFIX).unlink(missing_ok=True)
            return


def damaged_entries(folder: Path) -> list[Path]:
    """The entries in a folder that cannot be decompressed, so that JAX cannot read them."""
    return [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if _is_damaged(path.read_bytes())]


def _is_damaged(entry: bytes) -> bool:
    try:
        return not compilation_cache.decompress_executable(entry)
    except Exception:  # from zlib or zstd, whichever JAX uses
        return not entry.startswith(_ZSTD)
