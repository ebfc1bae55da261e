"""All runs that a dashboard shows, with a reader for each run that is looked at."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import anyio.abc
import redis.asyncio
from msgspec import Struct

from ..analysis.troubles import find_troubles
from ..archive import Archive
from ..core import MonitorState
from ..core.ordinal_ranges import count
from ..errors import KeyConflict, RunNotFound, TrinityError
from ..liveness import abandoned_since
from ..log import RedisEventLog, list_runs, position, require_run
from ..replay import SnapshotUnreadable, current_state
from .run_reader import RunReader
from .sources import DashboardSource, RecordedSource, ServerSource

logger = logging.getLogger(__name__)

_LISTED = 100
"""Runs of the list with their state, the newest ones."""
_READS = 8
"""Runs of the list that are read at once."""
_FRESH = 4.0
"""Seconds for which the list of runs is kept."""


class DashboardLimits(Struct, frozen=True, kw_only=True):
    """Limits and periods of a dashboard.

    Attributes:
        readers: Maximum runs with an index in memory; that of the run that was viewed longest ago
            goes first.
        turn_entries: Entries that are indexed before others get their turn: some 2 ms.
        frame_pause: Minimum seconds between two messages of a live stream.
        send_seconds: Seconds for which a viewer may leave a message unread, before it is dropped.
    """

    readers: int = 8
    turn_entries: int = 100
    frame_pause: float = 0.25
    send_seconds: float = 15.0


class TooManyRuns(TrinityError):
    """More runs are viewed at once than there are indexes.

    Attributes:
        limit: Number of the indexes.
    """

    limit: int
    text = "{limit} runs are viewed at once, which is the most: close the page of one"


class Runs(Protocol):
    """Runs that a dashboard can show."""

    async def list_runs(self) -> list[dict[str, Any]]:
        """Return a summary of each run, newest first."""
        ...

    async def source(self, run_id: str) -> DashboardSource:
        """Return the log of a run. Raises RunNotFound."""
        ...


class ServerRuns:
    """Runs of a server.

    Args:
        client: Client of the server; it needs the rights of the user ``viewer``.
        archive_of: Returns the archive of a run, if the folder of checkpoints is at hand.
    """

    def __init__(
        self, client: redis.asyncio.Redis, archive_of: Callable[[str], Archive | None]
    ) -> None:
        self._client = client
        self._archive_of = archive_of

    async def list_runs(self) -> list[dict[str, Any]]:
        """Return a summary of each run, newest first."""
        opened = list(reversed((await list_runs(self._client)).items()))
        reads = anyio.CapacityLimiter(_READS)
        summaries: dict[str, dict[str, Any]] = {}

        async def read_run(run: str) -> None:
            async with reads:
                try:
                    state = await current_state(RedisEventLog(self._client, run))
                    since = await abandoned_since(self._client, state)
                    summaries[run] = build_summary(state) | {"silent_since": since}
                # A run of another version is listed with its problem.
                except (SnapshotUnreadable, KeyConflict) as error:
                    summaries[run] = {"run": run, "problem": str(error)}

        async with anyio.create_task_group() as tasks:
            for run, _ in opened[:_LISTED]:
                tasks.start_soon(read_run, run)
        return [
            summaries.get(run, {"run": run}) | {"last_opened": int(at * 1000)} for run, at in opened
        ]

    async def source(self, run_id: str) -> DashboardSource:
        """Return the log of a run. Raises RunNotFound."""
        await require_run(self._client, run_id)
        return ServerSource(self._client, run_id, self._archive_of(run_id))


class RecordedRuns:
    """One recorded run.

    Args:
        recorded: Its log.
    """

    def __init__(self, recorded: RecordedSource) -> None:
        self._recorded = recorded

    async def list_runs(self) -> list[dict[str, Any]]:
        """Return the run."""
        return [{"run": self._recorded.run_id, "recorded": True}]

    async def source(self, run_id: str) -> DashboardSource:
        """Return the log of the run. Raises RunNotFound."""
        if run_id != self._recorded.run_id:
            raise RunNotFound(run_id, "not shown", self._recorded.run_id)
        return self._recorded


def build_summary(state: MonitorState) -> dict[str, Any]:
    """Return the line of a run in the list."""
    return {
        "run": state.run_id,
        "epoch": state.epoch,
        "step": state.trainer_step,
        "steps": state.learning.total_steps,
        "reward": state.learning.reward,
        "heard_at": position(state.position)[0] if state.entries else None,
        "command": None if state.is_closed_for_good else state.command,
        "trainer": state.trainer_status,
        "opened_at": state.opened_at,
        "entries": state.entries,
        "explorers": len(state.explorers) + count(state.unlisted_explorers),
        "ready": {kind: pointer.at.step for kind, pointer in state.ready.items()},
        "problems": sum(trouble.count for trouble in find_troubles(state)),
    }


class Board:
    """Readers of the runs that are looked at, each shared by all its viewers."""

    def __init__(self, runs: Runs, tasks: anyio.abc.TaskGroup, limits: DashboardLimits) -> None:
        self._runs = runs
        self.limits = limits
        self._tasks = tasks
        self._readers: dict[str, tuple[RunReader, anyio.CancelScope]] = {}
        # One at a time: two viewers would begin two readers of one run.
        self._opening = anyio.Lock()
        # Viewers that ask while the list is read get that list.
        self._listing = anyio.Lock()
        self._listed: tuple[float, list[dict[str, Any]]] = (-1e9, [])

    async def list_runs(self) -> list[dict[str, Any]]:
        """Return a summary of each run, newest first; read from the server every few seconds."""
        async with self._listing:
            at, summaries = self._listed
            if anyio.current_time() - at > _FRESH:
                summaries = await self._runs.list_runs()
                self._listed = (anyio.current_time(), summaries)
        return summaries

    async def reader(self, run_id: str) -> RunReader:
        """Return the reader of a run, begun if none reads it yet.

        Raises:
            RunNotFound: if there is no such run.
            TooManyRuns: if viewers look at too many runs at once.
        """
        async with self._opening:
            entry = self._readers.get(run_id)
            if entry is None:
                source = await self._runs.source(run_id)
                self._make_room()
                scope = anyio.CancelScope()
                entry = self._readers[run_id] = RunReader(source, self.limits.turn_entries), scope
                self._tasks.start_soon(self._run, run_id, *entry)
        entry[0].used_at = anyio.current_time()
        return entry[0]

    async def _run(self, run_id: str, reader: RunReader, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await reader.run()
                # It could not go on: the next viewer begins another one.
                await anyio.sleep(_FRESH)
            # One run's reader must not end those of the others, nor the server.
            except Exception:
                logger.exception("the reader of run %s failed", run_id)
                reader.problem = f"the reader of run {run_id} failed: see the dashboard's log"
        if self._readers.get(run_id, (None,))[0] is reader:
            del self._readers[run_id]

    def _make_room(self) -> None:
        if len(self._readers) < self.limits.readers:
            return
        # Only runs without a viewer: a page that is open keeps its index.
        unseen = [run for run, (reader, _) in self._readers.items() if not reader.viewers]
        if not unseen:
            raise TooManyRuns(self.limits.readers)
        oldest = min(unseen, key=lambda run: self._readers[run][0].used_at)
        # Its memory is freed; a viewer that comes back waits for another index.
        self._readers.pop(oldest)[1].cancel()


@asynccontextmanager
async def board(runs: Runs, limits: DashboardLimits = DashboardLimits()) -> AsyncIterator[Board]:
    """Open a board; its readers end with the block."""
    async with anyio.create_task_group() as tasks:
        yield Board(runs, tasks, limits)
        tasks.cancel_scope.cancel()
