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
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base else Path.home() / ".cache") / "fdjax" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.info("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    logger.info("compiled programs are kept in %s", folder)


def nvidia_driver_present() -> bool:
    """Whether this machine has an NVIDIA kernel driver."""
    return Path("/proc/driver/nvidia/version").exists()


def warn_of_idle_gpu() -> None:
    """Warn when there is an NVIDIA GPU and JAX cannot use it."""
    if jax.default_backend() == "cpu" and nvidia_driver_present() and not _cpu_was_asked_for():
        warnings.warn(
            "this machine has an NVIDIA driver but JAX sees only the CPU; "
            "install the GPU build: pip install 'fdjax[cuda13]'",
            stacklevel=3,
        )


def _cpu_was_asked_for() -> bool:
    return (jax.config.jax_platforms or "").split(",")[0] == "cpu"
