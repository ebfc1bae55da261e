"""Clients for a URL, with errors in plain words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from ..errors import InvalidUrl, ServerTooOld, ServerUnreachable

OLDEST_SERVER = (7, 0)
SOCKET_DEADLINE = 10.0
"""Seconds that a command may take before its connection is given up."""

_RETRIES = 6
_SCHEMES = ("redis", "rediss", "unix")


def redacted(url: str) -> str:
    """The URL without its password, fit for a message."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


@asynccontextmanager
async def connect(url: str, *, retry: bool = True) -> AsyncIterator[redis.asyncio.Redis]:
    """A checked client, closed on leaving.

    ``retry=False`` never sends a command twice: for whoever must know what an ambiguous reply
    means. Raises InvalidUrl, ServerUnreachable and ServerTooOld.
    """
    _check_url(url)
    backoff = ExponentialWithJitterBackoff(base=0.02, cap=1.0)
    client = redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_DEADLINE,
        socket_connect_timeout=SOCKET_DEADLINE,
        retry=AsyncRetry(backoff, _RETRIES if retry else 0),
    )
    try:
        try:
            info = await client.info("server")
        except redis.RedisError as error:
            raise _unreachable(url, error) from None
        check_server(url, info)
        yield client
    finally:
        await client.aclose()


def open_client(url: str) -> redis.Redis:
    """A synchronous client for worker threads, unchecked; the caller closes it."""
    _check_url(url)
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_DEADLINE,
        socket_connect_timeout=SOCKET_DEADLINE,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=1.0), _RETRIES),
    )


@contextmanager
def connect_sync(url: str) -> Iterator[redis.Redis]:
    """As :func:`connect`, synchronous."""
    with open_client(url) as client:
        try:
            info: Any = client.info("server")
        except redis.RedisError as error:
            raise _unreachable(url, error) from None
        check_server(url, info)
        yield client


def check_server(url: str, info: dict[str, Any]) -> None:
    """Refuse a server that lacks what the pipeline relies on. Raises ServerTooOld."""
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_SERVER:
        raise ServerTooOld(
            f"the server at {redacted(url)} is version {version}, but 7.0 or newer is needed: "
            "upgrade it, or leave --redis-url out to use the embedded server"
        )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in _SCHEMES or parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        shown = url.rpartition("@")[2]  # never the password
        raise InvalidUrl(
            f"{shown!r} is not the URL of a Redis server: "
            "use redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
        )


def _unreachable(url: str, error: Exception) -> ServerUnreachable:
    return ServerUnreachable(
        f"no Redis server answers at {redacted(url)} ({error}): "
        "start one there, or leave --redis-url out to use the embedded server"
    )
