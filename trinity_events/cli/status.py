"""``trinity-events status``."""

from __future__ import annotations

from typing import NamedTuple

import anyio
import msgspec

from ..analysis.causes import LiveFacts, select_processes
from ..core import MonitorState
from ..live_facts import read_live_facts
from ..liveness import ABANDONED_AFTER, abandoned_since
from ..log import RedisEventLog, position, require_run
from ..replay import current_state
from ..views import seconds, state_as_json, status_panel, waits_as_json
from .options import Json, OptionalRun, RedisUrl, console, open_client, print_json


class _RunStatus(NamedTuple):
    state: MonitorState
    facts: LiveFacts | None = None
    """Facts about an open run's server, and its processes without the past ones."""
    silent_since: int | None = None
    """Milliseconds since which the run is abandoned."""


def status(run: OptionalRun = None, redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """Show the ready steps, the weights of each explorer, and what steps and processes wait for.

    Of an open run it lists the processes of this host with their process ids.

    Example: trinity-events status demo-1
    """
    run_status = anyio.run(_read_status, redis_url, run)
    if not as_json:
        console().print(status_panel(*run_status))
        return
    state, facts, since = run_status
    shown = {name: value for name, value in state_as_json(state).items() if name != "waits"}
    # Ages stop with the run, and count to now while it is open
    # (test_ages_stop_when_the_run_has_ended).
    at = position(state.position)[0] if facts is None else facts.now
    processes = {} if facts is None else facts.processes
    reports_since = None if facts is None else facts.reports_since
    print_json(
        shown
        | waits_as_json(state, at)
        | ({} if since is None else {"silent_since": seconds(since)})
        | ({"processes": msgspec.to_builtins(processes)} if processes else {})
        | ({} if reports_since is None else {"reports_since": seconds(reports_since)})
    )


async def _read_status(
    redis_url: str | None, run: str | None, silence: float = ABANDONED_AFTER
) -> _RunStatus:
    async with open_client(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        state = await current_state(log)
        # Facts about processes and the server would say nothing about a run that is over.
        if state.closed is not None:
            return _RunStatus(state)
        facts = await read_live_facts(client, log.run_id)
        since = await abandoned_since(client, state, silence)
        facts = msgspec.structs.replace(facts, processes=select_processes(state, facts))
        if any(process.condition != "ended" for process in facts.processes.values()):
            # A trainer publishes nothing between steps. To start the run again would fence it.
            since = None
        return _RunStatus(state, facts, since)
