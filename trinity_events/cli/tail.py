"""``trinity-events tail``."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from trinity_schemas import ContractError, decode_envelope, to_json

from ..history import read_all
from ..log import Entry, RedisEventLog, Stream, position
from ..views import event_line
from .options import Json, RedisUrl, RunArgument, log_of, print_json


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
        after: dict[Stream, str] = {}
        found: list[tuple[Stream, Entry]] = []
        for stream in Stream:
            last = [entry async for entry in read_all(log, stream)][-lines:] if lines else []
            after[stream] = last[-1].id if last else await log.last_id(stream)
            found += [(stream, entry) for entry in last]
        found.sort(key=lambda pair: position(pair[1].id))
        for stream, entry in found[-lines:] if lines else []:
            _print(stream, entry, as_json=as_json)
        while follow:
            await _print_new(log, after, as_json=as_json)


async def _print_new(log: RedisEventLog, after: dict[Stream, str], *, as_json: bool) -> None:
    for stream, entry in await log.wait(after, seconds=5):
        after[stream] = entry.id
        _print(stream, entry, as_json=as_json)


def _print(stream: Stream, entry: Entry, *, as_json: bool) -> None:
    try:
        envelope = decode_envelope(entry.payload)
    except ContractError as error:
        if as_json:
            print_json({"id": entry.id, "stream": stream.value, "undecodable": str(error)})
        else:
            print(f"{entry.id:<18} undecodable: {error}")
        return
    if as_json:
        print_json({"id": entry.id, "stream": stream.value, **to_json(envelope)})
    else:
        print(event_line(entry.id, envelope), flush=True)
