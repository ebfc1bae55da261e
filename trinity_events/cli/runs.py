"""``trinity-events runs``."""

from __future__ import annotations

import sys

import anyio

from ..core import MonitorState
from ..errors import KeyTaken
from ..history import SnapshotUnreadable, current_state
from ..log import RedisEventLog, list_runs
from ..views import runs_table
from .options import Json, RedisUrl, client_of, console, print_json


def runs(redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """List the runs of a server, oldest first. One that cannot be read is told of, and passed over.

    Example: trinity-events runs
    """
    states = anyio.run(_states, redis_url)
    if as_json:
        print_json([_row(state) for state in states])
    elif states:
        console().print(runs_table(states))
    else:
        print("No runs yet. Start one with: trinity-events demo")


async def _states(redis_url: str | None) -> list[MonitorState]:
    found: list[MonitorState] = []
    async with client_of(redis_url) as client:
        for run in await list_runs(client):
            try:
                found.append(await current_state(RedisEventLog(client, run)))
            except (SnapshotUnreadable, KeyTaken) as error:
                print(f"error: {error}", file=sys.stderr)
    return found


def _row(state: MonitorState) -> dict[str, object]:
    return {
        "run_id": state.run_id,
        "opened_at": state.opened_at,
        "epoch": state.epoch,
        "trainer": state.closed or state.trainer,
        "step": state.trainer_step,
        "ready": {kind: pointer.at for kind, pointer in state.ready.items()},
    }
