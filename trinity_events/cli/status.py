"""``trinity-events status``."""

from __future__ import annotations

import anyio

from ..core import MonitorState
from ..liveness import abandoned_since
from ..log import RedisEventLog, position, require_run
from ..replay import current_state
from ..server import server_clock
from ..views import seconds, state_as_json, status_panel, waits_as_json
from .options import Json, OptionalRun, RedisUrl, client_of, console, print_json


def status(run: OptionalRun = None, redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """Show the ready steps, the weights of each explorer, and what steps and processes wait for.

    Example: trinity-events status demo-1
    """
    state, now, since = anyio.run(_state, redis_url, run)
    if as_json:
        silent = {} if since is None else {"silent_since": seconds(since)}
        at = position(state.position)[0] if now is None else now
        shown = {name: value for name, value in state_as_json(state).items() if name != "waits"}
        print_json(shown | waits_as_json(state, at) | silent)
    else:
        console().print(status_panel(state, now=now, silent_since=since))


async def _state(
    redis_url: str | None, run: str | None
) -> tuple[MonitorState, int | None, int | None]:
    """Return the run's state, the time now if it is open, and since when it is abandoned."""
    async with client_of(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        state = await current_state(log)
        now = await server_clock(client, log.keys.events) if state.closed is None else None
        return state, now, await abandoned_since(client, state)
