"""Reader of several streams of a log, which merges their entries by id."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from .base import Entry, EventLog, Stream
from .position import position

_SETTLED = 0.002
"""Seconds after which the server's clock is past the millisecond of an entry just read."""
# Largest number of an entry within one millisecond.
_LAST = 2**64 - 1

Found = tuple[Stream, Entry]


def stream_order(stream_entry: Found) -> tuple[tuple[int, int], int]:
    """Return the sort key of an entry: at one id, the announcement follows the event."""
    stream, entry = stream_entry
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
        self._pending: list[Found] = []

    async def read(self, *, seconds: float, limit: int) -> list[Found]:
        """Return the next entries; none if none comes within ``seconds``."""
        if not self._pending:
            batch = await self._log.read_blocking(self._after, seconds=seconds, limit=limit)
            self._read(batch)
            # One stream has its order already, so nothing is held back.
            if not batch or len(self._after) == 1:
                return batch
            self._pending = batch
        through = max(position(entry.id)[0] for _, entry in self._pending)
        # Entries of the same millisecond may still come, in either stream, until the clock is past
        # it.
        await anyio.sleep(_SETTLED)
        reached = await self._read_through(through, limit)
        self._pending.sort(key=stream_order)
        given = [
            stream_entry
            for stream_entry in self._pending
            if position(stream_entry[1].id) <= reached
        ]
        self._pending = self._pending[len(given) :]
        return given

    async def _read_through(self, through: int, limit: int) -> tuple[int, int]:
        """Read a page of each stream up to a millisecond; return the position that all reached."""
        reached = (through, _LAST)
        for stream, after in list(self._after.items()):
            page = await self._log.read(
                after, stream=stream, through=f"{through}-{_LAST}", limit=limit
            )
            self._pending += self._read([(stream, entry) for entry in page])
            if len(page) >= limit:  # the stream may have more
                reached = min(reached, position(page[-1].id))
        return reached

    def _read(self, batch: list[Found]) -> list[Found]:
        for stream, entry in batch:
            self._after[stream] = entry.id
        return batch
