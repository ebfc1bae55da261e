"""Export of a whole run to a file, and import into any server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import redis
import redis.asyncio

from trinity_schemas import ANNOUNCEMENT_TYPES, ContractError, Envelope, decode_envelope

from ..core import MonitorState
from ..core.announcements import is_current, subject
from ..errors import KeyConflict, TrinityError
from ..log import ORIGIN, DeadLetter, Entry, PageSize, RedisEventLog, Stream, list_runs, position
from ..log.page_size import PAGE_BYTES
from ..log.redis.replies import FIELD
from ..log.redis.run_index import add_run
from ..replay import page_of
from .continuation import common_part
from .format import (
    ArchiveMissing,
    Header,
    Line,
    LineStream,
    check_recording,
    line_of,
    lines_of_stream,
    lines_written,
    read_lines,
)
from .segments import Archive

T = TypeVar("T")

_AT_ONCE = 500
"""Most entries of one batch that is sent to the server."""


class RunExists(TrinityError):
    """The server already has a run of this id."""

    run_id: str
    text = (
        "run {run_id} is on this server already and is left as it is: import into another server, "
        "or another TRINITY_HOME"
    )


class Recording(NamedTuple):
    """Recorded log of a run; each part can be iterated repeatedly."""

    header: Header
    events: Iterable[Entry]
    announcements: Iterable[Entry]
    dead: Iterable[DeadLetter]


class _Entries:
    """Entries of one stream in a file, read anew each time, as a log may exceed the memory."""

    def __init__(self, path: Path, stream: Stream) -> None:
        self._path = path
        self._stream = stream

    def __iter__(self) -> Iterator[Entry]:
        return (line.entry for line in _lines_of(self._path, self._stream.value))


class _DeadLetters:
    """Dead letters in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[DeadLetter]:
        lines = _lines_of(self._path, "dead")
        return (DeadLetter(line.entry, line.reason or "") for line in lines)


def _lines_of(path: Path, stream: LineStream) -> Iterator[Line]:
    # A file with a digest is as it was written: in order, and each stream by itself.
    if read_lines(path)[0].digest is not None:
        return lines_of_stream(path, stream)
    return (line for line in read_lines(path)[1] if line.stream == stream)


async def whole_stream(
    log: RedisEventLog, stream: Stream, archive: Archive | None, after: str = ORIGIN
) -> AsyncGenerator[Entry, None]:
    """Yield every entry of a stream after a position: from the archive, then from the server."""
    end, page = None, PageSize(page_of(stream))
    while True:
        behind = after
        if archive is not None:
            # Later archived entries are of another log; the next leader sets them aside.
            through = (await common_part(archive, log, stream)).through
            for entry in archive.read(stream, after):
                if position(entry.id) > position(through):
                    break
                after = entry.id
                yield entry
        # The end at the first look: a run that goes on would else be followed for ever.
        end = end or await log.last_id(stream)
        while True:
            entries = await log.read(after, stream=stream, through=end, limit=page.limit)
            page.learn(entries)
            first_retained = await log.first_retained_id(stream)
            # The archive has the trimmed entries. If the server trims entries that a slow reader
            # has not reached, the reader continues in the archive.
            if first_retained is not None and position(after) < position(first_retained):
                break
            if not entries:
                return
            for entry in entries:
                yield entry
            after = entries[-1].id
        # A round without progress: neither the archive nor the server has what comes next.
        if after == behind:
            raise ArchiveMissing("trimmed", log.run_id, stream.value, before=str(first_retained))


async def record_run(
    log: RedisEventLog,
    path: Path,
    archive: Archive | None = None,
    line: Callable[[LineStream, Entry], Line] = line_of,
) -> int:
    """Write a run's whole log to a file; return the number of entries.

    Args:
        log: The run's log.
        path: The file.
        archive: Archive of the run; None without one.
        line: Makes the line of an entry.

    Raises:
        NotWritten: if the file cannot be written, or another process writes it.
        ArchiveMissing, BadRecording: if the archive cannot be read.
    """
    # A reducer may fold meanwhile, and recorded announcements must not exceed the recorded
    # position. Announcements up to here do not; each later one names the event that caused it.
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
    """Return True if an event after a position caused the announcement."""
    # What cannot be decoded names no cause, and is recorded.
    with suppress(ContractError):
        cause = getattr(decode_envelope(announcement.payload).event, "caused_by", reached)
        return position(cause) > position(reached)
    return False


def read_recording(path: Path) -> Recording:
    """Return the log of an exported file, which is checked once. Raises BadRecording."""
    return Recording(
        header=check_recording(path),
        events=_Entries(path, Stream.EVENTS),
        announcements=_Entries(path, Stream.ANNOUNCEMENTS),
        dead=_DeadLetters(path),
    )


async def import_recording(
    client: redis.asyncio.Redis, recording: Recording, *, page_bytes: int = PAGE_BYTES
) -> None:
    """Write a recorded run to a server, with its entry ids and bytes.

    The run appears atomically, because a running reducer would fold a partial log as new.

    Args:
        client: Connection to the server.
        recording: The recorded run.
        page_bytes: Bytes after which a pipeline takes no further entry.

    Raises:
        RunExists: if the server has a run of this id; the server is unchanged.
        KeyConflict: if it has a key of the run without the run; the server is unchanged.
    """
    run_id = recording.header.run_id
    log = RedisEventLog(client, run_id)
    if run_id in await list_runs(client) or await log.exists():
        raise RunExists(run_id)
    for key in _final_keys(log):
        if await client.exists(key):
            raise KeyConflict(key, "import", expected=run_id)
    try:
        await _write(client, log, recording, page_bytes)
        # Last of all: a listed run is folded at once.
        await add_run(client, run_id)
    except BaseException:
        # Partial keys would block the run id without a listed run.
        with anyio.CancelScope(shield=True), suppress(redis.RedisError, OSError):
            await client.delete(*_final_keys(log), *_temporary_keys(log))
        raise


def _temporary_keys(log: RedisEventLog) -> list[str]:
    """Return the temporary keys of the streams until they are complete."""
    return [f"{key}:coming" for key in _streams(log)]


def _streams(log: RedisEventLog) -> tuple[str, str, str]:
    return log.keys.events, log.keys.announcements, log.keys.dead


def _final_keys(log: RedisEventLog) -> tuple[str, ...]:
    return (*_streams(log), log.keys.current, log.keys.epoch, log.keys.position)


async def _write(
    client: redis.asyncio.Redis, log: RedisEventLog, recording: Recording, page_bytes: int
) -> None:
    server: Any = client
    keys, state = log.keys, MonitorState(run_id=log.run_id)
    current: dict[str, bytes] = {}
    events, announcements, dead = _temporary_keys(log)
    await server.delete(events, announcements, dead)  # left by an import that was killed
    async for _, envelope in _added(server, events, recording.events, page_bytes):
        state.epoch = max(state.epoch, envelope.epoch)
    async for entry, envelope in _added(server, announcements, recording.announcements, page_bytes):
        # Foreign entries are imported like all others; a reader ignores them.
        if isinstance(envelope.event, ANNOUNCEMENT_TYPES) and is_current(envelope, state):
            current[subject(envelope)] = entry.id.encode() + b" " + entry.payload
    for letters in _batches(recording.dead, lambda letter: letter.entry.payload, page_bytes):
        async with server.pipeline(transaction=False) as pipe:
            for entry, reason in letters:
                pipe.xadd(dead, {"id": entry.id, "reason": reason, "e": entry.payload})
            await pipe.execute()
    streams = zip(_temporary_keys(log), _streams(log), strict=True)
    # RENAME fails for a key that is not there, such as that of a stream without entries.
    there = [pair for pair in streams if await server.exists(pair[0])]
    async with server.pipeline(transaction=True) as pipe:
        for coming, key in there:
            pipe.execute_command("RENAME", coming, key)  # works on a cluster too, unlike rename()
        if current:
            pipe.hset(keys.current, mapping=current)
        pipe.set(keys.epoch, state.epoch)
        pipe.set(keys.position, recording.header.position)
        await pipe.execute()


def _batches(
    items: Iterable[T], payload_of: Callable[[T], bytes], page_bytes: int
) -> Iterator[list[T]]:
    """Yield batches that are bounded in number and in bytes."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += len(payload_of(item))
        if len(batch) == _AT_ONCE or nbytes >= page_bytes:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


async def _added(
    server: Any, key: str, entries: Iterable[Entry], page_bytes: int
) -> AsyncIterator[tuple[Entry, Envelope]]:
    """Append entries to a stream; yield each decodable entry after it was appended."""
    for batch in _batches(entries, lambda entry: entry.payload, page_bytes):
        async with server.pipeline(transaction=False) as pipe:
            for entry in batch:
                pipe.xadd(key, {FIELD: entry.payload}, id=entry.id)
            await pipe.execute()
        for entry in batch:
            with suppress(ContractError):
                yield entry, decode_envelope(entry.payload)
