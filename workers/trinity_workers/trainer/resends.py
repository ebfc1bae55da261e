"""Versions that are sent again, to explorers that joined a collective group too late."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio

from trinity_events.errors import LogLost
from trinity_events.subscriptions import subscribe
from trinity_schemas import ResendRequested

from ..beside import beside

logger = logging.getLogger(__name__)


class VersionResends:
    """Sends the newest version again when an explorer requests it, while the trainer is idle.

    Args:
        run_id: The run.
        redis_url: The server of the log.
        send: Sends the present weights to all members of the group.
    """

    def __init__(self, run_id: str, redis_url: str, send: Callable[[], Awaitable[None]]) -> None:
        self._run_id = run_id
        self._redis_url = redis_url
        self._send = send
        self._requested = anyio.Event()

    @asynccontextmanager
    async def listening(self, start: str) -> AsyncIterator[None]:
        """Follow requests for the block, from a position of the log on."""
        async with beside(partial(self._listen, start)):
            yield

    @asynccontextmanager
    async def allowed(self) -> AsyncIterator[None]:
        """Answer requests during the block; a version that is being sent then is sent whole."""
        async with beside(self._answer):
            yield

    def sending(self) -> None:
        """Forget earlier requests: the version that is about to be sent answers them."""
        self._requested = anyio.Event()

    async def _listen(self, start: str) -> None:
        while True:
            events = subscribe(
                self._run_id, ResendRequested, redis_url=self._redis_url, start=start
            )
            try:
                async with events:
                    async for _ in events:
                        self._requested.set()
            except LogLost as error:
                logger.warning("requests for weights may have been lost: %s", error)
                self._requested.set()
                start = "current"

    async def _answer(self) -> None:
        while True:
            await self._requested.wait()
            with anyio.CancelScope(shield=True):
                await self._send()
