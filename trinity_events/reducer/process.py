"""The reducer as a process: leads, survives its server's absence, serves one run or all."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import redis
import redis.asyncio

from ..archive.segments import Archive
from ..log import RedisEventLog, watch_runs
from ..server import connect
from .checkpoints import CheckpointFiles
from .leader import LEASE, Leader
from .reduce import Reducer
from .retention import Retention

logger = logging.getLogger(__name__)


async def reduce_all(
    url: str,
    *,
    run_id: str | None,
    root: Path | None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve one run, or every run of the index as it appears, until cancelled.

    A server that goes away later is waited for. Raises ServerUnreachable, ServerTooOld and
    InvalidUrl when there is none to begin with.
    """
    # A step that was sent is never sent again: after a lost reply we reload.
    async with connect(url, retry=False) as client:
        started()
        if run_id is not None:
            await reduce_run(client, run_id, root)
            return
        served: set[str] = set()
        async with anyio.create_task_group() as tasks:

            async def serve(found: str) -> None:
                log = RedisEventLog(client, found)
                while found in served:
                    await reduce_run(client, found, root, until_closed=True)
                    # Opened again it is listed again, and served again; what was listed while
                    # we were about to leave is in the log by now.
                    served.discard(found)
                    if await _has_more(log):
                        served.add(found)

            async for found in _patiently_watch(client):
                if found not in served:
                    served.add(found)
                    tasks.start_soon(serve, found)


async def reduce_run(
    client: redis.asyncio.Redis, run_id: str, root: Path | None, *, until_closed: bool = False
) -> None:
    """Lead and fold one run, for ever or until it is closed.

    A lost lead is taken again, a lost server waited for. An error in one run is that run's
    alone: it is logged, and tried again after a while.
    """
    log = RedisEventLog(client, run_id)
    files = CheckpointFiles(root, run_id) if root is not None else None
    backoff = _Backoff()
    while True:
        began = anyio.current_time()
        try:
            if await _lead_and_fold(log, files, until_closed=until_closed):
                return
            logger.warning("lost the lead of run %s", run_id)
        except* (redis.RedisError, OSError) as errors:
            logger.warning("run %s waits for the server: %s", run_id, errors.exceptions[0])
        except* Exception:
            logger.exception("run %s cannot be folded", run_id)
        if anyio.current_time() - began > LEASE:
            backoff.reset()
        await backoff.sleep()


async def _lead_and_fold(
    log: RedisEventLog, files: CheckpointFiles | None, *, until_closed: bool
) -> bool:
    """Lead once; returns whether the run was closed, and not the lead lost."""
    leader = Leader(log)
    closed = False
    token = await leader.take()
    logger.info("leads run %s with token %d", log.run_id, token)
    try:
        async with anyio.create_task_group() as tasks:

            async def keep() -> None:
                await leader.keep()
                tasks.cancel_scope.cancel()

            tasks.start_soon(keep)
            retention = None if files is None else Retention(log, Archive(files.folder, log.run_id))
            closed = await Reducer(log, files, token, retention).run(until_closed=until_closed)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), suppress(redis.RedisError), anyio.move_on_after(1):
            await leader.give_up()
    return closed


async def _has_more(log: RedisEventLog) -> bool:
    try:
        return (await log.load())[1] != await log.last_id()
    except redis.RedisError:
        return True  # not known: look again


async def _patiently_watch(client: redis.asyncio.Redis) -> AsyncIterator[str]:
    backoff = _Backoff()
    while True:
        try:
            async for run_id in watch_runs(client):
                backoff.reset()
                yield run_id
        except redis.RedisError as error:
            logger.warning("the index of runs waits for the server: %s", error)
            await backoff.sleep()


class _Backoff:
    """Waits that double from 50 ms to a second, with jitter."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.05

    async def sleep(self) -> None:
        await anyio.sleep(self._seconds * random.uniform(0.5, 1.0))  # noqa: S311
        self._seconds = min(2 * self._seconds, 1.0)
