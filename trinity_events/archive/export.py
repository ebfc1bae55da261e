"""A whole run as a file, and back on any server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import redis
import redis.asyncio
from msgspec import Struct

from trinity_schemas import ContractError, decode_envelope

from ..core import MonitorState
from ..core.standing import stands, subject
from ..errors import TrinityError
from ..history import PAGE
from ..log import ORIGIN, DeadLetter, Entry, RedisEventLog, Stream, list_runs, position
from ..log.index import add_run
from ..log.raw import FIELD
from .format import ArchiveMissing, Header, Line, line_of, read_lines
from .segments import Archive

_AT_ONCE = 500


class RunExists(TrinityError):
    """The run that is to be imported is on the server already."""


class Recording(Struct, frozen=True, kw_only=True):
    """A run's log in memory: what a file, or a server with its archive, holds of it."""

    header: Header
    events: list[Entry]
    announcements: list[Entry]
    dead: list[DeadLetter]

    def lines(self) -> Iterator[Line]:
        """The lines of its file."""
        for entry in self.events:
            yield line_of("events", entry)
        for entry in self.announcements:
            yield line_of("announcements", entry)
        for entry, reason in self.dead:
            yield line_of("dead", entry, reason)


async def whole_stream(
    log: RedisEventLog, stream: Stream, archive: Archive | None
) -> AsyncIterator[Entry]:
    """Every entry of a stream: the archive first, then what is still on the server."""
    after, end = ORIGIN, None
    while True:
        behind = after
        if archive is not None:
            for entry in archive.read(stream, after):
                after = entry.id
                yield entry
        end = end or await log.last_id(stream)
        while True:
            found = await log.read(after, stream=stream, through=end, limit=PAGE)
            left = await log.first_left(stream)
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


async def record_run(log: RedisEventLog, archive: Archive | None = None) -> Recording:
    """All of a run's log."""
    # A reducer may be at work: what it has announced must be of the position that is recorded.
    while True:
        _, reached = await log.load()
        announced = position(await log.last_id(Stream.ANNOUNCEMENTS))
        if (await log.load())[1] == reached:
            break
    announcements = whole_stream(log, Stream.ANNOUNCEMENTS, archive)
    return Recording(
        header=Header(run_id=log.run_id, position=reached),
        events=[entry async for entry in whole_stream(log, Stream.EVENTS, archive)],
        announcements=[e async for e in announcements if position(e.id) <= announced],
        dead=await log.dead_letters(),
    )


def read_recording(path: Path) -> Recording:
    """A file that ``export`` wrote. Raises BadRecording."""
    header, lines = read_lines(path)
    recording = Recording(header=header, events=[], announcements=[], dead=[])
    for line in lines:
        if line.stream == "dead":
            recording.dead.append(DeadLetter(line.entry, line.reason or ""))
        else:
            getattr(recording, line.stream).append(line.entry)
    return recording


async def import_recording(client: redis.asyncio.Redis, recording: Recording) -> None:
    """Put a recorded run on a server, entry ids and bytes as they were.

    Raises:
        RunExists: when the server has a run of that name; nothing is changed.
    """
    run_id = recording.header.run_id
    log = RedisEventLog(client, run_id)
    if run_id in await list_runs(client) or await log.exists():
        raise RunExists(
            f"run {run_id} is on this server already and is left as it is: "
            "import into another server, or another TRINITY_HOME"
        )
    try:
        await _write(client, log, recording)
        await add_run(client, run_id)
    except BaseException:
        # What is half there would keep the name taken, and be listed nowhere.
        with anyio.CancelScope(shield=True), suppress(redis.RedisError, OSError):
            keys = log.keys
            written = (keys.events, keys.announcements, keys.dead, keys.current)
            await client.delete(*written, keys.epoch, keys.position)
        raise


async def _write(client: redis.asyncio.Redis, log: RedisEventLog, recording: Recording) -> None:
    keys = log.keys
    server: Any = client
    for key, entries in (
        (keys.events, recording.events),
        (keys.announcements, recording.announcements),
    ):
        for first in range(0, len(entries), _AT_ONCE):
            async with server.pipeline(transaction=False) as pipe:
                for entry in entries[first : first + _AT_ONCE]:
                    pipe.xadd(key, {FIELD: entry.payload}, id=entry.id)
                await pipe.execute()
    async with server.pipeline(transaction=True) as pipe:
        for entry, reason in recording.dead:
            pipe.xadd(keys.dead, {"id": entry.id, "reason": reason, "e": entry.payload})
        state = MonitorState(run_id=log.run_id, epoch=_last_epoch(recording))
        for entry in recording.announcements:
            try:
                envelope = decode_envelope(entry.payload)
            except ContractError:
                continue
            if stands(envelope, state):
                value = entry.id.encode() + b" " + entry.payload
                pipe.hset(keys.current, subject(envelope), value)
        pipe.set(keys.epoch, state.epoch)
        pipe.set(keys.position, recording.header.position)
        await pipe.execute()


def _last_epoch(recording: Recording) -> int:
    epochs = [0]
    for entry in recording.events:
        try:
            epochs.append(decode_envelope(entry.payload).epoch)
        except ContractError:
            continue
    return max(epochs)
