"""Factories of all clients, of a single server or of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import AbstractBackoff, NoBackoff
from redis.retry import Retry

from ..errors import InvalidUrl
from ..log.retry import draw_delay
from .url import ServerUrl, redacted

SOCKET_DEADLINE = 10.0
"""Seconds that a command may take before the client gives up its connection."""
_CLOSE_WITHIN = 2.0
"""Seconds that the closing of an asynchronous client may take."""
_RETRIES = 6
"""Number of times that a client repeats a command after a connection error."""
_CONNECTIONS = 10_000  # a reducer waits on one connection for each run
_MOVED: dict[str, Any] = {"retry_on_error": [redis.ReadOnlyError]}
"""Settings that retry after the error of a server that became a replica. The next connection may
reach the new primary, if its address moved. Clients of a cluster find the primary themselves."""


class _Backoff(AbstractBackoff):
    """Delays between a client's attempts; redis-py's classes draw from the global generator."""

    def compute(self, failures: int) -> float:
        """Return the seconds to wait before the next attempt."""
        # At most about two seconds in all; longer outages are for the callers' deadlines.
        return draw_delay(min(0.02 * 2**failures, 1.0))


class _Cluster(redis.cluster.RedisCluster):
    """Client of a cluster that ends its connections when it is closed; redis-py's leaves them."""

    def close(self) -> None:
        """Close the client, and the connections to all nodes."""
        if getattr(self, "nodes_manager", None) is not None:  # None if no node was found
            self.disconnect_connection_pools()  # type: ignore[no-untyped-call]
        super().close()


def _settings() -> dict[str, Any]:
    return {
        # RESP3 has maps where callers expect lists, as in the reply to XREADGROUP.
        "protocol": 2,
        "socket_timeout": SOCKET_DEADLINE,
        "socket_connect_timeout": SOCKET_DEADLINE,
        "max_connections": _CONNECTIONS,
    }


def plain_client(url: ServerUrl, *, retry: bool = True) -> redis.Redis:
    """Return a synchronous client of one server."""
    again = Retry(_Backoff(), _RETRIES if retry else 0)
    return redis.Redis.from_url(url.url, retry=again, **_settings(), **_MOVED)


def cluster_client(url: ServerUrl) -> redis.Redis:
    """Return a synchronous client of a cluster; it asks for the cluster's nodes at once."""
    _check(url)
    # redis-py has no types for it.
    node: Any = redis.cluster.ClusterNode
    nodes = [node(*address) for address in url.more]
    client: Any = _Cluster.from_url(
        url.url, startup_nodes=nodes, retry=Retry(_Backoff(), _RETRIES), **_settings()
    )
    return client  # type: ignore[no-any-return] # it has the methods that callers use


def async_plain_client(url: ServerUrl, *, retry: bool) -> redis.asyncio.Redis:
    """Return an asynchronous client of one server."""
    return redis.asyncio.Redis.from_url(url.url, retry=_async_retry(retry), **_settings(), **_MOVED)


def async_cluster_client(url: ServerUrl, *, retry: bool) -> redis.asyncio.Redis:
    """Return an asynchronous client of a cluster; its first call asks for the nodes."""
    _check(url)
    node: Any = redis.asyncio.cluster.ClusterNode
    nodes = [node(*address) for address in url.more]
    client: Any = redis.asyncio.cluster.RedisCluster.from_url(
        url.url, startup_nodes=nodes, retry=_async_retry(retry), **_settings()
    )
    return client  # type: ignore[no-any-return] # it has the methods that callers use


def probe(socket: Path) -> redis.Redis:
    """Return a client that asks the embedded server once, without retries."""
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))


async def close_async(client: redis.asyncio.Redis) -> None:
    """Close an asynchronous client, even while its task is being cancelled."""
    # Without the shield a cancelled task would leave its connections open.
    with anyio.move_on_after(_CLOSE_WITHIN, shield=True):
        await client.aclose()
        nodes: Any = getattr(client, "nodes_manager", None)
        if nodes is not None:
            # A cluster client that lost a node counts as closed, so aclose does nothing.
            await nodes.aclose()
            await nodes.aclose("startup_nodes")


def _async_retry(retry: bool) -> AsyncRetry:
    return AsyncRetry(_Backoff(), _RETRIES if retry else 0)


def _check(url: ServerUrl) -> None:
    if url.url.startswith("unix:"):
        raise InvalidUrl(redacted(url.url), "cluster socket")
    parse: Any = redis.connection.parse_url
    # A cluster has database 0 alone; the client would ignore the number.
    if database := parse(url.url).get("db"):
        raise InvalidUrl(redacted(url.url), "cluster database", option=str(database))


def address_of(client: Any) -> str:
    """Return the address of a client's server, without user and password, for a message."""
    if isinstance(client, redis.asyncio.cluster.RedisCluster):
        return ",".join(sorted(f"{node.host}:{node.port}" for node in client.get_nodes()))
    where: dict[str, Any] = client.connection_pool.connection_kwargs
    return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")
