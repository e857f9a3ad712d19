"""Tracks which pages of the cache are in use, and which hold the beginning of a prompt.

A page has `SLOT_MULTIPLE` slots. If devices divide the tokens of a KV head, it has as many on each
of them. A full page never changes, so prompts with the same beginning share it. Its key is a hash
of all tokens up to its end. An unused page keeps its content until it is needed. The page that was
released first is overwritten first.
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from fdjax.engine.state import NOBODYS_PAGE, SLOT_MULTIPLE


def page_count(tokens: int, size: int = SLOT_MULTIPLE) -> int:
    """Pages of `size` tokens that hold a number of tokens."""
    return -(-tokens // size)


class PagePool:
    """Hands out the pages of a cache.

    Attributes:
      count: number of pages, including page 0, which is never handed out.
      size: tokens of a page.
      prefix_cache: whether pages are shared.
    """

    def __init__(self, count: int, *, size: int = SLOT_MULTIPLE, prefix_cache: bool = True):
        self.count = count
        self.size = size
        self.prefix_cache = prefix_cache
        self._users = [0] * count
        self._free = list(range(count - 1, NOBODYS_PAGE, -1))
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        # Unused pages that have a key, in the order in which they will be overwritten.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        # Pages that have a key, but whose prompts have not been dispatched yet.
        self._pending: set[int] = set()
        # The full pages of the latest prompt, as bytes, and their keys.
        self._latest: tuple[list[bytes], list[bytes]] = [], []

    @property
    def available(self) -> int:
        """Number of unused pages."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.count - 1 - self.available

    def admit(
        self, ids: Sequence[int], spare: int = 0, *, pending: bool = False
    ) -> tuple[list[int], int] | None:
        """Take the pages of a prompt.

        The last token of a prompt is always computed, so its page is never a shared one.

        Args:
          ids: the prompt.
          spare: number of pages that must remain unused.
          pending: whether it may share the pages of a prompt that has not been dispatched yet.

        Returns:
          (pages, number of tokens that they hold already). None if there are too few pages, or if
          another prompt with the same beginning has not been dispatched yet.
        """
        found = self._find(ids)
        if not pending and not self._pending.isdisjoint(found):
            return None
        needed = page_count(len(ids), self.size) - len(found)
        idle = sum(page in self._idle for page in found)
        if needed + spare > self.available - idle:
            return None
        for page in found:
            self._users[page] += 1
            self._idle.pop(page, None)
        return found + self.take(needed), len(found) * self.size

    def take(self, count: int) -> list[int]:
        """Take pages whose content does not matter.

        Raises:
          ValueError: too few pages are available.
        """
        if count > self.available:
            raise ValueError(f"pages: must leave {count} available, got {self.available}")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._drop_key(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def register(self, ids: Sequence[int], pages: Sequence[int], *, pending: bool = False) -> None:
        """Let prompts that begin with these tokens share the full pages among `pages`.

        Args:
          ids: tokens that the pages hold, or will hold before anybody reads them.
          pages: the pages, in order.
          pending: share the pages only after the next call of `dispatched`.
        """
        if not self.prefix_cache:
            return
        for page, key in zip(pages, self._keys_of(ids), strict=False):
            if key not in self._pages and page not in self._keys:
                self._pages[key] = page
                self._keys[page] = key
                if pending:
                    self._pending.add(page)

    def dispatched(self) -> None:
        """Note that all admitted prompts have been dispatched."""
        self._pending.clear()

    def release(self, pages: Sequence[int], *, forget: bool = False) -> None:
        """Give pages back.

        Args:
          pages: the pages of one prompt, in order.
          forget: whether to stop sharing their content.
        """
        # The end of a prompt is overwritten before its beginning.
        for page in reversed(pages):
            if forget or page in self._pending:
                self._drop_key(page)
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def flush(self) -> None:
        """Stop sharing the present content of all pages."""
        self._free += self._idle
        self._idle.clear()
        self._pending.clear()
        self._keys.clear()
        self._pages.clear()

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless these lists hold exactly the pages in use; for tests."""
        users = collections.Counter(page for pages in owners for page in pages)
        assert NOBODYS_PAGE not in users
        assert users == {page: n for page, n in enumerate(self._users) if n}, "wrong counts"
        free = {*self._free, *self._idle}
        assert len(free) == self.available and free.isdisjoint(users)
        assert len(free) + len(users) == self.count - 1, "a page is lost"
        assert {page: key for key, page in self._pages.items()} == self._keys
        assert set(self._keys).isdisjoint(self._free) and set(self._idle) <= set(self._keys)

    def _find(self, ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        if self.prefix_cache and self._pages:
            for key in self._keys_of(ids)[: (len(ids) - 1) // self.size]:
                if key not in self._pages:
                    break
                found.append(self._pages[key])
        return found

    def _keys_of(self, ids: Sequence[int]) -> list[bytes]:
        """The key of each full page.

        Samples of a prompt and turns of a chat come one after another, so pages with which the
        latest prompt began are not hashed again.
        """
        tokens, size = np.asarray(ids, np.int32).tobytes(), 4 * self.size
        pages = [tokens[end - size : end] for end in range(size, len(tokens) + 1, size)]
        known, keys = self._latest
        pairs = enumerate(zip(pages, known, strict=False))
        same = next((i for i, (page, other) in pairs if page != other), len(known))
        keys = keys[:same][: len(pages)]
        for page in pages[len(keys) :]:
            before = keys[-1] if keys else b""
            keys.append(hashlib.blake2b(before + page, digest_size=16).digest())
        self._latest = pages, keys
        return keys

    def _drop_key(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
        self._pending.discard(page)
