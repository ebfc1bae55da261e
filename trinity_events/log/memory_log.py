"""The in-memory twin of the event log, for unit tests: the server's semantics, no server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.lowlevel
import redis

from trinity_schemas import RunKeys

from .base import (
    DEAD_LETTERS_KEPT,
    GRANT_KEPT,
    Claimed,
    Commit,
    CurrentAnnouncement,
    DeadLetter,
    Entry,
    GroupInfo,
    Stream,
)
from .memory_stream import MemoryGroup, MemoryStream, entry_id
from .position import ORIGIN, position
from .sync_log import SyncEventLog

T = TypeVar("T")


class MemoryEventLog:
    """One run's log in this process. Implements :class:`~trinity_events.log.EventLog`.

    It has what :class:`~trinity_events.log.RedisEventLog` has beside that: the lead, and the
    consumer groups of :class:`~trinity_events.log.ConsumerGroup`. Any thread and any
    event loop may use it; whoever waits is woken by what is appended.

    Args:
        run_id: The run.
        clock: Unix time in seconds, of which entry ids are made.
        timer: Seconds that only rise, by which leases and holds lapse.
    """

    def __init__(
        self,
        run_id: str,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._clock = clock
        self._timer = timer
        # Held for moments only, and never while anything is awaited.
        self._lock = threading.Lock()
        self._granting = threading.Condition(self._lock)
        self._streams = {stream: MemoryStream() for stream in Stream}
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._epoch = 0
        self._fence = 0
        self._leader = 0
        self._leads_until = 0.0
        self._position = ORIGIN
        self._snapshot: bytes | None = None
        self._standing: dict[str, Entry] = {}
        self._dead: list[DeadLetter] = []
        self._lapse: dict[str, float] = {}  # of heartbeats
        self._granted: dict[str, float] = {}
        self._holds: dict[tuple[int, str], float] = {}
        self._doomed: set[int] = set()

    async def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        await anyio.lowlevel.checkpoint()
        return self.append_now(payload)

    def append_now(self, payload: bytes) -> str:
        """As :meth:`append`, from any thread."""
        with self._lock:
            return self._add(Stream.EVENTS, payload)

    def append_many_now(self, payloads: Sequence[bytes]) -> list[str]:
        """Append to the events, in this order, all at once."""
        with self._lock:
            return [self._add(Stream.EVENTS, payload) for payload in payloads]

    async def append_leading(self, token: int, payload: bytes) -> str | None:
        """As :meth:`append`, for the newest leader alone; None when ``token`` is not its."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._add(Stream.EVENTS, payload) if self._leads(token) else None

    async def renumber(self, token: int, after: str) -> int | None:
        """Renumber nothing: here all ids are of the clock. None when ``token`` is not the leader's.

        As on a server otherwise, where writers may choose ids.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return 0 if self._leads(token) else None

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

    async def read_blocking(
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

    def epoch_now(self) -> int:
        """The run's newest epoch, from any thread."""
        with self._lock:
            return self._epoch

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

    async def current_announcements(self) -> list[CurrentAnnouncement]:
        """The last announcement of every subject."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return [
                CurrentAnnouncement(subject, entry) for subject, entry in self._standing.items()
            ]

    async def load(self) -> tuple[bytes | None, str]:
        """The reducer's last snapshot and its position."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._snapshot, self._position

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step. False when another reducer leads or has gone further."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(commit.token) or commit.after != self._position:
                return False
            for subject in commit.retracted:
                self._standing.pop(subject, None)
            for subject, payload in commit.announcements:
                entry_id = self._add(Stream.ANNOUNCEMENTS, payload)
                if subject:
                    self._standing[subject] = Entry(entry_id, bytes(payload))
            for letter in commit.dead_letters:
                self._bury(letter)
            self._grant(commit.grants)
            self._position = commit.position
            self._snapshot = commit.snapshot or self._snapshot
            return True

    async def trim(self, stream: Stream, limit: str, *, token: int | None = None) -> int:
        """Drop entries below ``limit`` that no group still needs; returns how many.

        Given a ``token`` that is not the newest leader's, none.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if token is not None and not self._leads(token):
                return 0
            return self._streams[stream].trim(position(limit))

    async def first_retained_id(self, stream: Stream) -> str | None:
        """The oldest entry of a stream that has lost older ones; None when it is whole."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            found = self._streams[stream]
            if not found.trimmed:
                return None
            return found.entries[0].id if found.entries else entry_id(found.last)

    async def dead_letters(self) -> list[DeadLetter]:
        """The entries that could not be decoded, and why."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return list(self._dead)

    async def lead(self, lease: float) -> tuple[int, float]:
        """Take the lead for ``lease`` seconds: a token, or 0 and how long another still has it."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            left = self._leads_until - now
            if left > 0:
                return 0, left
            self._fence += 1
            self._leader, self._leads_until = self._fence, now + lease
            return self._fence, lease

    async def renew(self, token: int, lease: float) -> bool:
        """Keep the lead for ``lease`` more seconds; 0 gives it up. False when it was lost."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            if token != self._leader or self._leads_until <= now:
                return False
            self._leads_until = now + lease
            return True

    async def now(self) -> int:
        """The clock in milliseconds, of which entry ids are made."""
        await anyio.lowlevel.checkpoint()
        return int(self._clock() * 1000)

    async def heartbeat_ttls(self, incarnations: Collection[str]) -> dict[str, float]:
        """Those of them whose heartbeat has not lapsed, and in how many seconds it does."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            left = {one: self._lapse.get(one, now) - now for one in incarnations}
            return {one: seconds for one, seconds in left.items() if seconds > 0}

    def beat_now(self, incarnation: str, lease: float) -> None:
        """Keep a process alive to the reducer for ``lease`` more seconds, from any thread."""
        with self._lock:
            now = self._timer()
            self._lapse = {one: until for one, until in self._lapse.items() if until > now}
            self._lapse[incarnation] = now + lease

    def rest_now(self, incarnation: str) -> None:
        """End a process's heartbeat, from any thread."""
        with self._lock:
            self._lapse.pop(incarnation, None)

    def granted_now(self, save_id: str, seconds: float) -> bool:
        """Wait in this thread until a save's turn has come; False when it has not in time."""
        with self._granting:
            return self._granting.wait_for(
                lambda: self._granted.get(save_id, 0.0) > self._timer(), seconds
            )

    async def acquire_lease(self, step: int, who: str, seconds: float) -> bool:
        """Keep a checkpoint from being removed for a while; again, to keep it longer.

        False when it is being removed. Whether it is there at all, only its folder tells.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if step in self._doomed:
                return False
            self._holds[step, who] = self._timer() + seconds
            return True

    async def release_lease(self, step: int, who: str) -> None:
        """Let go of a checkpoint."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            self._holds.pop((step, who), None)

    async def mark_deleting(self, token: int, steps: Collection[int]) -> set[int]:
        """Mark those of the checkpoints that nobody holds, for removal; returns which.

        None of them when ``token`` is not the newest leader's.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return set()
            now = self._timer()
            self._holds = {held: until for held, until in self._holds.items() if until > now}
            doomed = set(steps) - {step for step, _ in self._holds}
            self._doomed |= doomed
            return doomed

    async def clear_deleting(self, token: int, steps: Collection[int] | None = None) -> bool:
        """Forget the marks, or all: they are removed, or will not be. False when another leads."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return False
            self._doomed = set() if steps is None else self._doomed - set(steps)
            return True

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; one that is there stays as it is."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            created = MemoryGroup(position(after), self._timer())
            self._streams[stream].groups.setdefault(group, created)

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet, waiting for them."""

        def take() -> list[Entry]:
            state = self._group(stream, group)
            found = self._streams[stream].between(state.last, limit)
            state.give(found, member, self._timer())
            return found

        return await self._until_some(take, seconds)

    async def claim(
        self, stream: Stream, group: str, member: str, *, idle: float, most: int, limit: int = 100
    ) -> Claimed:
        """Give this member what any member has left pending for ``idle`` seconds.

        What was given to members ``most`` times already is put to the dead letters instead.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            known = self._group(stream, group)
            times = {one.entry.id: one.times for one in known.pending.values()}
            claimed = known.claim(member, self._timer(), idle, most, limit)
            for entry in claimed.dead:
                often = f"delivered {times[entry.id]} times and never acknowledged"
                self._bury(DeadLetter(entry, f"group {group}: {often}"))
            return claimed

    async def groups(self, stream: Stream) -> list[GroupInfo]:
        """Every group of a stream."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now, found = self._timer(), self._streams[stream]
            return [found.info(name, now) for name in sorted(found.groups)]

    async def destroy_group(self, stream: Stream, group: str, *, token: int) -> bool:
        """Let the log forget a group. False when ``token`` is not the newest leader's."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return False
            if self._streams[stream].groups.pop(group, None) is not None:
                self._wake()
            return True

    async def forget_members(self, stream: Stream, group: str, idle: float) -> int:
        """Forget members that have nothing pending and asked for nothing for so many seconds.

        The last one to ask stays: it tells how long the group has been idle.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            known = self._streams[stream].groups.get(group)
            return 0 if known is None else known.forget_members(self._timer(), idle)

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Tell the group that an entry is dealt with."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            known = self._streams[stream].groups.get(group)
            if known is not None:
                known.pending.pop(position(entry_id), None)

    def _group(self, stream: Stream, group: str) -> MemoryGroup:
        try:
            return self._streams[stream].groups[group]
        except KeyError:
            # What the server says, in the error that callers know from there.
            raise redis.ResponseError(f"NOGROUP no group {group!r} of {stream.value}") from None

    def _leads(self, token: int) -> bool:
        return 0 < token == self._fence

    def _bury(self, letter: DeadLetter) -> None:
        self._dead.append(letter.kept)
        del self._dead[:-DEAD_LETTERS_KEPT]

    def _grant(self, save_ids: Sequence[str]) -> None:
        now = self._timer()
        self._granted = {one: until for one, until in self._granted.items() if until > now}
        self._granted.update((one, now + GRANT_KEPT) for one in save_ids)
        if save_ids:
            self._granting.notify_all()

    def _add(self, stream: Stream, payload: bytes) -> str:
        added = self._streams[stream].add(payload, int(self._clock() * 1000))
        self._wake()
        return added

    def _wake(self) -> None:
        for waiter, loop in self._waiting.items():
            with suppress(RuntimeError):  # its loop was closed under it: no one waits any more
                loop.call_soon_threadsafe(_done, waiter)
        self._waiting.clear()

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

    remote = False

    def __init__(self, log: MemoryEventLog) -> None:
        self.run_id = log.run_id
        self.keys = log.keys
        self._log = log

    def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        return self._log.append_now(payload)

    def append_many(self, payloads: Sequence[bytes]) -> list[str]:
        """Append to the events, in this order, all at once; returns the entry ids."""
        return self._log.append_many_now(payloads)

    def beat(self, incarnation: str, lease: float) -> None:
        """Keep a process alive to the reducer for ``lease`` more seconds."""
        self._log.beat_now(incarnation, lease)

    def rest(self, incarnation: str) -> None:
        """End a process's heartbeat: it has nothing more to be failed for."""
        self._log.rest_now(incarnation)

    def granted(self, save_id: str, seconds: float) -> bool:
        """Wait until a save's turn has come; False when it has not after so many seconds."""
        return self._log.granted_now(save_id, seconds)

    def read(
        self, after: str = ORIGIN, *, stream: Stream = Stream.EVENTS, limit: int = 1000
    ) -> list[Entry]:
        """Up to ``limit`` entries after a position."""
        return self._log.read_now(after, stream=stream, limit=limit)

    def epoch(self) -> int:
        """The run's newest epoch; 0 before any."""
        return self._log.epoch_now()

    def leaders_folder(self) -> bytes | None:
        """Return None: no reducer in memory tells where its folder is."""
        return None

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
