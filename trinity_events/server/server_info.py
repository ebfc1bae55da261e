"""Questions to a server by INFO, which viewers may ask too: its clock, its eviction policy."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import RedisClusterException

from .url import LOG_SERVER, ServerSetting, redacted

logger = logging.getLogger(__name__)

_SAFE = "noeviction"


async def server_clock(client: Any, key: str) -> int:
    """Return the clock of a key's server in milliseconds, the time part of entry ids.

    It uses INFO, since viewers may not run scripts.
    """
    return int((await server_info(client, key, "server"))["server_time_usec"]) // 1000


async def server_info(client: Any, key: str, section: str) -> dict[str, Any]:
    """Return a section of what a key's server tells about itself."""
    where: dict[str, Any] = {}
    if isinstance(client, redis.asyncio.RedisCluster):
        # Before its first command an asynchronous client knows no node.
        await client.initialize()
        # Each node has its own clock, and the ids of a key come from its node.
        where["target_nodes"] = client.get_node_from_key(key)
    info: dict[str, Any] = await client.info(section, **where)
    return info


async def warn_of_eviction(
    client: redis.asyncio.Redis, url: str, *, setting: ServerSetting = LOG_SERVER
) -> None:
    """Warn if the server has an eviction policy; do nothing if it cannot be asked."""
    with suppress(redis.RedisError, RedisClusterException, OSError):
        for policy in sorted(await _policies(client) - {_SAFE}):
            logger.warning(
                "the server at %s may drop %s once its memory is full (maxmemory-policy %s): set "
                "maxmemory-policy noeviction there, or nothing that docs/reliability.md promises "
                "holds",
                redacted(url),
                setting.keeps,
                policy,
            )


async def _policies(client: Any) -> set[str]:
    """Return the eviction policies of the server, or of all primaries of a cluster."""
    if not isinstance(client, redis.asyncio.RedisCluster):
        return {(await client.info("memory"))["maxmemory_policy"]}
    info = await client.info("memory", target_nodes=redis.asyncio.RedisCluster.PRIMARIES)
    nodes = [info] if "maxmemory_policy" in info else info.values()
    return {node_info["maxmemory_policy"] for node_info in nodes}
