"""Facts of one moment about a run's processes and server, which its log does not tell.

They are read as the user ``viewer`` may read them: no script runs, and nothing is written.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import redis.asyncio
from msgspec import Struct

from trinity_schemas import ContractError, EnvelopeReader

from .core.causes import CheckpointReader, HostProcess, LiveFacts, Reason, UnreadGroup
from .core.fold_state import describe_producer
from .log import ORIGIN, DeadLetter, RedisEventLog, Stream, position
from .log.redis_groups import FIRST_MEMBER
from .replay import envelope_of
from .server import server_clock, server_info
from .stacks import host_processes

_HEARD = 500
"""Last entries of the log that are read for the time at which each process was heard."""
_FULL = 0.99
"""Part of a server's memory beyond which it counts as full: its clients' buffers change."""
_GROUPS = 32
"""Consumer groups of a stream that are shown."""


class Group(NamedTuple):
    """Consumer group of a stream, as a viewer may see it."""

    stream: str
    name: str
    members: int
    pending: int
    last_delivered: str
    oldest_pending: str | None
    idle: float
    """Seconds since a member last read."""
    caught_up: bool
    lag: int | None = None
    """Entries that no member was given yet; None where the server does not know."""


class Surroundings(Struct, frozen=True):
    """Parts of a run that its events do not tell: consumer groups, dead letters, the reducer."""

    now: int
    """Milliseconds of the server's clock."""
    groups: tuple[Group, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    committed: str | None = None
    """Position that the reducer has committed."""
    end: str = ORIGIN
    unfolded_since: int | None = None
    """Milliseconds of the oldest entry that no reducer has folded."""
    facts: LiveFacts | None = None
    """Facts about processes and server, if they were read too."""


async def live_facts(client: redis.asyncio.Redis, run_id: str) -> LiveFacts:
    """Return the facts of this moment about a run."""
    log = RedisEventLog(client, run_id)
    now = await server_clock(client, log.keys.events)
    return LiveFacts(
        now=now,
        is_led=bool(await client.exists(log.keys.leader)),
        unfolded_since=await _unfolded_since(log, await _committed(client, log)),
        server_fault=await _server_fault(client, log.keys.events),
        processes=processes_here(run_id),
        heard=await _heard(log),
        groups=tuple(
            [one for stream in Stream for one in await _unread_groups(client, log, stream)]
        ),
        readers=await _readers(client, log, now),
    )


def processes_here(run_id: str) -> dict[str, HostProcess]:
    """Return the processes of a run on this host and of this user, by role and rank."""
    return {
        name: HostProcess(pid=one.pid, condition=one.condition)
        for name, one in host_processes(run_id).items()
    }


async def surroundings(client: redis.asyncio.Redis, run_id: str, *, letters: int) -> Surroundings:
    """Return consumer groups, the last dead letters and the reducer's position."""
    log = RedisEventLog(client, run_id)
    groups = [one for stream in Stream for one in await _groups(client, log, stream)]
    committed = await _committed(client, log)
    return Surroundings(
        now=await server_clock(client, log.keys.events),
        groups=tuple(groups),
        dead=tuple(await log.dead_letters(last=letters)),
        committed=committed,
        end=await log.last_id(),
        unfolded_since=await _unfolded_since(log, committed),
    )


async def _committed(client: redis.asyncio.Redis, log: RedisEventLog) -> str | None:
    """Return the position that the reducer has committed."""
    committed: Any = await client.get(log.keys.position)
    return None if committed is None else committed.decode(errors="replace")


async def _unfolded_since(log: RedisEventLog, committed: str | None) -> int | None:
    """Return the milliseconds of the oldest entry that no reducer has folded."""
    found = await log.read(committed or ORIGIN, limit=1)
    return position(found[0].id)[0] if found else None


async def _groups(client: redis.asyncio.Redis, log: RedisEventLog, stream: Stream) -> list[Group]:
    """Return the groups of a stream; viewers may not run the script that reducers use."""
    connection: Any = client
    key = getattr(log.keys, stream.value)
    if not await connection.exists(key):
        return []
    end, found = await log.last_id(stream), []
    for one in (await connection.xinfo_groups(key))[:_GROUPS]:
        waiting = await connection.xpending(key, one["name"])
        members = await connection.xinfo_consumers(key, one["name"])
        idle = [member["idle"] for member in members]
        delivered = one["last-delivered-id"].decode()
        found.append(
            Group(
                stream=stream.value,
                name=one["name"].decode(errors="backslashreplace"),
                members=sum(member["name"] != FIRST_MEMBER.encode() for member in members),
                pending=one["pending"],
                last_delivered=delivered,
                oldest_pending=waiting["min"].decode() if waiting["min"] else None,
                idle=min(idle, default=0) / 1000,
                caught_up=not one["pending"] and position(delivered) >= position(end),
                lag=one.get("lag"),
            )
        )
    return found


async def _server_fault(client: redis.asyncio.Redis, key: str) -> tuple[Reason, str] | None:
    memory = await server_info(client, key, "memory")
    used, most = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    if most and used >= _FULL * most:
        return "server-full", f"its memory is full ({used:,} of {most:,} bytes): raise maxmemory"
    files = await server_info(client, key, "persistence")
    if files.get("aof_enabled") and files.get("aof_last_write_status") == "err":
        return "server-read-only", "it cannot write its append-only file: make room on its disk"
    return None


async def _heard(log: RedisEventLog) -> dict[str, int]:
    """Return the milliseconds of the last entry of each process near the end of the log."""
    decode, heard = EnvelopeReader().decode, dict[str, int]()
    for entry in await log.read_back(limit=_HEARD):
        with suppress(ContractError):
            producer = envelope_of(log.run_id, entry.payload, decode).producer
            heard.setdefault(describe_producer(producer), position(entry.id)[0])
    return heard


async def _unread_groups(
    client: redis.asyncio.Redis, log: RedisEventLog, stream: Stream
) -> list[UnreadGroup]:
    key = getattr(log.keys, stream.value)
    if not await client.exists(key):
        return []
    found = []
    for group in await client.xinfo_groups(key):
        if not (group["pending"] or group.get("lag")):
            continue
        members = await client.xinfo_consumers(key, group["name"])
        idle = min((one["idle"] for one in members), default=None)
        if idle is not None:
            most = max(members, key=lambda one: one["pending"])
            found.append(
                UnreadGroup(
                    stream=stream.value,
                    group=_text(group["name"]),
                    pending=group["pending"],
                    idle=idle,
                    member=_text(most["name"]) if most["pending"] else None,
                )
            )
    return found


async def _readers(
    client: redis.asyncio.Redis, log: RedisEventLog, now: int
) -> tuple[CheckpointReader, ...]:
    """Return the readers that hold checkpoints."""
    held: list[Any] = await client.zrangebyscore(log.keys.holds, now, "+inf")
    pairs = (one.decode(errors="replace").partition(" ") for one in held)
    return tuple(
        CheckpointReader(step=int(step), reader=reader)
        for step, _, reader in pairs
        if step.isdecimal()
    )


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
