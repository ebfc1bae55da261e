"""``trinity-events tail``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import anyio
import redis.asyncio
import typer
from msgspec import Struct

from trinity_schemas import (
    EVENT_TYPES,
    ContractError,
    event_tag,
    to_json,
)

from ..analysis.event_filter import EventFilter
from ..archive import Archive
from ..errors import TrinityError
from ..log import (
    Entry,
    MergedReader,
    PageSize,
    RedisEventLog,
    Stream,
    require_run,
)
from ..log.merged_reader import Found
from ..log.redis.run_index import nearest_name
from ..replay import page_of
from ..server import Deadline, server_clock
from ..views import format_event
from ..views.cloudevents import build_cloudevent
from ..views.documents import UndecodableLine
from ..views.terminal import print_out
from .last_entries import find_begin, is_wanted, last_entries, try_decode
from .options import (
    CheckpointRoot,
    Json,
    OptionalRun,
    RedisUrl,
    checkpoint_root,
    open_client,
    print_json,
)
from .times import moment

Format = Literal["text", "json", "cloudevents"]
LINES = 20
"""Number of entries that are printed without --lines and --since."""


class UnknownType(TrinityError):
    """There is no event of this type.

    Attributes:
        name: The type.
        nearest: Type of the most similar name; None if none is similar.
        types: All types.
    """

    name: str
    nearest: str | None
    types: tuple[str, ...]

    def __str__(self) -> str:
        meant = f"is {self.nearest} meant?"
        if self.nearest is None:
            meant = f"there are {', '.join(self.types)}"
        return f"there is no event type {self.name!r}: {meant}"


class BadFilter(TrinityError):
    """The options contradict each other, or one of them is invalid.

    Attributes:
        fault: The options.
        value: Value of the option.
    """

    fault: Literal["format", "follow", "step"]
    value: str = ""
    texts: ClassVar = {
        "format": "--json and --format {value} contradict each other: leave one of them out",
        "follow": "--follow prints new entries, and --until ends before them: leave one of them "
        "out",
        "step": "--step takes a step, such as 40, or steps, such as 40-60: not {value!r}",
    }


class _TailOptions(Struct, frozen=True, kw_only=True):
    """Options of ``tail``."""

    lines: int | None = LINES
    types: tuple[str, ...] = ()
    producers: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    follow: bool = False
    form: Format = "text"


def tail(
    run: OptionalRun = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            help="Number of last entries to print; by default 20, or all since --since.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new entries, until interrupted.")
    ] = False,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type", "-t", help="Only events of these types, such as step-ready,step-failed."
        ),
    ] = None,
    producers: Annotated[
        list[str] | None,
        typer.Option(
            "--producer", "-p", help="Only from this role (explorer), process (explorer-0) or host."
        ),
    ] = None,
    steps: Annotated[
        list[str] | None,
        typer.Option("--step", "-s", metavar="N|N-M", help="Only about these training steps."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|ID",
            help="Only from here on: 18:29, '2026-11-22 18:29', 10m (ago), or an entry id.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME|ID", help="Only up to here.", show_default=False),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Form of each entry: text (the default), json, or cloudevents (1.0, as JSON).",
            show_default=False,
        ),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Print a run's last events and announcements (marked »), in the order of their ids.

    An option that is repeated matches any of its values. Entries that the server no longer has
    are read from the archive.

    Example: trinity-events tail demo-1 -n 50 --follow

    Example: trinity-events tail --type save-failed --type step-failed --since 10m

    Example: trinity-events tail demo-1 --format cloudevents --follow
    """
    if lines is None and since is None:
        lines = LINES
    options = _TailOptions(
        lines=lines,
        types=tuple(types or ()),
        producers=tuple(producers or ()),
        steps=tuple(steps or ()),
        since=since,
        until=until,
        follow=follow,
        form=form or ("json" if as_json else "text"),
    )
    if as_json and form not in (None, "json"):
        raise BadFilter("format", form)
    if follow and until is not None:
        raise BadFilter("follow")
    anyio.run(_tail, redis_url, run, checkpoint_root(root), options)


async def _tail(redis_url: str | None, run: str | None, root: Path, options: _TailOptions) -> None:
    async with open_client(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        event_filter = await _filter(client, log, options)
        begin = await find_begin(log, options.lines, event_filter)
        after = dict(begin.after)
        archive = Archive(root / log.run_id, log.run_id)
        async for stream, entry in last_entries(log, archive, begin, options.lines, event_filter):
            after[stream] = entry.id
            _print(log.run_id, stream, entry, options.form)
        if options.follow:
            await _follow(log, after, event_filter, options.form)


async def _follow(
    log: RedisEventLog, after: dict[Stream, str], event_filter: EventFilter, form: Format
) -> None:
    # The smaller page of both: an announcement lists the saves of all ranks.
    ahead, page = MergedReader(log, after), PageSize(page_of(Stream.ANNOUNCEMENTS))
    # Without a deadline: an outage of the server does not end what follows a run.
    wait = Deadline(None, f"nothing more of run {log.run_id}")
    faults = wait.faults

    async def read() -> list[Found]:
        nonlocal ahead, faults
        if wait.faults > faults:  # read again what was read and not printed
            ahead, faults = MergedReader(log, after), wait.faults
        return await ahead.read(seconds=5, limit=page.limit)

    while True:
        # Output to a pipe is buffered: its reader would wait for entries that were printed.
        sys.stdout.flush()
        entries = await wait.retry(read)
        page.learn([entry for _, entry in entries])
        for stream, entry in entries:
            after[stream] = entry.id
            if is_wanted(entry, event_filter):
                _print(log.run_id, stream, entry, form)


async def _filter(
    client: redis.asyncio.Redis, log: RedisEventLog, options: _TailOptions
) -> EventFilter:
    """Return the filter of the options. Raises BadFilter, UnknownType and BadTime."""
    bounds = {}
    if options.since is not None or options.until is not None:
        # The clock that stamped the entries; this host may have another time.
        now = await server_clock(client, log.keys.events)
        if options.since is not None:
            bounds["since"] = moment(options.since, now)
        if options.until is not None:
            bounds["until"] = moment(options.until, now, end=True)
    return EventFilter(
        types=frozenset(_known_type(name) for given in options.types for name in given.split(",")),
        producers=frozenset(options.producers),
        steps=tuple(_steps(text) for text in options.steps),
        **bounds,
    )


def _known_type(name: str) -> str:
    tags = [event_tag(event_type) for event_type in EVENT_TYPES]
    if name in tags:
        return name
    raise UnknownType(name, nearest_name(name, tags), tuple(sorted(tags)))


def _steps(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        return range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise BadFilter("step", text) from None


def _print(run_id: str, stream: Stream, entry: Entry, form: Format) -> None:
    envelope = try_decode(entry)
    if form == "cloudevents":
        print_json(build_cloudevent(run_id, stream, entry, envelope))
    elif isinstance(envelope, ContractError):
        if form == "json":
            print_json(UndecodableLine(id=entry.id, stream=stream.value, undecodable=str(envelope)))
        else:
            print_out(f"{entry.id:<18} undecodable: {envelope}", lines=False)
    elif form == "json":
        print_json({"id": entry.id, "stream": stream.value, **to_json(envelope)})
    else:
        print_out(format_event(entry.id, envelope), lines=False)
