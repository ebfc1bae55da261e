"""``trinity-events serve``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated

import anyio
import typer

from ..diagnostics.stacks import prepare_stack_dumps
from ..reducer import Policy, reduce_all, tune_process, writable_root
from ..reducer.policy import GROUP_IDLE, KEEP_CHECKPOINTS, STEP_DEADLINE
from ..server import EmbeddedServer, trinity_home
from .options import CheckpointRoot, Verbose, checkpoint_root, log_to_stderr, print_now
from .reducer import AdoptFolders, GroupIdle, KeepCheckpoints, StepDeadline, until_stopped


def serve(
    port: Annotated[
        int,
        typer.Option(
            help="Loopback port to listen on too; 0 listens on the socket alone.", min=0, max=65_535
        ),
    ] = 0,
    root: CheckpointRoot = None,
    step_deadline: StepDeadline = STEP_DEADLINE,
    group_idle: GroupIdle = GROUP_IDLE,
    keep_checkpoints: KeepCheckpoints = KEEP_CHECKPOINTS,
    adopt_folders: AdoptFolders = None,
    verbose: Verbose = False,
) -> None:
    """Run the embedded server and a reducer for all its runs, until interrupted.

    For local development without Docker: other commands use this server by default.

    Example: trinity-events serve --port 6390
    """
    log_to_stderr(verbose=verbose)
    policy = Policy(
        step_deadline=step_deadline,
        group_idle=group_idle,
        keep_checkpoints=keep_checkpoints,
        adopt_folders=frozenset(adopt_folders or ()),
    )
    folder = writable_root(checkpoint_root(root))
    tune_process()
    prepare_stack_dumps()
    server = EmbeddedServer(trinity_home())
    with ExitStack() as exits:
        # The port is for other programs: the reducer keeps the socket, which stays open when
        # another process closes the port.
        url = shown = exits.enter_context(server.attached())
        if port:
            shown = exits.enter_context(server.listening(port))
        started = partial(print_now, f"serving at {shown} (Ctrl-C stops)")
        reduce = partial(reduce_all, url, run_id=None, root=folder, started=started, policy=policy)
        anyio.run(until_stopped, reduce)
