"""Last matching entries of a run, from the server and the archive."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from trinity_schemas import ContractError, Envelope, decode_envelope

from ..analysis.event_filter import EventFilter
from ..archive import Archive
from ..archive.export import whole_stream
from ..log import Entry, PageSize, RedisEventLog, Stream, before, position, stream_order
from ..log.merged_reader import Found
from ..replay import page_of, read_all
from ..views.terminal import print_err

T = TypeVar("T")
_COUNTED = 1_000_000
"""Maximum entries to count back in an archive, as their keys are in memory; for a larger number all
entries are printed."""


class Begin(NamedTuple):
    """Positions on the server after which the last matching entries begin."""

    after: dict[Stream, str]
    all_there: bool
    """False if a trimmed stream may lack entries after the first of the last matching ones."""


async def find_begin(log: RedisEventLog, lines: int | None, event_filter: EventFilter) -> Begin:
    """Return the position in each stream after which the last matching entries begin."""
    # Read first, so that what is published from now on is left to --follow.
    after = {stream: await log.last_id(stream) for stream in Stream}
    if lines == 0:
        return Begin(after, True)
    # At one position, the announcement follows the event.
    back = {stream: _read_back(log, stream, lines, event_filter) for stream in reversed(Stream)}
    count = 0
    begin = event_filter.since
    async for stream, entry in _merged(back, max):
        # All that would follow are older.
        if position(entry.id) < event_filter.since:
            break
        if is_wanted(entry, event_filter):
            after[stream] = before(entry.id)
            count += 1
            if count == lines:
                begin = position(entry.id)
                break
    # The streams are trimmed to different ids, so the other stream may have run out before.
    first_ids = [await log.first_retained_id(stream) for stream in Stream]
    return Begin(
        after, all(entry_id is None or position(entry_id) <= begin for entry_id in first_ids)
    )


async def last_entries(
    log: RedisEventLog, archive: Archive, begin: Begin, lines: int | None, event_filter: EventFilter
) -> AsyncIterator[Found]:
    """Yield the last matching entries of both streams, in the order of their ids.

    The entries in between are not kept, since they may exceed the memory.
    """
    # Position and stream, since an event and its announcement may have the same id.
    first = (0, 0), 0
    sources = partial(_from_server, log, dict(begin.after))
    if not begin.all_there and archive.folder.is_dir():
        sources = partial(_from_archive, log, archive, event_filter)
        # Twice through the archive: it can only be read forwards, and what matches may exceed the
        # memory.
        first = await _find_first(sources(), lines, event_filter)
    elif not begin.all_there:
        print_err(
            f"older entries of run {log.run_id} are archived in its checkpoint directory: "
            "name it with --checkpoint-root"
        )
    matches = (
        match async for match in _matching(sources(), event_filter) if stream_order(match) >= first
    )
    # Stop at the number asked for, although new entries may come.
    async for match in _limit(lines, matches):
        yield match


def _from_server(
    log: RedisEventLog, after: dict[Stream, str]
) -> dict[Stream, AsyncIterator[Entry]]:
    return {stream: read_all(log, stream, after[stream]) for stream in Stream}


def _from_archive(
    log: RedisEventLog, archive: Archive, event_filter: EventFilter
) -> dict[Stream, AsyncIterator[Entry]]:
    after = before(f"{event_filter.since[0]}-{event_filter.since[1]}")
    return {stream: whole_stream(log, stream, archive, after) for stream in Stream}


async def _find_first(
    sources: dict[Stream, AsyncIterator[Entry]], lines: int | None, event_filter: EventFilter
) -> tuple[tuple[int, int], int]:
    """Return the sort key of the first of the last matching entries."""
    if lines is None or lines > _COUNTED:
        return (0, 0), 0
    last: deque[tuple[tuple[int, int], int]] = deque(maxlen=lines)
    async for match in _matching(sources, event_filter):
        last.append(stream_order(match))
    return last[0] if last else ((0, 0), 0)


async def _matching(
    sources: dict[Stream, AsyncIterator[Entry]], event_filter: EventFilter
) -> AsyncIterator[Found]:
    """Yield the matching entries of the streams, in order."""
    async for stream, entry in _merged(sources, min):
        if position(entry.id) > event_filter.until:
            return
        if is_wanted(entry, event_filter):
            yield stream, entry


def is_wanted(entry: Entry, event_filter: EventFilter) -> bool:
    """Return True if an entry matches; an undecodable entry matches a filter of time alone."""
    if not event_filter.in_time(position(entry.id)):
        return False
    # Without decoding: a filter of time alone passes millions of entries.
    if not event_filter.has_conditions:
        return True
    envelope = try_decode(entry)
    return isinstance(envelope, Envelope) and event_filter.matches(envelope)


def try_decode(entry: Entry) -> Envelope | ContractError:
    """Return the envelope of an entry, or the error of its decoding."""
    try:
        return decode_envelope(entry.payload)
    except ContractError as error:
        return error


async def _read_back(
    log: RedisEventLog, stream: Stream, lines: int | None, event_filter: EventFilter
) -> AsyncIterator[Entry]:
    """Yield the entries of a stream up to the end of the filter, newest first."""
    most = page_of(stream)
    # For 20 lines, a page of 20 is one small reply.
    page = PageSize(most if lines is None else min(most, lines))
    milliseconds, number = event_filter.until
    # The default end is above what an id can hold, which the server would refuse.
    end = "+" if milliseconds >= 2**63 else f"{milliseconds}-{number}"
    inclusive = True
    while entries := await log.read_back(end, stream=stream, limit=page.limit, inclusive=inclusive):
        page.learn(entries)
        for entry in entries:
            yield entry
        end, inclusive = entries[-1].id, False


async def _merged(
    streams: dict[Stream, AsyncIterator[Entry]], first: Callable[..., Stream]
) -> AsyncIterator[Found]:
    """Yield the entries of both streams in the order of their ids; the newest first by ``max``."""
    heads = {stream: await anext(entries, None) for stream, entries in streams.items()}
    while there := {stream: entry for stream, entry in heads.items() if entry is not None}:
        stream = first(there, key=lambda stream: position(there[stream].id))
        yield stream, there[stream]
        heads[stream] = await anext(streams[stream], None)


async def _limit(count: int | None, entries: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield at most ``count`` entries; all if ``count`` is None."""
    remaining = count
    while remaining is None or remaining > 0:
        try:
            yield await anext(entries)
        except StopAsyncIteration:
            return
        remaining = None if remaining is None else remaining - 1
