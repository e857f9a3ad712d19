"""The report of `fdjax doctor`: what runs here, and what is missing to use a GPU well."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import platform as python_platform
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import fdjax
from fdjax.engine.disk_cache import damaged_programs
from fdjax.engine.mesh import Place
from fdjax.pallas_kernels.attention import AttentionSpec, decode_attention
from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.system import platform
from fdjax.system.compiled_programs import damaged_entries
from fdjax.system.device_memory import device_memory_bytes
from fdjax.system.memory_share import HOW_TO_GET_MORE

# Oldest driver for each CUDA generation (NVIDIA's CUDA toolkit release notes).
_DRIVER_FOR_CUDA = {13: 580, 12: 525}
# First compute capability with bfloat16 tensor cores and asynchronous copies.
_FAST_CAPABILITY = (8, 0)
# Environment variables that can hide a GPU from JAX.
_KNOBS = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
# Largest number of damaged programs named one by one. For more, the advice is to delete the cache.
_NAMED = 3
_INSTALL = f"pip install 'jax[cuda13]=={jax.__version__}'"

Status = Literal["ok", "note", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      subject: name of the thing that was checked.
      status: "ok", "note" for a fact that needs no action, "problem" for one that does.
      text: the facts.
      cure: advice for a problem, or None.
    """

    subject: str
    status: Status
    text: str
    cure: str | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The whole report.

    Attributes:
      findings: the lines; each depends only on earlier ones.
    """

    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether there is no problem."""
        return all(f.status != "problem" for f in self.findings)

    def asdict(self) -> dict[str, Any]:
        """The report as a dict of JSON values."""
        return {"sound": self.sound, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        """A readable table."""
        lines = []
        for f in self.findings:
            lines.append(f"{f.status:8} {f.subject:18} {f.text}")
            if f.cure:
                lines.append(f"{'':27} -> {f.cure}")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Check versions, driver, plugin, devices and caches, and run two small operations."""
    findings = [_python(), _jax(), _libraries(), _driver(), _plugin()]
    try:
        with _complaints() as complaints:
            backend = platform.default_backend()
    except platform.NoDeviceError as error:
        cure = "unset JAX_PLATFORMS, or name a platform that exists"
        findings.append(Finding("devices", "problem", str(error), cure))
    else:
        findings.append(_backend(backend, complaints))
        findings += map(_device, jax.local_devices())
        if backend == "gpu":
            findings.append(
                Finding("memory", "note", f"JAX takes 75 % of a GPU; {HOW_TO_GET_MORE}")
            )
        findings.append(_operations())
        if jax.local_device_count() > 1:
            findings.append(_several_devices())
    return Diagnosis((*findings, _cache()))


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collect JAX's warnings while it starts its devices, such as why a plugin does not load.

    Inside the block, JAX does not log them itself.
    """
    complaints: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            error = record.exc_info[1] if record.exc_info else None
            complaints.append(str(error or record.getMessage()).partition("\n")[0])

    logger = logging.getLogger("jax")
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Listener(logging.WARNING)], False
    try:
        yield complaints
    finally:
        logger.handlers, logger.propagate = handlers, propagate


def _python() -> Finding:
    text = f"{fdjax.__version__} on Python {python_platform.python_version()}"
    return Finding("fdjax", "ok", f"{text}, {python_platform.platform(terse=True)}")


def _jax() -> Finding:
    text = f"{jax.__version__}, jaxlib {_version('jaxlib')}"
    bounds = _bounds("jax")
    if not _within(jax.__version__, bounds):
        return Finding(
            "jax", "problem", f"{text}; tested are {bounds}", f"pip install 'jax{bounds}'"
        )
    return Finding("jax", "ok", text)


def _libraries() -> Finding:
    names = ("flax", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub")
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        lost = ", ".join(missing)
        return Finding("libraries", "problem", f"no {lost}", f"pip install {' '.join(missing)}")
    return Finding("libraries", "ok", text)


def _driver() -> Finding:
    version = platform.nvidia_driver_version()
    if version is None:
        return Finding("NVIDIA driver", "note", "none found")
    cuda = _cuda_generation() or max(_DRIVER_FOR_CUDA)
    needed = _DRIVER_FOR_CUDA[cuda]
    if int(version.partition(".")[0]) < needed:
        return Finding(
            "NVIDIA driver",
            "problem",
            f"{version} is too old for CUDA {cuda}",
            f"install driver {needed} or newer",
        )
    return Finding("NVIDIA driver", "ok", f"{version}, runs CUDA {cuda}")


def _plugin() -> Finding:
    cuda = _cuda_generation()
    if cuda is None:
        if platform.nvidia_driver_version() is None:
            return Finding("CUDA plugin", "note", "none, and none is needed without a driver")
        return Finding("CUDA plugin", "problem", "none: JAX cannot use the GPU", _INSTALL)
    names = (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt", "jaxlib")
    versions = {name: _version(name) for name in names}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if len(set(versions.values())) > 1:
        cure = f"pip install 'jax[cuda{cuda}]=={jax.__version__}'"
        return Finding("CUDA plugin", "problem", f"versions differ: {text}", cure)
    return Finding("CUDA plugin", "ok", text)


def _backend(backend: str, complaints: Sequence[str]) -> Finding:
    if backend == "gpu":
        return Finding("devices", "ok", f"{jax.local_device_count()} on platform gpu")
    if not platform.nvidia_driver_present():
        return Finding("devices", "note", f"platform {backend}: for trying and testing only")
    if platform.gpu_is_idle():
        reason = f": {complaints[0]}" if complaints else ""
        text = f"platform {backend}, although there is an NVIDIA driver{reason}"
        return Finding("devices", "problem", text, _INSTALL)
    knobs = [f"{n}={os.environ[n]}" for n in _KNOBS if n in os.environ]
    asked = f"platform {backend}, as asked for{' by ' if knobs else ''}{', '.join(knobs)}"
    return Finding("devices", "note", asked)


def _device(device: jax.Device) -> Finding:
    subject = f"device {device.id}"
    memory = device_memory_bytes(device)
    text = device.device_kind + (f", {memory / 1e9:.1f} GB for JAX" if memory else "")
    if device.platform != "gpu":
        return Finding(subject, "note", text)
    plan = Plan.for_device(device)
    text += f", compute capability {device.compute_capability}"
    if plan.compute_capability < _FAST_CAPABILITY:
        return Finding(
            subject,
            "problem",
            f"{text}: no bfloat16 tensor cores, XLA runs every operation",
            f"use a GPU of compute capability {_FAST_CAPABILITY[0]}.{_FAST_CAPABILITY[1]} or newer",
        )
    table = f"{len(plan.table)} measured choices" if plan.table else "choices by heuristic"
    return Finding(subject, "ok", f"{text}, {table}")


def _several_devices() -> Finding:
    """Sum over all local devices, to find broken communication."""
    place = Place.for_ranks(jax.local_device_count())
    text = f"{len(place.devices)} devices can share a model (tensor_parallel)"
    try:
        sum_of = place.over(lambda x: jax.lax.psum(x, AXIS), PartitionSpec(), PartitionSpec())
        total = jax.jit(sum_of)(place.put(jnp.ones(8)))
        right = bool((total == len(place.devices)).all())
    except Exception as error:  # any error is a finding
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding("several devices", "problem", f"fail to add: {reason}", _INSTALL)
    if not right:
        return Finding("several devices", "problem", "add to a wrong sum", _INSTALL)
    return Finding("several devices", "ok", text)


def _operations() -> Finding:
    """Run a matrix product and attention with the device's plan, to find broken libraries."""
    plan = Plan.for_device()
    dtype = jnp.float32 if plan.compute_capability is None else jnp.bfloat16
    try:
        x = jnp.ones((8, 64), dtype)
        cache = jnp.ones((1, 2, 128, 64), dtype)
        product = jax.jit(functools.partial(matmul, plan=plan))(x, jnp.ones((64, 128), dtype))
        attend = functools.partial(decode_attention, spec=AttentionSpec(0.125), plan=plan)
        o = jax.jit(attend)(cache[:, :, 0][:, None], cache, cache, jnp.full((1,), 8, jnp.int32))
        right = bool((product == 64).all()) and bool((o == 1).all())
    except Exception as error:  # any error is a finding
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding("operations", "problem", f"fail: {reason}", _INSTALL)
    if not right:
        return Finding("operations", "problem", "matmul or attention gives wrong numbers", _INSTALL)
    return Finding("operations", "ok", "matmul and attention run")


def _cache() -> Finding:
    try:
        folder = platform.compilation_cache_folder()
    except RuntimeError as error:
        return Finding("compilation cache", "problem", str(error), "set XDG_CACHE_HOME")
    above = next(p for p in (folder, *folder.parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        configured = jax.config.jax_compilation_cache_dir is not None
        variable = "JAX_COMPILATION_CACHE_DIR" if configured else "XDG_CACHE_HOME"
        return Finding(
            "compilation cache",
            "problem",
            f"{above} cannot be written: every start compiles again",
            f"set {variable} to a folder of yours",
        )
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    text = f"{folder}, {size / 1e6:.1f} MB"
    if damaged := [*damaged_entries(folder), *damaged_programs(folder)]:
        what = "1 program is" if len(damaged) == 1 else f"{len(damaged)} programs are"
        remove = damaged if len(damaged) <= _NAMED else [folder]
        cure = f"delete {', '.join(map(str, remove))}"
        return Finding("compilation cache", "problem", f"{text}: {what} damaged", cure)
    return Finding("compilation cache", "ok", text)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_generation() -> int | None:
    return next((c for c in _DRIVER_FOR_CUDA if _version(f"jax-cuda{c}-plugin")), None)


def _bounds(name: str) -> str:
    """The versions of a library that fdjax requires, such as "<0.13,>=0.11.2"; "" if any."""
    for requirement in importlib.metadata.requires("fdjax") or ():
        if found := re.fullmatch(rf"{name}([<>=][^;\s]*)", requirement):
            return found[1]
    return ""


def _within(version: str, bounds: str) -> bool:
    compare = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b}
    return all(
        compare[sign](_numbers(version), _numbers(bound))
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
