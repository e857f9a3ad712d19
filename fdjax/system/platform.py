"""The machine below JAX: the compilation cache, the driver, and a GPU that JAX does not use."""

import logging
import os
import re
import warnings
from pathlib import Path

import jax

from fdjax.system import interrupts
from fdjax.system.compiled_programs import write_damaged_anew
from fdjax.system.memory_share import HOW_TO_GET_MORE, memory_is_configured

_DRIVER = Path("/proc/driver/nvidia/version")

logger = logging.getLogger("fdjax")


def compilation_cache_folder() -> Path:
    """The folder of compiled programs: JAX's configured one, else one in the user's cache folder.

    A relative `XDG_CACHE_HOME` is ignored, as its specification asks for.

    Raises:
      RuntimeError: there is no home directory.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return Path(jax.config.jax_compilation_cache_dir)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "fdjax" / "xla"


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Keep compiled programs on disk, unless JAX is already configured to do so.

    In both cases, damaged entries of the cache are replaced. If the folder cannot be written, there
    is no cache, and that is logged.

    Args:
      folder: default `$XDG_CACHE_HOME/fdjax/xla`, or `~/.cache/fdjax/xla`.
    """
    write_damaged_anew()
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = compilation_cache_folder() if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        # JAX would warn for each program that it cannot write.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        logger.info("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    logger.info("compiled programs are kept in %s", folder)


class NoDeviceError(RuntimeError):
    """JAX cannot start the platform that it is configured to use."""


def default_backend() -> str:
    """The platform that JAX runs on, such as "gpu" or "cpu".

    Raises:
      NoDeviceError: JAX cannot start a platform. The message names the configured one.
    """
    try:
        with interrupts.held():
            return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX 0.11 asserts that a platform started
        reason = (str(error).splitlines() or [""])[0] or "it finds no such device"
        raise NoDeviceError(
            f"JAX cannot run on platform {jax.config.jax_platforms!r}: {reason}"
        ) from None


def nvidia_driver_present() -> bool:
    """Whether this machine has an NVIDIA kernel driver."""
    return _DRIVER.exists()


def nvidia_driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, such as "580.65.06", or None without a driver."""
    try:
        found = re.search(r"\b\d{3,}(\.\d+)+\b", _DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None


def gpu_is_idle() -> bool:
    """Whether there is an NVIDIA driver, but JAX runs on the CPU without being configured to."""
    return default_backend() == "cpu" and nvidia_driver_present() and not _cpu_was_asked_for()


def warn_of_idle_gpu() -> None:
    """Warn if there is an NVIDIA GPU that JAX cannot use."""
    if gpu_is_idle():
        warnings.warn(
            "this machine has an NVIDIA driver but JAX sees only the CPU; "
            "install JAX for GPUs: pip install 'jax[cuda13]'; `fdjax doctor` says more",
            stacklevel=3,
        )


def log_memory_share() -> None:
    """Log how to give JAX more of a GPU's memory, unless its share is configured."""
    if default_backend() == "gpu" and not memory_is_configured():
        logger.info("JAX takes 75 %% of the GPU's memory; %s", HOW_TO_GET_MORE)


def _cpu_was_asked_for() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or (jax.config.jax_platforms or "").split(",")[0] == "cpu"
