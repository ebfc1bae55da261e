"""The event log on Redis streams."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import redis
import redis.asyncio
from redis.commands.core import AsyncScript

from trinity_schemas import RunKeys

from .base import Commit, DeadLetter, Entry, Standing, Stream
from .position import ORIGIN

FIELD = b"e"
"""The field of a stream entry that holds the event."""


class RedisEventLog:
    """One run's log on a server. Implements :class:`~trinity_events.log.EventLog`."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._redis: Any = client
        self._commit = lua_script(client, "commit")
        self._open_epoch = lua_script(client, "open_epoch")
        self._lead = lua_script(client, "lead")
        self._renew = lua_script(client, "renew")
        self._trim = lua_script(client, "trim")

    def _key(self, stream: Stream) -> str:
        return self.keys.events if stream is Stream.EVENTS else self.keys.announcements

    async def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
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
        """Up to ``limit`` entries after a position, up to and with ``through``."""
        return entries(
            await self._redis.xrange(self._key(stream), min=f"({after}", max=through, count=limit)
        )

    async def wait(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """As :meth:`read` on one or both streams, waiting on the server for them."""
        streams = {self._key(stream): stream for stream in after}
        reply = await self._redis.xread(
            {key: after[stream] for key, stream in streams.items()},
            count=limit,
            block=max(1, int(seconds * 1000)),
        )
        return [
            (streams[key.decode()], entry) for key, found in reply or () for entry in entries(found)
        ]

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """The position of the newest entry."""
        newest = entries(await self._redis.xrevrange(self._key(stream), count=1))
        return newest[0].id if newest else ORIGIN

    async def exists(self) -> bool:
        """Whether anything was ever written to it."""
        return bool(await self._redis.exists(self.keys.events))

    async def open_epoch(self, payload: Callable[[int], bytes]) -> int:
        """Take the next epoch and append its first event, in one script; returns the epoch."""
        epoch = int(await self._redis.get(self.keys.epoch) or 0) + 1
        while True:
            taken = await self._open_epoch(
                keys=[self.keys.epoch, self.keys.events], args=[epoch, payload(epoch)]
            )
            if int(taken) < 0:
                return epoch
            epoch = int(taken) + 1

    async def standing(self) -> list[Standing]:
        """The last announcement of every subject."""
        found: list[Standing] = []
        for subject, value in (await self._redis.hgetall(self.keys.current)).items():
            entry_id, _, payload = value.partition(b" ")
            found.append(Standing(subject.decode(), Entry(entry_id.decode(), payload)))
        return found

    async def load(self) -> tuple[bytes | None, str]:
        """The reducer's last snapshot and its position."""
        snapshot, position = await self._redis.mget(self.keys.snapshot, self.keys.position)
        return snapshot, position.decode() if position else ORIGIN

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step. False when another reducer leads or has gone further."""
        keys = self.keys
        args: list[Any] = [commit.token, commit.after, commit.position, commit.snapshot or b""]
        args += (len(commit.retracted), *commit.retracted, len(commit.announcements))
        for subject, payload in commit.announcements:
            args += (subject, payload)
        for letter in commit.dead_letters:
            args += (letter.entry.id, letter.reason, letter.entry.payload)
        outcome = await self._commit(
            keys=[
                keys.position,
                keys.fence,
                keys.announcements,
                keys.dead,
                keys.snapshot,
                keys.current,
            ],
            args=args,
        )
        return bool(outcome == b"ok")

    async def trim(self, stream: Stream, limit: str) -> int:
        """Drop entries below ``limit`` that no group still needs; returns how many."""
        key = self._key(stream)
        if not await self._redis.exists(key):
            return 0
        return int(await self._trim(keys=[key], args=[limit]))

    async def first_left(self, stream: Stream) -> str | None:
        """The oldest entry of a stream that has lost older ones; None when it is whole."""
        if not await self._redis.exists(self._key(stream)):
            return None
        info = await self._redis.xinfo_stream(self._key(stream))
        if info["entries-added"] == info["length"]:
            return None
        first = info["first-entry"]
        left: bytes = first[0] if first else info["last-generated-id"]
        return left.decode()

    async def dead_letters(self) -> list[DeadLetter]:
        """The entries that could not be decoded, and why."""
        return [
            DeadLetter(Entry(fields[b"id"].decode(), fields[b"e"]), fields[b"reason"].decode())
            for _, fields in await self._redis.xrange(self.keys.dead)
        ]

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; one that is there stays as it is."""
        try:
            await self._redis.xgroup_create(self._key(stream), group, id=after, mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet, waiting on the server."""
        reply = await self._redis.xreadgroup(
            group,
            member,
            {self._key(stream): ">"},
            count=limit,
            block=max(1, int(seconds * 1000)),
        )
        return [entry for _, pairs in reply or () for entry in entries(pairs)]

    async def claim_idle(
        self, stream: Stream, group: str, member: str, *, idle: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member what any member has left pending for ``idle`` seconds."""
        claimed = await self._redis.xautoclaim(
            self._key(stream), group, member, min_idle_time=int(idle * 1000), count=limit
        )
        return entries(pair for pair in claimed[1] if pair[1] is not None)

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Tell the group that an entry is dealt with."""
        await self._redis.xack(self._key(stream), group, entry_id)

    async def lead(self, lease: float) -> tuple[int, float]:
        """Take the lead for ``lease`` seconds: a token, or 0 and how long another still has it."""
        token, left = await self._lead(
            keys=[self.keys.leader, self.keys.fence], args=[int(lease * 1000)]
        )
        return int(token), int(left) / 1000

    async def renew(self, token: int, lease: float) -> bool:
        """Keep the lead for ``lease`` more seconds; 0 gives it up. False when it was lost."""
        kept = await self._renew(keys=[self.keys.leader], args=[token, int(lease * 1000)])
        return bool(int(kept))


def entries(reply: Any) -> list[Entry]:
    """Entries of an XRANGE or XREAD reply; one without our field reads as empty bytes."""
    return [Entry(entry_id.decode(), (fields or {}).get(FIELD, b"")) for entry_id, fields in reply]


def lua_script(client: redis.asyncio.Redis, name: str) -> AsyncScript:
    """One of the scripts beside this file."""
    return client.register_script(files(__package__).joinpath(f"{name}.lua").read_text())
