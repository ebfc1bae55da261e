"""Health file, whose age shows that a process is working."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

logger = logging.getLogger(__name__)

# The health checks of compose.yaml ask for a file of the last 30 seconds: some late beats are no
# failure.
BEAT = 5.0
"""Seconds between two updates of the file."""


async def _nothing_more() -> None:
    """Return at once: a running event loop is proof enough."""


@asynccontextmanager
async def beating(
    path: Path | None, answers: Callable[[], Awaitable[None]] = _nothing_more
) -> AsyncIterator[None]:
    """Touch a file every few seconds during the block, while the event loop runs.

    A process that is stopped or hung lets the file grow old. The file is removed after the block.

    Args:
        path: The file; None touches none.
        answers: Called before each touch; it returns once all processes have responded on which
            this one's health depends.
    """
    if path is None:
        yield
        return

    async def touch_often() -> None:
        has_warned = False
        while True:
            # Before the touch: a process that does not respond must let the file grow old.
            await answers()
            try:
                _touch(path)
                has_warned = False
            # A full disk must not end a run that trains. It is warned of once, not at each beat.
            except OSError as error:
                if not has_warned:
                    logger.warning("health checks will fail: %s", error)
                has_warned = True
            await anyio.sleep(BEAT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(touch_often)
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
