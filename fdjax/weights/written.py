"""Writes safetensors files one tensor at a time, so that only one is in memory."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fdjax.weights.stored import DTYPES, INDEX, SINGLE

# A new file begins when the current one has this size.
SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor to be written.

    Attributes:
      name: its name.
      dtype: its dtype, as safetensors names it.
      shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensors(
    folder: Path,
    groups: Sequence[tuple[Sequence[Planned], Callable[[], Sequence[np.ndarray]]]],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the weights of a checkpoint, in several files with an index if they are large.

    Args:
      folder: an existing folder.
      groups: pairs of (tensors that are made together, function that makes them).
      shard_bytes: a new file begins when the current one has this size.
      progress: called with (bytes written, bytes in all).

    Returns:
      Bytes of all tensors.

    Raises:
      OSError: a file cannot be written. No complete-looking file is then left.
    """
    shards: list[list] = [[]]
    for group in groups:
        size = sum(t.nbytes for tensors, _ in shards[-1] for t in tensors)
        if size and size + sum(t.nbytes for t in group[0]) > shard_bytes:
            shards.append([])
        shards[-1].append(group)
    total = sum(t.nbytes for tensors, _ in groups for t in tensors)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        done = _write_file(folder / name, shard, lambda n: progress(n, total), done)
    if len(shards) > 1:
        where = {
            t.name: name
            for name, shard in zip(names, shards, strict=True)
            for tensors, _ in shard
            for t in tensors
        }
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _write_file(path: Path, groups, progress: Callable[[int], None], done: int) -> int:
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensors, _ in groups:
        for t in tensors:
            span = [end, end := end + t.nbytes]
            header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": span}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for tensors, make in groups:
                for t, array in zip(tensors, make(), strict=True):
                    if (array.dtype, array.shape) != (DTYPES[t.dtype], t.shape):
                        raise AssertionError(f"{t}: made as {array.dtype}{array.shape}")
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                    done += t.nbytes
                progress(done)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return done
