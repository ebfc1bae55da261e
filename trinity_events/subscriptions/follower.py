"""A follower of one's own: every event, in order, from a position on."""

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
    """What there is from ``start`` on, and what comes.

    Raises:
        LogLost: when entries that follow what was read are gone.
        DeadlineExceeded: when nothing came in time.
    """
    reading.wait.renew()
    standing: list[Entry] = []
    if start == "current":
        after, standing = await reading.wait.ask(reading.current_announcements)
    elif start == "beginning":  # of what is still on the server
        after = dict.fromkeys(reading.streams, ORIGIN)
    else:
        after = await reading.wait.ask(lambda: _positions(reading, start))
    places = _Cursors(reading, after, asked_for=start not in ("current", "beginning"))
    seen = {(Stream.ANNOUNCEMENTS, entry.id) for entry in standing}
    for entry in standing:
        delivered = reading.filter.deliver(entry)
        if delivered is not None:
            yield delivered
            reading.wait.renew()
    while True:
        for stream, entry in await places.next():
            places.passed(stream, entry.id)
            known = (stream, entry.id) in seen
            delivered = None if known else reading.filter.deliver(entry)
            if delivered is not None:
                yield delivered
                reading.wait.renew()


async def _positions(reading: SubscriptionContext[E], start: str) -> dict[Stream, str]:
    """Return where each stream is to be read from, for all that follows one id.

    An event and an announcement may have the same id. Which of them was given last is not known
    then: the announcement, which follows the event, is given once more.
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
    """The place of a follower in each of its streams, and what comes next of them."""

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
        """Note that an entry was given."""
        self._places[stream].passed(entry_id)

    async def next(self) -> list[tuple[Stream, Entry]]:
        """Return what comes next, in the order of its ids.

        Raises:
            LogLost: when entries that follow what was given are gone.
            DeadlineExceeded: when nothing came in time.
        """
        wait = self._reading.wait
        faults = wait.faults

        async def read() -> list[tuple[Stream, Entry]]:
            # After a fault it may be another server, such as a replica that was promoted.
            again = wait.faults > faults
            if again:
                after = {stream: place.after for stream, place in self._places.items()}
                self._ahead = MergedReader(self._reading.log, after)
            for place in self._places.values():
                await place.check(now=again)
            return await self._ahead.read(seconds=self._reading.block(), limit=self._page.limit)

        while True:
            if found := await wait.ask(read):
                self._page.learn([entry for _, entry in found])
                return found
