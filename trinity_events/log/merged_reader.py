"""Reader of several streams of a log, which merges their entries by id."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from .base import Entry, EventLog, Stream
from .position import position

_SETTLED = 0.002
"""Seconds after which the server's clock is past the millisecond of an entry just read."""
_LAST = 2**64 - 1

Found = tuple[Stream, Entry]


def stream_order(found: Found) -> tuple[tuple[int, int], int]:
    """Return the sort key of an entry: at one id, the announcement follows the event."""
    stream, entry = found
    return position(entry.id), _RANK[stream]


_RANK = {stream: rank for rank, stream in enumerate(Stream)}


class MergedReader:
    """Reads several streams of one log, and yields their entries in the order of their ids.

    One clock stamps the streams, but each is read by itself. The reader holds an entry back until
    the clock is past its millisecond and every stream was read to the end of that millisecond.
    Then no entry with a lower id can follow. If the server's clock goes back, only the order
    within each stream is kept.

    Args:
        log: The log.
        after: The streams to read, each with the position after which reading begins.
    """

    def __init__(self, log: EventLog, after: Mapping[Stream, str]) -> None:
        self._log = log
        self._after = dict(after)
        self._held: list[Found] = []

    async def read(self, *, seconds: float, limit: int) -> list[Found]:
        """Return the next entries; none if none comes within ``seconds``."""
        if not self._held:
            found = await self._log.read_blocking(self._after, seconds=seconds, limit=limit)
            self._read(found)
            if not found or len(self._after) == 1:
                return found
            self._held = found
        through = max(position(entry.id)[0] for _, entry in self._held)
        await anyio.sleep(_SETTLED)
        known = await self._read_through(through, limit)
        self._held.sort(key=stream_order)
        given = [one for one in self._held if position(one[1].id) <= known]
        self._held = self._held[len(given) :]
        return given

    async def _read_through(self, through: int, limit: int) -> tuple[int, int]:
        """Read a page of each stream up to a millisecond; return the position that all reached."""
        known = (through, _LAST)
        for stream, after in list(self._after.items()):
            page = await self._log.read(
                after, stream=stream, through=f"{through}-{_LAST}", limit=limit
            )
            self._held += self._read([(stream, entry) for entry in page])
            if len(page) >= limit:  # the stream may have more
                known = min(known, position(page[-1].id))
        return known

    def _read(self, found: list[Found]) -> list[Found]:
        for stream, entry in found:
            self._after[stream] = entry.id
        return found
