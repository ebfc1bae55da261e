"""A follower of one's own: every event, in order, from a position on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from msgspec import Struct

from ..history import page_of
from ..log import ORIGIN, Entry, PageSize
from .delivered import Delivered
from .place import Place
from .reading import Reading

E = TypeVar("E", bound=Struct)


async def follow(reading: Reading[E], start: str) -> AsyncIterator[Delivered[E]]:
    """What there is from ``start`` on, and what comes.

    Raises:
        LogLost: when entries that follow what was read are gone.
        DeadlineExceeded: when nothing came in time.
    """
    reading.wait.renew()
    seen: set[str] = set()
    standing: list[Entry] = []
    if start == "current":
        after, standing = await reading.wait.ask(reading.standing)
        place = Place(reading.log, reading.stream, after, asked_for=False)
        seen = {entry.id for entry in standing}
    elif start == "beginning":  # of what is still on the server
        place = Place(reading.log, reading.stream, ORIGIN, asked_for=False)
    else:
        place = Place(reading.log, reading.stream, start, asked_for=True)
    for entry in standing:
        delivered = reading.wanted.deliver(entry)
        if delivered is not None:
            yield delivered
            reading.wait.renew()
    page = PageSize(page_of(reading.stream))
    while True:
        found = await _next(reading, place, page.limit)
        page.learn(found)
        for entry in found:
            place.passed(entry.id)
            delivered = None if entry.id in seen else reading.wanted.deliver(entry)
            if delivered is not None:
                yield delivered
                reading.wait.renew()


async def _next(reading: Reading[E], place: Place, limit: int) -> list[Entry]:
    faults = reading.wait.faults

    async def read() -> list[Entry]:
        # After a fault it may be another server, such as a replica that was promoted.
        await place.check(now=reading.wait.faults > faults)
        found = await reading.log.wait(
            {reading.stream: place.after}, seconds=reading.block(), limit=limit
        )
        return [entry for _, entry in found]

    while True:
        if found := await reading.wait.ask(read):
            return found
