"""Follower of a run: every event, in order, from a position on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from msgspec import Struct

from ..log import ORIGIN, Entry, MergedReader, PageSize, Stream, before
from ..replay import page_of
from .context import SubscriptionContext
from .cursor import StreamCursor
from .delivered import Delivered

E = TypeVar("E", bound=Struct)


async def follow(reading: SubscriptionContext[E], start: str) -> AsyncIterator[Delivered[E]]:
    """Yield the events from ``start`` on, and then each new one.

    Raises:
        LogLost: if entries that follow the last one read are gone.
        DeadlineExceeded: if no event came in time.
    """
    reading.wait.renew()
    standing: list[Entry] = []
    if start == "current":
        after, standing = await reading.wait.retry(reading.current_announcements)
    elif start == "beginning":  # the oldest entry that is still on the server
        after = dict.fromkeys(reading.streams, ORIGIN)
    else:
        after = await reading.wait.retry(lambda: _positions(reading, start))
    places = _Cursors(reading, after, asked_for=start not in ("current", "beginning"))
    # An announcement that came between the two reads is in both: it is delivered once.
    seen = {(Stream.ANNOUNCEMENTS, entry.id) for entry in standing}
    for entry in standing:
        delivered = reading.filter.deliver(entry)
        if delivered is not None:
            yield delivered
            # After the yield: the time that the subscriber takes for an event is no wait.
            reading.wait.renew()
    while True:
        for stream, entry in await places.next():
            places.passed(stream, entry.id)
            is_duplicate = (stream, entry.id) in seen
            delivered = None if is_duplicate else reading.filter.deliver(entry)
            if delivered is not None:
                yield delivered
                reading.wait.renew()


async def _positions(reading: SubscriptionContext[E], start: str) -> dict[Stream, str]:
    """Return the position in each stream after which to read, to get all entries after one id.

    An event and an announcement may have the same id. Then the follower cannot know which of them
    was delivered last, and delivers the announcement, which follows the event, once more.
    """
    positions = dict.fromkeys(reading.streams, start)
    if len(reading.streams) > 1:
        there = [
            await reading.log.read(before(start), stream=stream, through=start, limit=1)
            for stream in reading.streams
        ]
        if all(there):
            positions[Stream.ANNOUNCEMENTS] = before(start)
    return positions


class _Cursors(Generic[E]):
    """Cursors of a follower, one for each of its streams."""

    def __init__(
        self, reading: SubscriptionContext[E], after: dict[Stream, str], *, asked_for: bool
    ) -> None:
        self._reading = reading
        self._places = {
            stream: StreamCursor(reading.log, stream, position, asked_for=asked_for)
            for stream, position in after.items()
        }
        self._ahead = MergedReader(reading.log, after)
        self._page = PageSize(min(page_of(stream) for stream in reading.streams))

    def passed(self, stream: Stream, entry_id: str) -> None:
        """Advance the cursor of a stream to a delivered entry."""
        self._places[stream].passed(entry_id)

    async def next(self) -> list[tuple[Stream, Entry]]:
        """Return the next entries, in the order of their ids.

        Raises:
            LogLost: if entries that follow the last one delivered are gone.
            DeadlineExceeded: if no entry came in time.
        """
        wait = self._reading.wait
        faults = wait.faults

        async def read() -> list[tuple[Stream, Entry]]:
            # After a fault this may be another server, such as a promoted replica.
            again = wait.faults > faults
            if again:
                after = {stream: place.after for stream, place in self._places.items()}
                # From the last delivered entries: what was read ahead is read again, of this
                # server.
                self._ahead = MergedReader(self._reading.log, after)
            for place in self._places.values():
                await place.check(now=again)
            return await self._ahead.read(seconds=self._reading.block(), limit=self._page.limit)

        while True:
            if batch := await wait.retry(read):
                self._page.learn([entry for _, entry in batch])
                return batch
