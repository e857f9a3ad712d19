"""Which implementation of an op runs for which shape, decided once and passed down.

A `Plan` is frozen and hashable, so it is a static argument under `jax.jit`: no op looks at global
state while it is traced, and the plan of an H100 can be built and tested on a CPU.

Lookup order of `Plan.choose`: an implementation forced by name, the exact entry of the measured
table, the nearest measured shape, the heuristic of the device.
"""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fdjax.pallas_kernels.hopper import MULTIPROCESSORS

OPS = ("matmul", "linear_chain", "decode_layers", "decode_attention", "prefill_attention")
IMPLEMENTATIONS = ("xla", "cudnn", "mosaic_gpu")
TABLE_SCHEMA = 1

# Kernels that run where a table has them, and are not forced with the others of their name.
_BY_TABLE = {"mosaic_gpu": ("linear_chain", "decode_layers")}

# What a kernel runs instead of others: where one of them is named, it does not run in their place.
_PARTS = {"decode_layers": ("matmul", "linear_chain", "decode_attention")}

# A measurement at one value of these says nothing about another: other code runs, or none at all,
# or blocks that filled the device leave a part of it idle.
_EXACT_KEYS = ("hkv", "d", "itemsize", "masks", "gate", "fused", "k", "n", "width", "hidden")

# Of the "mosaic_gpu" kernels that take a measured configuration. A change of the kernel that would
# change what measures best is a new revision, which refuses the tables of the old one.
KERNEL_REVISIONS = {"matmul": 1, "linear_chain": 1, "decode_layers": 1, "decode_attention": 1}

logger = logging.getLogger("fdjax")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one op at one shape.

    Attributes:
      implementation: one of `IMPLEMENTATIONS`.
      config: kernel configuration as sorted (field, value) pairs, or None for the default.
      source: "named" | "table" | "nearest" | "heuristic", or "only" where there is no other, for
        `fdjax info`.
    """

    implementation: str
    config: tuple[tuple[str, int], ...] | None = None
    source: str = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured row of a dataflow table: op and shape to implementation."""

    op: str
    shape: tuple[tuple[str, int], ...]
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Plan:
    """Frozen answer to "which implementation runs here?".

    Attributes:
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3" or "cpu".
      compute_capability: (major, minor) of a CUDA device, None elsewhere.
      batch_invariant: ask XLA bodies for results that do not depend on what else is in the batch,
        bitwise. On by default on CPU, where it costs little.
      named: implementations forced by name, as ((op, implementation), ...). These never fall back:
        an op that cannot run as named raises `NotImplementedError`.
      table: measured entries.
      only_xla: ops for which there is nothing else here, unless they are named.
    """

    device_kind: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    batch_invariant: bool = False
    named: tuple[tuple[str, str], ...] = ()
    table: tuple[Entry, ...] = ()
    only_xla: tuple[str, ...] = ()

    def __post_init__(self):
        for op, implementation in self.named:
            check_implementation(op, implementation)

    @classmethod
    def for_device(
        cls,
        device=None,
        *,
        implementation: str | None = None,
        table: str | Path | None = None,
    ) -> "Plan":
        """Plan of a `jax.Device` (default: the first local one) with its shipped table.

        Args:
          implementation: force this implementation for every op that has it; "xla" elsewhere.
          table: file of a measured table, consulted before the shipped one.
        """
        if device is None:
            import jax

            device = jax.local_devices()[0]
        if isinstance(device, str):
            raise TypeError(f"for_device: takes a jax.Device, got {device!r}; see for_kind")
        capability = None
        if device.platform == "gpu":
            major, _, minor = device.compute_capability.partition(".")
            capability = (int(major), int(minor or 0))
        plan = cls.for_kind(
            device.device_kind, capability, implementation=implementation, table=table
        )
        if can_chain(device):
            return plan
        return plan.with_xla("linear_chain").with_xla("decode_layers")

    @classmethod
    def for_kind(
        cls,
        device_kind: str,
        compute_capability: tuple[int, int] | None = None,
        *,
        implementation: str | None = None,
        table: str | Path | None = None,
    ) -> "Plan":
        """Plan of a device known by name only: no such device is needed.

        Raises:
          ValueError: `implementation` is not one, or see `read_table`.
          NotImplementedError: no op has it, or not on this device; or the table's kernels need
            another.
        """
        if implementation in ("cudnn", "mosaic_gpu") and compute_capability is None:
            raise NotImplementedError(
                f"plan: {implementation} needs an NVIDIA GPU, got {device_kind!r}"
            )
        own = read_table(table, device_kind=device_kind) if table else ()
        if compute_capability is None and any(e.choice.implementation != "xla" for e in own):
            raise NotImplementedError(
                f"plan: the kernels in {table} need an NVIDIA GPU, got {device_kind!r}"
            )
        named = ()
        if implementation is not None:
            named = tuple((op, implementation) for op in _ops_with(implementation))
        return cls(
            device_kind=device_kind,
            compute_capability=compute_capability,
            batch_invariant=compute_capability is None,
            named=named,
            table=own + _shipped_table(device_kind),
        )

    def with_xla(self, op: str) -> "Plan":
        """This plan, with XLA for an op unless that is named already."""
        return dataclasses.replace(self, only_xla=(*self.only_xla, op))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - plans are few and live as long as the program
    def choose(self, op: str, **shape: int) -> Choice:
        """The choice for `op` at `shape` (the op's own keys, such as m, k, n)."""
        for name, implementation in self.named:
            if name == op:
                return Choice(implementation, source="named")
        if op in self.only_xla or not self._has_parts(op):
            return Choice("xla", source="only")
        key = tuple(sorted(shape.items()))
        entries = [e for e in self.table if e.op == op]
        for entry in entries:
            if entry.shape == key:
                return dataclasses.replace(entry.choice, source="table")
        near = [e for e in entries if _distance(e.shape, key) <= math.log(2)]
        if near:
            entry = min(near, key=lambda e: _distance(e.shape, key))
            logger.debug("%s %s: nearest measured shape %s", op, dict(key), dict(entry.shape))
            return dataclasses.replace(entry.choice, source="nearest")
        choice = self._heuristic(op, shape)
        logger.debug("%s %s: no measurement, %s", op, dict(key), choice.implementation)
        return choice

    def _has_parts(self, op: str) -> bool:
        """Whether nothing of what a kernel stands for is named to be of another kind."""
        parts = _PARTS.get(op, ())
        wanted = [*self.named, *((part, "xla") for part in self.only_xla)]
        return all(name not in parts or choice == "mosaic_gpu" for name, choice in wanted)

    def _heuristic(self, op: str, shape: Mapping[str, int]) -> Choice:
        on_gpu = self.compute_capability is not None and self.compute_capability >= (8, 0)
        if op == "decode_attention" and self.compute_capability == (9, 0):
            fits = shape["d"] in (64, 128, 256) and shape["itemsize"] == 2
            if fits and shape["s"] % 8 == 0:
                return Choice("mosaic_gpu", source="heuristic")
        if op == "prefill_attention" and self.compute_capability == (9, 0):
            fits = shape["d"] in (64, 96, 128, 256) and shape["itemsize"] == 2
            if fits and shape["s"] % 8 == 0:
                return Choice("mosaic_gpu", source="heuristic")
        # An H100 was measured at such sizes: our kernel is 0.93 to 2.7 times as fast as XLA's.
        if op == "matmul" and self.compute_capability == (9, 0):
            k, columns = shape["k"], shape["n"] // (1 + shape["gate"])
            fits = k % 64 == 0 and columns % 64 == 0 and shape["itemsize"] == 2
            if fits and shape["m"] <= 32 and 512 <= k <= 2**14 and 512 <= shape["n"] <= 2**15:
                return Choice("mosaic_gpu", source="heuristic")
        # cuDNN's attention reads only the live part of the cache; XLA's einsum reads every slot.
        if on_gpu and op in ("decode_attention", "prefill_attention"):
            supported = shape["d"] % 8 == 0 and shape["d"] <= 128 and shape["itemsize"] == 2
            plain = not (shape["masks"] or (op == "decode_attention" and shape["t"] > 1))
            if supported and plain:
                return Choice("cudnn", source="heuristic")
        return Choice("xla", source="heuristic")


def resolve(plan: Plan | None, implementation: str | None, op: str, **shape: int) -> Choice:
    """The choice an op makes: its `implementation` argument, else its plan, else "xla"."""
    if implementation is not None:
        check_implementation(op, implementation)
        return Choice(implementation, source="named")
    if plan is None:
        return Choice("xla", source="only")
    return plan.choose(op, **shape)


def can_chain(device) -> bool:
    """Whether a GPU may run `linear_chain` and `decode_layers`; on another they would never end.

    Their blocks wait for each other, so each needs a multiprocessor.
    """
    return getattr(device, "core_count", None) in (None, MULTIPROCESSORS)


def on_ampere(plan: Plan | None) -> bool:
    """Whether kernels must do without the TMA and wgmma of Hopper, which is taken for granted."""
    capability = plan.compute_capability if plan is not None else None
    return capability is not None and capability < (9, 0)


def check_implementation(op: str, implementation: str) -> None:
    """Raise ValueError for a name that is no implementation at all."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
            f"got {implementation!r}"
        )


def _ops_with(implementation: str) -> tuple[str, ...]:
    check_implementation("plan", implementation)
    return {
        "xla": OPS,
        "cudnn": ("decode_attention", "prefill_attention"),
        "mosaic_gpu": ("matmul", "decode_attention", "prefill_attention"),
    }[implementation]


def _distance(measured: tuple[tuple[str, int], ...], asked: tuple[tuple[str, int], ...]) -> float:
    """Largest log-ratio between two shapes; infinite where other code would run."""
    if [k for k, _ in measured] != [k for k, _ in asked]:
        return math.inf
    far = 0.0
    for (key, x), (_, y) in zip(measured, asked, strict=True):
        if x == y:
            continue
        # One query token is another kernel than several.
        if key in _EXACT_KEYS or (key == "t" and 1 in (x, y)) or x <= 0 or y <= 0:
            return math.inf
        # Rows are padded to those of the next measurement; one of fewer may have no room for them.
        if key == "m" and x < y:
            return math.inf
        # Kernels take caches of a multiple of 8 slots.
        if key == "s" and (x % 8 == 0) != (y % 8 == 0):
            return math.inf
        far = max(far, abs(math.log(x / y)))
    return far


def shipped_table_path(device_kind: str) -> Path:
    """Where the table of a device is, if it has one."""
    return Path(__file__).parent / "tables" / f"{device_kind.replace(' ', '_')}.json"


@functools.cache
def _shipped_table(device_kind: str) -> tuple[Entry, ...]:
    path = shipped_table_path(device_kind)
    return read_table(path, log_level=logging.INFO) if path.exists() else ()


def read_table(
    path: str | Path, *, device_kind: str | None = None, log_level: int = logging.WARNING
) -> tuple[Entry, ...]:
    """Read a measured dataflow table.

    Args:
      path: of the file.
      device_kind: the device it is for, where that is known.
      log_level: at which it is said that the table was measured with another JAX or on another
        device.

    Raises:
      ValueError: the file is no such table, has another schema, is of another revision of a kernel
        that it configures, names an unknown implementation, or holds a configuration that its
        kernel cannot have.
    """
    where = f"dataflow table {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: must be JSON, {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != TABLE_SCHEMA:
        raise ValueError(f"{where}: schema must be {TABLE_SCHEMA}, got {schema!r}")
    try:
        provenance = data.get("provenance", {})
        measured_with = provenance.get("versions", {}).get("jax")
        measured_on = provenance.get("device_kind")
        entries = tuple(as_entry(row, data.get("revisions", {}), where) for row in data["entries"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: entries must be those of schema {schema}, {error!r}") from None
    if device_kind is not None and measured_on not in (None, device_kind):
        logger.log(log_level, "%s: measured on %s, not %s", where, measured_on, device_kind)
    if measured_with not in (None, version("jax")):
        logger.log(
            log_level, "%s: measured with JAX %s, not %s", where, measured_with, version("jax")
        )
    return entries


def as_entry(row: dict[str, Any], revisions: dict[str, int], where: str) -> Entry:
    """An entry of a table from its row in the file; `where` begins errors, see `read_table`."""
    op, shape, config = row["op"], row["shape"], row.get("config")
    if op not in OPS:
        raise ValueError(f"{where}: op must be one of {', '.join(OPS)}, got {op!r}")
    check_implementation(f"{where}: {op}", row["implementation"])
    if op not in _ops_with(row["implementation"]) + _BY_TABLE.get(row["implementation"], ()):
        raise ValueError(f"{where}: there is no {row['implementation']!r} of {op}")
    for kind, mapping in (("shape", shape), ("config", config or {})):
        wrong = [f"{k!r}: {v!r}" for k, v in mapping.items() if type(v) is not int]
        if wrong:
            raise ValueError(f"{where}: a {kind} must hold integers, got {', '.join(wrong)}")
    if config is not None:
        _check_config(row, revisions, where)
    return Entry(
        op=op,
        shape=_sorted_items(shape),
        choice=Choice(
            row["implementation"],
            config=None if config is None else _sorted_items(config),
            source="table",
        ),
    )


def _check_config(row: dict[str, Any], revisions: dict[str, int], where: str) -> None:
    """Raise ValueError for the configuration of a row that its kernel cannot have."""
    op, implementation, config = row["op"], row["implementation"], row["config"]
    if implementation != "mosaic_gpu" or op not in KERNEL_REVISIONS:
        raise ValueError(f"{where}: {implementation!r} of {op} takes no config, got {config}")
    if revisions.get(op) != KERNEL_REVISIONS[op]:
        raise ValueError(
            f"{where}: the revision of {op} must be {KERNEL_REVISIONS[op]}, got {revisions.get(op)}"
        )
    try:
        _config_types()[op](**config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: a config must be one of {op}, got {config} for {row['shape']}, {error}"
        ) from None


def _config_types() -> dict[str, type]:
    """Configurations of the kernels in `KERNEL_REVISIONS`; their modules import this one."""
    from fdjax.pallas_kernels.attention.hopper.decode import DecodeAttentionConfig
    from fdjax.pallas_kernels.gemm import FlatGemmConfig, LinearChainConfig
    from fdjax.pallas_kernels.layers import DecodeLayersConfig

    return {
        "matmul": FlatGemmConfig,
        "linear_chain": LinearChainConfig,
        "decode_layers": DecodeLayersConfig,
        "decode_attention": DecodeAttentionConfig,
    }


def _sorted_items(mapping: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(mapping.items()))
