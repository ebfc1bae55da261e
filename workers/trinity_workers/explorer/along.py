"""Verifying weights while they are still being published, beside whatever the explorer does."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from trinity_events import Synchronizer
from trinity_events.errors import TrinityError
from trinity_events.subscriptions import subscribe
from trinity_schemas import VersionOpened

from ..config import RunConfig

logger = logging.getLogger(__name__)


class ReadingAlong:
    """Reads each version of the run's epoch along with its publisher, one at a time.

    Args:
        config: The run.
        synchronizer: Of the explorer, which pulls with it in :meth:`put_aside` alone.
    """

    def __init__(self, config: RunConfig, synchronizer: Synchronizer) -> None:
        self._config = config
        self._synchronizer = synchronizer
        self._stop = threading.Event()
        self._lock = anyio.Lock()

    async def follow(self) -> None:
        """Follow until cancelled; goes without when the log cannot be followed."""
        try:
            await self._follow()
        except* TrinityError as errors:
            logger.warning("weights are verified only once they are announced: %s", errors)

    async def _follow(self) -> None:
        config = self._config
        async with anyio.create_task_group() as tasks:
            try:
                events = subscribe(config.run_id, VersionOpened, redis_url=config.redis_url)
                async with events:
                    async for delivered in events:
                        if delivered.envelope.epoch == config.epoch:
                            self._stop.set()  # the one before will not come any more, or is whole
                            self._stop = threading.Event()
                            tasks.start_soon(self._read, delivered.event, self._stop)
            finally:
                self._stop.set()  # a thread is waited for, and knows nothing of being cancelled

    @asynccontextmanager
    async def put_aside(self) -> AsyncIterator[None]:
        """Nothing is read along in the block."""
        self._stop.set()
        async with self._lock:
            yield

    async def _read(self, opened: VersionOpened, stop: threading.Event) -> None:
        config = self._config
        async with self._lock:
            try:
                await anyio.to_thread.run_sync(
                    self._synchronizer.read_along, config.epoch, opened, stop, config.sync_timeout
                )
            except (TrinityError, OSError) as error:  # the pull will find it too, and say more
                logger.info("the weights of step %d were not read along: %s", opened.step, error)
