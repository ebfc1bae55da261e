"""``trinity-events reducer``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import anyio
import typer

from ..reducer import Policy, reduce_all, tune_process, writable_root
from ..reducer.policy import GROUP_IDLE, KEEP_CHECKPOINTS, STEP_DEADLINE
from ..server import serving
from ..signals import ending_signals
from .options import (
    CheckpointRoot,
    RedisUrl,
    Verbose,
    checked_run,
    checkpoint_root,
    log_to_stderr,
)

StepDeadline = Annotated[
    float,
    typer.Option(
        "--step-deadline",
        metavar="SECONDS",
        help="A step that is incomplete this long after its commit fails, with what it lacks.",
    ),
]
GroupIdle = Annotated[
    float,
    typer.Option(
        "--group-idle",
        metavar="SECONDS",
        help="A consumer group that asks for nothing this long holds up the log no more.",
    ),
]
KeepCheckpoints = Annotated[
    int,
    typer.Option(
        "--keep-checkpoints",
        metavar="N",
        help="How many of the newest ready checkpoints to keep; 0 keeps all.",
    ),
]
AdoptFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--adopt-folder",
        metavar="RUN",
        help="Take over this run's folder where it belongs to another log, which is gone for good; "
        "may be repeated.",
        show_default=False,
    ),
]


def reducer(
    run: Annotated[
        str | None,
        typer.Option("--run", help="Serve this run alone; every run when left out."),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    step_deadline: StepDeadline = STEP_DEADLINE,
    group_idle: GroupIdle = GROUP_IDLE,
    keep_checkpoints: KeepCheckpoints = KEEP_CHECKPOINTS,
    adopt_folders: AdoptFolders = None,
    verbose: Verbose = False,
    lifeline: Annotated[
        bool, typer.Option("--lifeline", help="End when standard input does.", hidden=True)
    ] = False,
) -> None:
    """Run the reducer: fold the log, announce what became true, keep the iteration files.

    Any number may run; one leads, and another takes over within seconds. Whoever leads also fails
    steps that are late, removes old checkpoints, and lets go of consumers that are gone.

    Example: trinity-events reducer --redis-url redis://localhost:6379 --checkpoint-root /ckpt

    Example: trinity-events reducer --step-deadline 1800 --keep-checkpoints 5
    """
    log_to_stderr(verbose=verbose)
    if run is not None:
        checked_run(run)
    policy = Policy(
        step_deadline=step_deadline,
        group_idle=group_idle,
        keep_checkpoints=keep_checkpoints,
        adopt_folders=frozenset(adopt_folders or ()),
    )
    folder = writable_root(checkpoint_root(root))
    tune_process()
    with serving(redis_url) as url:
        reduce = partial(reduce_all, url, run_id=run, root=folder, policy=policy)
        anyio.run(until_stopped, reduce, lifeline)


async def until_stopped(serve: Callable[[], Awaitable[None]], lifeline: bool = False) -> None:
    """Serve until it is asked to end: by a signal or, with a lifeline, the end of its input."""
    async with anyio.create_task_group() as tasks:

        async def stop_on_signal() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, *ending_signals()) as signals:
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
