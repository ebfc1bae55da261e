"""Facts of one moment about a run's processes and server, which its log does not contain.

They are read as the user ``viewer`` may read them: no script runs, and nothing is written.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import redis.asyncio
from msgspec import structs

from trinity_schemas import ContractError, EnvelopeReader

from .analysis.causes import CheckpointReader, GroupLag, HostProcess, LiveFacts, Reason
from .core.fold import decode_entry
from .core.fold_state import format_producer
from .core.state import ProcessHost
from .diagnostics.stacks import host_processes
from .log import ORIGIN, RedisEventLog, Stream, position
from .log.redis.groups import FIRST_MEMBER
from .log.reducer_root import parse_leader_host
from .server import server_clock, server_info
from .system.host import get_host_id

_HEARD = 500
"""Last entries of the log that are read for the time at which each process was heard."""
_FULL = 0.99
"""Part of a server's memory beyond which it counts as full: its clients' buffers change."""
_GROUPS = 256
"""Maximum consumer groups of a stream that are asked for."""


async def read_live_facts(client: redis.asyncio.Redis, run_id: str) -> LiveFacts:
    """Return the facts of this moment about a run."""
    log = RedisEventLog(client, run_id)
    lags = await read_lags(client, log)
    report = await log.oldest_waiting_report()
    return structs.replace(
        lags,
        is_led=bool(await client.exists(log.keys.leader)),
        reports_since=None if report is None else position(report.id)[0],
        server_fault=await _server_fault(client, log.keys.events),
        processes={
            name: HostProcess(pid=process.pid, condition=process.condition)
            for name, process in host_processes(run_id).items()
        },
        heard=await _heard(log),
        readers=await _readers(client, log, lags.now),
        host=ProcessHost(node=socket.gethostname(), host_id=get_host_id()),
        leader_host=parse_leader_host(await log.get_leader_folder()),
    )


async def read_lags(client: redis.asyncio.Redis, log: RedisEventLog) -> LiveFacts:
    """Return only the facts about the readers of a log: its reducer and consumer groups."""
    return LiveFacts(
        now=await server_clock(client, log.keys.events),
        unfolded_since=await _unfolded_since(client, log),
        groups=tuple([group for stream in Stream for group in await _groups(client, log, stream)]),
    )


async def _unfolded_since(client: redis.asyncio.Redis, log: RedisEventLog) -> int | None:
    """Return the milliseconds of the oldest entry that no reducer has folded."""
    committed: Any = await client.get(log.keys.position)
    after = ORIGIN if committed is None else committed.decode(errors="replace")
    entries = await log.read(after, limit=1)
    return position(entries[0].id)[0] if entries else None


async def _groups(
    client: redis.asyncio.Redis, log: RedisEventLog, stream: Stream
) -> list[GroupLag]:
    """Return the groups of a stream; viewers may not run the script that reducers use."""
    connection: Any = client
    key = getattr(log.keys, stream.value)
    if not await connection.exists(key):
        return []
    end, groups = await log.last_id(stream), []
    # Bounded, as each group costs two more requests.
    for info in (await connection.xinfo_groups(key))[:_GROUPS]:
        waiting = await connection.xpending(key, info["name"])
        members = await connection.xinfo_consumers(key, info["name"])
        idle = [member["idle"] for member in members]
        most = max(members, key=lambda member: member["pending"], default=None)
        delivered = info["last-delivered-id"].decode()
        groups.append(
            GroupLag(
                stream=stream.value,
                name=_text(info["name"]),
                # The one that creates a group is no reader of it.
                members=sum(member["name"] != FIRST_MEMBER.encode() for member in members),
                pending=info["pending"],
                last_delivered=delivered,
                oldest_pending=waiting["min"].decode() if waiting["min"] else None,
                idle=min(idle) / 1000 if idle else None,
                caught_up=not info["pending"] and position(delivered) >= position(end),
                lag=info.get("lag"),
                holder=_text(most["name"]) if most and most["pending"] else None,
            )
        )
    return groups


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
            producer = decode_entry(log.run_id, entry.payload, decode).producer
            # The newest entry comes first.
            heard.setdefault(format_producer(producer), position(entry.id)[0])
    return heard


async def _readers(
    client: redis.asyncio.Redis, log: RedisEventLog, now: int
) -> tuple[CheckpointReader, ...]:
    """Return the readers that hold checkpoints."""
    # A score is the time at which a hold ends.
    members: list[Any] = await client.zrangebyscore(log.keys.holds, now, "+inf")
    pairs = (member.decode(errors="replace").partition(" ") for member in members)
    return tuple(
        CheckpointReader(step=int(step), reader=reader)
        for step, _, reader in pairs
        if step.isdecimal()
    )


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
