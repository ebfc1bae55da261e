"""Detection of explorers that died, and of abandoned runs: open runs without a live process."""

from __future__ import annotations

from collections.abc import Iterable

import redis.asyncio

from trinity_schemas import explorer_key

from .core import MonitorState, lease_holders
from .log import RedisEventLog, Stream, position
from .server import server_clock

ABANDONED_AFTER = 5.0
"""Seconds without an entry after which leases are checked, by default; longer than the leader lease
(3 s)."""
_EXPLORER = "explorer-"


async def abandoned_since(
    client: redis.asyncio.Redis, state: MonitorState, silence: float = ABANDONED_AFTER
) -> int | None:
    """Return the time of an abandoned run's last entry, in milliseconds; None for other runs.

    An open run is abandoned if no reducer leads it, no saving or publishing process sends
    heartbeats, and no explorer process holds its rank. None of it is asked for ``silence`` seconds
    after an entry.
    """
    if state.closed is not None or state.opened_at is None:
        return None
    log = RedisEventLog(client, state.run_id)
    # Announcements too: a reducer that has just announced something is alive.
    last = max([position(await log.last_id(stream))[0] for stream in Stream])
    # An entry far ahead of the clock has an id that its writer chose, and shows no arrival time.
    if abs(await server_clock(client, log.keys.events) - last) < silence * 1000:
        return None
    if (
        await client.exists(log.keys.leader)
        or await list_live_explorers(client, state)
        or await log.heartbeat_ttls(lease_holders(state))
    ):
        return None
    return last


async def list_live_explorers(client: redis.asyncio.Redis, state: MonitorState) -> set[str]:
    """Return the names of the epoch's explorers whose rank is held by a live process."""
    claims = {name: explorer_key(state.run_id, state.epoch, rank) for name, rank in _ranks(state)}
    if not claims:
        return set()
    values = await client.mget(list(claims.values()))
    return {name for name, value in zip(claims, values, strict=True) if value is not None}


def _ranks(state: MonitorState) -> Iterable[tuple[str, int]]:
    """Yield name and rank of each explorer that is known."""
    for name in state.explorers:
        if name.startswith(_EXPLORER) and (rank := name.removeprefix(_EXPLORER)).isdecimal():
            yield name, int(rank)
