"""Requests of explorers for weights, which the trainer answers between two steps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio

from trinity_events.errors import LogLost
from trinity_events.subscriptions import subscribe
from trinity_schemas import ResendRequested, SyncRequested

from ...runtime.background_tasks import background_tasks

logger = logging.getLogger(__name__)


class ExplorerRequests:
    """Requests of one type, each of which one publication answers.

    Args:
        run_id: The run.
        redis_url: The server of the log.
        requested: Type of the requests: to send a version again, or to publish a newer one.
        publish: Publishes the present weights to all explorers.
    """

    def __init__(
        self,
        run_id: str,
        redis_url: str,
        requested: type[ResendRequested | SyncRequested],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._redis_url = redis_url
        self._requested = requested
        self._publish = publish
        self._open = anyio.Event()
        self.published = -1
        """Step of the newest version that was published."""

    @asynccontextmanager
    async def listening(self, start: str) -> AsyncIterator[None]:
        """Follow requests for the block, from a position of the log on."""
        async with background_tasks(partial(self._listen, start)):
            yield

    @asynccontextmanager
    async def allowed(self) -> AsyncIterator[None]:
        """Answer requests during the block; a publication that was begun then is completed."""
        async with background_tasks(self._answer):
            yield

    @property
    def is_open(self) -> bool:
        """Return True if there is a request since the last publication."""
        return self._open.is_set()

    async def wait(self) -> None:
        """Wait until there is a request since the last publication."""
        await self._open.wait()

    def publishing(self, step: int) -> None:
        """Forget earlier requests: the version of ``step`` answers them."""
        self._open = anyio.Event()
        self.published = step

    async def _listen(self, start: str) -> None:
        while True:
            events = subscribe(
                self._run_id, self._requested, redis_url=self._redis_url, start=start
            )
            try:
                async with events:
                    async for delivered in events:
                        if not self._is_answered(delivered.event):
                            self._open.set()
            # As if there was a request: a lost one would leave an explorer waiting until its
            # deadline, and weights sent in vain cost one transfer.
            except LogLost as error:
                logger.warning("requests for weights may have been lost: %s", error)
                self._open.set()
                start = "current"

    def _is_answered(self, event: ResendRequested | SyncRequested) -> bool:
        """Return True if an explorer asked for a version before it heard of it."""
        version = event.oldest_version if isinstance(event, SyncRequested) else None
        return version is not None and version.step <= self.published

    async def _answer(self) -> None:
        while True:
            await self.wait()
            # A publication that is cancelled half-way would leave ranks inside of a collective.
            with anyio.CancelScope(shield=True):
                await self._publish()
