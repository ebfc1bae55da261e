"""Facts of one moment about a run's processes and server, which its log does not tell.

They are read as the user ``viewer`` may read them: no script runs, and nothing is written.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis.asyncio

from trinity_schemas import ContractError, EnvelopeReader

from .core.causes import CheckpointReader, HostProcess, LiveFacts, Reason, UnreadGroup
from .core.fold_state import describe_producer
from .log import ORIGIN, RedisEventLog, Stream, position
from .replay import envelope_of
from .server import server_clock, server_info
from .stacks import host_processes

_HEARD = 500
"""Last entries of the log that are read for the time at which each process was heard."""
_FULL = 0.99
"""Part of a server's memory beyond which it counts as full: its clients' buffers change."""


async def live_facts(client: redis.asyncio.Redis, run_id: str) -> LiveFacts:
    """Return the facts of this moment about a run."""
    log = RedisEventLog(client, run_id)
    now = await server_clock(client, log.keys.events)
    return LiveFacts(
        now=now,
        is_led=bool(await client.exists(log.keys.leader)),
        unfolded_since=await _unfolded_since(client, log),
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


async def _unfolded_since(client: redis.asyncio.Redis, log: RedisEventLog) -> int | None:
    """Return the milliseconds of the oldest entry that no reducer has folded."""
    folded: Any = await client.get(log.keys.position)
    found = await log.read(ORIGIN if folded is None else folded.decode(), limit=1)
    return position(found[0].id)[0] if found else None


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
