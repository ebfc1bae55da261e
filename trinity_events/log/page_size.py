"""How many entries to read, and to fold, at once: bounded in bytes, not in number alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import Entry

PAGE_BYTES = 16 << 20
"""What a page comes to at most, as far as its entries are as large as those before them."""
TURN = 125
"""Entries that are folded before anyone else in the loop has a turn, at most: a lead is to be kept
meanwhile, and the next page comes in as many pieces as a socket holds."""
TURN_BYTES = 1 << 20
"""Bytes of those entries at most; one that is larger has a turn of its own. To find out that 4 MiB
are garbage takes 15 ms."""
_FIRST = 16
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

    def learn(self, page: Sequence[Entry]) -> int:
        """Note how large the entries are that came; returns their bytes."""
        if not page:
            return 0
        nbytes = sum(len(entry.payload) for entry in page)
        fit = PAGE_BYTES * len(page) // max(1, nbytes)
        self.limit = max(1, min(self._most, fit, _GROWTH * self.limit))
        return nbytes


def in_turns(page: Sequence[Entry], nbytes: int, most: int = TURN) -> Iterator[Sequence[Entry]]:
    """Cut a page of so many bytes into what is folded at once, at most ``most`` entries.

    By their mean size: to look at each again would take as long as a tenth of the folding.
    """
    each = max(1, min(most, TURN_BYTES * len(page) // max(1, nbytes)))
    for start in range(0, len(page), each):
        yield page[start : start + each]
