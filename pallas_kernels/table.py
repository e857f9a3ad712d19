"""Measured dataflow tables (FlashDecoding++, section 5): the fastest implementation by shape."""

import collections
import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fdjax.pallas_kernels.dispatch import Choice, Entry, Implementation, check_name

TABLE_SCHEMA = 1

logger = logging.getLogger("fdjax")


def shipped_table_path(device_kind: str) -> Path:
    """Path of the table shipped for a device; the file may not exist."""
    return Path(__file__).parent / "tables" / f"{device_kind.replace(' ', '_')}.json"


@functools.cache
def shipped_table(
    device_kind: str, implementations: tuple[Implementation, ...]
) -> tuple[Entry, ...]:
    """Entries of the table shipped for a device; () if there is none."""
    path = shipped_table_path(device_kind)
    return read_entries(path, implementations, log_level=logging.INFO) if path.exists() else ()


def read_entries(
    path: str | Path,
    implementations: Sequence[Implementation],
    *,
    device_kind: str | None = None,
    log_level: int = logging.WARNING,
) -> tuple[Entry, ...]:
    """Read a measured dataflow table.

    Args:
      path: path of the file.
      implementations: the implementations that its entries may name.
      device_kind: the device that will use it, or None.
      log_level: level of the message that the table was measured with another JAX version or on
        another device.

    Raises:
      ValueError: the file is not a table, has another schema, was measured with another revision of
        a kernel that it configures, names an unknown implementation, or holds an invalid
        configuration.
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
        revisions = data.get("revisions", {})
        entries = tuple(entry_of(row, revisions, where, implementations) for row in data["entries"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: entries must follow schema {schema}, {error!r}") from None
    if device_kind is not None and measured_on not in (None, device_kind):
        logger.log(log_level, "%s: measured on %s, not %s", where, measured_on, device_kind)
    if measured_with not in (None, version("jax")):
        logger.log(
            log_level, "%s: measured with JAX %s, not %s", where, measured_with, version("jax")
        )
    return entries


def revisions_of(implementations: Sequence[Implementation]) -> dict[str, int]:
    """The revision of each op's configurable kernels, as tables store it.

    It is 1 more than the number of changes to any of them.
    """
    changes = collections.Counter()
    for i in implementations:
        if i.config is not None:
            changes[i.op] += i.revision - 1
    return {op: 1 + count for op, count in changes.items()}


def entry_of(
    row: dict[str, Any],
    revisions: Mapping[str, int],
    where: str,
    implementations: Sequence[Implementation],
) -> Entry:
    """Parse one row of a table; error messages begin with `where`. See `read_entries`."""
    op, shape, config = row["op"], row["shape"], row.get("config")
    ops = tuple(dict.fromkeys(i.op for i in implementations))
    if op not in ops:
        raise ValueError(f"{where}: op must be one of {', '.join(ops)}, got {op!r}")
    own = [i for i in implementations if i.op == op]
    check_name(f"{where}: {op}", row["implementation"], own)
    found = [i for i in own if i.name == row["implementation"]]
    if not found:
        raise ValueError(f"{where}: {row['implementation']!r} does not implement {op}")
    for kind, mapping in (("shape", shape), ("config", config or {})):
        valid = {k for k, v in mapping.items() if type(v) is int and abs(v) < 2**63}
        if wrong := [f"{k!r}: {v!r}" for k, v in mapping.items() if k not in valid]:
            raise ValueError(
                f"{where}: a {kind} must hold integers below 2^63, got {', '.join(wrong)}"
            )
    if config is not None:
        _check_config(row, revisions, where, found, revisions_of(implementations))
    choice = Choice(
        row["implementation"],
        config=None if config is None else tuple(sorted(config.items())),
        source="table",
    )
    return Entry(op=op, shape=tuple(sorted(shape.items())), choice=choice)


def _check_config(row, revisions, where, found, current) -> None:
    """Raise ValueError if the configuration of a row is invalid for its kernel."""
    op, config = row["op"], row["config"]
    tuned = [i for i in found if i.config is not None]
    if not tuned:
        raise ValueError(
            f"{where}: {row['implementation']!r} for {op} takes no config, got {config}"
        )
    if revisions.get(op) != current[op]:
        raise ValueError(
            f"{where}: the revision of {op} must be {current[op]}, got {revisions.get(op)}"
        )
    # Kernels that share a name run other shapes, or have configurations with other fields.
    fitting = [i.config for i in tuned if _fits(i, row["shape"])] or [i.config for i in tuned]
    named = [c for c in fitting if set(config) <= {f.name for f in dataclasses.fields(c)}]
    try:
        (named or fitting)[0](**config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: a config must be valid for {op}, got {config} for {row['shape']}, {error}"
        ) from None


def _fits(implementation: Implementation, shape: Mapping[str, int]) -> bool:
    """Whether an implementation runs a shape, which may lack sizes that it asks for."""
    try:
        return implementation.fits(shape) is None
    except KeyError:
        return False
