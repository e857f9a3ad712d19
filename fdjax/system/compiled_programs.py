"""Entries of JAX's compilation cache that are not what was written: found, and written anew.

A full disk cuts an entry or leaves it empty, a bad one flips its bits, a restored backup may hold
it under another name. JAX warns of an entry that it cannot read, compiles, and keeps the file, so
every later process would do the same. It runs an entry of another program, or fails at its shapes.
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
# In JAX's folder: a file for each entry, with a digest of each content that was written there.
_DIGESTS = "fdjax/entries"
_DIGEST_BYTES = 32
# JAX records it before it looks for the entry of a program.
_READS = "/jax/compilation_cache/compile_requests_use_cache"
# JAX records it when it has compiled a program and is about to write its entry.
_WRITES = "/jax/compilation_cache/cache_misses"
# With this setting, JAX compiles a cached program again to compare it with the entry.
_COMPARES = "jax_compilation_cache_check_contents"
# Number of JAX's stack frames from the one that records the event to the one that holds the name.
_FRAMES = 3
_ZSTD = b"\x28\xb5\x2f\xfd"


@functools.cache
def write_damaged_anew() -> None:
    """From now on, JAX replaces an entry that it cannot read or that is not its name's."""
    jax.monitoring.register_event_listener(_attend)


def _attend(event: str, **_) -> None:
    """Look after the entry that JAX is about to read or write."""
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
            path.unlink(missing_ok=True)  # if there is one, JAX could not read it
            _note(path, known.get("executable_and_time"))
    except OSError as error:
        logger.info("the compilation cache cannot be looked after: %s", error)


def _known_to_jax() -> dict[str, Any]:
    """What the function of JAX knows that looks for an entry: JAX tells its name to nobody."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES + 1):
        frame = frame and frame.f_back
        if frame and "cache_key" in frame.f_locals:
            return frame.f_locals
    return {}


def _remove_if_another(path: Path) -> None:
    """Remove an entry that was not written under its name."""
    if path.exists() and _is_another(path, path.read_bytes()):
        logger.info("%s is not as it was written, and is written anew", path)
        path.unlink(missing_ok=True)


def _note(path: Path, entry: Any) -> None:
    """Note the content of an entry that is about to be written."""
    digests = _digests(path)
    if not isinstance(entry, bytes):  # of a JAX that calls it otherwise
        digests.unlink(missing_ok=True)
        return
    digests.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same entry, and either may be what stays.
    with digests.open("ab") as file:
        file.write(_digest(path, entry))


def _digests(path: Path) -> Path:
    return path.parent / _DIGESTS / path.name


def _digest(path: Path, entry: bytes) -> bytes:
    """Of an entry under its name."""
    return hashlib.sha256(path.name.encode() + entry).digest()


def _is_another(path: Path, entry: bytes) -> bool:
    """Whether an entry is none that was noted; False where none was."""
    try:
        noted = _digests(path).read_bytes()
    except FileNotFoundError:
        return False
    starts = range(0, len(noted), _DIGEST_BYTES)
    return _digest(path, entry) not in [noted[i : i + _DIGEST_BYTES] for i in starts]


def damaged_entries(folder: Path) -> list[Path]:
    """The entries in a folder that are not as they were written, as far as can be told."""
    return [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if _is_damaged(path)]


def _is_damaged(path: Path) -> bool:
    entry = path.read_bytes()
    if _is_another(path, entry):
        return True
    try:
        return not compilation_cache.decompress_executable(entry)
    except Exception:  # from zlib or zstd, whichever JAX uses
        return not entry.startswith(_ZSTD)
