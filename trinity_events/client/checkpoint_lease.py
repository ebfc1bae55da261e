"""Read lease on a checkpoint, which keeps the reducer from removing it.

1. A lease is refused once the checkpoint is being removed. A leased checkpoint is not removed.
2. A reader of :func:`hold_checkpoint` whose lease is lost is cancelled with an error.
3. A folder that was replaced while it was read is an error at the end of the block.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISDIR

import anyio
import anyio.to_thread
import redis.asyncio

from trinity_schemas import check_run_id

from ..checkpoints.layout import MADE_FROM, final_name
from ..core import Promotion, plan_files
from ..errors import CheckpointHeld, InvalidRunId, KeyConflict
from ..log import ORIGIN, RedisEventLog, new_producer
from ..log.retry import CONNECTION_ERRORS, is_transient
from ..replay import current_state
from ..server import Deadline, connect, serving, trinity_home
from ..system.error_text import ungrouped

logger = logging.getLogger(__name__)

LEASE = 60.0
"""Seconds after which the lease of a dead reader expires, by default."""
PROMOTED = 60.0
"""Seconds for which a reader waits until the reducer gives a ready folder its final name."""
_LONGEST_BLOCK = 5.0
"""Seconds of one wait, after which a folder is looked for again: file servers may be late."""
_RENEWALS = 4
"""Renewals within a lease."""


@asynccontextmanager
async def hold_checkpoint(
    run: str,
    step: int,
    *,
    redis_url: str | None = None,
    checkpoint_root: Path | str | None = None,
    deadline: float = PROMOTED,
    lease: float = LEASE,
) -> AsyncIterator[Path]:
    """Hold a lease on a step's folder during the block, so that the reducer keeps the folder.

    A step is announced before the reducer gives its folder the final name. A reader that comes in
    between waits until the reducer notifies it. The lease tolerates a server that is away for a
    while: by default it lasts a minute after the last renewal.

    Args:
        run: The run.
        step: Step whose ``global_step_N`` the block reads.
        redis_url: Server of the event log; the embedded server by default.
        checkpoint_root: Folder with one checkpoint directory for each run; below
            ``TRINITY_HOME`` by default.
        deadline: Seconds to wait for the folder of a step that is ready.
        lease: Seconds after which the lease of a dead reader expires.

    Raises:
        DeadlineExceeded: if the step is ready, and its folder gets no final name in time.
        CheckpointHeld: if the checkpoint is being removed or is absent. The block is cancelled
            with this error if the lease is lost. The end of the block raises it if the folder was
            replaced meanwhile.
    """
    try:
        check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(run, str(error)) from None
    # Safe as a path only because the run id was checked above.
    folder = Path(checkpoint_root or trinity_home() / "checkpoints") / run / final_name(step)
    with serving(redis_url) as url:
        holding = partial(_hold, run=run, step=step, folder=folder, deadline=deadline, lease=lease)
        async with connect(url) as client, holding(client):
            yield folder


@asynccontextmanager
async def hold_step(run: str, step: int, *, redis_url: str | None = None) -> AsyncIterator[None]:
    """Hold a lease on a step during the block, wherever its files lie.

    It is for a reader that checks the files itself: the reducer may still move them to their final
    folder. Raises CheckpointHeld if they are being removed.
    """
    with serving(redis_url) as url:
        async with connect(url) as client:
            # Each lease has its own holder: two readers of one process must not end each other's.
            log, who = RedisEventLog(client, run), new_producer("reader").incarnation
            with ungrouped():
                async with _leased(log, step, who, LEASE), anyio.create_task_group() as tasks:
                    tasks.start_soon(_lost, log, step, who, LEASE)
                    yield
                    tasks.cancel_scope.cancel()


@asynccontextmanager
async def _leased(log: RedisEventLog, step: int, who: str, lease: float) -> AsyncIterator[None]:
    """Acquire the lease, and release it at the end. Raises CheckpointHeld if it is refused."""
    # The script refuses a checkpoint that is marked for removal, in the same step (invariant 1).
    if not await log.acquire_lease(step, who, lease):
        raise CheckpointHeld(log.run_id, step, "removing")
    try:
        yield
    finally:
        with (
            # Also after a cancellation: a lease left behind keeps the checkpoint for its whole
            # time.
            anyio.CancelScope(shield=True),
            suppress(redis.RedisError, KeyConflict, *CONNECTION_ERRORS),
        ):
            with anyio.move_on_after(5):
                await log.release_lease(step, who)


@asynccontextmanager
async def _hold(
    client: redis.asyncio.Redis,
    *,
    run: str,
    step: int,
    folder: Path,
    deadline: float,
    lease: float,
) -> AsyncIterator[None]:
    log, who = RedisEventLog(client, run), new_producer("reader").incarnation
    lost, failure = False, None
    async with _leased(log, step, who, lease):
        # Under the lease: a folder that was looked at before it could be removed in between.
        identity = await _promoted(log, step, folder, deadline)
        async with anyio.create_task_group() as tasks:

            async def renew() -> None:
                nonlocal lost
                lost = await _lost(log, step, who, lease)
                # Invariant 2: the reader must not go on with files that may vanish.
                tasks.cancel_scope.cancel()

            tasks.start_soon(renew)
            try:
                yield
            except Exception as error:
                failure = error  # the caller's own error, raised outside of the task group
            tasks.cancel_scope.cancel()
    # After the task group, which would wrap it in an exception group.
    if failure is not None:
        raise failure
    # Read after the block: a replaced folder has another inode (invariant 3).
    last_identity = await _identity(folder)
    if lost or last_identity is None:
        raise CheckpointHeld(run, step, "removed", folder, lease)
    if last_identity != identity:
        raise CheckpointHeld(run, step, "replaced", folder)


async def _promoted(
    log: RedisEventLog, step: int, folder: Path, deadline: float
) -> tuple[int, int]:
    """Wait until the folder has all that is ready of the step; return its identity.

    Raises:
        CheckpointHeld: The step is not ready, or its files are gone.
        DeadlineExceeded: The reducer did not move the files in time.
    """
    wait = Deadline(
        deadline,
        f"step {step} of run {log.run_id} is ready, but its files did not become {folder}",
        "does a reducer run, with this checkpoint root?",
    )
    # The reducer's own plan, so that a reader waits for exactly what the reducer will do.
    plan = plan_files(await wait.retry(partial(current_state, log)))
    promotions = [promotion for promotion in plan.promotions if promotion.step == step]
    after = ORIGIN
    # In a thread: a file server that hangs must not stop the renewal of the lease.
    while await anyio.to_thread.run_sync(_is_to_come, folder, promotions):
        seconds = min(_LONGEST_BLOCK, wait.left())
        after = await wait.retry(partial(log.promoted_after, after, seconds=seconds))
    identity = await _identity(folder)
    if identity is None:
        raise CheckpointHeld(log.run_id, step, "absent", folder)
    return identity


def _is_to_come(folder: Path, promotions: Sequence[Promotion]) -> bool:
    """Return True if the reducer has yet to make the folder of a staged one."""
    for promotion in promotions:
        if (folder.parent / promotion.staged).is_dir():
            # A late writer may make a staged folder again, which then stays.
            settled = folder.is_dir() and (
                promotion.only_if_absent or _made_from(folder) == promotion.staged
            )
            if not settled:
                return True
    return False


def _made_from(folder: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (folder / MADE_FROM).read_text()
    return None


async def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder; None if it is absent."""
    with suppress(FileNotFoundError, NotADirectoryError):
        stat = await anyio.Path(folder).stat()
        if S_ISDIR(stat.st_mode):
            # A name can stand for another folder later; an inode on its device does not.
            return stat.st_dev, stat.st_ino
    return None


async def _lost(log: RedisEventLog, step: int, who: str, lease: float) -> bool:
    """Renew the lease until the server refuses it; return True then."""
    pause = lease / _RENEWALS
    while True:
        await anyio.sleep(pause)
        try:
            # Acquired again rather than extended: a server that restarted may have lost the lease.
            if not await log.acquire_lease(step, who, lease):
                return True
            pause = lease / _RENEWALS
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning(
                "the lease on the checkpoint of step %d was not renewed: %s", step, error
            )
            # Often from now on: the lease runs out while the server is away.
            pause = 1.0
