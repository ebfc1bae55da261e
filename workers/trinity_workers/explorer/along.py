"""Verifying weights while they are still being published, beside whatever the explorer does."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.to_thread
import torch
from anyio.abc import TaskGroup

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
        synchronizer: Of the explorer, which pulls and loads with it in :meth:`put_aside` alone.
    """

    def __init__(self, config: RunConfig, synchronizer: Synchronizer) -> None:
        self._config = config
        self._synchronizer = synchronizer
        self._stop = threading.Event()
        self._lock = anyio.Lock()
        self._opened: VersionOpened | None = None
        """What is being published, as far as we know."""
        self._into: torch.nn.Module | None = None
        self._tasks: TaskGroup | None = None

    async def follow(self) -> None:
        """Follow until cancelled; goes without when the log cannot be followed."""
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
                self._stop.set()  # a thread is waited for, and knows nothing of being cancelled

    def _begin(self) -> None:
        """Read what is being published; the one before will not come any more, or is whole."""
        self._stop.set()
        self._stop = threading.Event()
        if self._tasks is not None and self._opened is not None:
            self._tasks.start_soon(self._read, self._opened, self._stop, self._into)

    @contextmanager
    def filling(self, module: torch.nn.Module) -> Iterator[None]:
        """In the block nobody serves from the module: it takes what is read along.

        Of what is there at its end only :meth:`~trinity_events.Synchronizer.load` makes a version.
        """
        self._into = module
        self._begin()
        try:
            yield
        finally:
            self._into = None

    @asynccontextmanager
    async def put_aside(self) -> AsyncIterator[None]:
        """Nothing is read along in the block."""
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
            except (TrinityError, OSError) as error:  # the pull will find it too, and say more
                logger.info("the weights of step %d were not read along: %s", opened.step, error)
