"""Stores lowered programs on disk, because tracing and lowering a large model takes seconds.

JAX's compilation cache does not save this time: its key is the lowered program. The key here
consists of everything that the trace depends on: this package, the model and its plan, the shapes
of the arguments, JAX's version and settings, the device. A stored program is compiled like a traced
one, so JAX's cache finds it. Patched packages and custom classes bypass this cache.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import jaxlib
from jax import export

from fdjax.sampling.beams import BeamResults
from fdjax.sampling.sampler import Logprobs

logger = logging.getLogger("fdjax")

export.register_namedtuple_serialization(Logprobs, serialized_name="fdjax.Logprobs")
export.register_namedtuple_serialization(BeamResults, serialized_name="fdjax.BeamResults")

# JAX does not promise that a later version can run these custom calls. No later version reads a
# program, because the key contains JAX's version.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "annotate_device_placement", "__cudnn$fmhaSoftmax")
_CHECKS = tuple(map(export.DisabledSafetyCheck.custom_call, _CUSTOM_CALLS))

# Folder of stored programs in the folder of JAX's cache.
_FOLDER = "fdjax"
# Name of a stored program. While it is written, the number of the process follows.
_NAME = r"[0-9a-f]{64}"
# Folders of this package's sources. The latter two may be links.
_FOLDERS = (".", "models", "pallas_kernels")
_DIGEST_BYTES = 32
# Programs that were unused for this time are deleted. Most belong to another version.
_UNUSED_SECONDS = 30 * 24 * 60 * 60

# Packages from which modules of this package import functions and classes.
_KNOWN = (sys.stdlib_module_names - {"unittest"}) | {
    *("fdjax", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes"),
    *("jinja2", "markupsafe", "tokenizers", "safetensors", "huggingface_hub", "tqdm"),
}


def cached_on_disk(function: Callable, description: Any, device: jax.Device) -> Callable:
    """Wrap a function for `jax.jit` so that it is traced only if its program is not on disk.

    Programs are stored in the folder of JAX's compilation cache. Nothing is stored if that cache is
    off, limited in size or not in a local folder.

    Args:
      function: positional pytrees of arrays → lists, tuples, `Logprobs` and `BeamResults` of them.
      description: everything else that the program depends on; its `repr` must be complete.
      device: where the arrays are.
    """

    @functools.wraps(function)
    def program(*args):
        leaves, treedef = jax.tree.flatten(args)
        avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        path = _path(device, description, repr((treedef, avals)))
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
        logger.debug("a program cannot be stored: %s", error)
        return None


def _path(device: jax.Device, description: Any, shapes: str) -> Path | None:
    """The path of the program with this description; None if programs are not stored."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_max_size != -1:  # this module would ignore the limit
        return None
    if not jax.sharding.get_abstract_mesh().empty:  # a program traced now would depend on that mesh
        return None
    foreign = _foreign([*_modules(), description])
    if foreign is not None:
        logger.info("programs are not stored, because %r is not part of this package", foreign)
        return None
    if _SOURCE is None or _source_digest() != _SOURCE:
        logger.info("programs are not stored, because the files of this package have changed")
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
        shapes,
    )
    return Path(folder) / _FOLDER / hashlib.sha256(repr(origin).encode()).hexdigest()


def _modules() -> list[ModuleType]:
    """The loaded modules of this package."""
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "fdjax"]


def _foreign(roots: Iterable[Any]) -> Any:
    """The first object from neither this package nor its dependencies, or None.

    Such an object can change a program, but no digest covers it. Examples are a function that a
    user patched into a module of this package, and a model of the user's own classes.
    """
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if _package(thing) not in _KNOWN:
            return thing
        todo += _parts(thing)
    return None


def _package(thing: Any) -> str:
    """The name of the package whose code a thing runs."""
    match thing:
        case ModuleType():
            module = thing.__name__
        case FunctionType():  # `functools.wraps` changes `__module__`
            module = thing.__globals__.get("__name__", "")
        case type():
            module = thing.__module__
        case _:
            module = type(thing).__module__
    # The generated methods of a named tuple have another module.
    return "collections" if module.startswith("namedtuple_") else module.partition(".")[0]


def _parts(thing: Any) -> list[Any]:
    """The parts of an object that belong to this package, or that may hold foreign code."""
    match thing:
        case ModuleType() if _package(thing) == "fdjax":
            # Without the builtins, because interpreters such as IPython add functions there.
            return [part for name, part in list(vars(thing).items()) if not name.startswith("__")]
        case type() if _package(thing) == "fdjax":
            return list(vars(thing).values())
        case ModuleType() | type():
            return []
        case dict():
            return list(thing.values())
        case list() | tuple() | set() | frozenset():
            return list(thing)
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    names = (*(field.name for field in fields), *_HOLDERS)
    return [part for name in names if (part := getattr(thing, name, None)) is not None]


# Attributes in which decorators, methods, properties and partial functions hold other functions.
_HOLDERS = ("__wrapped__", "__func__", "func", "fget")


def _source_digest() -> str | None:
    """Digest of all modules of this package, or None if they cannot be read as files."""
    root = Path(__file__).parents[1]
    digest, found = hashlib.sha256(), False
    try:
        for path in sorted(path for name in _FOLDERS for path in (root / name).rglob("*.py")):
            if path.name.startswith("."):  # temporary files of editors
                continue
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
            found = True
    except OSError:
        return None
    return digest.hexdigest() if found else None


_SOURCE = _source_digest()


def _read(path: Path) -> export.Exported | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("%s cannot be read: %s", path, error)
        return None
    if _is_damaged(path, data):
        logger.info("%s is damaged", path)
        return None
    with contextlib.suppress(OSError):  # owned by another user
        os.utime(path)
    return export.deserialize(bytearray(data[_DIGEST_BYTES:]))


def _is_damaged(path: Path, data: bytes) -> bool:
    return _digest(path, data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]


def damaged_programs(folder: Path) -> list[Path]:
    """The stored programs in JAX's cache folder that are damaged."""
    programs = (p for p in sorted(folder.glob(f"{_FOLDER}/*")) if re.fullmatch(_NAME, p.name))
    return [path for path in programs if _is_damaged(path, path.read_bytes())]


def _digest(path: Path, program: bytes) -> bytes:
    """Digest of a program and its name, so that a copy under another name counts as damage."""
    return hashlib.sha256(path.name.encode() + program).digest()


def _write(path: Path, exported: export.Exported) -> None:
    program = bytes(exported.serialize())
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(_digest(path, program) + program)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        _remove_unused(path.parent)
    except OSError as error:
        logger.info("%s cannot be written: %s", path, error)


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        if re.fullmatch(rf"{_NAME}(\.\d+)?", path.name):
            with contextlib.suppress(OSError):  # deleted already, or owned by another user
                if time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                    path.unlink()
