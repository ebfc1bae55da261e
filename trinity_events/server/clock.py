"""Clock of a run's server, for users with read permission."""

from __future__ import annotations

from typing import Any

import redis.asyncio


async def server_clock(client: Any, key: str) -> int:
    """Return the clock of a key's server in milliseconds, the time part of entry ids.

    It uses INFO, since viewers may not run scripts.
    """
    where: dict[str, Any] = {}
    if isinstance(client, redis.asyncio.RedisCluster):
        await client.initialize()
        where["target_nodes"] = client.get_node_from_key(key)
    return int((await client.info("server", **where))["server_time_usec"]) // 1000
