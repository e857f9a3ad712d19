"""Finds and replaces damaged entries of JAX's compilation cache.

A full disk truncates entries, a bad disk flips bits, and a restored backup may have entries under
wrong names. If JAX cannot read an entry, it warns, compiles, and keeps the file, so every later
process does the same. If the entry belongs to another program, JAX runs that program, or fails
because shapes differ.
"""

import functools
import hashlib
import inspect
import logging
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax._src import compilation_cache

logger = logging.getLogger("fdjax")

_SUFFIX = "-cache"
# A folder in JAX's folder. It has a file for each entry, with a digest of each content written.
_DIGESTS = "fdjax/entries"
_DIGEST_BYTES = 32
# The event that JAX records before it looks up a program's entry.
_READS = "/jax/compilation_cache/compile_requests_use_cache"
# The event that JAX records after compiling a program, before it writes the entry.
_WRITES = "/jax/compilation_cache/cache_misses"
# With this setting, JAX compiles a cached program again to compare it with the entry.
_COMPARES = "jax_compilation_cache_check_contents"
# Number of stack frames from the one that records the event to the one that knows the name.
_FRAMES = 3
_ZSTD = b"\x28\xb5\x2f\xfd"


@functools.cache
def write_damaged_anew() -> None:
    """From now on, replace entries that JAX cannot read or that belong to another program."""
    jax.monitoring.register_event_listener(_attend)


def _attend(event: str, **_) -> None:
    """Check the entry that JAX is about to read or write."""
    folder = jax.config.jax_compilation_cache_dir
    if event not in (_READS, _WRITES) or not folder or "://" in folder:
        return
    known = _known_to_jax()
    if jax.config.values.get(_COMPARES) or "cache_key" not in known:
        return
    path = Path(folder, known["cache_key"] + _SUFFIX)
    try:
        if event == _READS:
            _remove_if_another(path)
        else:
            path.unlink(missing_ok=True)  # an existing entry is one that JAX could not read
            _note(path, known.get("executable_and_time"))
    except OSError as error:
        logger.info("the compilation cache cannot be checked: %s", error)


def _known_to_jax() -> dict[str, Any]:
    """Local variables of the JAX function that looks up an entry. Only they have its name."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES + 1):
        frame = frame and frame.f_back
        if frame and "cache_key" in frame.f_locals:
            return frame.f_locals
    return {}


def _remove_if_another(path: Path) -> None:
    """Remove an entry if its content was not written under this name."""
    if path.exists() and _is_another(path, path.read_bytes()):
        logger.info("%s is damaged and will be written again", path)
        path.unlink(missing_ok=True)


def _note(path: Path, entry: Any) -> None:
    """Note the content of an entry that is about to be written."""
    digests = _digests(path)
    if not isinstance(entry, bytes):  # a JAX version with other names of variables
        digests.unlink(missing_ok=True)
        return
    digests.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same entry, and either content may remain.
    with digests.open("ab") as file:
        file.write(_digest(path, entry))


def _digests(path: Path) -> Path:
    return path.parent / _DIGESTS / path.name


def _digest(path: Path, entry: bytes) -> bytes:
    """Digest of an entry and its name."""
    return hashlib.sha256(path.name.encode() + entry).digest()


def _is_another(path: Path, entry: bytes) -> bool:
    """Whether an entry differs from all noted contents; False if none was noted."""
    try:
        noted = _digests(path).read_bytes()
    except FileNotFoundError:
        return False
    starts = range(0, len(noted), _DIGEST_BYTES)
    return _digest(path, entry) not in [noted[i : i + _DIGEST_BYTES] for i in starts]


def damaged_entries(folder: Path) -> list[Path]:
    """The entries in a folder that are known to be damaged."""
    return [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if _is_damaged(path)]


def _is_damaged(path: Path) -> bool:
    entry = path.read_bytes()
    if _is_another(path, entry):
        return True
    try:
        return not compilation_cache.decompress_executable(entry)
    except Exception:  # an error of zlib or zstd, whichever JAX uses
        return not entry.startswith(_ZSTD)
