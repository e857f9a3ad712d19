"""The memory of a device: total, free, and how to free it."""

import os
from typing import Any

import jax


def device_memory_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes that JAX may allocate on a device, or None if unknown.

    On a GPU it is the allocator's limit, on a CPU the machine's memory.

    Args:
      device: default the first local one.
    """
    device = device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_memory_bytes(device: jax.Device | None = None) -> int | None:
    """`device_memory_bytes` minus the allocated bytes; None if unknown."""
    device = device or jax.local_devices()[0]
    limit = device_memory_bytes(device)
    return limit and limit - (device.memory_stats() or {}).get("bytes_in_use", 0)


def gigabytes(count: int) -> str:
    """Format a number of bytes in decimal units, such as "1.500 GB" or "12.000 MB"."""
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def free(tree: Any) -> None:
    """Free the arrays of a tree now, although the traceback of an error may refer to them.

    Somebody may keep that for long: a notebook keeps that of the last error. NumPy arrays stay.
    """
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array):
            array.delete()
