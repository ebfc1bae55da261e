"""The clock that entry ids are made of, for those who only look."""

from __future__ import annotations

from typing import Any

import redis.asyncio


async def server_clock(client: Any, key: str) -> int:
    """The clock of the run's server in milliseconds, asked for as viewers may."""
    where: dict[str, Any] = {}
    if isinstance(client, redis.asyncio.RedisCluster):
        await client.initialize()
        where["target_nodes"] = client.get_node_from_key(key)
    return int((await client.info("server", **where))["server_time_usec"]) // 1000
