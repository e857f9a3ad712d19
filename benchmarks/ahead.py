"""Programs of a benchmark, compiled before it by several processes at once.

A benchmark over many shapes spends nearly all of its time on tracing, lowering and compiling, one
program after another. Here processes share the points of a run, and each runs the benchmark on
stand-ins: arrays with a shape and next to no memory, from programs whose results are zeros. So they
compile what the benchmark will ask for and nothing else, for the device as it is, and leave the
executables in a folder. The process that measures loads them; what is not there, it compiles.

What XLA finds by autotuning is kept in the folder too, so that a process which has the device to
itself can do that for all: several that autotune at once disturb each other's timings.
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

from fdjax.bench.model import one_pass, one_pass_program
from fdjax.engine.engine import Engine, Programs
from fdjax.engine.program import Program
from fdjax.engine.state import DecodeState, init_cache, start
from fdjax.lm import LM
from fdjax.models import Model, Params
from fdjax.weights.stacked import stacked_shapes

ROOT = Path(__file__).parent.parent


def run_processes(command: Sequence[str], folder: Path, count: int) -> int:
    """Runs so many processes of a module, which share a device and the work; how many failed.

    Args:
      command: of the module, its name first.
      folder: where they leave what they compile, and what autotuning found.
      count: of the processes.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        # For autotuning alone: programs are kept by `Compiler`.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    processes = [
        # The last line of what a benchmark prints is its record.
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
    """Zeros in no memory, on a device as far as a model can tell."""

    def devices(self) -> set[jax.Device]:
        """The device that they would be on."""
        return {jax.local_devices()[0]}


def stand_ins(tree: Any) -> Any:
    """Arrays of zeros of the same shapes, in no memory."""
    return jax.tree.map(
        lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape).view(StandIn), tree
    )


class Compiler:
    """Compiles what a model would run.

    Attributes:
      folder: of the executables, which several processes may share.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def claim(self, name: str) -> bool:
        """Whether no other process has claimed a piece of work before."""
        with contextlib.suppress(FileExistsError):
            (self.folder / f"{_digest(name)}.claim").touch(exist_ok=False)
            return True
        return False

    def params(self, model: Model) -> Params:
        """Stand-ins of the weights."""
        return stand_ins(model.abstract_params)

    def engine(self, plan: str) -> Callable[..., Engine]:
        """Makes the engine of a model that compiles, and answers zeros, where it would run."""
        return functools.partial(_CompilingEngine, self, plan)

    def logits(self, lm: LM, ids: jax.Array, n: int, *, plan: str) -> Any:
        """In place of `one_pass`."""
        name = _one_pass_name(plan, ids, n)
        if self.claim(name):
            self.save(name, one_pass_program.lower(lm.model, lm.params, ids, last=n))
        return np.zeros((1, n, lm.config.vocab_size), np.float32)

    def save(self, name: str, lowered: jax.stages.Lowered) -> None:
        """Compile a program and leave it in the folder."""
        compiled = lowered.compile()
        payload, _, out_tree = serialize(compiled)
        # A tree of numbers rather than its structure, which cannot be pickled.
        tree = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        path = self.folder / f"{_digest(name)}.executable"
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps((payload, tree)))
        part.rename(path)


class Executables:
    """Loads what a `Compiler` has left.

    Attributes:
      folder: of the executables.
      loaded: how many were loaded.
      missing: what was not there, or could not be loaded.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.loaded = 0
        self.missing: list[str] = []

    def engine(self, plan: str) -> Callable[..., Engine]:
        """Makes the engine of a model that runs these where they are, and compiles the others."""
        return functools.partial(_LoadingEngine, self, plan)

    def logits(self, lm: LM, ids: jax.Array, n: int, *, plan: str) -> Any:
        """In place of `one_pass`."""
        args = lm.params, ids
        executable = self.load(_one_pass_name(plan, ids, n), args)
        return one_pass(lm, ids, n) if executable is None else executable(*args)

    def load(self, name: str, args: tuple) -> jax.stages.Compiled | None:
        """The executable for arguments like these, or None."""
        path = self.folder / f"{_digest(name)}.executable"
        if not path.exists():
            self.missing.append(_title(name))
            return None
        payload, tree = pickle.loads(path.read_bytes())
        try:
            loaded = deserialize_and_load(
                payload, jax.tree.structure((args, {})), jax.tree.structure(tree)
            )
        except Exception as error:  # whatever a runtime raises: it can still be compiled
            self.missing.append(f"{_title(name)}: {error}".splitlines()[0])
            return None
        self.loaded += 1
        return loaded


class _AheadEngine(Engine):
    """The engine of a model, its programs wrapped."""

    wrapper: Callable

    def __init__(self, ahead: Compiler | Executables, plan: str, *arguments: Any):
        super().__init__(*arguments)
        self.programs = Programs()
        self.ahead = ahead
        self.plan = plan
        self.wrapped: dict[str, Any] = {}

    def program(self, function: Callable, **static) -> Any:
        name = f"{self.plan} {function.__name__} {sorted(static.items())}"
        if name not in self.wrapped:
            program = super().program(function, **static)
            self.wrapped[name] = self.wrapper(program, self.ahead, name)
        return self.wrapped[name]


class _CompilingProgram:
    """In place of a `Program`: compiles it for its arguments, and returns zeros."""

    compile_seconds = 0.0

    def __init__(self, program: Program, compiler: Compiler, name: str):
        self._program, self._compiler, self._name = program, compiler, name
        self._results: dict[tuple, Any] = {}

    def __call__(self, params, state, host):
        shapes = _shapes(state, host)
        if shapes not in self._results:
            name = f"{self._name} {shapes}"
            lowered = self._program.lower(params, state, host)
            self._results[shapes] = stand_ins(lowered.out_info)
            if self._compiler.claim(name):
                self._compiler.save(name, lowered)
        return self._results[shapes]


class _LoadedProgram:
    """In place of a `Program`: runs the executable for its arguments.

    Attributes:
      compile_seconds: what loading it, or else compiling, took of the last call.
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

    def take_state(self, batch: int, slots: int, may_stack: bool) -> DecodeState:
        stacks = may_stack and self.stacks(batch, slots)
        cache = jax.eval_shape(lambda: init_cache(self.model, batch, slots, stacks))
        return start(stand_ins(cache))

    def stack(self, params: Params) -> dict[str, Any] | None:
        # As if there were memory for it: where there is none, other programs run, compiled there.
        return stand_ins(stacked_shapes(params)) if self.model.one_launch_possible else None


class _LoadingEngine(_AheadEngine):
    wrapper = _LoadedProgram


def _shapes(state, host) -> tuple:
    """What the shapes of an engine's program depend on, in a few microseconds."""
    return state[0].shape, host.shapes


def _one_pass_name(plan: str, ids: jax.Array, n: int) -> str:
    return f"{plan} one pass {ids.shape} {n}"


def _title(name: str) -> str:
    return name.partition(" [")[0].partition(" (")[0]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
