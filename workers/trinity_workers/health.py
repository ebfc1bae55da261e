"""A file by whose age a health check sees that a process is at work."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

logger = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between two touches of the file."""


async def _nothing_more() -> None:
    """Ask nothing else: that the event loop comes to it is enough."""


@asynccontextmanager
async def beating(
    path: Path | None, answers: Callable[[], Awaitable[None]] = _nothing_more
) -> AsyncIterator[None]:
    """Touch a file every few seconds in the block, as long as the event loop turns.

    A process that is stopped, or that hangs in its event loop, lets the file grow old. The file is
    gone after the block.

    Args:
        path: The file; None touches none.
        answers: Asked before each touch; it returns once the other processes have answered that
            the health of this one depends on.
    """
    if path is None:
        yield
        return

    async def beat() -> None:
        told = False
        while True:
            await answers()
            try:
                _touch(path)
                told = False
            except OSError as error:
                if not told:
                    logger.warning("health checks will fail: %s", error)
                told = True
            await anyio.sleep(BEAT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            _remove(path)


def _touch(path: Path) -> None:
    path.touch()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
