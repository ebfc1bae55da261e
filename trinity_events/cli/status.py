"""``trinity-events status``."""

from __future__ import annotations

from typing import NamedTuple

import anyio
import msgspec

from ..analysis.causes import HostProcess, processes_of_epoch
from ..core import MonitorState
from ..live_facts import processes_here, reports_since
from ..liveness import abandoned_since
from ..log import RedisEventLog, position, require_run
from ..replay import current_state
from ..server import server_clock
from ..views import seconds, state_as_json, status_panel, waits_as_json
from .options import Json, OptionalRun, RedisUrl, client_of, console, print_json


class _RunFacts(NamedTuple):
    state: MonitorState
    now: int | None
    """Milliseconds of the server's clock; None if the run is closed."""
    silent_since: int | None
    """Milliseconds since which the run is abandoned."""
    processes: dict[str, HostProcess]
    """Processes of an open run on this host."""
    reports_since: int | None = None
    """Milliseconds of the oldest report of an open run that no reducer has copied to the events."""


def status(run: OptionalRun = None, redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """Show the ready steps, the weights of each explorer, and what steps and processes wait for.

    Of an open run it lists the processes of this host with their process ids.

    Example: trinity-events status demo-1
    """
    snapshot = anyio.run(_look_up, redis_url, run)
    if not as_json:
        console().print(status_panel(*snapshot))
        return
    state, now, since, processes, reports_since = snapshot
    shown = {name: value for name, value in state_as_json(state).items() if name != "waits"}
    at = position(state.position)[0] if now is None else now
    print_json(
        shown
        | waits_as_json(state, at)
        | ({} if since is None else {"silent_since": seconds(since)})
        | ({"processes": msgspec.to_builtins(processes)} if processes else {})
        | ({} if reports_since is None else {"reports_since": seconds(reports_since)})
    )


async def _look_up(redis_url: str | None, run: str | None) -> _RunFacts:
    async with client_of(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        state = await current_state(log)
        is_open = state.closed is None
        now = await server_clock(client, log.keys.events) if is_open else None
        processes = processes_of_epoch(state, processes_here(log.run_id)) if is_open else {}
        reports = await reports_since(log) if is_open else None
        since = await abandoned_since(client, state)
        if any(process.condition != "ended" for process in processes.values()):
            # A trainer publishes nothing between steps. To start the run again would fence it.
            since = None
        return _RunFacts(state, now, since, processes, reports)
