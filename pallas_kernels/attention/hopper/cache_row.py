"""Finds the keys or values of a cache row, in one piece or in pages, for kernels."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from fdjax.pallas_kernels.attention.cache import Cache, features_of


class CacheRow:
    """Keys or values of one KV head of a row.

    Attributes:
      slots: S, number of slots.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        name: str,
        row: Array,
        head: Array,
        layer: Array | int | None = None,
        axis: int = -2,
        entry_slots: int | None = None,
    ):
        """Prepare the row without reading memory.

        Args:
          inputs: references to global memory by name: the cache [(L,)B,Hkv,S,D], or with "pages"
            [B,N] a pool [(L,)P,Hkv,page,D].
          name: the cache's name, "k" or "v".
          row, head: index of the row and of the KV head.
          layer: index of the layer in a stack; default `inputs["layer"]`, if given.
          axis: the axis of slots, the last one of scales [(L,)B,Hkv,S].
          entry_slots: slots of an entry of "pages"; default a whole page. Otherwise, entry e is
            part e % n of page e // n, for n parts of a page.
        """
        cache = inputs[name]
        if layer is None and "layer" in inputs:
            layer = inputs["layer"][0]
        self._cache = cache if layer is None else cache.at[layer]
        self._row, self._head = row, head
        self._pages = inputs.get("pages")
        self._size = cache.shape[axis] if entry_slots is None else entry_slots
        self._parts = cache.shape[axis] // self._size
        self.slots = self._size * (1 if self._pages is None else self._pages.shape[1])

    def block(self, start: Array, size: int, entry: Array | None = None) -> Any:
        """`size` slots from `start` on [size,D]; with pages, `start` is a multiple of `size`.

        Slots past the row's end must not be used. Without pages, TMA fills them with zeros.

        Args:
          start, size: first slot and number of slots.
          entry: `entry_at(start)`, if it was looked up before.
        """
        if self._pages is None:
            return self._cache.at[self._row, self._head, pl.ds(start, min(size, self.slots))]
        page, slot = self._place(start, entry)
        return self._cache.at[page, self._head, pl.ds(slot, size)]

    def token(self, slot: Array) -> Any:
        """One existing slot, [D]."""
        if self._pages is None:
            return self._cache.at[self._row, self._head, slot]
        page, slot = self._place(slot)
        return self._cache.at[page, self._head, slot]

    def entry_at(self, slot: Array) -> Array | None:
        """The entry of "pages" that holds a slot, or None without pages."""
        if self._pages is None:
            return None
        entry = lax.div(slot, jnp.int32(self._size))
        return self._pages[self._row, jnp.minimum(entry, self._pages.shape[1] - 1)]

    def _place(self, slot: Array, entry: Array | None = None) -> tuple[Array, Array]:
        """(page, slot of the page) of a slot."""
        page = self.entry_at(slot) if entry is None else entry
        slot = lax.rem(slot, jnp.int32(self._size))
        if self._parts > 1:
            parts = jnp.int32(self._parts)
            page, slot = lax.div(page, parts), slot + lax.rem(page, parts) * self._size
        return page, slot


def by_name(k: Cache, v: Cache) -> dict[str, Any]:
    """The arrays of caches by the names that kernels give them."""
    if not features_of(k):
        return {"k": k, "v": v}
    return {"k": k.codes, "v": v.codes, "k_scales": k.scales, "v_scales": v.scales}


def check_pages(
    op: str, k: Array, pages: Array | None, block_kv: int, entry_slots: int | None = None
) -> None:
    """Raise ValueError if blocks of `block_kv` slots do not divide the pages of a pool.

    If an entry of `pages` is a part of a page, blocks must also divide its `entry_slots` slots.
    """
    size = k.shape[-2]
    if pages is not None and size % block_kv:
        raise ValueError(f"{op}: block_kv must divide the {size} slots of a page, got {block_kv}")
    if entry_slots is not None and (size % entry_slots or entry_slots % block_kv):
        raise ValueError(
            f"{op}: entry_slots must divide the {size} slots of a page and be a multiple of the "
            f"{block_kv} of block_kv, got {entry_slots}"
        )
