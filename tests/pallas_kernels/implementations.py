"""What the shared suites run: the fp32 reference and every implementation, each where it runs.

To add an implementation, add its line to `MATMUL` or `ATTENTION`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import pytest

from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS

# The suite is after results; without a search among equivalent kernels a GPU is done in minutes.
_COMPILER_OPTIONS = {"cpu": None, "gpu": {"xla_gpu_autotune_level": 0}}
# The same HLO after XLA's own passes, less optimised by LLVM: half the time to compile.
_QUICK_OPTIONS = {"cpu": {"xla_backend_optimization_level": 0}, "gpu": _COMPILER_OPTIONS["gpu"]}


def _nothing(case) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation of an op on one platform.

    Attributes:
      name: the op's `implementation`, or "reference".
      platform: "cpu" | "gpu".
      cannot: cases that must raise NotImplementedError.
      quick: compile fast rather than for speed, where many cases run once each.
    """

    name: str
    platform: str = "cpu"
    cannot: Callable[[object], bool] = _nothing
    quick: bool = False

    @property
    def is_reference(self) -> bool:
        return self.name == "reference"

    def computes_in(self, dtype: str) -> str:
        """The dtype in which intermediate results may be held."""
        return "float32" if self.is_reference else dtype

    def jit(self, fn: Callable, **static) -> Callable:
        """`fn` compiled for the platform; one compile for the same statics and shapes."""
        quick = self.quick or self.is_reference
        return _jit(fn, self.platform, quick, tuple(sorted(static.items())))


@functools.cache
def _jit(fn: Callable, platform: str, quick: bool, static: tuple) -> Callable:
    options = (_QUICK_OPTIONS if quick else _COMPILER_OPTIONS)[platform]
    compiled = jax.jit(functools.partial(fn, **dict(static)), compiler_options=options)

    def call(*args, **kwargs):
        with on(platform):
            return jax.device_get(compiled(*args, **kwargs))

    return call


@contextlib.contextmanager
def on(platform: str) -> Iterator[None]:
    """Run on this platform, also where JAX would prefer another."""
    with jax.default_device(jax.devices(platform)[0]):
        yield


def _run(name: str, platform: str = "cpu"):
    marks = (pytest.mark.gpu,) if platform == "gpu" else ()
    cannot = functools.partial(_record_cannot, name)
    return pytest.param(
        Implementation(name, platform, cannot), id=f"{name}-{platform}", marks=marks
    )


def _record_cannot(name: str, case) -> bool:
    """What the implementation's own record says of a case."""
    shape, features = case.request
    records = [i for i in IMPLEMENTATIONS if (i.op, i.name) == (case.op_name, name)]
    return not records[0].supports(shape, features)


MATMUL = [
    _run("xla"),
    _run("xla", "gpu"),
    _run("mosaic_gpu", "gpu"),
]
ATTENTION = [
    _run("xla"),
    _run("xla", "gpu"),
    _run("cudnn", "gpu"),
    _run("mosaic_gpu", "gpu"),
]
# Ops with one implementation only.
PLATFORMS = [_run("xla"), _run("xla", "gpu")]
# `Plan.batch_invariant` is on by default on a CPU. Elsewhere XLA may tune the kernels of two
# programs differently, so equal bits are not promised.
BATCH_INVARIANT = [_run("xla")]

_REFERENCE = pytest.param(Implementation("reference"), id="reference-cpu")


def across(implementations: list, cases: list, *, quick: list = ()):
    """Parametrize over (implementation, case), with the reference for the cases in fp32.

    Cases in `quick` are compiled fast.

    The reference begins by converting to fp32, so other dtypes say nothing new about it.
    """
    return pytest.mark.parametrize(
        ("implementation", "case"),
        [
            pytest.param(
                dataclasses.replace(i.values[0], quick=case in quick),
                case,
                id=f"{i.id}-{case}",
                marks=i.marks,
            )
            for case in [*cases, *quick]
            for i in [_REFERENCE, *implementations]
            if i is not _REFERENCE or case.dtype == "float32"
        ],
    )
