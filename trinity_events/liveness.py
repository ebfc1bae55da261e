"""Whether anybody is still at work on a run that nobody has closed."""

from __future__ import annotations

import redis.asyncio

from trinity_schemas import explorer_key

from .core import MonitorState, lease_holders
from .log import RedisEventLog, Stream, position
from .server import server_clock

ABANDONED_AFTER = 5.0
"""Seconds without an entry after which leases are asked for. One who leads dies for less."""
_EXPLORER = "explorer-"


async def abandoned_since(client: redis.asyncio.Redis, state: MonitorState) -> int | None:
    """The milliseconds of the last entry of an open run that shows no sign of life since.

    That is: no reducer leads it, nobody who saves or publishes beats, no explorer of its own
    process holds its rank. None where anybody does, or the run is closed.
    """
    if state.closed is not None or state.opened_at is None:
        return None
    log = RedisEventLog(client, state.run_id)
    last = max([position(await log.last_id(stream))[0] for stream in Stream])
    # An entry far ahead of the clock, whose writer chose its id, says nothing of when it came.
    if abs(await server_clock(client, log.keys.events) - last) < ABANDONED_AFTER * 1000:
        return None
    ranks = [
        int(rank)
        for name in state.explorers
        if name.startswith(_EXPLORER) and (rank := name.removeprefix(_EXPLORER)).isdecimal()
    ]
    claims = [explorer_key(state.run_id, state.epoch, rank) for rank in ranks]
    if await client.exists(log.keys.leader, *claims) or await log.heartbeat_ttls(
        lease_holders(state)
    ):
        return None
    return last
