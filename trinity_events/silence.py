"""Whether anybody is still at work on a run that nobody has closed."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from trinity_schemas import explorer_key

from .core import MonitorState, holders
from .log import RedisEventLog, Stream, position

SILENCE = 5.0
"""Seconds without an entry after which leases are asked for. One who leads dies for less."""
_EXPLORER = "explorer-"


async def silent_since(client: redis.asyncio.Redis, state: MonitorState) -> int | None:
    """The milliseconds of the last entry of an open run that shows no sign of life since.

    That is: no reducer leads it, nobody who saves or publishes beats, no explorer of its own
    process holds its rank. None where anybody does, or the run is closed.
    """
    if state.closed is not None or state.opened_at is None:
        return None
    log = RedisEventLog(client, state.run_id)
    last = max([position(await log.last_id(stream))[0] for stream in Stream])
    if await _clock(client, log.keys.events) - last < SILENCE * 1000:
        return None
    ranks = [
        int(rank)
        for name in state.explorers
        if name.startswith(_EXPLORER) and (rank := name.removeprefix(_EXPLORER)).isdecimal()
    ]
    claims = [explorer_key(state.run_id, state.epoch, rank) for rank in ranks]
    if await client.exists(log.keys.leader, *claims) or await log.alive(holders(state)):
        return None
    return last


async def _clock(client: Any, key: str) -> int:
    """The clock of the run's server in milliseconds, asked for as viewers may."""
    where: dict[str, Any] = {}
    if isinstance(client, redis.asyncio.RedisCluster):
        await client.initialize()
        where["target_nodes"] = client.get_node_from_key(key)
    return int((await client.info("server", **where))["server_time_usec"]) // 1000
