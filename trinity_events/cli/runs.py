"""``trinity-events runs``."""

from __future__ import annotations

import anyio
from msgspec import UNSET

from ..core import MonitorState
from ..errors import KeyConflict
from ..liveness import abandoned_since
from ..log import RedisEventLog, list_runs, position
from ..replay import SnapshotUnreadable, current_state
from ..views import format_run_hints, runs_table, seconds
from ..views.documents import Prompts, RunRow
from ..views.terminal import print_err, print_out
from .options import Json, RedisUrl, console, open_client, print_json

_READS = 16
"""Number of runs that are read at once: each takes a dozen requests to a distant server."""


def runs(redis_url: RedisUrl = None, as_json: Json = False) -> None:
    """List the runs of a server, oldest first; report a run that cannot be read, and go on.

    The trainer of an abandoned run, which is open but has no live process, is shown as silent.

    Example: trinity-events runs
    """
    rows = anyio.run(_states, redis_url)
    if as_json:
        print_json([_row(state, since) for state, since in rows])
    elif rows:
        shown = console()
        # In a terminal narrower than the ids and some columns, lines break.
        shown.width = max(shown.width, 72 + max(len(state.run_id) for state, _ in rows))
        shown.print(runs_table(rows))
        for hint in format_run_hints(rows):
            print_out(hint, lines=False)
    else:
        print_out("No runs yet. Start one with: trinity-events demo")


async def _states(redis_url: str | None) -> list[tuple[MonitorState, int | None]]:
    """Return each run's state, and the time since which it is abandoned, as in ``status``."""
    async with open_client(redis_url) as client:
        listed = await list_runs(client)
        states: dict[str, tuple[MonitorState, int | None]] = {}
        reads = anyio.CapacityLimiter(_READS)

        async def read_run(run: str) -> None:
            async with reads:
                try:
                    state = await current_state(RedisEventLog(client, run))
                    states[run] = state, await abandoned_since(client, state)
                # One run of another version, or a foreign key, hides no other run.
                except (SnapshotUnreadable, KeyConflict) as error:
                    print_err(f"error: {error}")

        async with anyio.create_task_group() as tasks:
            for run in listed:
                tasks.start_soon(read_run, run)
    # Reads end in any order; the index is in the order of openings.
    return [states[run] for run in listed if run in states]


def _row(state: MonitorState, since: int | None) -> RunRow:
    ledger = state.ledger
    return RunRow(
        run_id=state.run_id,
        opened_at=seconds(state.opened_at),
        epoch=state.epoch,
        trainer=state.trainer_status,
        step=state.trainer_step,
        last_event_at=seconds(position(state.position)[0] if state.entries else None),
        reward=state.learning.reward,
        total_steps=state.learning.total_steps,
        ready={kind: pointer.at for kind, pointer in state.ready.items()},
        prompts=UNSET
        if ledger is None
        else Prompts(trained=ledger.trained, dropped=ledger.dropped, open=ledger.open_count),
        silent_since=UNSET if since is None else since / 1000,
    )
