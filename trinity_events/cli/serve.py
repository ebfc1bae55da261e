"""``trinity-events serve``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated

import anyio
import redis
import typer

from ..errors import ServerUnreachable, TrinityError
from ..reducer import Policy, calm_interpreter, reduce_all, writable_root
from ..reducer.policy import GROUP_IDLE, KEEP_CHECKPOINTS, STEP_DEADLINE
from ..server import EmbeddedServer, connect_sync, trinity_home
from .options import CheckpointRoot, Verbose, checkpoint_root, log_to_stderr
from .reducer import GroupIdle, KeepCheckpoints, StepDeadline, until_stopped


def serve(
    port: Annotated[
        int,
        typer.Option(
            help="Loopback port to listen on too; 0 for the socket alone.", min=0, max=65_535
        ),
    ] = 0,
    root: CheckpointRoot = None,
    step_deadline: StepDeadline = STEP_DEADLINE,
    group_idle: GroupIdle = GROUP_IDLE,
    keep_checkpoints: KeepCheckpoints = KEEP_CHECKPOINTS,
    verbose: Verbose = False,
) -> None:
    """Run the embedded server and a reducer for all its runs, until interrupted.

    For local development without Docker: other commands find the server by themselves.

    Example: trinity-events serve --port 6390
    """
    log_to_stderr(verbose=verbose)
    policy = Policy(
        step_deadline=step_deadline, group_idle=group_idle, keep_checkpoints=keep_checkpoints
    )
    folder = writable_root(checkpoint_root(root))
    calm_interpreter()
    with EmbeddedServer(trinity_home()).attached() as url, _listening(url, port) as shown:
        say = partial(print, f"serving at {shown} (Ctrl-C stops)", flush=True)
        reduce = partial(reduce_all, url, run_id=None, root=folder, started=say, policy=policy)
        anyio.run(until_stopped, reduce)


@contextmanager
def _listening(url: str, port: int) -> Iterator[str]:
    """Have the server listen on the port too, for the block; yields the URL to show."""
    if port == 0:
        yield url
        return
    with connect_sync(url) as client:
        client.config_set("bind", "127.0.0.1")
        try:
            client.config_set("port", port)
        except redis.ResponseError as error:
            raise ServerUnreachable(
                f"the embedded server cannot listen on port {port} ({error}): "
                "choose another with --port"
            ) from None
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        # Others may go on with the server, which nobody is to reach by a port that we opened.
        with suppress(redis.RedisError, TrinityError), connect_sync(url) as client:
            client.config_set("port", 0)
