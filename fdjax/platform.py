"""The machine around JAX: the compilation cache, and a GPU nobody uses."""

import logging
import os
import warnings
from pathlib import Path

import jax

logger = logging.getLogger("fdjax")


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Keep compiled programs on disk, unless JAX is already configured to.

    Args:
      folder: default `$XDG_CACHE_HOME/fdjax/xla`, or `~/.cache/fdjax/xla`.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        if folder is None:
            base = os.environ.get("XDG_CACHE_HOME")
            folder = (Path(base) if base else Path.home() / ".cache") / "fdjax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
        # JAX would warn of each program that it cannot write.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        logger.info("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    logger.info("compiled programs are kept in %s", folder)


class NoDeviceError(RuntimeError):
    """JAX cannot start the platform that it was told to use."""


def default_backend() -> str:
    """The platform JAX runs on.

    Raises:
      NoDeviceError: there is none; the message says what was asked for.
    """
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX 0.11 asserts that one platform started
        reason = (str(error).splitlines() or [""])[0] or "it finds no such device"
        raise NoDeviceError(
            f"JAX cannot run on platform {jax.config.jax_platforms!r}: {reason}"
        ) from None


def nvidia_driver_present() -> bool:
    """Whether this machine has an NVIDIA kernel driver."""
    return Path("/proc/driver/nvidia/version").exists()


def warn_of_idle_gpu() -> None:
    """Warn when there is an NVIDIA GPU and JAX cannot use it."""
    if default_backend() == "cpu" and nvidia_driver_present() and not _cpu_was_asked_for():
        warnings.warn(
            "this machine has an NVIDIA driver but JAX sees only the CPU; "
            "install JAX for GPUs: pip install 'jax[cuda13]'",
            stacklevel=3,
        )


def _cpu_was_asked_for() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or (jax.config.jax_platforms or "").split(",")[0] == "cpu"
