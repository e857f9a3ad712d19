"""Finds the keys or values of a cache row, in one piece or in pages, for kernels."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl


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
    ):
        """Prepare the row without reading memory.

        Args:
          inputs: references to global memory by name: the cache [(L,)B,Hkv,S,D], or with "pages"
            [B,N] a pool [(L,)P,Hkv,page,D].
          name: the cache's name, "k" or "v".
          row, head: index of the row and of the KV head.
          layer: index of the layer in a stack; default `inputs["layer"]`, if given.
          axis: the axis of slots, the last one of scales [(L,)B,Hkv,S].
        """
        cache = inputs[name]
        if layer is None and "layer" in inputs:
            layer = inputs["layer"][0]
        self._cache = cache if layer is None else cache.at[layer]
        self._row, self._head = row, head
        self._pages = inputs.get("pages")
        self._size = cache.shape[axis]
        self.slots = self._size * (1 if self._pages is None else self._pages.shape[1])

    def block(self, start: Array, size: int, page: Array | None = None) -> Any:
        """`size` slots from `start` on [size,D]; with pages, `start` is a multiple of `size`.

        Slots past the row's end must not be used. Without pages, TMA fills them with zeros.

        Args:
          start, size: first slot and number of slots.
          page: `page_at(start)`, if it was looked up before.
        """
        if self._pages is None:
            return self._cache.at[self._row, self._head, pl.ds(start, min(size, self.slots))]
        place = pl.ds(lax.rem(start, jnp.int32(self._size)), size)
        page = self.page_at(start) if page is None else page
        return self._cache.at[page, self._head, place]

    def token(self, slot: Array) -> Any:
        """One existing slot, [D]."""
        if self._pages is None:
            return self._cache.at[self._row, self._head, slot]
        return self._cache.at[self.page_at(slot), self._head, lax.rem(slot, jnp.int32(self._size))]

    def page_at(self, slot: Array) -> Array | None:
        """The page that holds a slot, or None without pages."""
        if self._pages is None:
            return None
        entry = lax.div(slot, jnp.int32(self._size))
        return self._pages[self._row, jnp.minimum(entry, self._pages.shape[1] - 1)]


def check_pages(op: str, k: Array, pages: Array | None, block_kv: int) -> None:
    """Raise ValueError if blocks of `block_kv` slots do not divide the pages of a pool."""
    if pages is not None and k.shape[-2] % block_kv:
        raise ValueError(
            f"{op}: block_kv must divide the {k.shape[-2]} slots of a page, got {block_kv}"
        )
