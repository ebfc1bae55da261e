"""One run's reducer: read, fold, commit, and bring the files in step."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from trinity_schemas import encode

from ..core import Monitor, MonitorState, encode_state, plan_files
from ..core.standing import OF_AN_EPOCH, stands, subject
from ..history import fold, load_monitor
from ..log import Commit, Entry, EventLog, Stream
from .checkpoints import CheckpointFiles

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 10_000
"""Entries between two snapshots."""
BATCH = 1000
RECONCILE_EVERY = 1.0
"""Seconds after which the files are compared with the state although nothing happened."""


class Reducer:
    """Folds one run while it leads.

    ``keep`` is called after each snapshot, to archive what came before it.

    Everything it holds in memory can be loaded again, so that whenever it is in doubt (a reply
    that was lost, a lead that was lost) it is thrown away and made anew.
    """

    def __init__(
        self,
        log: EventLog,
        files: CheckpointFiles | None,
        token: int,
        keep: Callable[[MonitorState], Awaitable[None]] | None = None,
    ) -> None:
        self._log = log
        self._files = files
        self._token = token
        self._keep = keep
        self._since_snapshot = 0
        self._reconciled_at = 0.0
        self._stale = False
        self._idle = False

    async def run(self, *, until_closed: bool = False) -> bool:
        """Fold until the log refuses us, because another leads or has gone further.

        Told to, also until the run is closed and nothing more comes; returns whether it was.

        Raises the client's errors. Whichever way it ends, what was folded does not count.
        """
        monitor, self._since_snapshot = await load_monitor(self._log)
        await self._reconcile(monitor.state)
        while await self._turn(monitor):
            if until_closed and self._idle and monitor.state.closed is not None:
                return True
        return False

    async def _turn(self, monitor: Monitor) -> bool:
        """Wait for entries, for a second at most, and take one step with them."""
        after = monitor.state.position
        found = await self._log.read(after, limit=BATCH)
        if not found:
            waited = await self._log.wait(
                {Stream.EVENTS: after}, seconds=RECONCILE_EVERY, limit=BATCH
            )
            found = [entry for _, entry in waited]
        self._idle = not found
        if found and not await self._step(monitor, after, found):
            return False
        if self._stale or time.monotonic() - self._reconciled_at >= RECONCILE_EVERY:
            await self._reconcile(monitor.state)
        return True

    async def _step(self, monitor: Monitor, after: str, found: list[Entry]) -> bool:
        was_closed, epoch_before = monitor.state.closed, monitor.state.epoch
        announcements, dead = fold(monitor, found)
        self._stale = bool(announcements)
        self._since_snapshot += len(found)
        # A run that ends leaves its last state, for whoever looks at it afterwards.
        ended = monitor.state.closed is not None and was_closed is None
        due = ended or self._since_snapshot >= SNAPSHOT_EVERY
        commit = Commit(
            token=self._token,
            after=after,
            position=monitor.state.position,
            announcements=[
                (subject(one) if stands(one, monitor.state) else "", encode(one))
                for one in announcements
            ],
            retracted=OF_AN_EPOCH if monitor.state.epoch != epoch_before else (),
            dead_letters=dead,
            snapshot=encode_state(monitor.state) if due else None,
        )
        if not await self._log.commit(commit):
            return False
        if due:
            self._since_snapshot = 0
            if self._keep is not None:
                await self._keep(monitor.state)
        for one in announcements:
            logger.info("%s", one.event)
        return True

    async def _reconcile(self, state: MonitorState) -> None:
        self._reconciled_at, self._stale = time.monotonic(), False
        if self._files is not None:
            await anyio.to_thread.run_sync(self._files.reconcile, plan_files(state))
