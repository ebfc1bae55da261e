"""Prefetch of weight versions while they are published, beside the explorer's other work."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from trinity_events.errors import TrinityError
from trinity_events.subscriptions import subscribe
from trinity_schemas import VersionOpened

from ..config import RunConfig

if TYPE_CHECKING:
    import torch

    from trinity_events import Synchronizer

logger = logging.getLogger(__name__)


class VersionPrefetcher:
    """Reads and verifies each version of an epoch while its publisher writes it, one at a time.

    Args:
        config: The run.
        synchronizer: Synchronizer of the explorer. The explorer pulls and loads with it only
            within :meth:`paused`.
    """

    def __init__(self, config: RunConfig, synchronizer: Synchronizer) -> None:
        self._config = config
        self._synchronizer = synchronizer
        self._stop = threading.Event()
        self._lock = anyio.Lock()
        self._opened: VersionOpened | None = None
        """Version that is being published, as far as the log told."""
        self._into: torch.nn.Module | None = None
        self._tasks: TaskGroup | None = None

    async def follow(self) -> None:
        """Follow the log until cancelled; without the log, nothing is prefetched."""
        try:
            await self._follow()
        except* TrinityError as errors:
            logger.warning("weights are verified only once they are announced: %s", errors)

    async def _follow(self) -> None:
        config = self._config
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                events = subscribe(config.run_id, VersionOpened, redis_url=config.redis_url)
                async with events:
                    async for delivered in events:
                        if delivered.envelope.epoch == config.epoch:
                            self._opened = delivered.event
                            self._begin()
            finally:
                self._tasks = None
                self._stop.set()  # The thread is waited for, and sees no cancellation.

    def _begin(self) -> None:
        """Read the version that is being published; the one before is whole, or never will be."""
        self._stop.set()
        self._stop = threading.Event()
        if self._tasks is not None and self._opened is not None:
            self._tasks.start_soon(self._read, self._opened, self._stop, self._into)

    @contextmanager
    def into(self, module: torch.nn.Module | None) -> Iterator[None]:
        """Write chunks into a module that serves nothing, for the block.

        Only :meth:`~trinity_events.Synchronizer.load` makes a version of what it holds then.
        """
        if module is None:
            yield
            return
        self._into = module
        self._begin()
        try:
            yield
        finally:
            self._into = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Prefetch nothing for the block."""
        self._stop.set()
        async with self._lock:
            yield

    async def _read(
        self, opened: VersionOpened, stop: threading.Event, into: torch.nn.Module | None
    ) -> None:
        config = self._config
        async with self._lock:
            try:
                await anyio.to_thread.run_sync(
                    self._synchronizer.prefetch,
                    config.epoch,
                    opened,
                    stop,
                    config.sync.timeout,
                    into,
                )
            except (TrinityError, OSError) as error:  # The pull meets it too, and says more.
                logger.info("the weights of step %d were not prefetched: %s", opened.step, error)
