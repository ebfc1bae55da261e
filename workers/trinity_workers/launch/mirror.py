"""Copies of a run's ready checkpoints on object storage."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from trinity_events.checkpoints.layout import final_name
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.errors import TrinityError
from trinity_events.log import RedisEventLog
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.subscriptions import subscribe
from trinity_schemas import StepReady

from ..config.train_config import RunConfig
from ..runtime.background_tasks import background_tasks
from ..storage.object_store import ObjectStore

logger = logging.getLogger(__name__)

_LAST_COPY_DEADLINE = 30.0
"""Seconds that the last copy is given after an error in the run."""


@asynccontextmanager
async def mirrored(config: RunConfig) -> AsyncIterator[None]:
    """Copy each checkpoint that becomes ready in the block, and wait for the last copy.

    A copy that fails is told of, and the run goes on.
    """
    url = config.checkpoints.mirror
    if url is None:
        yield
        return
    mirror = CheckpointMirror(config, await to_thread.run_sync(ObjectStore, url))
    deadline = _LAST_COPY_DEADLINE
    async with background_tasks(mirror.follow):
        try:
            yield
            deadline = config.sync.timeout
        finally:
            with anyio.CancelScope(shield=True):
                await mirror.finish(deadline)


class CheckpointMirror:
    """Copies the checkpoints of one epoch, in the order of their announcements.

    Args:
        config: The run.
        store: Receives the copies.
    """

    def __init__(self, config: RunConfig, store: ObjectStore) -> None:
        self._config = config
        self._store = store
        self._through = -1
        """Newest step that was copied, or could not be."""
        self._changed = anyio.Event()

    async def follow(self) -> None:
        """Copy each checkpoint that is announced."""
        config = self._config
        async with subscribe(config.run_id, StepReady, redis_url=config.redis_url) as events:
            async for delivered in events:
                event = delivered.event
                if event.kind != "checkpoint" or event.epoch != config.epoch:
                    continue
                try:
                    await self._copy(event.step)
                except (TrinityError, OSError) as error:
                    logger.warning(
                        "the checkpoint of step %d is not mirrored: %s", event.step, error
                    )
                # After a failure too: finish() would else wait for a copy that never comes.
                self._through = event.step
                self._changed.set()
                # Replaced, since an event of anyio cannot be cleared.
                self._changed = anyio.Event()

    async def finish(self, deadline: float) -> None:
        """Wait until the newest ready checkpoint is copied, at most so many seconds."""
        config = self._config
        async with connect(config.redis_url) as client:
            # From the log, not from what follow() has received: an announcement may be on its way.
            state = await current_state(RedisEventLog(client, config.run_id))
        ready = state.ready.get("checkpoint")
        if ready is None or ready.at.epoch != config.epoch:
            return
        with anyio.move_on_after(deadline) as scope:
            while self._through < ready.at.step:
                await self._changed.wait()
        if scope.cancelled_caught:
            logger.warning(
                "the checkpoint of step %d is not mirrored: its copy took longer than %g s",
                ready.at.step,
                deadline,
            )

    async def _copy(self, step: int) -> None:
        config, store = self._config, self._store
        root = config.checkpoint_folder.parent
        hold = hold_checkpoint(
            config.run_id, step, redis_url=config.redis_url, checkpoint_root=root
        )
        # Held: the reducer may remove an old checkpoint while it is uploaded.
        async with hold as folder:
            await to_thread.run_sync(store.upload, config.run_id, step, folder)
        # After the upload, so that the storage never has fewer copies than are to be kept.
        await to_thread.run_sync(store.prune, config.run_id, config.checkpoints.keep)


async def restore(config: RunConfig) -> None:
    """Fetch the checkpoint that the run resumes from, if it has a copy and no local folder.

    Raises ObjectStoreUnusable if the storage fails, or a file is not what was copied.
    """
    if config.resumed_step is not None:
        folder = config.checkpoint_folder
        await fetch_checkpoint(
            config.checkpoints.mirror, config.run_id, config.resumed_step, folder
        )


async def fetch_checkpoint(url: str | None, run_id: str, step: int, folder: Path) -> None:
    """Fetch the checkpoint of a step into a run's folder, if it has a copy and is not there.

    Raises ObjectStoreUnusable if the storage fails, or a file is not what was copied.
    """
    target = folder / final_name(step)
    if url is None or await anyio.Path(target).is_dir():
        return
    store = await to_thread.run_sync(ObjectStore, url)
    if await to_thread.run_sync(store.fetch, run_id, step, target):
        logger.warning("the checkpoint of step %d was fetched from %s", step, url)
