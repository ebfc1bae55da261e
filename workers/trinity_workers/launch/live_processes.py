"""Processes of a run that live on this host, over which the run is not started a second time."""

from __future__ import annotations

import os
from collections.abc import Mapping

import anyio

from trinity_events.diagnostics.stacks import RunProcess, host_processes
from trinity_events.errors import TrinityError

LAUNCHER = "launcher-0"
ENDING = 10.0
"""Seconds in which the processes of a launcher that was killed are ended by their Ray's reaper."""
_OUTLIVING = ("explorer", "reducer")
"""Roles whose processes may be started by themselves, and wait for the run to be opened again."""
_LOOK = 0.2


class RunIsLive(TrinityError):
    """A run is started whose processes live: a second epoch would fence them.

    Attributes:
        run_id: The run.
        processes: Its processes on this host, by role and rank.
    """

    run_id: str
    processes: Mapping[str, RunProcess]
    text = (
        "run {run_id} is running on this host: {_listed}: end it with kill {_first.pid}, give "
        "another name with --run, or start it over the running one with --take-over, which loses "
        "the steps since its newest checkpoint"
    )

    @property
    def _listed(self) -> str:
        processes = sorted(self.processes.items())
        return ", ".join(f"{name} (process {process.pid})" for name, process in processes)

    @property
    def _first(self) -> RunProcess:
        return self.processes.get(LAUNCHER, next(iter(self.processes.values())))


async def refuse_live_run(run_id: str) -> None:
    """Raise RunIsLive if a launcher, trainer or rank of the run lives on this host.

    Those whose launcher has ended are waited for: they are about to end.
    """
    with anyio.move_on_after(ENDING):
        while processes := _find_processes(run_id):
            # It is not about to end: a wait would only delay the refusal.
            if LAUNCHER in processes:
                break
            await anyio.sleep(_LOOK)
    if processes:
        raise RunIsLive(run_id, processes)


def _find_processes(run_id: str) -> dict[str, RunProcess]:
    return {
        name: process
        for name, process in host_processes(run_id).items()
        if process.condition != "ended"
        and process.pid != os.getpid()
        and name.rpartition("-")[0] not in _OUTLIVING
    }
