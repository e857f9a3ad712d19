"""Compiles the programs of a benchmark ahead, in several processes at once.

A benchmark over many shapes spends nearly all its time tracing, lowering and compiling one program
after another. Here several processes share the points of a run. Each runs the benchmark with
stand-ins: arrays that have a shape but almost no memory, and programs that return zeros. So they
compile exactly the programs that the benchmark needs, for the real device, and save the executables
in a folder. The measuring process loads them and compiles missing ones.

The folder also keeps XLA's autotuning results. So one process can autotune for all, with the device
to itself: several that autotune at once would disturb each other's timings.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from fdjax.bench.one_pass import one_pass, one_pass_program
from fdjax.engine.engine import Engine, Programs
from fdjax.engine.pages import PagePool
from fdjax.engine.program import Program
from fdjax.engine.scheduler import StateShape
from fdjax.engine.state import DecodeState, init_cache, init_pool, start, start_in_pages
from fdjax.lm import LM
from fdjax.models import Model, Params
from fdjax.sampling.sampler import Processors
from fdjax.weights.stacked import stacked_shapes

ROOT = Path(__file__).parent.parent


def run_processes(command: Sequence[str], folder: Path, count: int) -> int:
    """Run several processes of a module, which share a device and the work.

    Args:
      command: name and arguments of the module.
      folder: folder for the executables and autotuning results.
      count: number of processes.

    Returns:
      How many processes failed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        # JAX's cache is only for autotuning results. `Compiler` saves the programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    processes = [
        # Output is dropped: the last line that a benchmark prints must be its own record.
        subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL
        )
        for _ in range(count)
    ]
    try:
        return sum(process.wait() != 0 for process in processes)
    finally:
        for process in processes:
            process.kill()


class StandIn(np.ndarray):
    """Zeros that take no memory and claim to be on a device."""

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding that a real array would have."""
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def devices(self) -> set[jax.Device]:
        """The device that real arrays would be on."""
        return {jax.local_devices()[0]}


def stand_ins(tree: Any) -> Any:
    """Zeros of the same shapes and dtypes that take no memory."""
    return jax.tree.map(
        lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape).view(StandIn), tree
    )


class Compiler:
    """Compiles the programs that a model would run.

    Attributes:
      folder: folder of the executables, which several processes may share.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def claim(self, name: str) -> bool:
        """Claim a piece of work; False if another process has claimed it."""
        with contextlib.suppress(FileExistsError):
            (self.folder / f"{_digest(name)}.claim").touch(exist_ok=False)
            return True
        return False

    def params(self, model: Model) -> Params:
        """Stand-ins for the weights."""
        return stand_ins(model.abstract_params)

    def engine(self, plan: str) -> Callable[..., Engine]:
        """Constructor of an engine that compiles its programs but returns zeros."""
        return functools.partial(_CompilingEngine, self, plan)

    def logits(self, lm: LM, ids: jax.Array, n: int, *, plan: str) -> Any:
        """Replaces `one_pass`: compiles its program and returns zeros."""
        name = _one_pass_name(plan, ids, n)
        if self.claim(name):
            self.save(name, one_pass_program.lower(lm.model, lm.params, ids, last=n))
        return np.zeros((1, n, lm.config.vocab_size), np.float32)

    def save(self, name: str, lowered: jax.stages.Lowered) -> None:
        """Compile a program and save it in the folder."""
        compiled = lowered.compile()
        payload, _, out_tree = serialize(compiled)
        # The structure cannot be pickled, but a tree of numbers with that structure can.
        tree = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        path = self.folder / f"{_digest(name)}.executable"
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps((payload, tree)))
        part.rename(path)


class Executables:
    """Loads the executables that a `Compiler` has saved.

    Attributes:
      folder: folder of the executables.
      loaded: number of executables loaded.
      missing: titles of executables that did not exist or could not be loaded.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.loaded = 0
        self.missing: list[str] = []

    def engine(self, plan: str) -> Callable[..., Engine]:
        """Constructor of an engine that runs saved executables and compiles missing ones."""
        return functools.partial(_LoadingEngine, self, plan)

    def logits(self, lm: LM, ids: jax.Array, n: int, *, plan: str) -> Any:
        """Replaces `one_pass`: runs its executable, or compiles it if it is missing."""
        args = lm.params, ids
        executable = self.load(_one_pass_name(plan, ids, n), args)
        return one_pass(lm, ids, n) if executable is None else executable(*args)

    def load(self, name: str, args: tuple) -> jax.stages.Compiled | None:
        """The executable saved under a name, for arguments like these, or None."""
        path = self.folder / f"{_digest(name)}.executable"
        if not path.exists():
            self.missing.append(_title(name))
            return None
        payload, tree = pickle.loads(path.read_bytes())
        try:
            loaded = deserialize_and_load(
                payload, jax.tree.structure((args, {})), jax.tree.structure(tree)
            )
        except Exception as error:  # the program can be compiled after any error
            self.missing.append(f"{_title(name)}: {error}".splitlines()[0])
            return None
        self.loaded += 1
        return loaded


class _AheadEngine(Engine):
    """An engine that wraps its programs."""

    wrapper: Callable

    def __init__(self, ahead: Compiler | Executables, plan: str, *arguments: Any):
        super().__init__(*arguments)
        self.programs = Programs()
        self.ahead = ahead
        self.plan = plan
        self.wrapped: dict[str, Any] = {}

    def program(self, function: Callable, **static) -> Any:
        name = f"{function.__name__} {sorted(static.items())}"
        return self._wrapped(name, functools.partial(super().program, function, **static))

    def choosing(self, processors: Processors, *, beams: bool = False) -> Any:
        choosing = functools.partial(super().choosing, processors, beams=beams)
        return self._wrapped(f"first_tokens ({processors}, {beams})", choosing)

    def _wrapped(self, name: str, program: Callable[[], Program]) -> Any:
        name = f"{self.plan} {name}"
        if name not in self.wrapped:
            self.wrapped[name] = self.wrapper(program(), self.ahead, name)
        return self.wrapped[name]


class _CompilingProgram:
    """Replaces a `Program`: compiles it for its arguments and returns zeros."""

    compile_seconds = 0.0

    def __init__(self, program: Program, compiler: Compiler, name: str):
        self._program, self._compiler, self._name = program, compiler, name
        self._results: dict[tuple, Any] = {}

    def __call__(self, given, state, host):
        shapes = _shapes(state, host)
        if shapes not in self._results:
            name = f"{self._name} {shapes}"
            lowered = self._program.lower(given, state, host)
            self._results[shapes] = stand_ins(lowered.out_info)
            if self._compiler.claim(name):
                self._compiler.save(name, lowered)
        return self._results[shapes]


class _LoadedProgram:
    """Replaces a `Program`: runs the executable for its arguments.

    Attributes:
      compile_seconds: time that the last call spent on loading or compiling.
    """

    def __init__(self, program: Program, executables: Executables, name: str):
        self._program, self._executables, self._name = program, executables, name
        self._loaded: dict[tuple, Any] = {}
        self.compile_seconds = 0.0

    def __call__(self, *args):
        shapes = _shapes(*args[1:])
        self.compile_seconds = 0.0
        if shapes not in self._loaded:
            began = time.perf_counter()
            self._loaded[shapes] = self._executables.load(f"{self._name} {shapes}", args)
            self.compile_seconds = time.perf_counter() - began
        executable = self._loaded[shapes]
        if executable is not None:
            return executable(*args)
        out = self._program(*args)
        self.compile_seconds += self._program.compile_seconds
        return out


class _CompilingEngine(_AheadEngine):
    wrapper = _CompilingProgram

    def take_state(self, shape: StateShape, may_stack: bool) -> DecodeState:
        batch, slots = shape.rows, shape.slots
        if shape.pages:
            self._open_pool(shape.pages)
            pool = jax.eval_shape(lambda: init_pool(self.model, shape.pages))
            return start_in_pages(stand_ins(pool), shape.room, slots)
        stacks = may_stack and self.stacks(batch, slots)
        cache = jax.eval_shape(lambda: init_cache(self.model, batch, slots, stacks))
        return start(stand_ins(cache))

    def _open_pool(self, pages: int) -> None:
        self.pool = PagePool(pages)

    def stack(self, params: Params) -> dict[str, Any] | None:
        # Assumes that memory allows it. If not, the measuring process compiles other programs.
        return stand_ins(stacked_shapes(params)) if self.model.stacks_layers else None


class _LoadingEngine(_AheadEngine):
    wrapper = _LoadedProgram


def _shapes(state, host) -> tuple:
    """Key for the shapes of an engine's program, found in a few microseconds."""
    return state[0].shape, host.shapes


def _one_pass_name(plan: str, ids: jax.Array, n: int) -> str:
    return f"{plan} one pass {ids.shape} {n}"


def _title(name: str) -> str:
    return name.partition(" [")[0].partition(" (")[0]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
