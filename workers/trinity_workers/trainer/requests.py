"""Explorers that came after weights were sent, where nobody keeps them: they ask for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from trinity_events.error_text import first_error
from trinity_events.errors import LogLost
from trinity_events.subscriptions import subscribe
from trinity_schemas import SyncRequested

logger = logging.getLogger(__name__)


class WeightRequests:
    """Hears what explorers ask for, and answers while the trainer has nothing else to do.

    Args:
        run_id: The run.
        redis_url: The server of the log.
        send: Sends the present weights to all explorers that are there.
    """

    def __init__(self, run_id: str, redis_url: str, send: Callable[[], Awaitable[None]]) -> None:
        self._run_id = run_id
        self._redis_url = redis_url
        self._send = send
        self._asked = anyio.Event()

    @asynccontextmanager
    async def heard(self, start: str) -> AsyncIterator[None]:
        """Listen in the block, from a position of the log on."""
        async with _beside(partial(self._listen, start)):
            yield

    @asynccontextmanager
    async def answered(self) -> AsyncIterator[None]:
        """Answer in the block; what is being sent when it ends is sent to its end."""
        async with _beside(self._answer):
            yield

    def sending(self) -> None:
        """Weights are about to be sent: who asked before gets them."""
        self._asked = anyio.Event()

    async def _listen(self, start: str) -> None:
        while True:
            events = subscribe(self._run_id, SyncRequested, redis_url=self._redis_url, start=start)
            try:
                async with events:
                    async for _ in events:
                        self._asked.set()
            except LogLost as error:
                logger.warning("somebody may have asked for weights unheard: %s", error)
                self._asked.set()
                start = "current"

    async def _answer(self) -> None:
        while True:
            await self._asked.wait()
            with anyio.CancelScope(shield=True):
                await self._send()


@asynccontextmanager
async def _beside(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Something beside the block, cancelled at its end."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            yield
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
