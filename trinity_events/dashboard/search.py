"""Search of a log for events, newest first: it reads only the blocks that may have a match."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from msgspec import Struct

from trinity_schemas import Envelope, event_tag

from ..core import MonitorState
from ..core.fold_state import format_producer
from ..log import Entry, before, position
from ..replay import fold_each
from ..views import format_event
from .categories import BIT_OF_TAG, find_category, find_step
from .run_reader import InvalidQuery, RunReader

FOUND = 200
"""Maximum results of one search."""
SEARCHED = 24
"""Maximum blocks that one search reads; the result says where to continue."""


class Search(Struct, frozen=True, kw_only=True):
    """Conditions of a search, newest first."""

    types: tuple[str, ...] = ()
    producer: str = ""
    """Role, or role and rank."""
    step: int | None = None
    since: int = 0
    until: int = 2**62
    before: int | None = None
    """Number of an entry; results are before it."""
    limit: int = 50

    def check(self) -> None:
        """Raise InvalidQuery for a type that does not exist."""
        for tag in self.types:
            if tag not in BIT_OF_TAG:
                raise InvalidQuery("type", tag)

    def matches(self, envelope: Envelope, milliseconds: int) -> bool:
        """Return True if an event matches."""
        event, producer = envelope.event, envelope.producer
        return (
            self.since <= milliseconds <= self.until
            and (not self.types or event_tag(event) in self.types)
            and (not self.producer or self.producer in (producer.role, format_producer(producer)))
            and (self.step is None or find_step(event) == self.step)
        )


async def search_events(reader: RunReader, query: Search) -> dict[str, Any]:
    """Return matching events and announcements, newest first, and where to go on."""
    query.check()
    history = await reader.indexed()
    types = sum({BIT_OF_TAG[tag] for tag in query.types})
    wanted_lanes = sum(
        1 << number
        for number, lane in enumerate(history.lanes)
        if query.producer in (lane.name, lane.role)
    )
    most = min(max(1, query.limit), FOUND)
    results: list[list[Any]] = []
    end = history.number if query.before is None else min(query.before - 1, history.number)
    blocks, read = history.blocks, 0
    at = blocks.at_number(max(0, end - 1))
    while at >= 0 and len(results) < most and read < SEARCHED:
        block = blocks.all[at]
        # A block ends where the next one begins.
        following = blocks.all[at + 1].milliseconds if at + 1 < len(blocks.all) else history.last
        may = (
            (not types or block.types & types)
            and (not query.producer or block.lanes & wanted_lanes)
            and (query.step is None or block.least_step <= query.step <= block.greatest_step)
            and block.milliseconds <= query.until
            and following >= query.since
        )
        if may:
            read += 1
            count = min(block.entries, end - block.number)
            # Announcements are not in the stream of events: they follow from the fold of the block.
            start = await reader.at(block.number)
            entries = await reader.source.read(before(block.first), limit=max(count, 0))
            matching = await anyio.to_thread.run_sync(_matching, start.state, entries, query)
            # The fold goes forward, and results go backward.
            results += reversed(matching)
        end = block.number
        at -= 1
    more = results[most - 1][0] if len(results) >= most else (end + 1 if at >= 0 else None)
    return {
        "found": results[:most],
        "before": more,
        "until": history.blocks.all[at + 1].milliseconds if blocks.all else None,
    }


def _matching(state: MonitorState, entries: list[Entry], query: Search) -> list[list[Any]]:
    """Return the matching events and announcements of one block, oldest first."""
    results = []
    for entry, envelope, announcements, problem in fold_each(state, entries):
        milliseconds = position(entry.id)[0]
        if envelope is None:
            if not (query.types or query.producer) and query.step is None:
                reason = str(problem)[:300]
                results.append([state.entries, entry.id, milliseconds, "", "", None, -1, reason])
            continue
        results += [
            _search_row(state.entries, entry.id, message)
            for message in (envelope, *announcements)
            if query.matches(message, milliseconds)
        ]
    return results


def _search_row(number: int, entry_id: str, envelope: Envelope) -> list[Any]:
    event = envelope.event
    return [
        number,
        entry_id,
        position(entry_id)[0],
        format_producer(envelope.producer),
        event_tag(event),
        find_step(event),
        find_category(event),
        format_fields(entry_id, envelope),
    ]


def format_fields(entry_id: str, envelope: Envelope) -> str:
    """Return the fields of an event as ``tail`` prints them, without id, time and producer."""
    tag = event_tag(envelope.event)
    return format_event(entry_id, envelope).partition(f" {tag}")[2].strip()[:400]
