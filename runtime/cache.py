"""Which pages of the paged cache belong to which request.

One page id stands for `tokens_per_page` tokens in every lane of every layer: keys, values and index
keys. The lanes cannot come apart because nothing smaller than a page id is ever handed out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class CacheError(RuntimeError):
    """Pages were given out or taken back wrongly: a bug of the caller."""


class PagePool:
    """Hands out pages, all of a request's at once, and takes them back.

    Freed pages are reused first: on a CPU, whose memory is given out on first touch, the cache
    then takes no more than its busiest moment needed.
    """

    def __init__(self, num_pages: int, tokens_per_page: int) -> None:
        if num_pages < 1 or tokens_per_page < 1:
            raise ValueError(
                f"a cache of {num_pages} pages of {tokens_per_page} tokens, expected at least one"
            )
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self._free = list(range(num_pages - 1, -1, -1))  # the last is the next to go
        self._tables: dict[str, npt.NDArray[np.int32]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_page)

    def fits(self, tokens: int) -> bool:
        """Whether pages for `tokens` tokens are free now."""
        return self.pages_for(tokens) <= self.free

    def allocate(self, request_id: str, tokens: int) -> npt.NDArray[np.int32]:
        """The page table int32 [pages] of a request that will hold `tokens` tokens.

        Raises:
            CacheError: the request has pages already, or too few are free.
        """
        if request_id in self._tables:
            raise CacheError(f"request {request_id!r} has pages already: release them first")
        count = self.pages_for(tokens)
        if count > self.free:
            raise CacheError(
                f"request {request_id!r} needs {count} pages, {self.free} of {self.num_pages} are"
                " free: ask fits() first"
            )
        table = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self._tables[request_id] = table
        return table

    def release(self, request_id: str) -> None:
        """Take a request's pages back.

        Raises:
            CacheError: it has none (released twice).
        """
        if request_id not in self._tables:
            raise CacheError(f"request {request_id!r} has no pages: released twice, or never given")
        self._free.extend(self._tables.pop(request_id).tolist())

    def check(self) -> None:
        """Verify that every page is free or owned exactly once.

        Raises:
            CacheError: a page is lost or owned twice.
        """
        owned = [page for table in self._tables.values() for page in table.tolist()]
        if sorted([*owned, *self._free]) != list(range(self.num_pages)):
            raise CacheError(
                f"{len(owned)} owned and {len(self._free)} free pages do not add up to"
                f" {self.num_pages} different ones"
            )
