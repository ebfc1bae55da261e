"""Consumer groups of a log on Redis streams."""

from __future__ import annotations

import math
import time
from typing import Any

import redis.asyncio

from trinity_schemas import RunKeys

from ..base import (
    DEAD_LETTER_BYTES,
    DEAD_LETTERS_KEPT,
    Claimed,
    Entry,
    GroupInfo,
    Stream,
)
from .key_errors import naming_key_conflicts
from .replies import entries, flat_entries
from .scripts import Scripts

_KEPT = (DEAD_LETTERS_KEPT, DEAD_LETTER_BYTES)
_TRACE_EVERY = 1.0
"""Seconds between two traces of a reading member; the resolution of its idle time."""
_AFTER_ALL = f"{2**64 - 1}-{2**64 - 2}"
"""The last position but one, after which nothing is pending; the last one means new entries."""
FIRST_MEMBER = "-"
"""Member that a group is created with, so that the server counts the group's idle time."""


@naming_key_conflicts
class RedisGroups:
    """Implements :class:`~trinity_events.log.ConsumerGroup`."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._redis: Any = client
        self._run = Scripts(client)
        self._traces: dict[tuple[Stream, str, str], float] = {}
        """Local time of the last trace of each member that reads here, in seconds."""

    def _key(self, stream: Stream) -> str:
        return self.keys.events if stream is Stream.EVENTS else self.keys.announcements

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; leave an existing group as it is."""
        await self._run("create_group", keys=[self._key(stream)], args=[group, after, FIRST_MEMBER])

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet; wait on the server for them.

        A group with a waiting member is not idle, even if no entry comes.
        """
        await self._leave_trace(stream, group, member)
        reply = await self._redis.xreadgroup(
            group,
            member,
            {self._key(stream): ">"},
            count=limit,
            block=max(1, int(seconds * 1000)),
        )
        new_entries = [entry for _, pairs in reply or () for entry in entries(pairs)]
        # The server has reset the idle time with the entries that it gave.
        if new_entries:
            self._traces[stream, group, member] = time.monotonic()
        return new_entries

    async def _leave_trace(self, stream: Stream, group: str, member: str) -> None:
        """Reset the member's idle time on the server, unless that was done a moment ago.

        Redis 7.0 resets it neither for a member that waits, nor for one that gets no entry. It
        resets it for a member that reads its own pending entries: here, those after the last.
        """
        now = time.monotonic()
        if now - self._traces.get((stream, group, member), -math.inf) < _TRACE_EVERY:
            return
        await self._redis.xreadgroup(group, member, {self._key(stream): _AFTER_ALL}, count=1)
        self._traces[stream, group, member] = now

    async def claim(
        self, stream: Stream, group: str, member: str, *, idle: float, most: int, limit: int = 100
    ) -> Claimed:
        """Give this member the entries that stayed pending with any member for ``idle`` seconds.

        An entry that was delivered ``most`` times becomes a dead letter instead.
        """
        claimed, dead = await self._run(
            "claim",
            keys=[self._key(stream), self.keys.dead],
            args=[group, member, int(idle * 1000), most, limit, *_KEPT],
        )
        return Claimed(flat_entries(claimed), flat_entries(dead))

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Acknowledge an entry to the group."""
        await self._redis.xack(self._key(stream), group, entry_id)

    async def groups(self, stream: Stream) -> list[GroupInfo]:
        """Return every group of a stream."""
        rows = await self._run("groups", keys=[self._key(stream)], args=[FIRST_MEMBER])
        return [
            GroupInfo(
                name=name.decode(errors="surrogateescape"),
                pending=pending,
                last_delivered=last.decode(),
                oldest_pending=oldest.decode() or None,
                idle=idle / 1000,
                members=members,
                caught_up=bool(given) and not pending,
            )
            for name, pending, last, oldest, idle, members, given in rows
        ]

    async def destroy_group(self, stream: Stream, group: str, *, token: int) -> bool:
        """Remove a group from the log; return False if ``token`` is not the newest leader's."""
        keys = [self._key(stream), self.keys.fence]
        return bool(await self._run("destroy_group", keys=keys, args=[token, _raw(group)]))

    async def forget_members(self, stream: Stream, group: str, idle: float) -> int:
        """Remove members with nothing pending that were idle for this many seconds.

        The member that read last stays, since it shows how long the group has been idle.
        """
        keys = [self._key(stream)]
        args = [_raw(group), int(idle * 1000)]
        return int(await self._run("forget_members", keys=keys, args=args))


def _raw(group: str) -> bytes:
    """Return the bytes of a group's name on the server."""
    return group.encode(errors="surrogateescape")
