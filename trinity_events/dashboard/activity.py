"""Numbers of events by lane, category and time, in bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from .categories import CATEGORIES

BUCKETS = 1024
"""Maximum buckets of time; a longer run has wider ones."""
_PLANES = len(CATEGORIES)
# Two bytes a cell: 2,048 lanes of nine categories take 38 MB at most.
_FULL = 65_535
"""Largest count of one cell; a fuller one stays there."""


class Cell(NamedTuple):
    """Number of events of one category in one bucket of a lane."""

    bucket: int
    category: int
    number: int
    """Number of its events."""


class Activity:
    """Counts of a run's events.

    Args:
        begin: Milliseconds at which the first bucket begins.
        end: Milliseconds that the buckets reach at least; a guess saves later widening.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.width = 1
        """Milliseconds of a bucket."""
        self._lanes: list[array[int]] = []
        self._widen_to(end)

    def add(self, lane: int, category: int, milliseconds: int) -> None:
        """Count one event."""
        at = (milliseconds - self.begin) // self.width
        if at >= BUCKETS:
            self._widen_to(milliseconds)
            at = (milliseconds - self.begin) // self.width
        while lane >= len(self._lanes):
            self._lanes.append(array("H", bytes(2 * BUCKETS * _PLANES)))
        cells = self._lanes[lane]
        # Category by category, so that a category without events is skipped as one slice.
        cell = category * BUCKETS + max(at, 0)
        if cells[cell] < _FULL:
            cells[cell] += 1

    def cells(self, lane: int, begin: int, end: int) -> Iterator[Cell]:
        """Yield the counts of a lane that are not zero, of buckets between two moments."""
        if lane >= len(self._lanes):
            return
        first = min(max((begin - self.begin) // self.width, 0), BUCKETS)
        last = min(max((end - self.begin) // self.width, -1) + 1, BUCKETS)
        cells = self._lanes[lane]
        for category in range(_PLANES):
            counts = cells[category * BUCKETS + first : category * BUCKETS + last]
            if any(counts):
                for bucket, count in enumerate(counts, first):
                    if count:
                        yield Cell(bucket, category, count)

    def _widen_to(self, milliseconds: int) -> None:
        while (milliseconds - self.begin) // self.width >= BUCKETS:
            self.width *= 2
            self._lanes = [_halved(cells) for cells in self._lanes]


def _halved(cells: array[int]) -> array[int]:
    """Return counts of buckets that are twice as wide."""
    wide = array("H", bytes(2 * BUCKETS * _PLANES))
    half = BUCKETS // 2
    for category in range(_PLANES):
        begin = category * BUCKETS
        counts = cells[begin : begin + BUCKETS]
        if any(counts):
            pairs = zip(counts[::2], counts[1::2], strict=True)
            summed = array("H", (min(_FULL, count + other) for count, other in pairs))
            wide[begin : begin + half] = summed
    return wide
