"""``trinity-events metrics``."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio
import redis

from ..errors import TrinityError
from ..log import RedisEventLog, require_run
from ..replay import follow_state
from ..server import server_clock
from ..signals import cancelled_by_signals
from ..views.terminal import tell
from .options import ListenHost, ListenPort, OptionalRun, RedisUrl, client_of, say_at_once

if TYPE_CHECKING:
    from ..views.metrics import RunMetrics

PORT = 9760
"""Default port of the metrics."""
_AGAIN = 2.0
"""Seconds after which a server that went away is asked again."""


class MetricsMissing(TrinityError):
    """The package of the metrics is not installed."""


class CannotListen(TrinityError):
    """The address cannot be listened at."""


def metrics(
    run: OptionalRun = None,
    host: ListenHost = "127.0.0.1",
    port: ListenPort = PORT,
    redis_url: RedisUrl = None,
) -> None:
    """Serve the metrics of a run to Prometheus, at /metrics, until stopped.

    It reads the log as a follower does, in a process of its own, and publishes nothing.

    Example: trinity-events metrics demo-1 --port 9760
    """
    try:
        from ..views.metrics import RunMetrics
    except ImportError:
        raise MetricsMissing(
            "metrics needs the package prometheus-client: pip install 'trinity-events[metrics]'"
        ) from None
    anyio.run(_serve, RunMetrics, redis_url, run, host, port)


async def _serve(
    kind: type[RunMetrics], redis_url: str | None, run: str | None, host: str, port: int
) -> None:
    from prometheus_client import start_http_server

    async with client_of(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        found = kind(log.run_id)
        try:
            server, thread = start_http_server(port, host, found.registry)
        except OSError as error:
            raise CannotListen(
                f"port {port} of {host} cannot be listened at ({error.strerror}): name another "
                "with --port"
            ) from None
        say_at_once(f"metrics of run {log.run_id} at http://{host}:{server.server_port}/metrics")
        try:
            async with cancelled_by_signals():
                ahead = await server_clock(client, log.keys.events) - time.time() * 1000
                await _follow(log, found, ahead)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


async def _follow(log: RedisEventLog, found: RunMetrics, ahead: float) -> None:
    """Update the metrics with each entry; go on after the server was away."""
    while True:
        try:
            async with aclosing(follow_state(log)) as following:
                async for state, folded in following:
                    found.update(state, folded, int(time.time() * 1000 + ahead))
        except (redis.RedisError, OSError) as error:
            tell(f"the server does not answer ({error}): the metrics are of the past")
        await anyio.sleep(_AGAIN)
