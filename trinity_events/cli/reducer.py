"""``trinity-events reducer``."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import anyio
import typer

from ..diagnostics.stacks import prepare_stack_dumps
from ..reducer import Policy, reduce_all, tune_process, writable_root
from ..reducer.policy import GROUP_IDLE, KEEP_CHECKPOINTS, STEP_DEADLINE
from ..server import serving
from ..system.signals import cancelled_by_signals
from .options import (
    CheckpointRoot,
    RedisUrl,
    Verbose,
    checkpoint_root,
    log_to_stderr,
    parse_run_id,
)

StepDeadline = Annotated[
    float,
    typer.Option(
        "--step-deadline",
        metavar="SECONDS",
        help="Fail a step that is incomplete this many seconds after its commit.",
    ),
]
GroupIdle = Annotated[
    float,
    typer.Option(
        "--group-idle",
        metavar="SECONDS",
        help="Detach a consumer group after this many idle seconds, so that the log can be "
        "trimmed.",
    ),
]
KeepCheckpoints = Annotated[
    int,
    typer.Option(
        "--keep-checkpoints",
        metavar="N",
        help="Number of newest ready checkpoints to keep; 0 keeps all.",
    ),
]
AdoptFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--adopt-folder",
        metavar="RUN",
        help="Take over this run's folder from another log, which must be gone for good; may be "
        "repeated.",
        show_default=False,
    ),
]


def reducer(
    run: Annotated[
        str | None,
        typer.Option("--run", help="Serve this run alone; by default every run."),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    step_deadline: StepDeadline = STEP_DEADLINE,
    group_idle: GroupIdle = GROUP_IDLE,
    keep_checkpoints: KeepCheckpoints = KEEP_CHECKPOINTS,
    adopt_folders: AdoptFolders = None,
    verbose: Verbose = False,
    # Of launchers: a pipe ends with the process that holds it, also if that was killed.
    lifeline: Annotated[
        bool, typer.Option("--lifeline", help="End at the end of standard input.", hidden=True)
    ] = False,
) -> None:
    """Run the reducer: fold the log, append announcements, update the iteration files.

    Any number of reducers may run. One leads, and another takes over within seconds. The leader
    also fails late steps, deletes old checkpoints, and detaches idle consumer groups.

    Example: trinity-events reducer --redis-url redis://localhost:6379 --checkpoint-root /ckpt

    Example: trinity-events reducer --step-deadline 1800 --keep-checkpoints 5
    """
    log_to_stderr(verbose=verbose)
    if run is not None:
        parse_run_id(run)
    policy = Policy(
        step_deadline=step_deadline,
        group_idle=group_idle,
        keep_checkpoints=keep_checkpoints,
        adopt_folders=frozenset(adopt_folders or ()),
    )
    # Before it may lead: as the leader it would keep others from writing the files.
    folder = writable_root(checkpoint_root(root))
    tune_process()
    prepare_stack_dumps()
    with serving(redis_url) as url:
        reduce = partial(reduce_all, url, run_id=run, root=folder, policy=policy)
        anyio.run(until_stopped, reduce, lifeline)


async def until_stopped(serve: Callable[[], Awaitable[None]], lifeline: bool = False) -> None:
    """Serve until a signal comes or, with a lifeline, the end of standard input."""
    async with cancelled_by_signals(), anyio.create_task_group() as tasks:

        async def stop_on_end() -> None:
            while True:
                await anyio.wait_readable(sys.stdin)
                # Its content means nothing; only the end counts.
                if not os.read(sys.stdin.fileno(), 64):
                    tasks.cancel_scope.cancel()

        if lifeline:
            tasks.start_soon(stop_on_end)
        await serve()
        tasks.cancel_scope.cancel()  # else the group waits for the lifeline's end
