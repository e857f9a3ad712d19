"""The plan of a device: all implementations, and the measured table that chooses among them.

`Dispatch.choose` looks an op up. The plan of an H100 can be built and tested on a CPU.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdjax.pallas_kernels import table as tables
from fdjax.pallas_kernels.dispatch import Choice, Dispatch, Entry, Implementation, check_name
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.table import TABLE_SCHEMA, shipped_table_path

__all__ = [
    "KERNEL_REVISIONS",
    "TABLE_SCHEMA",
    "Choice",
    "Entry",
    "Plan",
    "as_entry",
    "can_chain",
    "read_table",
    "shipped_table_path",
]

# Revisions of the kernels. They are written into new tables and compared when tables are read.
KERNEL_REVISIONS = tables.revisions_of(IMPLEMENTATIONS)


@dataclasses.dataclass(frozen=True)
class Plan(Dispatch):
    """A `Dispatch` that holds this package's implementations by default.

    Attributes:
      prompt_tiles: number of tiles into which devices that share a model divide a call of prompts,
        so that the sums of one tile travel while another is computed; None for the fastest that
        was measured, see `Model.prompt_tiles`.
      divide_tokens: whether devices with the same KV head divide its tokens, if they can. Otherwise
        each of them holds all tokens. Only a cache of pages can be divided. On GPUs, where this has
        not been measured, only if the caller asks for it.
    """

    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
    prompt_tiles: int | None = None
    divide_tokens: bool = True

    def __post_init__(self):
        super().__post_init__()
        ops = dict.fromkeys(i.op for i in (*IMPLEMENTATIONS, *self.implementations))
        for op in self.only_xla:
            if op not in ops:
                raise ValueError(
                    f"plan: an op of only_xla must be one of {', '.join(ops)}, got {op!r}"
                )
        tiles = self.prompt_tiles
        if tiles is not None and not (type(tiles) is int and tiles > 0):
            raise ValueError(f"plan: prompt_tiles must be a positive integer, got {tiles!r}")

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
          implementation: force this implementation for every op that has it.
          table: path of a measured table, consulted before the shipped one.
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
        kept = tuple(i for i in plan.implementations if not i.persistent)
        plan = dataclasses.replace(plan, implementations=kept)
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
        """Plan of a device known by its name; the machine need not have it.

        Raises:
          ValueError: `implementation` is unknown, or see `read_table`.
          TypeError: `device_kind` is not a name.
          NotImplementedError: `implementation` or the table needs an NVIDIA GPU.
        """
        if not isinstance(device_kind, str):
            raise TypeError(f"for_kind: takes a name, got {device_kind!r}; see for_device")
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
            check_name("plan", implementation)
            ops = dict.fromkeys(
                i.op for i in IMPLEMENTATIONS if i.name == implementation and i.forced
            )
            named = tuple((op, implementation) for op in ops)
        # Cards need not have NVLink, or not between all of them. Parts of a GPU have none.
        unlinked = any(word in device_kind for word in ("PCIe", "NVL", "MIG"))
        return cls(
            device_kind=device_kind,
            compute_capability=compute_capability,
            batch_invariant=compute_capability is None,
            divide_tokens=compute_capability is None,
            named=named,
            table=own + tables.shipped_table(device_kind, IMPLEMENTATIONS),
            only_xla=("all_reduce",) if unlinked else (),
        )


def can_chain(device) -> bool:
    """Whether a GPU has the multiprocessors that `linear_chain` and `decode_layers` need.

    The blocks of these kernels wait for each other, so each needs a multiprocessor of its own. With
    fewer, the kernels would never end.
    """
    return getattr(device, "core_count", None) in (None, MULTIPROCESSORS)


def read_table(
    path: str | Path, *, device_kind: str | None = None, log_level: int = logging.WARNING
) -> tuple[Entry, ...]:
    """Read a measured dataflow table for this package's kernels; see `table.read_entries`."""
    return tables.read_entries(path, IMPLEMENTATIONS, device_kind=device_kind, log_level=log_level)


def as_entry(row: dict[str, Any], revisions: Mapping[str, int], where: str) -> Entry:
    """Parse one row of such a table; see `table.entry_of`."""
    return tables.entry_of(row, revisions, where, IMPLEMENTATIONS)
