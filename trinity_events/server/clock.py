"""The clock of a run's server, as whoever may only read can ask for it."""

from __future__ import annotations

from typing import Any

import redis.asyncio


async def server_clock(client: Any, key: str) -> int:
    """The milliseconds of the server that the key is on, of which entry ids are made.

    Not by a script, which viewers may not run.
    """
    where: dict[str, Any] = {}
    if isinstance(client, redis.asyncio.RedisCluster):
        await client.initialize()
        where["target_nodes"] = client.get_node_from_key(key)
    return int((await client.info("server", **where))["server_time_usec"]) // 1000
