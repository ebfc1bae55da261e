"""``trinity-events status``."""

from __future__ import annotations

import anyio

from ..core import MonitorState
from ..history import current_state
from ..views import status_panel
from .options import Json, OptionalRun, RedisUrl, console, log_of, print_json


def status(run: OptionalRun = None, redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """Show what is ready, who serves which weights, and what a step waits for.

    Example: trinity-events status demo-1
    """
    state = anyio.run(_state, redis_url, run)
    if as_json:
        print_json(state)
    else:
        console().print(status_panel(state))


async def _state(redis_url: str | None, run: str | None) -> MonitorState:
    async with log_of(redis_url, run) as log:
        return await current_state(log)
