"""Sizes of the pages that are read and folded at once, bounded in number and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import Entry

PAGE_BYTES = 16 << 20
"""Maximum bytes of a page, if its entries have the size of those before."""
TURN = 125
"""Maximum entries that are folded before other tasks of the event loop run. They renew the lead,
and receive the next page in pieces of a socket buffer."""
TURN_BYTES = 1 << 20
"""Maximum bytes of those entries; a larger entry is folded by itself. To reject 4 MiB of garbage
takes 15 ms."""
_FIRST = 16
"""Entries of the first page, before sizes are known: an event may take 4 MiB."""
_GROWTH = 4
"""Maximum factor by which the limit grows from one page to the next."""


class PageSize:
    """Number of entries to ask for, learnt from earlier pages: servers limit replies by number.

    Args:
        most: Maximum entries of a page, however small they are.
        nbytes: Maximum bytes of a page, if its entries have the size of those before.
    """

    def __init__(self, most: int, nbytes: int = PAGE_BYTES) -> None:
        self._most = most
        self._nbytes = nbytes
        self.limit = min(_FIRST, most)

    def learn(self, page: Sequence[Entry]) -> int:
        """Adapt the limit to the sizes of a page's entries; return their bytes."""
        if not page:
            return 0
        nbytes = sum(len(entry.payload) for entry in page)
        # Entries of one run are alike in size for a while, so the last page predicts the next.
        fit = self._nbytes * len(page) // max(1, nbytes)
        # At least one: an entry that is larger than a page is still read.
        self.limit = max(1, min(self._most, fit, _GROWTH * self.limit))
        return nbytes


def in_turns(page: Sequence[Entry], nbytes: int, most: int = TURN) -> Iterator[Sequence[Entry]]:
    """Cut a page into turns, each of at most ``most`` entries, by the mean size of its entries.

    To measure each entry again would take a tenth of the time of the fold.
    """
    each = max(1, min(most, TURN_BYTES * len(page) // max(1, nbytes)))
    for start in range(0, len(page), each):
        yield page[start : start + each]
