"""Events of a recorded log, read from any place on: of an exported file, or of a temporary one."""

from __future__ import annotations

import struct
import tempfile
from bisect import bisect_right
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Protocol

from ..archive.format import events_from, last_events
from ..log import ORIGIN, Entry, position

# Both numbers of an entry's id, and the length of its payload.
_LENGTHS = struct.Struct(">QQI")
_INDEXED = 250
"""Entries between two that the index of a temporary file knows by their place."""


class RecordedEvents(Protocol):
    """Events in the order of their log."""

    first: str
    """Id of the first one."""
    last: str
    entries: int
    """Number of events, at most."""

    def after(self, after: str) -> Generator[Entry, None, None]:
        """Yield the events after a position."""
        ...

    def last_ones(self, limit: int) -> list[Entry]:
        """Return about ``limit`` events at the end."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class FileEvents:
    """Events of an exported file, whose places are found by bisection.

    Args:
        path: The file, whose digest was checked.
        entries: Number of its entries.
    """

    def __init__(self, path: Path, entries: int) -> None:
        self._path = path
        self.entries = entries
        self.first = next((entry.id for entry in self.after(ORIGIN)), ORIGIN)
        self.last = next((entry.id for entry in last_events(path, 1)), ORIGIN)

    def after(self, after: str) -> Generator[Entry, None, None]:
        """Yield the events after a position."""
        milliseconds, number = position(after)
        # The id after it: an entry's own id would be yielded again.
        yield from events_from(self._path, f"{milliseconds}-{number + 1}")

    def last_ones(self, limit: int) -> list[Entry]:
        """Return about ``limit`` events at the end."""
        return last_events(self._path, limit)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class StoredEvents:
    """Events in a temporary file.

    Args:
        entries: Events, in their order.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._file = tempfile.TemporaryFile(prefix="trinity-events-")  # noqa: SIM115
        self._positions: list[tuple[int, int]] = []
        self._offsets: list[int] = []
        self.first = self.last = ORIGIN
        self.entries = 0
        for entry in entries:
            at = position(entry.id)
            # Not each one, so that the index of millions of entries stays small.
            if self.entries % _INDEXED == 0:
                self._positions.append(at)
                self._offsets.append(self._file.tell())
            if self.entries == 0:
                self.first = entry.id
            self._file.write(_LENGTHS.pack(*at, len(entry.payload)))
            self._file.write(entry.payload)
            self.last = entry.id
            self.entries += 1
        self._end = self._file.tell()

    def after(self, after: str) -> Generator[Entry, None, None]:
        """Yield the events after a position."""
        begin = position(after)
        at = max(0, bisect_right(self._positions, begin) - 1)
        return (entry for entry in self._from(at) if position(entry.id) > begin)

    def _from(self, number: int) -> Generator[Entry, None, None]:
        """Yield the events from one on that the index knows."""
        file, at = self._file, self._offsets[number] if self._offsets else 0
        while at < self._end:
            file.seek(at)  # others read the file meanwhile
            milliseconds, order, length = _LENGTHS.unpack(file.read(_LENGTHS.size))
            payload = file.read(length)
            at = file.tell()
            yield Entry(f"{milliseconds}-{order}", payload)

    def last_ones(self, limit: int) -> list[Entry]:
        """Return about ``limit`` events at the end."""
        return list(self._from(max(0, len(self._positions) - 1 - limit // _INDEXED)))

    def close(self) -> None:
        """Close the temporary file, which removes it."""
        self._file.close()
