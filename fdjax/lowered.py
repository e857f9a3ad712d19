"""Programs on disk as JAX lowered them: tracing and lowering a large model takes seconds.

JAX's compilation cache does not save them, as it finds a program by what lowering makes of it.
Here one is found by what it was traced from: this package, the model and its plan, the arguments'
shapes, JAX's version and settings, the device. What is found is compiled as what was traced, and so
is found by JAX's cache in turn. Who puts a function of his own into this package has it traced.
"""

import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jaxlib
from jax import export

from fdjax.sampling import Logprobs

logger = logging.getLogger("fdjax")

export.register_namedtuple_serialization(Logprobs, serialized_name="fdjax.Logprobs")

# Custom calls of which JAX promises nothing to a later version; a program is read by none.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "annotate_device_placement", "__cudnn$fmhaSoftmax")
_CHECKS = tuple(map(export.DisabledSafetyCheck.custom_call, _CUSTOM_CALLS))

_PACKAGES = (".", "models", "pallas_kernels")  # beside this file; the latter two may be links
_DIGEST_BYTES = 32

# Whose functions and classes are in modules of this package, as it is.
_KNOWN = (sys.stdlib_module_names - {"unittest"}) | {
    *("fdjax", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes"),
    *("jinja2", "tokenizers", "safetensors", "huggingface_hub", "tqdm"),
}


def kept(function: Callable, description: Any, device: jax.Device) -> Callable:
    """A function for `jax.jit` that is traced itself only where its program is not on disk.

    Programs are kept where JAX's compilation cache is, unless that is off or not a local folder.

    Args:
      function: positional pytrees of arrays → lists, tuples and `Logprobs` of arrays.
      description: what it depends on besides them and this package, complete in its `repr`.
      device: where the arrays are.
    """

    @functools.wraps(function)
    def program(*args):
        leaves, treedef = jax.tree.flatten(args)
        avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        path = _path(device, repr((description, treedef, avals)))
        exported = path and _read(path)
        if path and not exported:

            def of_leaves(*leaves):
                return function(*jax.tree.unflatten(treedef, leaves))

            exported = _export(of_leaves, avals, device.platform)
            if exported:
                _write(path, exported)
        return exported.call(*leaves) if exported else function(*args)

    return program


def _export(
    function: Callable, avals: list[jax.ShapeDtypeStruct], platform: str
) -> export.Exported | None:
    platforms = ["cuda" if platform == "gpu" else platform]
    exporter = export.export(jax.jit(function), platforms=platforms, disabled_checks=_CHECKS)
    try:
        return exporter(*avals)
    except (NotImplementedError, ValueError) as error:  # a custom call or a callback
        logger.debug("a program cannot be kept: %s", error)
        return None


def _path(device: jax.Device, description: str) -> Path | None:
    """Where the program is that is described so; None if programs are not kept."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    if foreign := next(_foreign(), None):
        logger.info("programs are not kept, as %s is not of this package", foreign)
        return None
    if _source_digest() != _SOURCE:
        logger.info("programs are not kept, as this package has changed since it was loaded")
        return None
    settings = {name: value for name, value in jax.config.values.items() if "_dir" not in name}
    origin = (
        jax.__version__,
        jaxlib.__version__,
        device.client.platform_version,
        device.device_kind,
        sorted(settings.items(), key=lambda setting: setting[0]),
        _SOURCE,
        description,
    )
    return Path(folder) / "fdjax" / hashlib.sha256(repr(origin).encode()).hexdigest()


def _foreign() -> Iterator[str]:
    """Names of what others have put into modules and classes of this package while it runs."""
    modules = [(n, m) for n, m in sys.modules.items() if n.partition(".")[0] == "fdjax"]
    for name, module in modules:
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("__"):
                continue
            members = vars(value) if isinstance(value, type) else value
            for thing in (value, *(members.values() if isinstance(members, Mapping) else ())):
                origin = "__name__" if isinstance(thing, ModuleType) else "__module__"
                owner = getattr(thing, origin, None)
                if isinstance(owner, str) and owner.partition(".")[0] not in _KNOWN:
                    yield f"{name}.{attribute}"


def _source_digest() -> str:
    """Of all of this package's modules."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


_SOURCE = _source_digest()


def _read(path: Path) -> export.Exported | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("%s cannot be read: %s", path, error)
        return None
    digest, program = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(program).digest() != digest:
        logger.info("%s is damaged", path)
        return None
    return export.deserialize(bytearray(program))


def _write(path: Path, exported: export.Exported) -> None:
    program = bytes(exported.serialize())
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(program).digest() + program)
        part.replace(path)
    except OSError as error:
        logger.info("%s cannot be written: %s", path, error)
