"""The last entries of a run that are asked for, from the server and the archive."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from trinity_schemas import ContractError, Envelope, decode_envelope

from ..archive import Archive
from ..archive.export import whole_stream
from ..core.event_filter import EventFilter
from ..log import Entry, PageSize, RedisEventLog, Stream, before, position, stream_order
from ..replay import page_of, read_all
from ..views.terminal import tell

T = TypeVar("T")
Found = tuple[Stream, Entry]

_COUNTED = 1_000_000
"""Entries of an archive that are looked back on; where more are asked for, all are given."""


class Begin(NamedTuple):
    """Positions on the server after which the last entries begin that are asked for."""

    after: dict[Stream, str]
    all_there: bool
    """False where fewer are left than are asked for, and a stream was trimmed."""


async def begin_of_last(log: RedisEventLog, lines: int | None, wanted: EventFilter) -> Begin:
    """Return after which entry of each stream the last ones begin, as far as they are there."""
    after = {stream: await log.last_id(stream) for stream in Stream}
    if lines == 0:
        return Begin(after, True)
    # At one position the announcement comes last.
    back = {stream: _read_back(log, stream, lines, wanted) for stream in reversed(Stream)}
    found = 0
    async for stream, entry in _merged(back, max):
        if position(entry.id) < wanted.since:
            return Begin(after, True)
        if is_wanted(entry, wanted):
            after[stream] = before(entry.id)
            found += 1
            if found == lines:
                return Begin(after, True)
    left = [await log.first_retained_id(stream) for stream in Stream]
    return Begin(after, all(one is None or position(one) <= wanted.since for one in left))


async def last_entries(
    log: RedisEventLog, archive: Archive, begin: Begin, lines: int | None, wanted: EventFilter
) -> AsyncIterator[Found]:
    """Yield the last entries that are asked for, in the order of their ids, of both streams.

    Of the entries in between nothing is kept: they may be more than there is memory for.
    """
    first = (0, 0), 0
    sources = partial(_from_server, log, dict(begin.after))
    if not begin.all_there and archive.folder.is_dir():
        sources = partial(_from_archive, log, archive, wanted)
        first = await _first_of_last(sources(), lines, wanted)
    elif not begin.all_there:
        tell(
            f"older entries of run {log.run_id} are archived in its checkpoint directory: "
            "name that with --checkpoint-root"
        )
    found = (one async for one in _wanted(sources(), wanted) if stream_order(one) >= first)
    # No more than were asked for, although more may come meanwhile.
    async for one in _some(lines, found):
        yield one


def _from_server(
    log: RedisEventLog, after: dict[Stream, str]
) -> dict[Stream, AsyncIterator[Entry]]:
    return {stream: read_all(log, stream, after[stream]) for stream in Stream}


def _from_archive(
    log: RedisEventLog, archive: Archive, wanted: EventFilter
) -> dict[Stream, AsyncIterator[Entry]]:
    after = before(f"{wanted.since[0]}-{wanted.since[1]}")
    return {stream: whole_stream(log, stream, archive, after) for stream in Stream}


async def _first_of_last(
    sources: dict[Stream, AsyncIterator[Entry]], lines: int | None, wanted: EventFilter
) -> tuple[tuple[int, int], int]:
    """Return the place of the first of the last entries that are asked for."""
    if lines is None or lines > _COUNTED:
        return (0, 0), 0
    last: deque[tuple[tuple[int, int], int]] = deque(maxlen=lines)
    async for one in _wanted(sources, wanted):
        last.append(stream_order(one))
    return last[0] if last else ((0, 0), 0)


async def _wanted(
    sources: dict[Stream, AsyncIterator[Entry]], wanted: EventFilter
) -> AsyncIterator[Found]:
    """Yield what of the streams is asked for, in order."""
    async for stream, entry in _merged(sources, min):
        if position(entry.id) > wanted.until:
            return
        if is_wanted(entry, wanted):
            yield stream, entry


def is_wanted(entry: Entry, wanted: EventFilter) -> bool:
    """Return True if an entry is asked for; one that cannot be decoded is, where only time is."""
    if not wanted.in_time(position(entry.id)):
        return False
    if not wanted.asks:
        return True
    envelope = decoded(entry)
    return isinstance(envelope, Envelope) and wanted.wants(envelope)


def decoded(entry: Entry) -> Envelope | ContractError:
    """Return the envelope of an entry, or why it has none."""
    try:
        return decode_envelope(entry.payload)
    except ContractError as error:
        return error


async def _read_back(
    log: RedisEventLog, stream: Stream, lines: int | None, wanted: EventFilter
) -> AsyncIterator[Entry]:
    """Every entry of a stream up to the end of what is asked for, the newest first."""
    most = page_of(stream)
    page = PageSize(most if lines is None else min(most, lines))
    milliseconds, number = wanted.until
    end = "+" if milliseconds >= 2**63 else f"{milliseconds}-{number}"
    inclusive = True
    while found := await log.read_back(end, stream=stream, limit=page.limit, inclusive=inclusive):
        page.learn(found)
        for entry in found:
            yield entry
        end, inclusive = found[-1].id, False


async def _merged(
    streams: dict[Stream, AsyncIterator[Entry]], first: Callable[..., Stream]
) -> AsyncIterator[Found]:
    """The entries of both streams, in the order of their ids."""
    heads = {stream: await anext(entries, None) for stream, entries in streams.items()}
    while there := {stream: entry for stream, entry in heads.items() if entry is not None}:
        stream = first(there, key=lambda one: position(there[one].id))
        yield stream, there[stream]
        heads[stream] = await anext(streams[stream], None)


async def _some(count: int | None, found: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield at most ``count`` of them; all where there is no number."""
    left = count
    while left is None or left > 0:
        try:
            yield await anext(found)
        except StopAsyncIteration:
            return
        left = None if left is None else left - 1
