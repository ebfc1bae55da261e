"""In-memory event log for unit tests, with the semantics of the server."""

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

from ..base import (
    DEAD_LETTERS_KEPT,
    GRANT_KEPT,
    Claimed,
    Commit,
    CurrentAnnouncement,
    DeadLetter,
    Entry,
    GroupInfo,
    Intake,
    Stream,
)
from ..position import ORIGIN, position
from ..redis.sync_log import SyncEventLog
from .stream import MemoryGroup, MemoryStream, entry_id

T = TypeVar("T")


class MemoryEventLog:
    """One run's log in this process. Implements :class:`~trinity_events.log.EventLog`.

    Like :class:`~trinity_events.log.RedisEventLog` it also has the lead, and the consumer groups
    of :class:`~trinity_events.log.ConsumerGroup`. Any thread and any event loop may use it. An
    append wakes the readers that wait.

    Args:
        run_id: The run.
        clock: Unix time in seconds, the time part of entry ids.
        timer: Monotonic seconds, by which leases lapse.
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
        # Held briefly, and never across an await.
        self._lock = threading.Lock()
        # On the same lock: a grant cannot come between the check of a waiting save and its wait.
        self._granting = threading.Condition(self._lock)
        self._streams = {stream: MemoryStream() for stream in Stream}
        self._reports = MemoryStream()
        self._reported = ORIGIN
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._epoch = 0
        self._fence = 0
        self._leader = 0
        self._leads_until = 0.0
        self._position = ORIGIN
        self._snapshot: bytes | None = None
        self._standing: dict[str, Entry] = {}
        self._dead: list[DeadLetter] = []
        self._lapse: dict[str, float] = {}  # deadlines of heartbeats
        self._granted: dict[str, float] = {}
        self._holds: dict[tuple[int, str], float] = {}
        self._doomed: set[int] = set()
        self._promotions = 0

    async def append(self, payload: bytes) -> str:
        """Append an event; return its entry id."""
        await anyio.lowlevel.checkpoint()
        return self.append_now(payload)

    def append_now(self, payload: bytes) -> str:
        """Append as :meth:`append`, from any thread."""
        with self._lock:
            return self._add(Stream.EVENTS, payload)

    def append_many_now(self, payloads: Sequence[bytes]) -> list[str]:
        """Append events in this order, all at once."""
        with self._lock:
            return [self._add(Stream.EVENTS, payload) for payload in payloads]

    async def append_report(self, payload: bytes) -> str:
        """Append a report; return its entry id."""
        await anyio.lowlevel.checkpoint()
        return self.append_reports_now([payload])[0]

    def append_reports_now(self, payloads: Sequence[bytes]) -> list[str]:
        """Append reports in this order, all at once, from any thread."""
        with self._lock:
            now = int(self._clock() * 1000)
            added = [self._reports.add(payload, now) for payload in payloads]
            self._wake()
            return added

    async def read_reports(self, after: str, *, seconds: float, limit: int) -> list[Entry]:
        """Return up to ``limit`` reports after a position; wait for the first."""
        return await self._until_some(
            lambda: self._reports.between(position(after), limit), seconds
        )

    async def reports_position(self) -> str:
        """Return the position up to which reports were accepted or refused."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._reported

    async def has_reports(self) -> bool:
        """Return True if there is a report that was neither accepted nor refused."""
        await anyio.lowlevel.checkpoint()
        return self.has_reports_now()

    def has_reports_now(self) -> bool:
        """Return as :meth:`has_reports`, from any thread."""
        with self._lock:
            return self._reports.last > position(self._reported)

    async def accept_reports(self, intake: Intake) -> bool:
        """Append accepted reports to the events; return False if another reducer leads."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            # The two checks of `accept_reports.lua`.
            if not self._leads(intake.token) or intake.after != self._reported:
                return False
            for payload in intake.accepted:
                self._add(Stream.EVENTS, payload)
            for letter in intake.refused:
                self._bury(letter)
            self._reported = intake.position
            self._reports.trim(position(intake.position))
            self._wake()
            return True

    async def renumber_reports(self, token: int, after: str) -> int | None:
        """Return as :meth:`renumber`: all ids here are of the clock."""
        return await self.renumber(token, after)

    async def renumber_dead_letters(self, token: int) -> int | None:
        """Return as :meth:`renumber`: all ids here are of the clock."""
        return await self.renumber(token, ORIGIN)

    async def append_leading(self, token: int, payload: bytes) -> str | None:
        """Append for the newest leader alone; return None if ``token`` is not its fence token."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._add(Stream.EVENTS, payload) if self._leads(token) else None

    async def renumber(self, token: int, after: str) -> int | None:
        """Return 0, or None if ``token`` is not the leader's: all ids here are of the clock.

        On a server, writers may choose ids.
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
        """Return up to ``limit`` entries after a position, up to and including ``through``."""
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
        """Read as :meth:`read`, from any thread."""
        with self._lock:
            return self._streams[stream].between(position(after), limit, through)

    async def read_blocking(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """Return the entries of one or both streams; wait while there are none."""

        def find() -> list[tuple[Stream, Entry]]:
            return [
                (stream, entry)
                for stream, start in after.items()
                for entry in self._streams[stream].between(position(start), limit)
            ]

        return await self._until_some(find, seconds)

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """Return the position of the newest entry."""
        await anyio.lowlevel.checkpoint()
        return self.last_id_now(stream)

    def last_id_now(self, stream: Stream = Stream.EVENTS) -> str:
        """Return the position of the newest entry, from any thread."""
        with self._lock:
            entries = self._streams[stream].entries
            return entries[-1].id if entries else ORIGIN

    async def exists(self) -> bool:
        """Return True if the log has an entry, or ever had one."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._streams[Stream.EVENTS].last > (0, 0)

    async def newest_epoch(self) -> int:
        """Return the newest epoch of the run; 0 before the first one."""
        return self.epoch_now()

    def epoch_now(self) -> int:
        """Return the run's newest epoch, from any thread."""
        with self._lock:
            return self._epoch

    async def open_epoch(self, payload: Callable[[int], bytes]) -> int:
        """Take the next epoch and append its first event, at once; return the epoch."""
        await anyio.lowlevel.checkpoint()
        while True:
            epoch = self._epoch + 1
            first = payload(epoch)  # outside the lock: this calls code of the caller
            with self._lock:
                # Another opening may have taken the number meanwhile, as on a server
                # (`open_epoch.lua`).
                if self._epoch + 1 == epoch:
                    self._epoch = epoch
                    self._add(Stream.EVENTS, first)
                    return epoch

    async def raise_epoch(self, token: int, epoch: int) -> int | None:
        """Raise the counter of epochs to ``epoch``; return the counter as it was.

        Return None, and change nothing, if ``token`` is not the newest leader's.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return None
            counted, self._epoch = self._epoch, max(self._epoch, epoch)
            return counted

    async def current_announcements(self) -> list[CurrentAnnouncement]:
        """Return the last announcement of every subject, in the order of the stream."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            current = [
                CurrentAnnouncement(subject, entry) for subject, entry in self._standing.items()
            ]
        return sorted(current, key=lambda announcement: position(announcement.entry.id))

    async def load(self) -> tuple[bytes | None, str]:
        """Return the reducer's last snapshot and its position."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return self._snapshot, self._position

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step; return False if another reducer leads or is further on."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            # The two checks of `commit.lua`: the newest leader, and the position that it folded
            # from.
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
        """Drop entries below ``limit`` that no group still needs; return their number.

        Drop none if ``token`` is given and is not the newest leader's.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if token is not None and not self._leads(token):
                return 0
            return self._streams[stream].trim(position(limit))

    async def first_retained_id(self, stream: Stream) -> str | None:
        """Return the id of a trimmed stream's oldest entry; None if nothing was trimmed."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            memory_stream = self._streams[stream]
            if not memory_stream.trimmed:
                return None
            return (
                memory_stream.entries[0].id
                if memory_stream.entries
                else entry_id(memory_stream.last)
            )

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the entries that could not be decoded, each with its reason."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            return list(self._dead)

    async def lead(self, lease: float) -> tuple[int, float]:
        """Take the lead for ``lease`` seconds.

        Return a fence token; or 0, and the seconds that the lease of another leader has left.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            remaining = self._leads_until - now
            if remaining > 0:
                return 0, remaining
            self._fence += 1
            self._leader, self._leads_until = self._fence, now + lease
            return self._fence, lease

    async def renew(self, token: int, lease: float) -> bool:
        """Renew the lead for ``lease`` seconds; 0 gives it up. Return False if it was lost."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            if token != self._leader or self._leads_until <= now:
                return False
            self._leads_until = now + lease
            return True

    async def now(self) -> int:
        """Return the clock in milliseconds, the time part of entry ids."""
        await anyio.lowlevel.checkpoint()
        return int(self._clock() * 1000)

    async def heartbeat_ttls(self, incarnations: Collection[str]) -> dict[str, float]:
        """Return the seconds left of each heartbeat that has not lapsed, by incarnation."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now = self._timer()
            remaining = {
                incarnation: self._lapse.get(incarnation, now) - now for incarnation in incarnations
            }
            return {
                incarnation: seconds for incarnation, seconds in remaining.items() if seconds > 0
            }

    def renew_heartbeat_now(self, incarnation: str, lease: float) -> None:
        """Renew a process's heartbeat for ``lease`` seconds, from any thread."""
        with self._lock:
            now = self._timer()
            # Lapsed keys go here; a server removes them by itself.
            self._lapse = {name: until for name, until in self._lapse.items() if until > now}
            self._lapse[incarnation] = now + lease

    def clear_heartbeat_now(self, incarnation: str) -> None:
        """End a process's heartbeat, from any thread."""
        with self._lock:
            self._lapse.pop(incarnation, None)

    def granted_now(self, save_id: str, seconds: float) -> bool:
        """Wait in this thread until a save is granted its turn; return False if too late."""
        with self._granting:
            return self._granting.wait_for(
                lambda: self._granted.get(save_id, 0.0) > self._timer(), seconds
            )

    async def notify_promoted(self) -> None:
        """Wake the readers that wait for a folder to get its final name."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            self._promotions += 1
            self._wake()

    async def promoted_after(self, after: str, *, seconds: float) -> str:
        """Return the position of the last promotion of a folder, once it is after a position.

        Return ``after`` if there is none within the time.
        """

        def find() -> list[str]:
            newest = f"{self._promotions}-0"
            return [newest] if position(newest) > position(after) else []

        return ([after] + await self._until_some(find, seconds))[-1]

    async def acquire_lease(self, step: int, who: str, seconds: float) -> bool:
        """Take or extend a lease on a checkpoint, which the reducer then does not delete.

        Return False if the checkpoint is being deleted. Only its folder tells if it exists.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if step in self._doomed:
                return False
            self._holds[step, who] = self._timer() + seconds
            return True

    async def release_lease(self, step: int, who: str) -> None:
        """Release the lease on a checkpoint."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            self._holds.pop((step, who), None)

    async def mark_deleting(self, token: int, steps: Collection[int]) -> set[int]:
        """Mark the checkpoints without a lease for deletion; return their steps.

        Mark none if ``token`` is not the newest leader's.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return set()
            now = self._timer()
            self._holds = {lease: until for lease, until in self._holds.items() if until > now}
            doomed = set(steps) - {step for step, _ in self._holds}
            self._doomed |= doomed
            return doomed

    async def clear_deleting(self, token: int, steps: Collection[int] | None = None) -> bool:
        """Clear the deletion marks of some steps, or of all; return False if another leads."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return False
            self._doomed = set() if steps is None else self._doomed - set(steps)
            return True

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; leave an existing group as it is."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            created = MemoryGroup(position(after), self._timer())
            self._streams[stream].groups.setdefault(group, created)

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet; wait while there are none."""

        def find() -> list[Entry]:
            state = self._group(stream, group)
            entries = self._streams[stream].between(state.last, limit)
            state.give(entries, member, self._timer())
            return entries

        return await self._until_some(find, seconds)

    async def claim(
        self, stream: Stream, group: str, member: str, *, idle: float, most: int, limit: int = 100
    ) -> Claimed:
        """Give this member the entries that stayed pending with any member for ``idle`` seconds.

        An entry that was delivered ``most`` times becomes a dead letter instead.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            state = self._group(stream, group)
            times = {pending.entry.id: pending.times for pending in state.pending.values()}
            claimed = state.claim(member, self._timer(), idle, most, limit)
            for entry in claimed.dead:
                often = f"delivered {times[entry.id]} times and never acknowledged"
                self._bury(DeadLetter(entry, f"group {group}: {often}"))
            return claimed

    async def groups(self, stream: Stream) -> list[GroupInfo]:
        """Return every group of a stream."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            now, memory_stream = self._timer(), self._streams[stream]
            return [memory_stream.info(name, now) for name in sorted(memory_stream.groups)]

    async def destroy_group(self, stream: Stream, group: str, *, token: int) -> bool:
        """Remove a group from the log; return False if ``token`` is not the newest leader's."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if not self._leads(token):
                return False
            if self._streams[stream].groups.pop(group, None) is not None:
                self._wake()
            return True

    async def forget_members(self, stream: Stream, group: str, idle: float) -> int:
        """Remove members with nothing pending that were idle for this many seconds.

        The member that read last stays, since it shows how long the group has been idle.
        """
        await anyio.lowlevel.checkpoint()
        with self._lock:
            state = self._streams[stream].groups.get(group)
            return 0 if state is None else state.forget_members(self._timer(), idle)

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Acknowledge an entry to the group."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            state = self._streams[stream].groups.get(group)
            if state is not None:
                state.pending.pop(position(entry_id), None)

    def _group(self, stream: Stream, group: str) -> MemoryGroup:
        try:
            return self._streams[stream].groups[group]
        except KeyError:
            # The error that the server raises.
            raise redis.ResponseError(f"NOGROUP no group {group!r} of {stream.value}") from None

    def _leads(self, token: int) -> bool:
        # Token 0 is that of no leader: `lead` returns it while another reducer leads.
        return 0 < token == self._fence

    def _bury(self, letter: DeadLetter) -> None:
        self._dead.append(letter.truncated)
        del self._dead[:-DEAD_LETTERS_KEPT]

    def _grant(self, save_ids: Sequence[str]) -> None:
        now = self._timer()
        self._granted = {save_id: until for save_id, until in self._granted.items() if until > now}
        self._granted.update((save_id, now + GRANT_KEPT) for save_id in save_ids)
        if save_ids:
            self._granting.notify_all()

    def _add(self, stream: Stream, payload: bytes) -> str:
        added = self._streams[stream].add(payload, int(self._clock() * 1000))
        self._wake()
        return added

    def _wake(self) -> None:
        for waiter, loop in self._waiting.items():
            with suppress(RuntimeError):  # its loop was closed: no reader waits on it
                # The append may be in another thread: a future is touched by its own loop only.
                loop.call_soon_threadsafe(_done, waiter)
        self._waiting.clear()

    async def _until_some(self, find: Callable[[], list[T]], seconds: float) -> list[T]:
        """Return the result of ``find``, now or after an append within the time."""
        await anyio.lowlevel.checkpoint()
        loop = asyncio.get_running_loop()
        # At least a millisecond, as with a server, for which 0 is a wait without end.
        with anyio.move_on_after(max(0.001, seconds)):
            while True:
                with self._lock:
                    if result := find():
                        return result
                    # Made under the lock that appends take: no append comes between the look and
                    # the wait.
                    waiter = loop.create_future()
                    self._waiting[waiter] = loop
                try:
                    await waiter
                finally:
                    with self._lock:
                        self._waiting.pop(waiter, None)
        return []


class SyncMemoryEventLog(SyncEventLog):
    """Synchronous client of a :class:`MemoryEventLog`, for code that runs in worker threads.

    It never waits for an event loop, so a save may also run on the loop's own thread.
    """

    remote = False

    def __init__(self, log: MemoryEventLog) -> None:
        self.run_id = log.run_id
        self.keys = log.keys
        self._log = log

    def append(self, payload: bytes) -> str:
        """Append an event; return its entry id."""
        return self._log.append_now(payload)

    def append_many(self, payloads: Sequence[bytes]) -> list[str]:
        """Append events in this order, all at once; return their entry ids."""
        return self._log.append_many_now(payloads)

    def append_reports(self, payloads: Sequence[bytes]) -> list[str]:
        """Append reports in this order, all at once; return their entry ids."""
        return self._log.append_reports_now(payloads)

    def renew_heartbeat(self, incarnation: str, lease: float) -> None:
        """Renew a process's heartbeat for ``lease`` seconds."""
        self._log.renew_heartbeat_now(incarnation, lease)

    def clear_heartbeat(self, incarnation: str) -> None:
        """End a process's heartbeat, once it has no running save that could fail."""
        self._log.clear_heartbeat_now(incarnation)

    def granted(self, save_id: str, seconds: float) -> bool:
        """Wait until a save is granted its turn; return False if it is not in time."""
        return self._log.granted_now(save_id, seconds)

    def read(
        self, after: str = ORIGIN, *, stream: Stream = Stream.EVENTS, limit: int = 1000
    ) -> list[Entry]:
        """Return up to ``limit`` entries after a position."""
        return self._log.read_now(after, stream=stream, limit=limit)

    def epoch(self) -> int:
        """Return the run's newest epoch; 0 if none was opened."""
        return self._log.epoch_now()

    def get_leader_folder(self) -> bytes | None:
        """Return None: an in-memory reducer does not describe its folder."""
        return None

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _done(waiter: asyncio.Future[None]) -> None:
    # A wait that timed out in the meantime has cancelled it.
    if not waiter.done():
        waiter.set_result(None)
