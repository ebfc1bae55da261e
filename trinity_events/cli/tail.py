"""``trinity-events tail``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, TypeVar

import anyio
import typer

from trinity_schemas import ContractError, decode_envelope, to_json

from ..history import page_of, read_all
from ..log import Entry, PageSize, RedisEventLog, Stream, before, position
from ..server import Wait
from ..views import event_line
from ..views.terminal import say
from .options import Json, RedisUrl, RunArgument, log_of, print_json

T = TypeVar("T")


def tail(
    run: RunArgument,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many of the last entries to print.")
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until interrupted.")
    ] = False,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Print a run's last events and announcements (marked »), in the order of their ids.

    Example: trinity-events tail demo-1 -n 50 --follow
    """
    anyio.run(_tail, redis_url, run, lines, follow, as_json)


async def _tail(redis_url: str | None, run: str, lines: int, follow: bool, as_json: bool) -> None:
    async with log_of(redis_url, run) as log:
        after = await _before_last(log, lines)
        forwards = {stream: read_all(log, stream, after[stream]) for stream in Stream}
        # No more than were asked for, although more may come meanwhile.
        async for stream, entry in _some(lines, _merged(forwards, min)):
            after[stream] = entry.id
            _print(stream, entry, as_json=as_json)
        page = PageSize(page_of(Stream.ANNOUNCEMENTS))
        wait = Wait(None, f"nothing more of run {log.run_id}")
        while follow:
            sys.stdout.flush()
            found = await wait.ask(partial(log.wait, after, seconds=5, limit=page.limit))
            page.learn([entry for _, entry in found])
            for stream, entry in found:
                after[stream] = entry.id
                _print(stream, entry, as_json=as_json)


async def _before_last(log: RedisEventLog, lines: int) -> dict[Stream, str]:
    """After which entry of each stream the last of both begin.

    Nothing but that is kept of them: they may be more than there is memory for.
    """
    after = {stream: await log.last_id(stream) for stream in Stream}
    # At one position the announcement comes last.
    back = {stream: _read_back(log, stream, lines) for stream in reversed(Stream)}
    async for stream, entry in _some(lines, _merged(back, max)):
        after[stream] = before(entry.id)
    return after


async def _read_back(log: RedisEventLog, stream: Stream, lines: int) -> AsyncIterator[Entry]:
    """Every entry of a stream, the newest first."""
    end, page = "+", PageSize(min(page_of(stream), lines))
    while found := await log.read_back(end, stream=stream, limit=page.limit):
        page.learn(found)
        for entry in found:
            yield entry
        end = found[-1].id


async def _merged(
    streams: dict[Stream, AsyncIterator[Entry]], first: Callable[..., Stream]
) -> AsyncIterator[tuple[Stream, Entry]]:
    """The entries of both streams, in the order of their ids."""
    heads = {stream: await anext(entries, None) for stream, entries in streams.items()}
    while there := {stream: entry for stream, entry in heads.items() if entry is not None}:
        stream = first(there, key=lambda one: position(there[one].id))
        yield stream, there[stream]
        heads[stream] = await anext(streams[stream], None)


async def _some(count: int, found: AsyncIterator[T]) -> AsyncIterator[T]:
    """So many of them at most."""
    for _ in range(count):
        try:
            yield await anext(found)
        except StopAsyncIteration:
            return


def _print(stream: Stream, entry: Entry, *, as_json: bool) -> None:
    try:
        envelope = decode_envelope(entry.payload)
    except ContractError as error:
        if as_json:
            print_json({"id": entry.id, "stream": stream.value, "undecodable": str(error)})
        else:
            say(f"{entry.id:<18} undecodable: {error}", lines=False)
        return
    if as_json:
        print_json({"id": entry.id, "stream": stream.value, **to_json(envelope)})
    else:
        say(event_line(entry.id, envelope), lines=False)
