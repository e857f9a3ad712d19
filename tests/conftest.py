"""Settings of all tests: strict JAX promotion, no compile cache, reproducible Hypothesis."""

import argparse
import functools
import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import jax
import pytest
from safetensors.numpy import load_file, save_file

from marks import in_part

# This folder is in the checkout but not in the wheel. The tests may run on an installed wheel.
with mock.patch.object(sys, "path", [str(Path(__file__).parents[1]), *sys.path]):
    import benchmarks  # noqa: F401

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A test must see the compiler work, and not use files that an earlier run left on disk.
jax.config.update("jax_enable_compilation_cache", False)

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))

# Without a GPU, the CUDA plugin of the `deviceless` extra finds no cuDNN. JAX then drops the
# plugin, unless another platform is asked for by name.
if jax.config.jax_platforms is None and not HAS_GPU:
    jax.config.update("jax_platforms", "cpu")

# The first call of a jitted function compiles, so there is no deadline.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_xdist_auto_num_workers() -> int:
    """One process per core, because compiling mostly uses one core. On a GPU, one process."""
    return 0 if HAS_GPU else min(os.cpu_count() or 1, 4)


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Make compiling twice as fast and programs slower, in modules that mostly compile.

    XLA's own passes do not change. LLVM runs fewer passes. The processes that these tests start do
    the same.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with mock.patch.dict(os.environ, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def quick_on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """`quick_compiles` for tests that compile for a CPU, in modules that also compile for a GPU."""
    if {"gpu", "multigpu", "deviceless"} & set(request.keywords) or (
        "full_compiles" in request.fixturenames
    ):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def full_compiles() -> Iterator[None]:
    """Compile as users do, in a module that otherwise compiles quickly."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    with mock.patch.dict(os.environ):
        os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with two of the five layers of the embedded model.

    Its programs compile in half of the time. It is for tests that hold answers against other
    answers of the same model, whatever it says.
    """
    embedded = Path(__file__).parents[1] / "models" / "tiny"
    folder = tmp_path_factory.mktemp("two_layers")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    config = json.loads((embedded / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(embedded / "model.safetensors")
    left_out = tuple(f"model.layers.{i}." for i in range(2, config["num_hidden_layers"]))
    kept = {name: array for name, array in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


# Executables by the module that XLA gets. XLA takes most of the time of the tests, and it often
# compiled a module again that another test had compiled, with another LM or plan.
_executables: dict[str, object] = {}
# Names the folder in which processes find each other's executables. `.ci/run` has one for all of
# its stages, otherwise each run has its own.
_FOLDER = "FDJAX_TEST_PROGRAMS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`, with which `.ci/run` divides long stages among the changes that go in."""
    parser.addoption(
        "--part", metavar="K/N", type=_part, help="run the K-th of N parts of the tests"
    )


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with 1 <= K <= N, got {text!r}")
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)  # of the tests that other options have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--part`."""
    if config.option.part is not None:
        kept = in_part([item.nodeid for item in items], *config.option.part)
        left_out = [item for item, keep in zip(items, kept, strict=True) if not keep]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


def pytest_configure(config: pytest.Config) -> None:
    """Set what the processes of this run share, such as a folder for their executables."""
    if _FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fdjax-tests-", ignore_cleanup_errors=True)
        os.environ[_FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)
    # Processes that tests start share what they compile through JAX's own cache. This process has
    # read these variables already, and does not use that cache.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{os.environ[_FOLDER]}/processes")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Each worker would start a thread of NumPy's BLAS for every core, and these would compete.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def one_compile_of_a_program() -> Iterator[None]:
    """Reuse the executable of a program that is lowered again, if it is for a CPU.

    Everything before does not change: JAX traces, lowers, and believes that it compiles.
    """
    compiler = jax._src.compiler
    compile_ = compiler.backend_compile_and_load

    @functools.wraps(compile_)
    def compiled(backend, module, executable_devices, options, host_callbacks, *args, **kwargs):
        given = backend, module, executable_devices, options, host_callbacks
        if backend.platform != "cpu" or host_callbacks or args or kwargs:
            return compile_(*given, *args, **kwargs)
        devices = [device.id for device in executable_devices]
        text = f"{jax.__version__} {backend.device_count()} {devices} {module}".encode()
        key = hashlib.sha256(text + options.SerializeAsString()).hexdigest()
        if key not in _executables:
            _executables[key] = _from_folder(key, *given[:-1]) or _to_folder(key, compile_, given)
        return _executables[key]

    with mock.patch.object(compiler, "backend_compile_and_load", compiled):
        yield


def _from_folder(key, backend, module, executable_devices, options):
    file = Path(os.environ[_FOLDER], key)
    if not file.exists():
        return None
    return backend.deserialize_executable(file.read_bytes(), executable_devices, options)


def _to_folder(key, compile_, given):
    executable = compile_(*given)
    # Several threads may compile the same program.
    writer = f"{os.getpid()}-{threading.get_ident()}"
    unfinished = Path(os.environ[_FOLDER], f"{key}.{writer}")
    # Tests may replace functions of `Path`.
    with open(unfinished, "wb") as file:  # noqa: PTH123
        file.write(executable.serialize())
    os.replace(unfinished, unfinished.with_suffix(""))  # noqa: PTH105
    return executable


@pytest.fixture(autouse=True)
def few_memory_mappings() -> Iterator[None]:
    """Drop compiled programs before they are too many.

    Each holds memory mappings, and Linux kills a process with more than 65530 of them.
    """
    before = len(_executables)
    yield
    # Few tests compile anything, and only they pay for the count.
    maps = Path("/proc/self/maps")
    if len(_executables) == before or not maps.exists():
        return
    if len(maps.read_bytes().splitlines()) > 20_000:
        gc.unfreeze()
        _executables.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def little_to_carry_along() -> Iterator[None]:
    """Clean up after each module, so that it does not slow down the next ones.

    A compilation cache that the command line turned on is turned off again. Objects that outlive a
    module are frozen, so that the garbage collector does not visit them again and again.
    """
    cache = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", cache)
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache_setting() -> Iterator[None]:
    """No compilation cache, whatever JAX's configuration."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def arrays_made() -> Callable[[], int]:
    """Number of arrays that did not exist when the test began."""
    before = jax.live_arrays()  # held, so that none is freed meanwhile
    return lambda: len(jax.live_arrays()) - len(before)


@functools.cache
def _gpu_count() -> int:
    try:
        return jax.local_device_count("gpu")
    except RuntimeError:  # JAX does not have this platform here
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    needed = 2 if item.get_closest_marker("multigpu") else int("gpu" in item.keywords)
    if needed and _gpu_count() < needed:
        pytest.skip(f"needs {needed} GPU(s), found {_gpu_count()}")
