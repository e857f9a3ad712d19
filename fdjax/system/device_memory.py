"""How much memory a device has, and has left."""

import os

import jax


def device_memory_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes JAX may allocate on a device: the allocator's limit, or the machine's memory.

    None where neither is known.
    """
    device = device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_memory_bytes(device: jax.Device | None = None) -> int | None:
    """`device_memory_bytes` less what the allocator has given out."""
    device = device or jax.local_devices()[0]
    limit = device_memory_bytes(device)
    return limit and limit - (device.memory_stats() or {}).get("bytes_in_use", 0)


def gigabytes(count: int) -> str:
    """A number of bytes for people, in units of 1000."""
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"
