"""Sets JAX's share of a GPU's memory, which must be done before JAX starts."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

# The share that fdjax's commands take unless the user sets another. JAX's default is 75 %.
DEFAULT_SHARE = 0.9
HOW_TO_GET_MORE = (
    f"set XLA_CLIENT_MEM_FRACTION={DEFAULT_SHARE} before it starts, as the commands of fdjax do"
)
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_SETTINGS = (*_FRACTIONS, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
_SECONDS = 10  # to wait for nvidia-smi


def memory_is_configured() -> bool:
    """Whether environment variables configure JAX's use of memory."""
    return any(os.environ.get(name) for name in _SETTINGS)


@contextlib.contextmanager
def memory_share(share: float | None = None, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Let JAX take a share of the memory of each GPU, if it starts inside this block.

    Args:
      share: above 0 and at most 1; default 0.9, or the setting of the environment.
      needed_bytes: the default share becomes as small as is enough for this. JAX's allocator has a
        table in host memory, of a byte for every 32 bytes that it takes of the GPU.
    """
    if share is None and memory_is_configured():
        yield
        return
    # JAX refuses to start if both variables are set.
    name = next((name for name in _FRACTIONS if os.environ.get(name)), _FRACTIONS[0])
    before = os.environ.get(name)
    os.environ[name] = str(_default_share(needed_bytes) if share is None else share)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _default_share(needed_bytes: int | None) -> float:
    total = None if needed_bytes is None else _gpu_bytes()
    return DEFAULT_SHARE if total is None else min(DEFAULT_SHARE, needed_bytes / total)


def _gpu_bytes() -> int | None:
    """The memory of the smallest GPU, asked before JAX starts; None if unknown."""
    command = "nvidia-smi", "--query-gpu=memory.total,mig.mode.current"
    try:
        lines = subprocess.check_output(
            (*command, "--format=csv,noheader,nounits"),
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_SECONDS,
        ).splitlines()
        # A GPU that is divided has less for each process.
        if any("Enabled" in line for line in lines):
            return None
        return min(int(line.split(",")[0]) for line in lines) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
