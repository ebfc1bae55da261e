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
from trinity_schemas import PublicationStarted

from ..config.train_config import RunConfig
from .run_follower import Followed, RunFollower

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
        self._opened: PublicationStarted | None = None
        """Version that is being published, as far as the run's announcements say."""
        self._into: torch.nn.Module | None = None
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def listening(self, run: RunFollower) -> AsyncIterator[None]:
        """Read each version as its publication is announced, for the block."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                async with run.listening(self._hear):
                    yield
            finally:
                self._tasks = None
                self._stop.set()  # The thread is waited for, and sees no cancellation.
                tasks.cancel_scope.cancel()

    async def _hear(self, announcement: Followed) -> None:
        match announcement:
            case PublicationStarted(epoch=epoch) if epoch == self._config.epoch:
                self._opened = announcement
                self._begin()

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
        self, opened: PublicationStarted, stop: threading.Event, into: torch.nn.Module | None
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
