"""Implementations for the shared suites: the fp32 reference and all others, on their platforms.

To add an implementation, add its line to `MATMUL` or `ATTENTION`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import pytest

from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS

# The suite tests results, not speed. Without autotuning, a run on a GPU takes minutes.
_COMPILER_OPTIONS = {"cpu": None, "gpu": {"xla_gpu_autotune_level": 0}}
# XLA's passes give the same HLO, and LLVM optimises it less. Compiling takes half the time.
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
      quick: optimise less to compile faster, for many cases that run once each.
    """

    name: str
    platform: str = "cpu"
    cannot: Callable[[object], bool] = _nothing
    quick: bool = False

    @property
    def is_reference(self) -> bool:
        return self.name == "reference"

    def computes_in(self, dtype: str) -> str:
        """The dtype that intermediate results may have."""
        return "float32" if self.is_reference else dtype

    def jit(self, fn: Callable, **static) -> Callable:
        """Compile `fn` for the platform, once for the same static arguments and shapes."""
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
    """Run on this platform, even if JAX prefers another."""
    with jax.default_device(jax.devices(platform)[0]):
        yield


def _run(name: str, platform: str = "cpu"):
    marks = (pytest.mark.gpu,) if platform == "gpu" else ()
    cannot = functools.partial(_record_cannot, name)
    return pytest.param(
        Implementation(name, platform, cannot), id=f"{name}-{platform}", marks=marks
    )


def _record_cannot(name: str, case) -> bool:
    """Whether all records of the implementation refuse a case."""
    shape, features = case.request
    records = [i for i in IMPLEMENTATIONS if (i.op, i.name) == (case.op_name, name)]
    return not any(record.supports(shape, features) for record in records)


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
# For ops with only one implementation.
PLATFORMS = [_run("xla"), _run("xla", "gpu")]
# `Plan.batch_invariant` is on by default on a CPU. Elsewhere XLA may tune the kernels of two
# programs differently, so equal bits are not promised.
BATCH_INVARIANT = [_run("xla")]

_REFERENCE = pytest.param(Implementation("reference"), id="reference-cpu")


def across(implementations: list, cases: list, *, quick: list = (), more: list = ()):
    """Parametrize over (implementation, case). Cases in `quick` are compiled fast.

    So are those in `more`, which are for slow tests.
    The reference runs fp32 cases only, because it converts operands to fp32 first.
    """
    return pytest.mark.parametrize(
        ("implementation", "case"),
        [
            pytest.param(
                dataclasses.replace(i.values[0], quick=case in quick or case in more),
                case,
                id=f"{i.id}-{case}",
                marks=[*i.marks, *[pytest.mark.slow] * (case in more)],
            )
            for case in [*cases, *quick, *more]
            for i in [_REFERENCE, *implementations]
            if i is not _REFERENCE or case.dtype == "float32"
        ],
    )
