"""A whole run as a file, and back on any server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import redis
import redis.asyncio

from trinity_schemas import ANNOUNCEMENT_TYPES, ContractError, Envelope, decode_envelope

from ..core import MonitorState
from ..core.current import is_current, subject
from ..errors import KeyConflict, TrinityError
from ..log import ORIGIN, DeadLetter, Entry, PageSize, RedisEventLog, Stream, list_runs, position
from ..log.page_size import PAGE_BYTES
from ..log.redis_replies import FIELD
from ..log.run_index import add_run
from ..replay import page_of
from .continuation import common_part
from .format import (
    ArchiveMissing,
    Header,
    Line,
    LineStream,
    line_of,
    lines_written,
    read_lines,
)
from .segments import Archive

T = TypeVar("T")

_AT_ONCE = 500


class RunExists(TrinityError):
    """The run that is to be imported is on the server already."""


class Recording(NamedTuple):
    """A run's log, of which each part can be gone through again and again."""

    header: Header
    events: Iterable[Entry]
    announcements: Iterable[Entry]
    dead: Iterable[DeadLetter]


class _Entries:
    """The entries of one stream in a file, read anew each time: a log may be larger than memory."""

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path = path
        self._stream = stream

    def __iter__(self) -> Iterator[Entry]:
        return (line.entry for line in _lines_of(self._path, self._stream.value))


class _DeadLetters:
    """The dead letters in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[DeadLetter]:
        lines = _lines_of(self._path, "dead")
        return (DeadLetter(line.entry, line.reason or "") for line in lines)


def _lines_of(path: Path, stream: LineStream) -> Iterator[Line]:
    return (line for line in read_lines(path)[1] if line.stream == stream)


async def whole_stream(
    log: RedisEventLog, stream: Stream, archive: Archive | None, after: str = ORIGIN
) -> AsyncIterator[Entry]:
    """Every entry of a stream after a position: the archive first, then what is on the server."""
    end, page = None, PageSize(page_of(stream))
    while True:
        behind = after
        if archive is not None:
            # What of it is of another log is set aside by the next leader.
            known = (await common_part(archive, log, stream)).known
            for entry in archive.read(stream, after):
                if position(entry.id) > position(known):
                    break
                after = entry.id
                yield entry
        end = end or await log.last_id(stream)
        while True:
            found = await log.read(after, stream=stream, through=end, limit=page.limit)
            page.learn(found)
            left = await log.first_retained_id(stream)
            # What is trimmed is in the archive, whose newest segments the server has too. A
            # reader that is slow may be overtaken: it goes on in the archive.
            if left is not None and position(after) < position(left):
                break
            if not found:
                return
            for entry in found:
                yield entry
            after = found[-1].id
        if after == behind:
            raise ArchiveMissing(
                f"{stream.value} of run {log.run_id} before {left} are no longer on the server: "
                "they are in its checkpoint directory, so name that with --checkpoint-root"
            )


async def record_run(
    log: RedisEventLog,
    path: Path,
    archive: Archive | None = None,
    line: Callable[[LineStream, Entry], Line] = line_of,
) -> int:
    """Write all of a run's log to a file; returns how many entries that are.

    Args:
        log: The run's log.
        path: The file.
        archive: What is kept of the log in files.
        line: Makes the line of an entry.

    Raises:
        NotWritten: when the file cannot be written, or another is writing it.
        ArchiveMissing, BadRecording: when what is kept in files cannot be had.
    """
    # A reducer may be at work: what it has announced must be of the position that is recorded.
    # Up to here it is; what comes after says itself which event made it true.
    certain = position(await log.last_id(Stream.ANNOUNCEMENTS))
    _, reached = await log.load()
    count = 0
    header = Header(run_id=log.run_id, position=reached)
    with lines_written(path, header) as write:
        async for entry in whole_stream(log, Stream.EVENTS, archive):
            write([line("events", entry)])
            count += 1
        async for entry in whole_stream(log, Stream.ANNOUNCEMENTS, archive):
            if position(entry.id) > certain and _is_of_later(entry, reached):
                break
            write([line("announcements", entry)])
            count += 1
        for entry, reason in await log.dead_letters():
            write([line_of("dead", entry, reason)])
            count += 1
    return count


def _is_of_later(announcement: Entry, reached: str) -> bool:
    """Whether an event after a position made it true. A retired version follows on what did."""
    with suppress(ContractError):
        cause = getattr(decode_envelope(announcement.payload).event, "caused_by", reached)
        return position(cause) > position(reached)
    return False


def read_recording(path: Path) -> Recording:
    """A file that ``export`` wrote, looked through once. Raises BadRecording."""
    header, lines = read_lines(path)
    for _ in lines:
        pass
    return Recording(
        header=header,
        events=_Entries(path, Stream.EVENTS),
        announcements=_Entries(path, Stream.ANNOUNCEMENTS),
        dead=_DeadLetters(path),
    )


async def import_recording(client: redis.asyncio.Redis, recording: Recording) -> None:
    """Put a recorded run on a server, entry ids and bytes as they were.

    All of it appears at once: a reducer that is there already would fold what has come as new.

    Raises:
        RunExists: when the server has a run of that name; nothing is changed.
        KeyConflict: when it has a key of that run, without the run; nothing is changed.
    """
    run_id = recording.header.run_id
    log = RedisEventLog(client, run_id)
    if run_id in await list_runs(client) or await log.exists():
        raise RunExists(
            f"run {run_id} is on this server already and is left as it is: "
            "import into another server, or another TRINITY_HOME"
        )
    for key in _written(log):
        if await client.exists(key):
            raise KeyConflict(
                f"{key} is on this server already, without run {run_id}: something else wrote to "
                "this key; rename or delete it, and import again"
            )
    try:
        await _write(client, log, recording)
        await add_run(client, run_id)
    except BaseException:
        # What is there would keep the name taken, and be listed nowhere.
        with anyio.CancelScope(shield=True), suppress(redis.RedisError, OSError):
            await client.delete(*_written(log), *_coming(log))
        raise


def _coming(log: RedisEventLog) -> list[str]:
    """Where the streams are until they are whole."""
    return [f"{key}:coming" for key in _streams(log)]


def _streams(log: RedisEventLog) -> tuple[str, str, str]:
    return log.keys.events, log.keys.announcements, log.keys.dead


def _written(log: RedisEventLog) -> tuple[str, ...]:
    return (*_streams(log), log.keys.current, log.keys.epoch, log.keys.position)


async def _write(client: redis.asyncio.Redis, log: RedisEventLog, recording: Recording) -> None:
    server: Any = client
    keys, state = log.keys, MonitorState(run_id=log.run_id)
    standing: dict[str, bytes] = {}
    events, announcements, dead = _coming(log)
    await server.delete(events, announcements, dead)  # of an import that was killed
    async for _, envelope in _added(server, events, recording.events):
        state.epoch = max(state.epoch, envelope.epoch)
    async for entry, envelope in _added(server, announcements, recording.announcements):
        # What something else put there is kept, as all of it; a reader passes it over.
        if isinstance(envelope.event, ANNOUNCEMENT_TYPES) and is_current(envelope, state):
            standing[subject(envelope)] = entry.id.encode() + b" " + entry.payload
    for letters in _batches(recording.dead, lambda letter: letter.entry.payload):
        async with server.pipeline(transaction=False) as pipe:
            for entry, reason in letters:
                pipe.xadd(dead, {"id": entry.id, "reason": reason, "e": entry.payload})
            await pipe.execute()
    streams = zip(_coming(log), _streams(log), strict=True)
    there = [pair for pair in streams if await server.exists(pair[0])]
    async with server.pipeline(transaction=True) as pipe:
        for coming, key in there:
            pipe.execute_command("RENAME", coming, key)  # of a cluster too, unlike rename()
        if standing:
            pipe.hset(keys.current, mapping=standing)
        pipe.set(keys.epoch, state.epoch)
        pipe.set(keys.position, recording.header.position)
        await pipe.execute()


def _batches(found: Iterable[T], payload_of: Callable[[T], bytes]) -> Iterator[list[T]]:
    """What was found, so much at once as is bounded in number and in bytes."""
    batch: list[T] = []
    nbytes = 0
    for one in found:
        batch.append(one)
        nbytes += len(payload_of(one))
        if len(batch) == _AT_ONCE or nbytes >= PAGE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


async def _added(
    server: Any, key: str, entries: Iterable[Entry]
) -> AsyncIterator[tuple[Entry, Envelope]]:
    """Put entries into a stream; yields those that can be decoded, once they are there."""
    for batch in _batches(entries, lambda entry: entry.payload):
        async with server.pipeline(transaction=False) as pipe:
            for entry in batch:
                pipe.xadd(key, {FIELD: entry.payload}, id=entry.id)
            await pipe.execute()
        for entry in batch:
            with suppress(ContractError):
                yield entry, decode_envelope(entry.payload)
