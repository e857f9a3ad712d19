"""Decode attention of rows that share their first pages, which are read once for several rows.

Rows with one beginning, such as a system prompt or the prompt of several samples, have the same
first pages. The rows of a tile become query heads of one row that attends to these pages. Each row
attends to its other pages as ever. The two results are merged by their logsumexp, which is exact
(cascade attention, Ye et al. 2024; segment KV cache, Wu et al. 2024).

It must read the shared pages once per tile, and each row's other pages once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Capability, Features, Implementation, Shape

# Features that do not depend on the distance between a query and a slot.
_CAN = frozenset({"rope", "soft_cap", "phi", "unified", "sinks"})
# Query heads of a tile: the kernel reads the cache again for the rows beyond.
_TILE_HEADS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPages:
    """Which rows share their first pages. These pages are full, and nobody writes them.

    Attributes:
      members: [N, R] int32, the rows of each tile; 0 where there is none.
      pages: [N, W] int32, the pages of each tile.
      counts: [N] int32, number of first pages that the rows of a tile share; 0 for no tile.
      places: [B] int32, for each row its place in `members`, flattened; N·R for a row in no tile.
    """

    members: Array
    pages: Array
    counts: Array
    places: Array

    @property
    def width(self) -> int:
        """R, the largest number of rows of a tile."""
        return self.members.shape[1]

    def skipped(self) -> Array:
        """[B] int32, number of first pages of each row that its tile reads."""
        return self.counts.at[self.places // self.width].get(mode="fill", fill_value=0)

    def own(self, pages: Array, lengths: Array, size: int) -> tuple[Array, Array]:
        """(pages [B, W] of each row that its tile does not read, number of tokens in them [B])."""
        skipped = self.skipped()
        entry = jnp.arange(pages.shape[1], dtype=jnp.int32)[None] + skipped[:, None]
        pages = jnp.take_along_axis(pages, jnp.minimum(entry, pages.shape[1] - 1), axis=1)
        return pages, jnp.maximum(lengths - skipped * size, 0)

    def tiles(self, q: Array, kv_heads: int) -> Array:
        """Queries [B, 1, H, D] as [N, 1, R·H, D], by KV head."""
        b, _, h, d = q.shape
        # One gather in the order of the result: XLA would emit a slow transpose after it.
        of_head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
        rows = self.members[:, None] * kv_heads + of_head
        q = q.reshape(b * kv_heads, h // kv_heads, d)[rows]
        return q.reshape(len(self.members), 1, self.width * h, d)

    def by_row(self, tiles: Array, kv_heads: int, empty: float) -> Array:
        """Results [N, 1, R·H, ...] of tiles as [B, 1, H, ...]; `empty` for rows without a tile."""
        n, _, heads, *rest = tiles.shape
        tiles = tiles.reshape(n * kv_heads * self.width, -1, *rest)
        tile, member = self.places // self.width, self.places % self.width
        of_head = jnp.arange(kv_heads, dtype=jnp.int32)[None]
        rows = (tile[:, None] * kv_heads + of_head) * self.width + member[:, None]
        rows = tiles.at[rows].get(mode="fill", fill_value=empty)
        return rows.reshape(-1, 1, heads // self.width, *rest)


def can_share(spec: AttentionSpec) -> bool:
    """Whether attention can be computed in these parts. Otherwise rows read all of their pages."""
    return not needs_positions(spec)


def needs_positions(spec: AttentionSpec) -> Features:
    """The features of an attention that depend on the distance between a query and a slot."""
    return spec.features - _CAN


def spec_of_tiles(spec: AttentionSpec, kv_heads: int, width: int) -> AttentionSpec:
    """The attention of the tiles, in which each KV head has the queries of `width` rows."""
    if spec.phi is None:
        return spec
    phi = np.array(spec.phi).reshape(kv_heads * spec.ranks, 1, -1)
    return dataclasses.replace(spec, phi=tuple(phi.repeat(width, axis=1).ravel().tolist()))


def reading_shape(shared: SharedPages, hkv: int, d: int, itemsize: int, size: int) -> Shape:
    """The shape of the op `shared_pages`, as a plan chooses it.

    Args:
      shared: what `find_shared` returned.
      hkv, d, itemsize: KV heads, values of a head and their bytes.
      size: tokens of a page.

    Returns:
      hkv, d, itemsize; `rows` that share, and `saved`, the tokens that a layer then does not read.
    """
    places = shared.places[shared.places < shared.members.size]
    rows = np.bincount(places // shared.width, minlength=len(shared.counts))
    saved = int((shared.counts * np.maximum(rows - 1, 0)).sum()) * size
    return {"hkv": hkv, "d": d, "itemsize": itemsize, "rows": len(places), "saved": saved}


def _pays(shape: Shape, capability: Capability | None) -> bool:
    """Whether reading together saves 64 MB of a layer, for 16 rows or more.

    On an H100 these take 20 µs, and reading together takes three more kernels. With 8 rows, steps
    were 7 % slower (benchmarks/LOG.md). A CPU has no such costs.
    """
    saved = 2 * shape["saved"] * shape["hkv"] * shape["d"] * shape["itemsize"]
    return capability is None or (shape["rows"] >= 16 and saved >= 64e6)


def _chosen_by_the_host(*_args: Any, **_options: Any) -> None:
    raise NotImplementedError("shared_pages: a plan chooses it, nobody calls it")


# The choice between reading shared pages once for several rows ("together") and once for each row
# ("apart"). They only stand for the choice: decode attention itself reads the pages.
SHARED_PAGES = (
    Implementation("shared_pages", "together", _chosen_by_the_host, heuristic=_pays, forced=False),
    Implementation("shared_pages", "apart", _chosen_by_the_host, forced=False),
)


def find_shared(pages: np.ndarray, group: int) -> SharedPages | None:
    """Find rows that share their first pages, on the host.

    Args:
      pages: [B, W] int32, the pages of each row, and 0 where it has none.
      group: query heads per KV head.

    Returns:
      NumPy arrays, whose shapes depend only on B, W and `group`; or None if no rows share pages.
    """
    rows = len(pages)
    width = max(min(_TILE_HEADS // group, rows), 2)
    fewest = max(width // 2, 2)  # fewer rows make no tile
    order = [i for i in np.lexsort(pages.T[::-1]) if pages[i, 0]]
    tiles = []
    while order:
        tile = [i for i in order[:width] if pages[i, 0] == pages[order[0], 0]]
        order = order[len(tile) :]
        if len(tile) >= fewest:
            # Of sorted rows, the first and the last differ the most.
            first, last = pages[tile[0]], pages[tile[-1]]
            tiles.append((tile, int(((first == last) & (first != 0)).cumprod().sum())))
    if not any(count for _, count in tiles):
        return None
    n = rows // fewest
    members, tables = np.zeros((n, width), np.int32), np.zeros((n, pages.shape[1]), np.int32)
    counts, places = np.zeros(n, np.int32), np.full(rows, n * width, np.int32)
    for i, (tile, count) in enumerate(tiles):
        members[i, : len(tile)] = tile
        tables[i, :count] = pages[tile[0], :count]
        counts[i] = count
        places[tile] = i * width + np.arange(len(tile))
    return SharedPages(members, tables, counts, places)
