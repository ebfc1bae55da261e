"""``trinity-events metrics``."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated

import anyio
import typer

from ..errors import PackageMissing
from ..log import list_runs, require_run
from ..system.signals import cancelled_by_signals
from .options import ListenHost, ListenPort, RedisUrl, open_client, print_now

PORT = 9760
"""Default port of the metrics."""
_Run = Annotated[
    str | None,
    typer.Argument(
        help="The run's id; by default every open run of the server.", show_default=False
    ),
]


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
    # Before anything is opened, and by the name that pip knows, which differs from the module's.
    for package, module in (("prometheus-client", "prometheus_client"), ("uvicorn", "uvicorn")):
        try:
            import_module(module)
        except ModuleNotFoundError:
            raise PackageMissing("metrics", package, "trinity-events[metrics]") from None
    anyio.run(_serve, redis_url, run, host, port)


async def _serve(redis_url: str | None, run: str | None, host: str, port: int) -> None:
    from prometheus_client import make_asgi_app

    from ..http_server.serving import open_listening_socket, serve_application
    from ..views.metrics import ServerMetrics
    from ..views.metrics_followers import RunFollowers

    async with open_client(redis_url) as client:
        if run is not None:
            # A wrong name ends the command here, and not the first scrape.
            run = await require_run(client, run)
        else:
            await list_runs(client)  # raises if the index cannot be read
        served = ServerMetrics()
        followers = RunFollowers(client, served, run)
        runs = "of all open runs" if run is None else f"of run {run}"
        with open_listening_socket("metrics", host, port) as listening:
            url = f"http://{host}:{listening.getsockname()[1]}/metrics"
            started = partial(print_now, f"metrics {runs} at {url}")
            application = make_asgi_app(served.registry)
            serve = partial(serve_application, application, listening, on_start=started)
            async with cancelled_by_signals(), anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await followers.run()
