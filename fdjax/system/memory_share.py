"""Sets JAX's share of a GPU's memory, which must be done before JAX starts."""

import contextlib
import os
from collections.abc import Iterator

# The share that fdjax's commands take unless the user sets another. JAX's default is 75 %.
DEFAULT_SHARE = 0.9
HOW_TO_GET_MORE = (
    f"set XLA_CLIENT_MEM_FRACTION={DEFAULT_SHARE} before it starts, as the commands of fdjax do"
)
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_SETTINGS = (*_FRACTIONS, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")


def memory_is_configured() -> bool:
    """Whether environment variables configure JAX's use of memory."""
    return any(os.environ.get(name) for name in _SETTINGS)


@contextlib.contextmanager
def memory_share(share: float | None = None) -> Iterator[None]:
    """Let JAX take a share of the memory of each GPU, if it starts inside this block.

    Args:
      share: above 0 and at most 1; default 0.9, or the setting of the environment.
    """
    if share is None and memory_is_configured():
        yield
        return
    # JAX refuses to start if both variables are set.
    name = next((name for name in _FRACTIONS if os.environ.get(name)), _FRACTIONS[0])
    before = os.environ.get(name)
    os.environ[name] = str(DEFAULT_SHARE if share is None else share)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
