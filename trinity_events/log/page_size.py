"""How many entries to read at once, so that what is in memory is bounded in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Entry

PAGE_BYTES = 16 << 20
"""What a page comes to at most, as far as its entries are as large as those before them."""
_FIRST = 64
"""Entries of the first page, whose size nobody knows: an event may take 4 MiB."""
_GROWTH = 4


class PageSize:
    """The number to ask for, learnt from what came: servers bound their replies by number alone.

    Args:
        most: The most entries at once, however small.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(_FIRST, most)

    def learn(self, page: Sequence[Entry]) -> None:
        """Note how large the entries are that came."""
        if not page:
            return
        nbytes = sum(len(entry.payload) for entry in page)
        fit = PAGE_BYTES * len(page) // max(1, nbytes)
        self.limit = max(1, min(self._most, fit, _GROWTH * self.limit))
