"""Summaries of blocks of entries: a search reads only the blocks that may have a match."""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct

BLOCK = 1000
"""Entries of one block."""


# Without the collector: it refers to nothing that could refer to it (msgspec).
class EntryBlock(Struct, gc=False):
    """Block of entries: its first entry, and the types, lanes and steps of all of them."""

    number: int
    """Number of the entries before it."""
    first: str
    """Id of its first entry."""
    milliseconds: int
    entries: int = 0
    types: int = 0
    """Set of the types, as bits."""
    lanes: int = 0
    """Set of the lanes, as bits."""
    least_step: int = -1
    greatest_step: int = -1


class Blocks:
    """Blocks of a log, in its order."""

    def __init__(self) -> None:
        self.all: list[EntryBlock] = []
        self._times: list[int] = []

    def open(self, number: int, entry_id: str, milliseconds: int) -> EntryBlock:
        """Begin the block of an entry."""
        block = EntryBlock(number, entry_id, milliseconds)
        self.all.append(block)
        # A clock that went back must not break the order that the search by time needs.
        last = self._times[-1] if self._times else milliseconds
        self._times.append(max(last, milliseconds))
        return block

    def at_number(self, number: int) -> int:
        """Return the index of the block with the entry after ``number`` entries; -1 without any."""
        return bisect_right(self.all, number, key=lambda block: block.number) - 1

    def at_time(self, milliseconds: int) -> int:
        """Return the index of the last block that begins before a moment; at least 0."""
        return max(0, bisect_right(self._times, milliseconds - 1) - 1)

    def count_between(self, begin: int, end: int) -> int:
        """Return about how many entries are between two moments: never fewer than there are."""
        if not self.all:
            return 0
        first, last = self.at_time(begin), bisect_right(self._times, end) - 1
        return sum(block.entries for block in self.all[first : last + 1]) if last >= first else 0
