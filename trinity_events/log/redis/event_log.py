"""The event log on Redis streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import redis.asyncio

from trinity_schemas import grant_key, heartbeat_key

from ...errors import EpochBehind
from ..base import (
    DEAD_LETTERS_KEPT,
    GRANT_KEPT,
    Commit,
    CurrentAnnouncement,
    DeadLetter,
    Entry,
    Intake,
    Stream,
)
from ..position import LAST_ID, LATEST, ORIGIN, position
from ..reducer_root import select_leader_folder
from .groups import RedisGroups
from .key_errors import (
    naming_key_conflicts,
    parse_announcement,
    parse_dead_letter,
    parse_number,
    parse_position,
    wrong_type,
)
from .replies import FIELD, entries, flat_entries

_HEARTBEATS_AT_ONCE = 512
"""Heartbeats of one request: thousands of explorers hold up no other client."""


@naming_key_conflicts
class RedisEventLog(RedisGroups):
    """One run's log on a server. Implements :class:`~trinity_events.log.EventLog`.

    Methods raise KeyConflict for a key of the run that another program wrote.
    """

    async def append(self, payload: bytes) -> str:
        """Append an event; return its entry id."""
        entry_id: bytes = await self._redis.xadd(self.keys.events, {FIELD: payload})
        return entry_id.decode()

    async def read(
        self,
        after: str = ORIGIN,
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        through: str = "+",
    ) -> list[Entry]:
        """Return up to ``limit`` entries after a position, up to and including ``through``."""
        if after == LAST_ID:  # a server answers this with an error
            return []
        key, first = self._key(stream), f"({after}"
        if isinstance(self._redis, redis.asyncio.RedisCluster):
            return entries(await self._redis.xrange(key, min=first, max=through, count=limit))
        # The name is bytes, for which the client has no parser: see flat_entries.
        return flat_entries(
            await self._redis.execute_command(b"XRANGE", key, first, through, b"COUNT", limit)
        )

    async def read_back(
        self,
        before: str = "+",
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        inclusive: bool = False,
    ) -> list[Entry]:
        """Return up to ``limit`` entries before a position, newest first.

        ``inclusive`` adds the entry at the position itself.
        """
        last = before if before == "+" or inclusive else f"({before}"
        return entries(await self._redis.xrevrange(self._key(stream), max=last, count=limit))

    async def read_blocking(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """Return the entries of one or both streams; wait on the server while there are none."""
        streams = {self._key(stream): stream for stream in after}
        reply = await self._redis.xread(
            {key: after[stream] for key, stream in streams.items()},
            count=limit,
            # For a server, 0 is a wait without end.
            block=max(1, int(seconds * 1000)),
        )
        return [
            (streams[key.decode()], entry) for key, pairs in reply or () for entry in entries(pairs)
        ]

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """Return the position of the newest entry."""
        newest = entries(await self._redis.xrevrange(self._key(stream), count=1))
        return newest[0].id if newest else ORIGIN

    async def exists(self) -> bool:
        """Return True if the log has an entry, or ever had one."""
        return bool(await self._redis.exists(self.keys.events))

    async def identity(self) -> str | None:
        """Return the identity of the log that :meth:`store_identity` stored."""
        value: bytes | None = await self._redis.get(self.keys.identity)
        return None if value is None else value.decode(errors="replace")

    async def store_identity(self, identity: str) -> None:
        """Store the log's identity, unless one is stored; it outlives the first entry."""
        await self._redis.set(self.keys.identity, identity, nx=True)

    async def newest_epoch(self) -> int:
        """Return the newest epoch of the run; 0 before the first one."""
        return parse_number(self.keys.epoch, await self._redis.get(self.keys.epoch))

    async def open_epoch(self, payload: Callable[[int], bytes], *, above: int = 0) -> int:
        """Take the next epoch and append its first event, in one script; return the epoch.

        Raises EpochBehind while the counter of epochs is below ``above``.
        """
        epoch = await self.newest_epoch() + 1
        if epoch <= above:
            raise EpochBehind(self.run_id, above, epoch - 1)
        while True:
            keys = [self.keys.epoch, self.keys.events]
            reply = await self._run("open_epoch", keys=keys, args=[epoch, payload(epoch)])
            # Else the reply is the counter, which another opening has raised in between.
            if int(reply) < 0:
                return epoch
            epoch = int(reply) + 1

    async def raise_epoch(self, token: int, epoch: int) -> int | None:
        """Raise the counter of epochs to ``epoch``; return the counter as it was.

        Return None, and change nothing, if ``token`` is not the newest leader's.
        """
        keys = [self.keys.epoch, self.keys.fence]
        counted = await self._run("raise_epoch", keys=keys, args=[token, epoch])
        return None if counted is None else int(counted)

    async def current_announcements(self) -> list[CurrentAnnouncement]:
        """Return the last announcement of every subject, in the order of the stream."""
        current: list[CurrentAnnouncement] = []
        # A server gives the fields of a hash in any order.
        for field, value in (await self._redis.hgetall(self.keys.current)).items():
            subject, entry_id, payload = parse_announcement(self.keys.current, field, value)
            current.append(CurrentAnnouncement(subject, Entry(entry_id, payload)))
        return sorted(current, key=lambda announcement: position(announcement.entry.id))

    async def load(self) -> tuple[bytes | None, str]:
        """Return the reducer's last snapshot and its position."""
        key = self.keys.position
        snapshot, position = await self._redis.mget(self.keys.snapshot, key)
        if position is None:
            # MGET also answers None for a key that is no string.
            if (actual := (await self._redis.type(key)).decode()) not in ("none", "string"):
                raise wrong_type(key, actual, "string")
            return snapshot, ORIGIN
        return snapshot, parse_position(key, position)

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step; return False if another reducer leads or is further on.

        A key of another type raises KeyConflict, and nothing is written.
        """
        keys = self.keys
        # The order is that in the head of `commit.lua`.
        args: list[Any] = [commit.token, commit.after, commit.position, commit.snapshot or b""]
        args += (DEAD_LETTERS_KEPT, int(GRANT_KEPT * 1000))
        args += (len(commit.retracted), *commit.retracted, len(commit.announcements))
        for subject, payload in commit.announcements:
            args += (subject, payload)
        for letter in commit.dead_letters:
            entry, reason = letter.truncated
            args += (entry.id, reason, entry.payload)
        written = [
            *(keys.position, keys.fence, keys.announcements, keys.dead, keys.snapshot),
            *(keys.current, *(grant_key(self.run_id, save_id) for save_id in commit.grants)),
        ]
        return bool(await self._run("commit", keys=written, args=args) == b"ok")

    async def append_leading(self, token: int, payload: bytes) -> str | None:
        """Append for the newest leader alone; return None if ``token`` is not its fence token."""
        keys = [self.keys.events, self.keys.fence]
        entry_id: bytes | None = await self._run("append_leading", keys=keys, args=[token, payload])
        return entry_id.decode() if entry_id else None

    async def renumber(self, token: int, after: str) -> int | None:
        """Give new ids to events with ids past year 9999; return their number.

        The order of the events stays. Return None if ``token`` is not the newest leader's. Nothing
        changes if ``after``, the last folded position, is itself such an id.
        """
        return await self._renumber(self.keys.events, token, after)

    async def _renumber(self, key: str, token: int, after: str) -> int | None:
        keys = [key, f"{key}:renumbered", self.keys.fence]
        number = int(await self._run("renumber", keys=keys, args=[f"{LATEST + 1}-0", after, token]))
        return None if number < 0 else number

    async def append_report(self, payload: bytes) -> str:
        """Append a report; return its entry id."""
        entry_id: bytes = await self._redis.xadd(self.keys.reports, {FIELD: payload})
        return entry_id.decode()

    async def read_reports(self, after: str, *, seconds: float, limit: int) -> list[Entry]:
        """Return up to ``limit`` reports after a position; wait on the server for the first."""
        block = max(1, int(seconds * 1000))
        reply = await self._redis.xread({self.keys.reports: after}, count=limit, block=block)
        return entries(reply[0][1]) if reply else []

    async def reports_position(self) -> str:
        """Return the position up to which reports were accepted or refused."""
        key = self.keys.reported
        value = await self._redis.get(key)
        return ORIGIN if value is None else parse_position(key, value)

    async def has_reports(self) -> bool:
        """Return True if there is a report that was neither accepted nor refused."""
        newest = entries(await self._redis.xrevrange(self.keys.reports, count=1))
        return bool(newest) and position(newest[0].id) > position(await self.reports_position())

    async def oldest_waiting_report(self) -> Entry | None:
        """Return the oldest report that was neither accepted nor refused."""
        after = f"({await self.reports_position()}"
        waiting = entries(await self._redis.xrange(self.keys.reports, min=after, count=1))
        return waiting[0] if waiting else None

    async def accept_reports(self, intake: Intake) -> bool:
        """Append accepted reports to the events; return False if another reducer leads."""
        args: list[Any] = [intake.token, intake.after, intake.position, DEAD_LETTERS_KEPT]
        args += [len(intake.accepted), *intake.accepted]
        for entry, reason in (letter.truncated for letter in intake.refused):
            args += (entry.id, reason, entry.payload)
        keys = self.keys
        written = [keys.reported, keys.fence, keys.reports, keys.events, keys.dead]
        return bool(await self._run("accept_reports", keys=written, args=args) == b"ok")

    async def renumber_reports(self, token: int, after: str) -> int | None:
        """Renumber reports as :meth:`renumber` does events."""
        return await self._renumber(self.keys.reports, token, after)

    async def renumber_dead_letters(self, token: int) -> int | None:
        """Renumber all dead letters as :meth:`renumber` does events."""
        return await self._renumber(self.keys.dead, token, ORIGIN)

    async def heartbeat_ttls(self, incarnations: Collection[str]) -> dict[str, float]:
        """Return the seconds left of each heartbeat that has not lapsed, by incarnation."""
        ids, remaining = list(incarnations), list[int]()
        for first in range(0, len(ids), _HEARTBEATS_AT_ONCE):
            # A transaction would hold up all other clients for the whole page.
            async with self._redis.pipeline(transaction=False) as pipeline:
                for incarnation in ids[first : first + _HEARTBEATS_AT_ONCE]:
                    pipeline.pttl(heartbeat_key(self.run_id, incarnation))
                remaining += await pipeline.execute()
        # -2: there is no key; -1: the key never lapses, which no process of ours writes.
        there = (
            (incarnation, ms) for incarnation, ms in zip(ids, remaining, strict=True) if ms != -2
        )
        return {incarnation: math.inf if ms < 0 else ms / 1000 for incarnation, ms in there}

    async def now(self) -> int:
        """Return the server's clock in milliseconds, the time part of entry ids."""
        return int(await self._run("now", keys=[self.keys.events]))

    async def notify_promoted(self) -> None:
        """Wake the readers that wait for a folder to get its final name."""
        # A stream of one entry: a reader can wait on it, and sees a promotion from before its wait.
        await self._redis.xadd(self.keys.promoted, {FIELD: b""}, maxlen=1, approximate=False)

    async def promoted_after(self, after: str, *, seconds: float) -> str:
        """Return the position of the last promotion of a folder, once it is after a position.

        Return ``after`` if there is none within the time.
        """
        block = max(1, int(seconds * 1000))
        reply = await self._redis.xread({self.keys.promoted: after}, block=block)
        return entries(reply[0][1])[-1].id if reply else after

    async def acquire_lease(self, step: int, who: str, seconds: float) -> bool:
        """Take or extend a lease on a checkpoint, which the reducer then does not delete.

        Return False if the checkpoint is being deleted. Only its folder tells if it exists.
        """
        keys = [self.keys.holds, self.keys.doomed]
        return bool(
            await self._run("acquire_lease", keys=keys, args=[step, who, int(seconds * 1000)])
        )

    async def release_lease(self, step: int, who: str) -> None:
        """Release the lease on a checkpoint."""
        await self._redis.zrem(self.keys.holds, f"{step} {who}")

    async def mark_deleting(self, token: int, steps: Collection[int]) -> set[int]:
        """Mark the checkpoints without a lease for deletion; return their steps.

        Mark none if ``token`` is not the newest leader's.
        """
        keys = [self.keys.holds, self.keys.doomed, self.keys.fence]
        return {
            int(step) for step in await self._run("mark_deleting", keys=keys, args=[token, *steps])
        }

    async def clear_deleting(self, token: int, steps: Collection[int] | None = None) -> bool:
        """Clear the deletion marks of some steps, or of all; return False if another leads."""
        keys = [self.keys.doomed, self.keys.fence]
        args = [token, "all"] if steps is None else [token, *steps]
        return bool(await self._run("clear_deleting", keys=keys, args=args))

    async def trim(self, stream: Stream, limit: str, *, token: int | None = None) -> int:
        """Drop entries below ``limit`` that no group still needs; return their number.

        Drop none if ``token`` is given and is not the newest leader's.
        """
        keys = [self._key(stream), self.keys.fence]
        args = [limit, "" if token is None else token]
        return int(await self._run("trim", keys=keys, args=args))

    async def first_retained_id(self, stream: Stream) -> str | None:
        """Return the id of a trimmed stream's oldest entry; None if nothing was trimmed."""
        if not await self._redis.exists(self._key(stream)):
            return None
        info = await self._redis.xinfo_stream(self._key(stream))
        # The server counts what was ever added: a shorter stream was trimmed.
        if info["entries-added"] == info["length"]:
            return None
        first = info["first-entry"]
        oldest_id: bytes = first[0] if first else info["last-generated-id"]
        return oldest_id.decode()

    async def dead_letters(self, last: int | None = None) -> list[DeadLetter]:
        """Return the entries that could not be decoded, each with its reason; all by default."""
        letters: list[DeadLetter] = []
        newest_first = await self._redis.xrevrange(self.keys.dead, count=last)
        for at, fields in reversed(newest_first):
            entry_id, reason, payload = parse_dead_letter(self.keys.dead, at, fields)
            letters.append(DeadLetter(Entry(entry_id, payload), reason))
        return letters

    async def lead(self, lease: float) -> tuple[int, float]:
        """Take the lead for ``lease`` seconds.

        Return a fence token; or 0, and the seconds that the lease of another leader has left.
        """
        keys = [self.keys.leader, self.keys.fence]
        token, remaining = await self._run("lead", keys=keys, args=[int(lease * 1000)])
        return int(token), int(remaining) / 1000

    async def set_leader_folder(self, description: bytes) -> None:
        """Store the folder that the leader uses for the run's checkpoints."""
        await self._redis.set(self.keys.folder, description)

    async def get_leader_folder(self) -> bytes | None:
        """Return the leader's description of its folder; None without a leader or description."""
        # In one request: both are of one moment.
        return select_leader_folder(*await self._redis.mget(self.keys.leader, self.keys.folder))

    async def renew(self, token: int, lease: float) -> bool:
        """Renew the lead for ``lease`` seconds; 0 gives it up. Return False if it was lost."""
        reply = await self._run("renew", keys=[self.keys.leader], args=[token, int(lease * 1000)])
        return bool(int(reply))
