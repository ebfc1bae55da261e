"""``trinity-events metrics``."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from ..errors import TrinityError
from ..log import list_runs, require_run
from ..signals import cancelled_by_signals
from .options import ListenHost, ListenPort, RedisUrl, client_of, say_at_once

PORT = 9760
"""Default port of the metrics."""
_Run = Annotated[
    str | None,
    typer.Argument(
        help="The run's id; by default every open run of the server.", show_default=False
    ),
]


class MetricsMissing(TrinityError):
    """The package of the metrics is not installed."""


class CannotListen(TrinityError):
    """The address cannot be listened at."""


def metrics(
    run: _Run = None,
    host: ListenHost = "127.0.0.1",
    port: ListenPort = PORT,
    redis_url: RedisUrl = None,
) -> None:
    """Serve the metrics of the runs of a server to Prometheus, at /metrics, until stopped.

    It follows each open run, those that are opened later too, and keeps a closed one for 15
    minutes. It reads logs as a follower does, in a process of its own, and publishes nothing.

    Example: trinity-events metrics --port 9760
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MetricsMissing(
            "metrics needs the package prometheus-client: pip install 'trinity-events[metrics]'"
        ) from None
    anyio.run(_serve, redis_url, run, host, port)


async def _serve(redis_url: str | None, run: str | None, host: str, port: int) -> None:
    from prometheus_client import start_http_server

    from ..views.metrics import ServerMetrics
    from ..views.metrics_followers import RunFollowers

    async with client_of(redis_url) as client:
        if run is not None:
            run = await require_run(client, run)
        else:
            await list_runs(client)  # raises if the index cannot be read
        found = ServerMetrics()
        followers = RunFollowers(client, found, run)
        try:
            server, thread = start_http_server(port, host, found.registry)
        except OSError as error:
            raise CannotListen(
                f"port {port} of {host} cannot be listened at ({error.strerror}): name another "
                "with --port"
            ) from None
        of = "of all open runs" if run is None else f"of run {run}"
        say_at_once(f"metrics {of} at http://{host}:{server.server_port}/metrics")
        try:
            async with cancelled_by_signals():
                await followers.run()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
