"""``trinity-events reducer``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
import typer

from ..reducer import reduce_all, writable_root
from ..server import serving
from .options import (
    CheckpointRoot,
    RedisUrl,
    Verbose,
    checked_run,
    checkpoint_root,
    log_to_stderr,
)


def reducer(
    run: Annotated[
        str | None,
        typer.Option("--run", help="Serve this run alone; every run when left out."),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    verbose: Verbose = False,
    lifeline: Annotated[
        bool, typer.Option("--lifeline", help="End when standard input does.", hidden=True)
    ] = False,
) -> None:
    """Run the reducer: fold the log, announce what became true, keep the iteration files.

    Any number may run; one leads, and another takes over within seconds.

    Example: trinity-events reducer --redis-url redis://localhost:6379 --checkpoint-root /ckpt
    """
    log_to_stderr(verbose=verbose)
    if run is not None:
        checked_run(run)
    folder = writable_root(checkpoint_root(root))
    with serving(redis_url) as url:
        anyio.run(until_stopped, lambda: reduce_all(url, run_id=run, root=folder), lifeline)


async def until_stopped(serve: Callable[[], Awaitable[None]], lifeline: bool = False) -> None:
    """Serve until SIGINT, SIGTERM or, with a lifeline, the end of standard input."""
    async with anyio.create_task_group() as tasks:

        async def stop_on_signal() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

        async def stop_on_end() -> None:
            while True:
                await anyio.wait_readable(sys.stdin)
                if not os.read(sys.stdin.fileno(), 64):
                    tasks.cancel_scope.cancel()

        tasks.start_soon(stop_on_signal)
        if lifeline:
            tasks.start_soon(stop_on_end)
        await serve()
        tasks.cancel_scope.cancel()
