"""The in-memory twin of the event log, for unit tests: the server's semantics, no server."""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.lowlevel
import redis
from msgspec import Struct, field

from trinity_schemas import RunKeys

from .base import Commit, DeadLetter, Entry, Standing, Stream
from .position import ORIGIN, position
from .sync_log import SyncEventLog

T = TypeVar("T")


class _Pending(Struct):
    """An entry that a member of a group was given and has not acknowledged."""

    entry: Entry
    member: str
    since: float


class _Group(Struct):
    last: tuple[int, int]
    """The newest entry that was given to anyone."""
    pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)


class _Stream(Struct):
    entries: list[Entry] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    groups: dict[str, _Group] = field(default_factory=dict)
    last: tuple[int, int] = (0, 0)
    """The newest position there ever was."""
    trimmed: bool = False

    def add(self, payload: bytes, milliseconds: int) -> str:
        """Append; the id is above the last one, also when the clock went back."""
        at = max((milliseconds, 0), (self.last[0], self.last[1] + 1))
        entry = Entry(_entry_id(at), bytes(payload))
        self.last = at
        self.positions.append(at)
        self.entries.append(entry)
        return entry.id

    def between(self, after: tuple[int, int], limit: int, through: str = "+") -> list[Entry]:
        first = bisect_right(self.positions, after)
        end = len(self.entries)
        if through != "+":
            end = bisect_right(self.positions, position(through))
        return self.entries[first : min(end, first + limit)]

    def trim(self, limit: tuple[int, int]) -> int:
        """Drop what is below the limit and needed by no group."""
        for group in self.groups.values():
            limit = min(limit, group.last, *group.pending)
        dropped = bisect_left(self.positions, limit)
        del self.entries[:dropped], self.positions[:dropped]
        self.trimmed = self.trimmed or dropped > 0
        return dropped


class MemoryEventLog:
    """One run's log in this process. Implements :class:`~trinity_events.log.EventLog`.

    It has what :class:`~trinity_events.log.RedisEventLog` has beside that: the lead, and the
    consumer groups of :class:`~trinity_events.log.ConsumerGroup`. Any thread and any
    event loop may use it; whoever waits is woken by what is appended.

    Args:
        run_id: The run.
        clock: Unix time in seconds, of which entry ids are made.
    """

    def __init__(self, run_id: str, *, clock: Callable[[], float] = time.time) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._clock = clock
        # Held for moments only, and never while anything is awaited.
        self._lock = threading.Lock()
        self._streams = {stream: _Stream() for stream in Stream}
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._epoch = 0
        self._fence = 0
        self._leader = 0
        self._leads_until = 0.0
        self._position = ORIGIN
        self._snapshot: bytes | None = None
        self._standing: dict[str, Entry] = {}
        self._dead: list[DeadLetter] = []

    async def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        await anyio.lowlevel.checkpoint()
        return self.append_now(payload)

    def append_now(self, payload: bytes) -> str:
        """As :meth:`append`, from any thread."""
        with self._lock:
            return self._add(Stream.EVENTS, payload)

    async def read(
        self,
        after: str = ORIGIN,
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        through: str = "+",
    ) -> list[Entry]:
        """Up to ``limit`` entries after a position, up to and with ``through``."""
        await anyio.lowlevel.checkpoint()
        return self.read_now(after, stream=stream, limit=limit, through=through)

    def read_now(
        self,
        after: str = ORIGIN,
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        through: str = "+",
    ) -> list[Entry]:
        """As :meth:`read`, from any thread."""
        with self._lock:
            return self._streams[stream].between(position(after), limit, through)

    async def wait(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """As :meth:`read` on one or both streams, waiting for them."""

        def take() -> list[tuple[Stream, Entry]]:
            return [
                (stream, entry)
                for stream, start in after.items()
                for entry in self._streams[stream].between(position(start), limit)
            ]

        return await self._until_some(take, seconds)

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """The position of the newest entry."""
        await anyio.lowlevel.checkpoint()
        return self.last_id_now(stream)

    def last_id_now(self, stream: Stream = Stream.EVENTS) -> str:
        """As :meth:`last_id`, from any thread."""
        with self._lock:
            found = self._streams[stream].entries
            return found[-1].id if found else ORIGIN

    async def exists(self) -> bool:
        """Whether anything was ever written to it."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._streams[Stream.EVENTS].last > (0, 0)

    async def open_epoch(self, payload: Callable[[int], bytes]) -> int:
        """Take the next epoch and append its first event, at once; returns the epoch."""
        await anyio.lowlevel.checkpoint()
        while True:
            epoch = self._epoch + 1
            first = payload(epoch)  # not under the lock: it is the caller's code
            with self._lock:
                if self._epoch + 1 == epoch:
                    self._epoch = epoch
                    self._add(Stream.EVENTS, first)
                    return epoch

    async def standing(self) -> list[Standing]:
        """The last announcement of every subject."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return [Standing(subject, entry) for subject, entry in self._standing.items()]

    async def load(self) -> tuple[bytes | None, str]:
        """The reducer's last snapshot and its position."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._snapshot, self._position

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step. False when another reducer leads or has gone further."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._fence or commit.token != self._fence:
                return False
            if commit.after != self._position:
                return False
            for subject in commit.retracted:
                self._standing.pop(subject, None)
            for subject, payload in commit.announcements:
                entry_id = self._add(Stream.ANNOUNCEMENTS, payload)
                if subject:
                    self._standing[subject] = Entry(entry_id, bytes(payload))
            self._dead += commit.dead_letters
            self._position = commit.position
            self._snapshot = commit.snapshot or self._snapshot
            return True

    async def trim(self, stream: Stream, limit: str) -> int:
        """Drop entries below ``limit`` that no group still needs; returns how many."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._streams[stream].trim(position(limit))

    async def first_left(self, stream: Stream) -> str | None:
        """The oldest entry of a stream that has lost older ones; None when it is whole."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            found = self._streams[stream]
            if not found.trimmed:
                return None
            return found.entries[0].id if found.entries else _entry_id(found.last)

    async def dead_letters(self) -> list[DeadLetter]:
        """The entries that could not be decoded, and why."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return list(self._dead)

    async def lead(self, lease: float) -> tuple[int, float]:
        """Take the lead for ``lease`` seconds: a token, or 0 and how long another still has it."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            left = self._leads_until - time.monotonic()
            if left > 0:
                return 0, left
            self._fence += 1
            self._leader, self._leads_until = self._fence, time.monotonic() + lease
            return self._fence, lease

    async def renew(self, token: int, lease: float) -> bool:
        """Keep the lead for ``lease`` more seconds; 0 gives it up. False when it was lost."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = time.monotonic()
            if token != self._leader or self._leads_until <= now:
                return False
            self._leads_until = now + lease
            return True

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; one that is there stays as it is."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            self._streams[stream].groups.setdefault(group, _Group(position(after)))

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet, waiting for them."""

        def take() -> list[Entry]:
            state = self._group(stream, group)
            found = self._streams[stream].between(state.last, limit)
            now = time.monotonic()
            for entry in found:
                state.last = position(entry.id)
                state.pending[state.last] = _Pending(entry, member, now)
            return found

        return await self._until_some(take, seconds)

    async def claim_idle(
        self, stream: Stream, group: str, member: str, *, idle: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member what any member has left pending for ``idle`` seconds."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            pending, now = self._group(stream, group).pending, time.monotonic()
            due = [at for at in sorted(pending) if now - pending[at].since >= idle][:limit]
            for at in due:
                pending[at].member, pending[at].since = member, now
            return [pending[at].entry for at in due]

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Tell the group that an entry is dealt with."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            known = self._streams[stream].groups.get(group)
            if known is not None:
                known.pending.pop(position(entry_id), None)

    def _group(self, stream: Stream, group: str) -> _Group:
        try:
            return self._streams[stream].groups[group]
        except KeyError:
            # What the server says, in the error that callers know from there.
            raise redis.ResponseError(f"NOGROUP no group {group!r} of {stream.value}") from None

    def _add(self, stream: Stream, payload: bytes) -> str:
        entry_id = self._streams[stream].add(payload, int(self._clock() * 1000))
        for waiter, loop in self._waiting.items():
            with suppress(RuntimeError):  # its loop was closed under it: no one waits any more
                loop.call_soon_threadsafe(_wake, waiter)
        self._waiting.clear()
        return entry_id

    async def _until_some(self, take: Callable[[], list[T]], seconds: float) -> list[T]:
        """What ``take`` finds, now or after any append within the time."""
        await anyio.lowlevel.checkpoint()
        loop = asyncio.get_running_loop()
        with anyio.move_on_after(max(0.001, seconds)):
            while True:
                with self._lock:
                    if found := take():
                        return found
                    waiter = loop.create_future()
                    self._waiting[waiter] = loop
                try:
                    await waiter
                finally:
                    with self._lock:
                        self._waiting.pop(waiter, None)
        return []


class SyncMemoryEventLog(SyncEventLog):
    """The synchronous face of a :class:`MemoryEventLog`, for code that runs in worker threads.

    It never waits for an event loop, so that a save may also run on the loop's own thread.
    """

    def __init__(self, log: MemoryEventLog) -> None:
        self.run_id = log.run_id
        self.keys = log.keys
        self._log = log

    def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        return self._log.append_now(payload)

    def read(
        self, after: str = ORIGIN, *, stream: Stream = Stream.EVENTS, limit: int = 1000
    ) -> list[Entry]:
        """Up to ``limit`` entries after a position."""
        return self._log.read_now(after, stream=stream, limit=limit)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _entry_id(at: tuple[int, int]) -> str:
    return f"{at[0]}-{at[1]}"


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
