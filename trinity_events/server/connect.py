"""Checked clients for a URL, with one-sentence errors."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import redis
import redis.asyncio
from redis.exceptions import RedisClusterException

from ..errors import (
    CertificateRefused,
    ServerRefuses,
    ServerTooOld,
    ServerUnreachable,
    TrinityError,
)
from ..log.redis.error_replies import is_reply, reply_text
from ..log.retry import backoff_delays, is_transient
from .acl_errors import permission_error
from .clients import (
    SOCKET_DEADLINE,
    async_cluster_client,
    async_plain_client,
    close_async,
    cluster_client,
    plain_client,
)
from .url import LOG_SERVER, ServerSetting, parse, redacted

__all__ = ["OLDEST_SERVER", "SOCKET_DEADLINE", "redacted"]

T = TypeVar("T")

OLDEST_SERVER = (7, 0)
"""Oldest version of a server that is accepted."""
START_PATIENCE = 2.0
"""Seconds for which a client waits for a server that is starting, by default."""
_LONGEST_PAUSE = 0.5
"""Maximum seconds between two attempts."""
_ERRORS = (redis.RedisError, RedisClusterException, OSError)


@asynccontextmanager
async def connect(
    url: str,
    *,
    retry: bool = True,
    setting: ServerSetting = LOG_SERVER,
    patience: float = START_PATIENCE,
) -> AsyncIterator[redis.asyncio.Redis]:
    """Open a checked client of a server or cluster, and close it on leaving.

    ``retry=False`` never sends a command twice, for callers that handle a lost reply themselves.
    ``setting`` is the option that names the server. A server that is starting is waited for, at
    most ``patience`` seconds. Raises InvalidUrl, ServerUnreachable, ServerTooOld and
    PermissionDenied; the last also for a request of the block.
    """
    client = await _opened(url, retry, setting, patience)
    try:
        yield client
    except redis.RedisError as error:
        raise (permission_error(error, url) or error) from None
    finally:
        await close_async(client)


async def _opened(
    url: str, retry: bool, setting: ServerSetting, patience: float
) -> redis.asyncio.Redis:
    parsed, patiently = parse(url), partial(_patiently, url, setting, patience)
    if not parsed.cluster:
        # Without retries, because the wait around it has its own deadline.
        client = async_plain_client(parsed, retry=False)
        try:
            check_server(url, setting, await patiently(lambda: client.info("server")))
            # A plain URL may name a node of a cluster, which answers MOVED for most keys.
            if not _is_cluster(await patiently(lambda: client.info("cluster"))):
                return async_plain_client(parsed, retry=retry)
        finally:
            await close_async(client)
    client = async_cluster_client(parsed, retry=retry)
    try:
        # Any node: all nodes of a cluster are to have one version.
        info = await patiently(lambda: client.info("server", target_nodes="random"))
        check_server(url, setting, info)
    # Also a cancellation, after which the connection would leak.
    except BaseException:
        await close_async(client)
        raise
    return client


async def _patiently(
    url: str, setting: ServerSetting, patience: float, ask: Callable[[], Awaitable[T]]
) -> T:
    """Return the answer of a server, which may be starting."""
    give_up = anyio.current_time() + patience
    for pause in backoff_delays(_LONGEST_PAUSE):
        try:
            return await ask()
        except _ERRORS as error:
            if not is_transient(error) or anyio.current_time() > give_up:
                raise _refused(url, setting, error) from None
        await anyio.sleep(pause)
    # It yields for ever; this satisfies the type checker.
    raise AssertionError("backoff_delays ended")


def open_client(
    url: str, *, setting: ServerSetting = LOG_SERVER, patience: float = START_PATIENCE
) -> redis.Redis:
    """Open a synchronous client of a server or cluster, as :func:`connect`; the caller closes it.

    Raises InvalidUrl, ServerUnreachable and PermissionDenied.
    """
    parsed, patiently = parse(url), partial(_patiently_sync, url, setting, patience)
    if not parsed.cluster:
        with plain_client(parsed, retry=False) as client:
            if not _is_cluster(patiently(lambda: client.info("cluster"))):
                return plain_client(parsed)
    return patiently(lambda: cluster_client(parsed))


def _patiently_sync(url: str, setting: ServerSetting, patience: float, ask: Callable[[], T]) -> T:
    give_up = time.monotonic() + patience
    for pause in backoff_delays(_LONGEST_PAUSE):
        try:
            return ask()
        except _ERRORS as error:
            if not is_transient(error) or time.monotonic() > give_up:
                raise _refused(url, setting, error) from None
        time.sleep(pause)
    raise AssertionError("backoff_delays ended")


@contextmanager
def connect_sync(
    url: str, *, setting: ServerSetting = LOG_SERVER, patience: float = START_PATIENCE
) -> Iterator[redis.Redis]:
    """Open a synchronous client, checked as by :func:`connect`."""
    with open_client(url, setting=setting, patience=patience) as client:
        info = _patiently_sync(url, setting, patience, lambda: client.info("server"))
        check_server(url, setting, info)
        try:
            yield client
        except redis.RedisError as error:
            raise (permission_error(error, url) or error) from None


def check_server(url: str, setting: ServerSetting, info: dict[str, Any]) -> None:
    """Raise ServerTooOld if the server is older than 7.0."""
    version = str(info.get("redis_version", "0"))
    # Valkey reports the version of Redis that it is compatible with here.
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_SERVER:
        raise ServerTooOld(redacted(url), version, way_out=setting.way_out)


def _is_cluster(info: Any) -> bool:
    return bool(info.get("cluster_enabled"))


def _refused(url: str, setting: ServerSetting, error: BaseException) -> TrinityError:
    if (refused := permission_error(error, url)) is not None:
        return refused
    if is_reply(error):
        return ServerRefuses(redacted(url), reply_text(error), setting.way_out)
    if (refusal := _find_certificate_error(error)) is not None:
        return CertificateRefused(redacted(url), refusal.verify_message, setting.way_out)
    return ServerUnreachable(redacted(url), str(error).rstrip("."), setting.way_out)


def _find_certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the refusal of a certificate that an error of the client library rests on."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        # redis-py raises its own ConnectionError over that of ssl.
        error = error.__cause__ or error.__context__
    return error
