"""Sources of a run's log: its server and archive, or a recorded log."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread
import redis.asyncio

from ..analysis.causes import LiveFacts
from ..archive import Archive, ArchiveMissing, read_recording
from ..archive.export import whole_stream
from ..core import MonitorState
from ..live_facts import read_live_facts
from ..log import ORIGIN, DeadLetter, Entry, RedisEventLog, Stream, position
from ..record.reader import RolloutRecord
from ..replay import PAGE, load_monitor
from .recorded_events import FileEvents, RecordedEvents, StoredEvents

_BLOCKS = 5.0
"""Seconds for which one read waits on the server for new entries."""
LETTERS = 50
"""Dead letters that are shown, the last ones."""
_CURSORS = 4
"""Places of a recorded log from which it is read on."""


class Beginning(NamedTuple):
    """State at which an index begins, with the times of the first and the last entry."""

    state: MonitorState
    begin: int
    end: int
    note: str | None = None
    """Reason for which the index does not begin with the log."""
    entries: int = 0
    """Entries that follow; 0 if they are not counted."""


class DashboardSource(Protocol):
    """Log of one run, which a dashboard reads and never writes."""

    run_id: str
    is_live: bool
    """True if entries may follow."""
    record: RolloutRecord | None
    """Record of the run's rollouts, if the run's folder is at hand or the run is simulated."""

    async def begin(self) -> Beginning:
        """Return the state before the first readable entry."""
        ...

    async def read(self, after: str, *, through: str = "+", limit: int = 1000) -> list[Entry]:
        """Return up to ``limit`` entries after a position."""
        ...

    async def wait(self, after: str) -> list[Entry]:
        """Return entries after a position; wait some seconds while there are none."""
        ...

    async def read_last(self, limit: int) -> list[Entry]:
        """Return up to ``limit`` entries at the end of the log, in its order."""
        ...

    async def newest_state(self) -> MonitorState | None:
        """Return a recent state that costs little to load; None if there is none."""
        ...

    async def live_facts(self) -> LiveFacts:
        """Return the facts about processes and server that no event has."""
        ...

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the last dead letters, at most :data:`LETTERS`."""
        ...

    def close(self) -> None:
        """Free the source's resources."""
        ...


class ServerSource:
    """Log on a server, with the archive of trimmed entries. It sends commands that read, alone.

    Args:
        client: Client of the server, for example as the user ``viewer``.
        run_id: The run.
        archive: Archive of the run, if its folder is at hand.
    """

    is_live = True

    def __init__(self, client: redis.asyncio.Redis, run_id: str, archive: Archive | None) -> None:
        self.run_id = run_id
        self._client = client
        self._log = RedisEventLog(client, run_id)
        self.record = None if archive is None else RolloutRecord(archive.folder.parent, run_id)
        self._archive = archive if archive is not None and archive.folder.is_dir() else None
        self._first_retained: str | None = None

    async def begin(self) -> Beginning:
        """Return the state before the first readable entry."""
        log = self._log
        end = position(await log.last_id())[0]
        self._first_retained = await log.first_retained_id(Stream.EVENTS)
        first = await self._first_archived() if self._first_retained is not None else None
        # The log is whole: nothing was trimmed, or the archive has what was.
        if self._first_retained is None or first is not None:
            entries = [first] if first is not None else await log.read(limit=1)
            begin = position(entries[0].id)[0] if entries else end
            return Beginning(MonitorState(run_id=self.run_id), begin, end)
        # It lacks entries before the first one retained: the index begins at the snapshot.
        self._archive = None
        state = (await load_monitor(log)).monitor.state
        note = (
            f"Entries before {state.position} are archived: name the folder of the checkpoints "
            "with --checkpoint-root to see them."
        )
        return Beginning(state, position(state.position)[0], end, note)

    async def _first_archived(self) -> Entry | None:
        if self._archive is None:
            return None
        return await anyio.to_thread.run_sync(self._archive.first, Stream.EVENTS)

    async def read(self, after: str, *, through: str = "+", limit: int = 1000) -> list[Entry]:
        """Return up to ``limit`` entries after a position, archived ones included."""
        if self._first_retained is not None and position(after) < position(self._first_retained):
            return await self._read_archived(after, through, limit)
        entries = await self._log.read(after, through=through, limit=limit)
        first_retained = (
            await self._log.first_retained_id(Stream.EVENTS)
            if not entries
            else self._first_retained
        )
        # The reducer has trimmed the stream since: what was asked for is in the archive by now.
        if first_retained != self._first_retained:
            self._first_retained = first_retained
            return await self.read(after, through=through, limit=limit)
        return entries

    async def _read_archived(self, after: str, through: str, limit: int) -> list[Entry]:
        entries: list[Entry] = []
        async for entry in whole_stream(self._log, Stream.EVENTS, self._archive, after):
            if through != "+" and position(entry.id) > position(through):
                break
            entries.append(entry)
            if len(entries) >= limit:
                break
        return entries

    async def wait(self, after: str) -> list[Entry]:
        """Return entries after a position; wait some seconds while there are none."""
        entries = await self._log.read_blocking({Stream.EVENTS: after}, seconds=_BLOCKS)
        return [entry for _, entry in entries]

    async def read_last(self, limit: int) -> list[Entry]:
        """Return up to ``limit`` entries that are on the server, the last ones, in their order."""
        entries: list[Entry] = []
        while len(entries) < limit:
            # Backwards from the end: the number of entries before it is not known.
            before_these = entries[-1].id if entries else "+"
            page = await self._log.read_back(
                before_these, limit=min(PAGE, limit - len(entries)), inclusive=not entries
            )
            if not page:
                break
            entries += page
        return entries[::-1]

    async def newest_state(self) -> MonitorState | None:
        """Return the state of the reducer's last snapshot; None without one."""
        # Without a snapshot, the state would have to be folded from the beginning.
        snapshot, _ = await self._log.load()
        if snapshot is None:
            return None
        return (await load_monitor(self._log)).monitor.state

    async def live_facts(self) -> LiveFacts:
        """Return the facts of this moment."""
        return await read_live_facts(self._client, self.run_id)

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the last dead letters of the server, at most :data:`LETTERS`."""
        return await self._log.dead_letters(last=LETTERS)

    def close(self) -> None:
        """Do nothing: the client belongs to the caller."""


class RecordedSource:
    """Recorded log, to which no entries are added.

    Args:
        run_id: The run.
        events: Its events.
        dead: Dead letters.
    """

    is_live = False

    def __init__(
        self,
        run_id: str,
        events: RecordedEvents,
        dead: Iterable[DeadLetter] = (),
    ) -> None:
        self.run_id = run_id
        self.record: RolloutRecord | None = None
        self._events = events
        self._dead = tuple(dead)[-LETTERS:]
        self._cursors: dict[str, Generator[Entry, None, None]] = {}
        """Iterators that go on after a position, so that a log is read on without a search."""

    @classmethod
    def from_entries(cls, run_id: str, entries: Iterable[Entry]) -> RecordedSource:
        """Return a log of entries, which a temporary file holds."""
        return cls(run_id, StoredEvents(entries))

    @classmethod
    def from_file(cls, path: Path) -> RecordedSource:
        """Return the log of a file that ``export`` wrote. Raises BadRecording."""
        recording = read_recording(path)
        header = recording.header
        if header.digest is None:  # written by an older version: its order is not known
            return cls(header.run_id, StoredEvents(recording.events), recording.dead)
        events = FileEvents(path, header.entries or 0)
        return cls(header.run_id, events, recording.dead)

    @classmethod
    def from_archive(cls, run_folder: Path) -> RecordedSource:
        """Return the archived log of a run's folder, of which no server has the rest."""
        archive = Archive(run_folder, run_folder.name)
        if not archive.folder.is_dir() or archive.through(Stream.EVENTS) == ORIGIN:
            raise ArchiveMissing("folder", folder=run_folder)
        source = cls.from_entries(run_folder.name, archive.read(Stream.EVENTS))
        source.record = RolloutRecord(run_folder, run_folder.name)
        return source

    async def begin(self) -> Beginning:
        """Return the empty state, with the times of the first and the last entry."""
        events = self._events
        begin, end = position(events.first)[0], position(events.last)[0]
        state = MonitorState(run_id=self.run_id)
        return Beginning(state, begin, end, entries=events.entries)

    async def read(self, after: str, *, through: str = "+", limit: int = 1000) -> list[Entry]:
        """Return up to ``limit`` entries after a position."""
        return self.read_now(after, through=through, limit=limit)

    def read_now(self, after: str, *, through: str = "+", limit: int = 1000) -> list[Entry]:
        """Return up to ``limit`` entries after a position."""
        end = None if through == "+" else position(through)
        # Taken out: two readers that go on from one place must not share an iterator.
        cursor = self._cursors.pop(after, None) or self._events.after(after)
        entries: list[Entry] = []
        for entry in cursor:
            if end is not None and position(entry.id) > end:
                break
            entries.append(entry)
            if len(entries) >= limit:
                self._store_cursor(entry.id, cursor)
                return entries
        cursor.close()
        return entries

    def _store_cursor(self, at: str, cursor: Generator[Entry, None, None]) -> None:
        if at in self._cursors:
            self._cursors.pop(at).close()
        self._cursors[at] = cursor
        while len(self._cursors) > _CURSORS:
            self._cursors.pop(next(iter(self._cursors))).close()

    async def wait(self, after: str) -> list[Entry]:
        """Return no entries: none follow."""
        await anyio.sleep_forever()
        return []

    async def read_last(self, limit: int) -> list[Entry]:
        """Return about ``limit`` entries at the end of the log, in its order."""
        return self._events.last_ones(limit)

    async def newest_state(self) -> MonitorState | None:
        """Return None: only the fold of all entries gives the state."""
        return None

    async def live_facts(self) -> LiveFacts:
        """Return no facts but the time of the last entry."""
        return LiveFacts(now=position(self._events.last)[0])

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the recorded dead letters."""
        return self._dead

    def close(self) -> None:
        """Close the files that are open."""
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._events.close()
