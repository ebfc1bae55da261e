"""``python -m tests.hosts.member ROLE URL RUN LEASE``: be a trainer or an explorer, until SIGTERM.

It trains and serves nothing. Its trainer takes a step each tenth of a second.
"""

from __future__ import annotations

import signal
import sys
import time

from trinity_events import training_run
from trinity_events.log import Publisher, SyncEventLog, new_producer, renewing_explorer_lease
from trinity_events.server import open_client
from trinity_schemas import ExplorerStatusChanged, TrainerStatusChanged

_DEADLINE = 120.0
_STEP = 0.1


def be_trainer(redis_url: str, run_id: str, lease: float) -> None:
    """Open the run, and take steps for ever."""
    with training_run(run_id, redis_url=redis_url, lease=lease, deadline=_DEADLINE) as run:
        step = 0
        while True:
            step += 1
            run.publish(TrainerStatusChanged(status="running", step=step, lease=lease))
            time.sleep(_STEP)


def be_explorer(redis_url: str, run_id: str, lease: float) -> None:
    """Hold the lease of explorer 0 for ever."""
    log = SyncEventLog(open_client(redis_url), run_id)
    publisher = Publisher(log, 1, new_producer("explorer"), deadline=_DEADLINE)
    running = ExplorerStatusChanged(status="running")
    with renewing_explorer_lease(publisher, lambda: running, lease=lease):
        signal.pause()


if __name__ == "__main__":
    members = {"trainer": be_trainer, "explorer": be_explorer}
    members[sys.argv[1]](sys.argv[2], sys.argv[3], float(sys.argv[4]))
