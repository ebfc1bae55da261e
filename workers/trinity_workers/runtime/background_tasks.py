"""Tasks that run during a block of code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio

from trinity_events.system.error_text import ungrouped


@asynccontextmanager
async def background_tasks(*tasks: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run tasks during the block, and cancel them at its end; raise the first error alone."""
    with ungrouped():
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
            yield
            # The tasks do not end by themselves, and the group would wait for them.
            group.cancel_scope.cancel()
