"""What every test runs under: strict JAX promotion, no compile cache, reproducible Hypothesis."""

import functools
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import jax
import pytest

# In the checkout and not in the wheel, which is what may be tested.
with mock.patch.object(sys, "path", [str(Path(__file__).parents[1]), *sys.path]):
    import benchmarks  # noqa: F401

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A test must see the compiler at work, not what an earlier run left on disk.
jax.config.update("jax_enable_compilation_cache", False)

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))

# Without a GPU the CUDA plugin of the `deviceless` extra finds no cuDNN, and JAX then drops it
# unless another platform was asked for by name.
if jax.config.jax_platforms is None and not HAS_GPU:
    jax.config.update("jax_platforms", "cpu")

# The first call of a jitted function compiles, so no deadline holds.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_xdist_auto_num_workers() -> int:
    """A process for a core, as most of the time compiles on one; a GPU's memory is not shared."""
    return 0 if HAS_GPU else min(os.cpu_count() or 1, 4)


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Compile in half the time rather than for speed, where compiling takes longer than running.

    XLA's own passes stay as they are, LLVM's are fewer.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def full_compiles() -> Iterator[None]:
    """Compile as users do, in a module that else has `quick_compiles`."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


# By what XLA is given. Most of the time of the tests is XLA's, and much of that was spent on what
# another test had compiled: of another LM, by another plan.
_executables: dict[bytes, object] = {}


@pytest.fixture(autouse=True, scope="session")
def one_compile_of_a_program() -> Iterator[None]:
    """Give a program that is lowered again the executable that it had, where that is of a CPU.

    All that is before stays as it is: what JAX traces, lowers and believes to compile.
    """
    compiler = jax._src.compiler
    compile_ = compiler.backend_compile_and_load

    @functools.wraps(compile_)
    def compiled(backend, module, executable_devices, options, host_callbacks, *args, **kwargs):
        given = backend, module, executable_devices, options, host_callbacks
        if backend.platform != "cpu" or host_callbacks or args or kwargs:
            return compile_(*given, *args, **kwargs)
        devices = [device.id for device in executable_devices]
        text = f"{id(backend)} {devices} {module}".encode() + options.SerializeAsString()
        key = hashlib.sha256(text).digest()
        if key not in _executables:
            _executables[key] = compile_(*given)
        return _executables[key]

    with mock.patch.object(compiler, "backend_compile_and_load", compiled):
        yield


@pytest.fixture(autouse=True, scope="module")
def little_to_carry_along() -> Iterator[None]:
    """Keep what one module leaves behind from burdening the next.

    A compilation cache that the command line turned on goes off again. Compiled programs are
    dropped before the kernel's limit of memory mappings kills the process: every program holds
    some, and Linux allows 65530 of them. Whatever else outlives a module is frozen, or the garbage
    collector would look through all of it again and again.
    """
    cache = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", cache)
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        gc.unfreeze()
        _executables.clear()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache_setting() -> Iterator[None]:
    """No compilation cache, whatever JAX is configured to."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def arrays_made() -> Callable[[], int]:
    """How many arrays there are that were not there when the test began."""
    before = jax.live_arrays()  # held: garbage of other tests cannot go meanwhile and hide one
    return lambda: len(jax.live_arrays()) - len(before)


@functools.cache
def _gpu_count() -> int:
    try:
        return jax.local_device_count("gpu")
    except RuntimeError:  # JAX knows no such platform here
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    needed = 2 if item.get_closest_marker("multigpu") else int("gpu" in item.keywords)
    if needed and _gpu_count() < needed:
        pytest.skip(f"needs {needed} GPU(s), found {_gpu_count()}")
