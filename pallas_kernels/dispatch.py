"""Chooses the implementation that runs an op at a shape.

An `Implementation` describes one implementation and stands beside its kernel. A `Dispatch` holds
the implementations of all ops and looks them up. It is frozen and hashable, so it can be a static
argument of `jax.jit`: no op reads global state while it is traced. This module imports no op; the
composed `Plan` is in `fdjax.pallas_kernels.plan`.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

Capability = tuple[int, int]
Shape = Mapping[str, int]
Features = frozenset[str]

NAMES = ("xla", "cudnn", "mosaic_gpu")
NO_FEATURES: Features = frozenset()

# A measurement at one value of these keys does not apply to another value. The kernel may then run
# other code, not run at all, or leave a part of the device idle.
_EXACT_KEYS = (
    *("hkv", "d", "itemsize", "masks", "gate", "fused", "k", "n", "width", "hidden"),
    *("int4", "int8", "fp8", "fp4", "experts", "chosen"),
)

_DTYPES = {1: "float8", 4: "float32", 8: "float64"}

logger = logging.getLogger("fdjax")


def _fits_all(shape: Shape) -> str | None:
    return None


def _always(shape: Shape, capability: Capability | None) -> bool:
    return True


def never(shape: Shape, capability: Capability | None) -> bool:
    """Heuristic of an implementation that runs only where a name or a table chooses it."""
    return False


def on_gpu(shape: Shape, capability: Capability | None) -> bool:
    """Heuristic of an implementation that runs on every GPU that supports it."""
    return capability is not None


def _no_candidates(shape: Shape) -> Sequence[Any]:
    return ()


@dataclasses.dataclass(frozen=True, repr=False)
class Implementation:
    """One implementation of an op.

    All its functions are module-level functions, so that plans pickle.

    Attributes:
      op: the op's name.
      name: "xla" | "cudnn" | "mosaic_gpu", or a name from outside this package.
      run: runs the op; each op has its own convention for the arguments.
      can: names of the features that it supports. It refuses all others.
      needs: features of `can` without which it does not run.
      fits: shape → why the sizes or the dtype do not fit, or None.
      heuristic: (shape, compute capability) → whether it runs at a shape that was not measured. The
        plan asks its implementations in order. It also decides between kernels with the same name.
      capabilities: compute capabilities that it runs on, as (first, end), end excluded; None for
        every device.
      config: class of its tuning configurations, or None.
      revision: revision of the kernel. Increase it with every change that may change which
        configuration is fastest; tables of another revision are then refused.
      candidates: shape → configurations that `fdjax tune` tries.
      append: for attention, the implementation that also rotates new tokens and writes them to the
        cache, or None.
      parts: ops that it replaces. It does not run where another implementation is named for one of
        them.
      forced: whether it also runs where its name is forced for all ops. False if only a table
        chooses it.
      shared: whether it also runs where several devices share a model.
      in_place: whether it reads a layer of stacked weights where it lies. XLA copies it.
      persistent: whether its blocks divide the work among the multiprocessors of an H100. On a GPU
        with fewer, some of them would begin when the others have ended.
    """

    op: str
    name: str
    run: Callable[..., Any]
    can: Features = NO_FEATURES
    needs: Features = NO_FEATURES
    fits: Callable[[Shape], str | None] = _fits_all
    heuristic: Callable[[Shape, Capability | None], bool] = _always
    capabilities: tuple[Capability, Capability] | None = None
    config: type | None = None
    revision: int = 1
    candidates: Callable[[Shape], Sequence[Any]] = _no_candidates
    append: "Implementation | None" = None
    parts: tuple[str, ...] = ()
    forced: bool = True
    shared: bool = True
    in_place: bool = False
    persistent: bool = False

    def __repr__(self) -> str:
        """Same text in every process: it is part of the key of programs on disk."""
        run = f"{self.run.__module__}.{self.run.__qualname__}"
        return f"Implementation({self.op}, {self.name}, {run}, revision {self.revision})"

    def runs_on(self, capability: Capability | None) -> bool:
        """Whether it runs on this compute capability; None, for an unknown device, gives True."""
        if self.capabilities is None or capability is None:
            return True
        first, end = self.capabilities
        return first <= capability < end

    def refusal(
        self, shape: Shape, features: Features = NO_FEATURES, capability: Capability | None = None
    ) -> str | None:
        """Why it cannot run, to be put after its name in a sentence; None if it can run."""
        if unknown := sorted(features - self.can):
            return f"cannot do {', '.join(unknown)}"
        if missing := sorted(self.needs - features):
            return f"is only for {', '.join(missing)}"
        if not self.runs_on(capability):
            (major, minor), _ = self.capabilities
            got = ".".join(map(str, capability))
            return f"needs compute capability {major}.{minor}, got {got}"
        return self.fits(shape)

    def supports(
        self, shape: Shape, features: Features = NO_FEATURES, capability: Capability | None = None
    ) -> bool:
        """Whether it can run, that is, whether `refusal` gives no reason."""
        return self.refusal(shape, features, capability) is None


def needs_half(shape: Shape) -> str | None:
    """Check for `Implementation.fits`: elements of the operands must have two bytes."""
    if shape["itemsize"] == 2:
        return None
    return f"needs bfloat16 or float16, got {_DTYPES[shape['itemsize']]}"


def used_features(spec: Any) -> Features:
    """Names of the dataclass fields whose values are not their defaults."""
    return frozenset(
        field.name
        for field in dataclasses.fields(spec)
        if field.default is not dataclasses.MISSING and getattr(spec, field.name) != field.default
    )


def refuse_unknown(op: str, features: Features, can: Features) -> None:
    """Raise NotImplementedError if a feature is missing from `can`."""
    if unknown := sorted(features - can):
        raise NotImplementedError(f"{op}: cannot do {', '.join(unknown)}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one op at one shape.

    Attributes:
      implementation: its name.
      config: kernel configuration as sorted (field, value) pairs, or None for the default.
      source: why it was chosen, for `fdjax info`: "named" | "table" | "nearest" | "heuristic", or
        "only" if there was no alternative.
    """

    implementation: str
    config: tuple[tuple[str, int], ...] | None = None
    source: str = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured row of a dataflow table: the fastest implementation of an op at a shape."""

    op: str
    shape: tuple[tuple[str, int], ...]
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Frozen lookup of the implementation that runs.

    Lookup order: an implementation forced by name, the exact entry of the measured table, the
    nearest measured shape, the first implementation whose heuristic accepts the shape. The table
    and the heuristics choose only implementations that can run.

    Attributes:
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3" or "cpu".
      compute_capability: (major, minor) of a CUDA device, None elsewhere.
      batch_invariant: XLA implementations compute a row with the same bits in any batch. On by
        default on a CPU, where it costs little.
      named: implementations forced by name, as ((op, implementation), ...). They never fall back:
        an op that cannot run as named raises `NotImplementedError`.
      table: measured entries.
      only_xla: ops that run through XLA unless they are named.
      implementations: implementations of all ops. The preferred ones of an op come first.
    """

    device_kind: str = "cpu"
    compute_capability: Capability | None = None
    batch_invariant: bool = False
    named: tuple[tuple[str, str], ...] = ()
    table: tuple[Entry, ...] = ()
    only_xla: tuple[str, ...] = ()
    implementations: tuple[Implementation, ...] = ()

    def __post_init__(self):
        for pair in self.named:
            if isinstance(pair, str) or len(pair) != 2:
                raise ValueError(
                    f"plan: named must hold pairs of op and implementation, got {pair!r}"
                )
        # A list would make the plan unhashable.
        object.__setattr__(self, "named", tuple(map(tuple, self.named)))
        for name in ("table", "only_xla", "implementations"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        ops = dict.fromkeys(i.op for i in self.implementations)
        for op, implementation in self.named:
            if ops and op not in ops:
                raise ValueError(
                    f"plan: an op of named must be one of {', '.join(ops)}, got {op!r}"
                )
            check_name(op, implementation, [i for i in self.implementations if i.op == op])

    def of(self, op: str) -> tuple[Implementation, ...]:
        """The implementations of an op that run on this device."""
        return tuple(
            i for i in self.implementations if i.op == op and i.runs_on(self.compute_capability)
        )

    def able(self, op: str, features: Features, shape: Shape) -> list[Implementation]:
        """The implementations that can run an op at a shape, in order of preference."""
        return [i for i in self.of(op) if i.supports(shape, features)]

    def candidates(self, op: str, features: Features, shape: Shape) -> Sequence[Any]:
        """Configurations that `fdjax tune` tries, from the first implementation that has some."""
        found = (i.candidates(shape) for i in self.able(op, features, shape))
        return next(filter(None, found), ())

    def has_kernel(self, op: str, features: Features = NO_FEATURES, **shape: int) -> bool:
        """Whether anything but XLA can run an op at a shape."""
        return any(i.name != "xla" for i in self.able(op, features, shape))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - plans are few and live as long as the program
    def choose(self, op: str, features: Features = NO_FEATURES, **shape: int) -> Choice:
        """The choice for `op` at `shape` (the op's own keys, such as m, k, n).

        Args:
          op: the op's name.
          features: features that the call needs, see `Implementation.can`.
          **shape: sizes.
        """
        for name, implementation in self.named:
            if name == op:
                return Choice(implementation, source="named")
        able = self.able(op, features, shape)
        if op in self.only_xla or not all(map(self._has_parts, able)):
            return Choice("xla", source="only")
        key = tuple(sorted(shape.items()))
        names = {i.name for i in able}
        entries = [e for e in self.table if e.op == op and e.choice.implementation in names]
        for entry in entries:
            if entry.shape == key:
                return dataclasses.replace(entry.choice, source="table")

        def kernel(choice: Choice, shape: Shape) -> Implementation | None:
            return _kernel_of(
                choice, self.able(op, features, shape), shape, self.compute_capability
            )

        def applies(entry: Entry) -> bool:
            if _distance(entry.shape, key) > math.log(2):
                return False
            # A measurement of a kernel says nothing about others with the same name.
            measured = kernel(entry.choice, dict(entry.shape))
            return measured is not None and measured is kernel(entry.choice, shape)

        near = list(filter(applies, entries))
        if near:
            entry = min(near, key=lambda e: _distance(e.shape, key))
            logger.debug("%s %s: nearest measured shape %s", op, dict(key), dict(entry.shape))
            return dataclasses.replace(entry.choice, source="nearest")
        taken = (i.name for i in able if i.heuristic(shape, self.compute_capability))
        choice = Choice(next(taken, "xla"), source="heuristic")
        logger.debug("%s %s: no measurement, %s", op, dict(key), choice.implementation)
        return choice

    def summary(self) -> dict[str, Any]:
        """The fields for a benchmark record, with the number of entries in place of the table."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "implementations"]
        return {name: getattr(self, name) for name in names} | {"table": len(self.table)}

    def with_xla(self, op: str) -> Self:
        """A copy of this plan that runs an op through XLA unless the op is named."""
        return dataclasses.replace(self, only_xla=(*self.only_xla, op))

    def for_several_devices(self) -> Self:
        """The plan of devices that share a model."""
        shared = tuple(i for i in self.implementations if i.shared)
        return dataclasses.replace(self, implementations=shared)

    def _has_parts(self, implementation: Implementation) -> bool:
        """Whether the ops that it replaces are neither named otherwise nor limited to XLA."""
        wanted = [*self.named, *((part, "xla") for part in self.only_xla)]
        return all(
            name not in implementation.parts or choice == implementation.name
            for name, choice in wanted
        )


def resolve(
    own: Sequence[Implementation],
    plan: Dispatch | None,
    implementation: str | None,
    features: Features = NO_FEATURES,
    **shape: int,
) -> tuple[Implementation, Any]:
    """The implementation an op runs: its `implementation` argument, else its plan's, else "xla".

    Args:
      own: the op's implementations, used without a plan or if the plan has none of this op.
      plan, implementation: arguments of the op.
      features, **shape: see `Dispatch.choose`.

    Returns:
      (implementation, its measured configuration or None).

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the op has no implementation of this name, or it cannot run here.
    """
    op = own[0].op
    capability = plan.compute_capability if plan is not None else None
    known = (plan.of(op) if plan is not None else ()) or own
    if implementation is not None:
        check_name(op, implementation, known)
        choice = Choice(implementation, source="named")
    else:
        choice = (
            Choice("xla", source="only") if plan is None else plan.choose(op, features, **shape)
        )
    named = [i for i in (*known, *own) if i.name == choice.implementation]
    if not named:
        raise NotImplementedError(f"{op}: no {choice.implementation!r} implementation")
    first = next((i for i in named if i.runs_on(capability)), named[0])
    # Kernels that share a name and the devices they run on differ in what they can do.
    alike = [i for i in named if i.capabilities == first.capabilities]
    able = [i for i in alike if i.supports(shape, features, capability)]
    chosen = _kernel_of(choice, able, shape, capability) or first
    if reason := chosen.refusal(shape, features, capability):
        raise NotImplementedError(f"{op}: {chosen.name} {reason}")
    return chosen, chosen.config(**dict(choice.config)) if choice.config else None


def _kernel_of(
    choice: Choice,
    able: Sequence[Implementation],
    shape: Shape,
    capability: Capability | None,
) -> Implementation | None:
    """The one that runs of those that can, if several have the name that was chosen.

    A configuration belongs to the first kernel that has exactly its fields. Without one, the first
    kernel runs whose heuristic accepts the shape, or the first.
    """
    named = [i for i in able if i.name == choice.implementation]
    fields = {field for field, _ in choice.config or ()}
    owners = (i for i in named if fields and fields == _fields_of(i.config))
    # Where the device is not known, it is one that the kernel is for.
    accepting = (
        i for i in named if i.heuristic(shape, capability or (i.capabilities or (None,))[0])
    )
    return next(itertools.chain(owners, accepting, named), None)


def _fields_of(config: type | None) -> set[str]:
    return {field.name for field in dataclasses.fields(config)} if config else set()


def check_name(op: str, name: str, implementations: Sequence[Implementation] = ()) -> None:
    """Raise ValueError for a name that no implementation has."""
    names = dict.fromkeys((*NAMES, *(i.name for i in implementations)))
    if name not in names:
        raise ValueError(f"{op}: implementation must be one of {', '.join(names)}, got {name!r}")


def _distance(measured: tuple[tuple[str, int], ...], asked: tuple[tuple[str, int], ...]) -> float:
    """Largest log-ratio between two shapes; infinite if the measurement does not apply."""
    if [k for k, _ in measured] != [k for k, _ in asked]:
        return math.inf
    far = 0.0
    for (key, x), (_, y) in zip(measured, asked, strict=True):
        if x == y:
            continue
        # One query token and several run different kernels.
        if key in _EXACT_KEYS or (key == "t" and 1 in (x, y)) or x <= 0 or y <= 0:
            return math.inf
        # A configuration measured with fewer rows may not fit into memory with more rows.
        if key == "m" and x < y:
            return math.inf
        # Kernels need a multiple of 8 slots.
        if key == "s" and (x % 8 == 0) != (y % 8 == 0):
            return math.inf
        far = max(far, abs(math.log(x / y)))
    return far
