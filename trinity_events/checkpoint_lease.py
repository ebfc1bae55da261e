"""Holding a checkpoint while it is read, so that the reducer does not remove it meanwhile."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

import anyio
import redis.asyncio

from trinity_schemas import check_run_id

from .checkpoint_layout import final_name
from .errors import CheckpointHeld, InvalidRunId, KeyConflict
from .log import RedisEventLog, new_producer
from .log.retry import CONNECTION_ERRORS, is_transient
from .server import connect, serving, trinity_home

logger = logging.getLogger(__name__)

LEASE = 60.0
"""Seconds for which a reader that dies still holds its checkpoint."""
_RENEW_EVERY = LEASE / 4


@asynccontextmanager
async def hold_checkpoint(
    run: str, step: int, *, redis_url: str | None = None, checkpoint_root: Path | str | None = None
) -> AsyncIterator[Path]:
    """The folder of a step, which is not removed before the block is left.

    A server that is away for a while is waited for: the hold lasts a minute beyond the last time
    that it was asked.

    Args:
        run: The run.
        step: The step whose ``global_step_N`` is to be read.
        redis_url: Server of the event log; the embedded server when left out.
        checkpoint_root: Folder with one checkpoint directory a run; below ``TRINITY_HOME`` when
            left out.

    Raises:
        CheckpointHeld: when it is being removed or is not there; from within the block too, when
            it could not be held any longer; and at its end when the folder was replaced meanwhile.
    """
    try:
        check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(str(error)) from None
    folder = Path(checkpoint_root or trinity_home() / "checkpoints") / run / final_name(step)
    with serving(redis_url) as url:
        async with connect(url) as client, _held(client, run, step, folder):
            yield folder


@asynccontextmanager
async def _held(
    client: redis.asyncio.Redis, run: str, step: int, folder: Path
) -> AsyncIterator[None]:
    log, who = RedisEventLog(client, run), new_producer("reader").incarnation
    if not await log.acquire_lease(step, who, LEASE):
        raise CheckpointHeld(
            f"the checkpoint of step {step} of run {run} is being removed: take a newer one"
        )
    lost, failure = False, None
    try:
        found = await _identity(folder)
        if found is None:
            raise CheckpointHeld(
                f"there is no checkpoint {folder}: it was removed or is not ready yet; name "
                "another step, or the folder of all runs with checkpoint_root"
            )
        async with anyio.create_task_group() as tasks:

            async def keep() -> None:
                nonlocal lost
                lost = await _lost(log, step, who)
                tasks.cancel_scope.cancel()

            tasks.start_soon(keep)
            try:
                yield
            except Exception as error:
                failure = error  # the caller's own, not to be wrapped in a group
            tasks.cancel_scope.cancel()
    finally:
        with (
            anyio.CancelScope(shield=True),
            suppress(redis.RedisError, KeyConflict, *CONNECTION_ERRORS),
        ):
            with anyio.move_on_after(5):
                await log.release_lease(step, who)
    if failure is not None:
        raise failure
    left = await _identity(folder)
    if lost or left is None:
        raise CheckpointHeld(
            f"the checkpoint of step {step} of run {run} was removed while it was read: this "
            f"process did not reach the server for {LEASE:g} s; read a newer one"
        )
    if left != found:
        raise CheckpointHeld(
            f"the checkpoint of step {step} of run {run} was replaced while it was read: its "
            "trainer saved that step again; read it once more"
        )


async def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder it is; None when there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        stat = await anyio.Path(folder).stat()
        if S_ISDIR(stat.st_mode):
            return stat.st_dev, stat.st_ino
    return None


async def _lost(log: RedisEventLog, step: int, who: str) -> bool:
    """Hold on until that is refused; then true."""
    pause = _RENEW_EVERY
    while True:
        await anyio.sleep(pause)
        try:
            if not await log.acquire_lease(step, who, LEASE):
                return True
            pause = _RENEW_EVERY
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning("the checkpoint of step %d cannot be held on to: %s", step, error)
            pause = 1.0
