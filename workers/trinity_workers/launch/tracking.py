"""Trackers of a run that its command starts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio import to_thread

from trinity_events.trackers import TrackedRun, open_trackers, track_live, tracking_folder

from ..config.train_config import RunConfig
from ..runtime.background_tasks import background_tasks

logger = logging.getLogger(__name__)

LAST_METRICS_DEADLINE = 30.0
"""Seconds that trackers are given to take the last metrics, once the run is closed."""


@asynccontextmanager
async def tracked(config: RunConfig) -> AsyncIterator[None]:
    """Give the run's metrics to its trackers until it is closed, which the block does.

    A tracker that fails later is only told of: the run goes on.

    Raises:
        TrackerUnusable: A tracker cannot be opened.
    """
    settings = config.tracking
    if not settings.trackers:
        yield
        return
    run = TrackedRun(
        run_id=config.run_id,
        folder=tracking_folder(settings.folder),
        project=settings.project,
        config=config.to_text(),
        resumed_after=config.resumed_step,
    )
    opening = open_trackers(settings.trackers, run)
    # In a thread: libraries of trackers open connections, and block.
    trackers = await to_thread.run_sync(opening.__enter__)
    ended = anyio.Event()

    async def follow() -> None:
        try:
            await track_live(config.run_id, config.epoch, trackers, redis_url=config.redis_url)
        except Exception as error:
            logger.warning("run %s is not tracked any more: %s", config.run_id, error)
        finally:
            ended.set()

    try:
        async with background_tasks(follow):
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_METRICS_DEADLINE):
                    await ended.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(opening.__exit__, None, None, None)
