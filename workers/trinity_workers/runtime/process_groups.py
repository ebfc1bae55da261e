"""End of a child process together with all that it started in its group."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio.abc


async def kill_group(process: anyio.abc.Process) -> None:
    """Kill a process that leads a group, and all of the group; close the pipes to it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            # Only here: it reaps a process that has ended, and asyncio then warns that it cannot.
            process.kill()
    await process.aclose()
