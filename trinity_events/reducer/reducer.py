"""Reducer of one run: read, fold, commit, and update the checkpoint files.

1. A batch's announcements, dead letters and position are one commit. So an announcement is in the
   log once, wherever a reducer dies.
2. Commits follow one another in the order of the log, although the next batch is read meanwhile.
3. After a refused commit, nothing more is sent: another reducer leads, or has gone further.
4. The log can restore everything that the reducer holds in memory. After a lost reply or a lost
   lead, the caller drops the reducer and makes a new one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from trinity_schemas import Envelope, EnvelopeReader, SaveGranted, encode

from ..core import Monitor, MonitorState, encode_state, plan_files
from ..core.announcements import OF_AN_EPOCH, newest_subjects
from ..core.decisions.timeouts import lease_holders
from ..diagnostics.phases import PhaseClock
from ..log import ORIGIN, Commit, DeadLetter, Entry, EventLog, PageSize, Stream, position
from ..log.page_size import in_turns
from ..log.position import is_from_a_clock
from ..replay import Work, load_monitor
from ..system.error_text import ungrouped
from .background_job import BackgroundJob, TaskResult
from .checkpoint_files import CheckpointFiles
from .live_state import LiveState
from .policy import Policy
from .report_intake import ReportIntake

logger = logging.getLogger(__name__)

LATE_REPORTS = 60.0
"""Seconds after its end for which a run is served, while an explorer has not reported its own end.

An explorer ends what it generates first. Later reports wait until the run is served again.
"""
# Seconds of the first wait while files are reconciled; each further one is twice as long.
_SHORTEST_WAIT = 0.01


class _BatchResult:
    """Announcements and dead letters of one batch, gathered from its slices."""

    def __init__(self, state: MonitorState) -> None:
        self.announcements: list[Envelope] = []
        self.dead: list[DeadLetter] = []
        self.was_closed = state.closed
        self.epoch = state.epoch
        self.forgotten = state.forgotten_through

    def moves_files(self, state: MonitorState) -> bool:
        """Return True if the file plan may have changed; weights are in no plan."""
        if state.epoch != self.epoch or state.forgotten_through != self.forgotten:
            return True
        return any(getattr(e.event, "kind", "weights") != "weights" for e in self.announcements)


class Reducer:
    """Fold of one run while this process leads it.

    While the reducer folds one batch, it reads the next and commits the last. Disk work runs
    concurrently. Without a backlog, one event costs one blocking read and one commit.

    Args:
        log: The run's log.
        files: The run's checkpoint directory; None without one.
        token: Fencing token of the lead.
        archive: Archives the log up to the position of a snapshot. The reducer calls it when idle,
            and again after a pause if it returns False or raises.
        archived: Reads the archived events after a position.
        beside: Other tasks of the leader; each gets the live state.
        reached: Last known position of the fold, to detect a server that lost entries.
        policy: Limits of the fold, and the periods of its other work.
    """

    def __init__(
        self,
        log: EventLog,
        files: CheckpointFiles | None,
        token: int,
        archive: Callable[[str], Awaitable[bool]] | None = None,
        *,
        archived: Callable[[str], Iterator[Entry]] | None = None,
        beside: Sequence[Callable[[LiveState], Coroutine[Any, Any, None]]] = (),
        reached: str = ORIGIN,
        policy: Policy = Policy(),
    ) -> None:
        self._log = log
        self._files = files
        self._token = token
        self._archive = archive
        self._archived = archived
        self._beside = beside
        self.reached = reached
        """Position of the last commit that the log accepted."""
        self._limits = limits = policy.fold
        self._timeouts = policy.timeouts
        self.clock = PhaseClock()
        """Clock of the seconds in which entries are folded and committed."""
        self._decode = EnvelopeReader().decode
        self._batch = PageSize(limits.batch_entries, limits.page_bytes)
        self._after = ORIGIN
        self._since_snapshot = Work()
        self._snapshot_at = ORIGIN
        self._began_before = ORIGIN
        self._unarchived = 0
        self._archive_at = -math.inf
        self._reconciled_at = 0.0
        self._unnotified = True
        self._stale = False

    async def run(self, *, until_closed: bool = False) -> bool:
        """Fold until the log refuses a commit, because another reducer leads or has gone further.

        With ``until_closed``, also return once the run is closed and everything is archived.
        Returns True in that case. Raises the client's errors. Entries folded without a commit do
        not count.
        """
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                closed = await self._run(tasks, until_closed)
                tasks.cancel_scope.cancel()
        return closed

    async def _run(self, tasks: anyio.abc.TaskGroup, until_closed: bool) -> bool:
        monitor = await self._load()
        if monitor is None:
            return False
        self._tasks = tasks
        self._commit: TaskResult[bool] | None = None
        self._file_job = BackgroundJob("updating the checkpoint files")
        self._archive_job = BackgroundJob("archiving")
        for beside in (self._file_job.run, self._archive_job.run):
            tasks.start_soon(beside)
        self._live = LiveState(monitor.state)
        tasks.start_soon(ReportIntake(self._log, self._token).run)
        for attend in self._beside:
            tasks.start_soon(attend, self._live)
        # An earlier leader may have died between a commit and its files.
        self._submit_reconcile(monitor.state)
        closed = await self._fold_until_closed(monitor, until_closed)
        if closed:
            # The caller cancels the task group next, and with it what the jobs have not begun.
            await self._file_job.until_idle()
            await self._archive_job.until_idle()
        return closed

    async def _load(self) -> Monitor | None:
        """Load the state to continue from; return None if another reducer leads."""
        page = PageSize(self._limits.page_entries, self._limits.page_bytes)
        loaded = await load_monitor(self._log, self._archived, page)
        self._since_snapshot, self._after = loaded.silent, loaded.position
        if position(loaded.position) < position(self.reached):
            logger.error(
                "the log of %s was folded up to %s, but the server has only %s: it failed over or "
                "lost its data; the entries between are lost, and the run continues from there",
                self._log.run_id,
                self.reached,
                loaded.position,
            )
        self.reached = loaded.position
        # First of all: timeouts cannot be appended to a log that accepts no more entries.
        if await self._log.renumber(self._token, loaded.position) is None:
            return None
        if await self._log.renumber_dead_letters(self._token) is None:
            return None
        self._began_before = await self._log.last_id()
        # An earlier leader may have died between its snapshot and archiving up to it.
        self._snapshot_at, self._unarchived = loaded.began, int(loaded.began != ORIGIN)
        return loaded.monitor

    async def _fold_until_closed(self, monitor: Monitor, until_closed: bool) -> bool:
        """Fold batches; return True if the run was closed, False if a commit was refused."""
        state = monitor.state
        limit = self._batch.limit
        entries = await self._log.read(state.position, limit=limit)
        while True:
            if entries and not is_from_a_clock(entries[-1].id):
                if not await self._renumber(state, entries):
                    return False
                entries = await self._log.read(state.position, limit=limit)
            nbytes = self._batch.learn(entries)
            # A full page: there may be more, so the next one is read while this one is folded.
            if len(entries) == limit:
                is_behind = self._unarchived >= self._limits.unarchived_snapshots
                if is_behind and self._is_past_the_beginning(entries[-1].id):
                    # Entries stay on the server until they are archived.
                    await self._archive_job.until_idle()
                    self._submit_archiving()
                limit = self._batch.limit
                more = partial(self._log.read, entries[-1].id, limit=limit)
                ahead = TaskResult(self._tasks, more)
                if not await self._step(monitor, entries, nbytes, last=False):
                    return False
                entries = await ahead.result()
                continue
            if not await self._step(monitor, entries, nbytes, last=True):
                return False
            limit = self._batch.limit
            entries = await self._wait(state, limit)
            if not entries and self._file_job.is_idle:
                over = state.closed is not None and not lease_holders(state)
                ended = until_closed and over and self._is_archived
                if ended and not await self._awaits_reports(state):
                    return True
                if position(await self._log.last_id()) < position(state.position):
                    return False  # the server lost entries: load the state again

    async def _awaits_reports(self, state: MonitorState) -> bool:
        """Return True if explorers of a closed run have reports to come."""
        if await self._log.has_reports():
            return True
        if not any(explorer.runs for explorer in state.explorers.values()):
            return False
        return await self._log.now() < (state.closed_at or 0) + LATE_REPORTS * 1000

    async def _renumber(self, state: MonitorState, entries: list[Entry]) -> bool:
        """Give entries ids of the server's clock; return False if another reducer leads."""
        renumbered = await self._log.renumber(self._token, state.position)
        if renumbered:
            logger.warning(
                "run %s had entries with ids that no clock makes, such as %s: %d entries got new "
                "ids; docs/security.md says which users can choose ids",
                self._log.run_id,
                entries[-1].id,
                renumbered,
            )
        return renumbered is not None

    def _is_past_the_beginning(self, entry_id: str) -> bool:
        return position(entry_id) > position(self._began_before)

    async def _wait(self, state: MonitorState, limit: int) -> list[Entry]:
        """Wait for entries, when all earlier entries are folded and committed.

        The waits are short while the files are being reconciled, and then last a second.
        """
        seconds, longest = _SHORTEST_WAIT, self._timeouts.reconcile_every
        while True:
            self._submit_archiving()
            self._reconcile_if_due(state, 0.0)
            if self._file_job.is_idle or seconds > longest:
                seconds = longest
            waited = await self._log.read_blocking(
                {Stream.EVENTS: state.position}, seconds=seconds, limit=limit
            )
            if waited or seconds == longest:
                return [entry for _, entry in waited]
            seconds *= 2

    async def _step(
        self, monitor: Monitor, entries: list[Entry], nbytes: int, *, last: bool
    ) -> bool:
        """Fold a batch and commit it; wait for the commit only of the ``last`` batch."""
        with self.clock.phase("folding"):
            return await self._fold_and_commit(monitor, entries, nbytes, last=last)

    async def _fold_and_commit(
        self, monitor: Monitor, entries: list[Entry], nbytes: int, *, last: bool
    ) -> bool:
        state = monitor.state
        step = _BatchResult(state)
        since = self._since_snapshot
        since.entries += len(entries)
        since.bytes += nbytes
        for number, batch in enumerate(in_turns(entries, nbytes, self._limits.turn_entries)):
            # The first slice of a last batch is folded at once: a lone event waits for no other
            # task.
            if number or not last:
                await anyio.lowlevel.checkpoint()
            began = anyio.current_time()
            announcements, undecodable = monitor.fold(batch, self._decode)
            since.seconds += anyio.current_time() - began
            step.announcements += announcements
            step.dead += starmap(DeadLetter, undecodable)
        # The log takes a commit only from the position before it: one that came early is refused.
        if self._commit is not None and not await self._commit.result():
            return False
        self._commit = None
        if not entries:
            return True
        # Before the commit: what the tasks append is fenced, so a lost lead makes no difference.
        self._live.notify()
        self._stale = self._stale or step.moves_files(state)
        commit = partial(self._send_commit, self._make_commit(step, state), step)
        if last:
            return await commit()
        self._commit = TaskResult(self._tasks, commit)
        self._reconcile_if_due(state, self._timeouts.reconcile_every)
        return True

    def _make_commit(self, step: _BatchResult, state: MonitorState) -> Commit:
        # A run that ends leaves a snapshot of its last state, for later readers.
        ended = state.closed is not None and step.was_closed is None
        due = ended or self._is_snapshot_due()
        if due:
            # Even if the commit fails: the reducer is dropped then, with its counts (invariant 4).
            self._since_snapshot = Work()
        made = step.announcements
        commit = Commit(
            token=self._token,
            after=self._after,
            position=state.position,
            announcements=list(
                zip(
                    newest_subjects(made, state),
                    [encode(envelope) for envelope in made],
                    strict=True,
                )
            ),
            retracted=OF_AN_EPOCH if state.epoch != step.epoch else (),
            grants=[
                envelope.event.save_id for envelope in made if type(envelope.event) is SaveGranted
            ],
            dead_letters=step.dead,
            snapshot=encode_state(state) if due else None,
        )
        self._after = state.position
        return commit

    def _is_snapshot_due(self) -> bool:
        """Return True if a new leader would have too much to repeat without a snapshot."""
        since, limits = self._since_snapshot, self._limits
        return (
            since.entries >= limits.snapshot_entries
            or since.bytes >= limits.snapshot_bytes
            or since.seconds >= limits.snapshot_seconds
        )

    async def _send_commit(self, commit: Commit, step: _BatchResult) -> bool:
        if not await self._log.commit(commit):
            return False
        self.reached = commit.position
        if commit.snapshot is not None:
            self._snapshot_at = commit.position
            self._unarchived += 1
        if logger.isEnabledFor(logging.INFO):
            for envelope in step.announcements:
                logger.info("%s", envelope.event)
        return True

    def _submit_archiving(self) -> None:
        """Submit archiving up to the last snapshot, if that is new or failed before."""
        if (
            self._unarchived
            and self._archive is not None
            and anyio.current_time() >= self._archive_at
        ):
            self._unarchived = 0
            self._archive_job.submit_latest(
                partial(self._archive_through, self._archive, self._snapshot_at)
            )

    async def _archive_through(
        self, archive: Callable[[str], Awaitable[bool]], through: str
    ) -> None:
        # Also for an error or a cancellation: what is not archived is due again.
        failed = True
        try:
            failed = await archive(through) is False
        finally:
            if failed:
                self._unarchived = max(1, self._unarchived)
                self._archive_at = anyio.current_time() + self._timeouts.archive_retry

    @property
    def _is_archived(self) -> bool:
        """True if nothing is left to archive."""
        return self._archive is None or (self._archive_job.is_idle and not self._unarchived)

    def _reconcile_if_due(self, state: MonitorState, pause: float) -> None:
        """Reconcile the files once a second, or ``pause`` seconds after the last time if stale."""
        since = anyio.current_time() - self._reconciled_at
        if since >= (pause if self._stale else self._timeouts.reconcile_every):
            self._submit_reconcile(state)

    def _submit_reconcile(self, state: MonitorState) -> None:
        self._reconciled_at, self._stale = anyio.current_time(), False
        if self._files is not None:
            self._file_job.submit_latest(partial(self._reconcile, self._files, state))

    async def _reconcile(self, files: CheckpointFiles, state: MonitorState) -> None:
        # Plan here and not in the thread, because the fold changes the state meanwhile.
        plan = plan_files(state)
        promoted = await anyio.to_thread.run_sync(files.reconcile, plan)
        if promoted:
            self._live.notify()  # retention counts folders that have their name
        # An earlier leader may have died between a promotion and its notification.
        self._unnotified = promoted or (self._unnotified and bool(plan.promotions))
        if self._unnotified:
            await self._log.notify_promoted()
            self._unnotified = False
