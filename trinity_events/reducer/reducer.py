"""One run's reducer: read, fold, commit, and bring the files in step."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from trinity_schemas import Envelope, EnvelopeReader, SaveGranted, encode

from ..core import Monitor, MonitorState, encode_state, plan_files
from ..core.current import OF_AN_EPOCH, newest_subjects
from ..core.timeouts import lease_holders
from ..log import ORIGIN, Commit, DeadLetter, Entry, EventLog, PageSize, Stream, position
from ..log.page_size import TURN, in_turns
from ..log.position import is_from_a_clock
from ..replay import Work, fold, load_monitor
from .background_job import BackgroundJob
from .checkpoint_files import CheckpointFiles
from .live_state import LiveState
from .task_result import TaskResult

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 5_000
"""Entries after which there is a snapshot."""
SNAPSHOT_BYTES = 32 << 20
"""Bytes of entries after which there is one, however few they are."""
SNAPSHOT_SECONDS = 1.0
"""Seconds of folding after which there is one: the next leader repeats no more than that."""
BATCH = 2000
"""Entries that are folded and committed at once, at most; of large ones, fewer: see PageSize."""
SLICE = TURN
"""Entries that are folded before anyone else has a turn, at most: see in_turns."""
RECONCILE_EVERY = 1.0
"""Seconds after which the files are compared with the state although nothing happened."""
_SHORTEST_WAIT = 0.01
KEEP_AGAIN = 10.0
"""Seconds before archiving that failed is tried again."""
_UNKEPT = 40
"""Snapshots after which the log is archived although there is a backlog to fold; one that comes
faster than it can be archived is folded no faster, so that the server is not filled. What was on
the server when we began is folded first: it takes no more room there while it waits."""


class _Step:
    """What one batch made true, as it is gathered from its slices."""

    def __init__(self, state: MonitorState) -> None:
        self.announcements: list[Envelope] = []
        self.dead: list[DeadLetter] = []
        self.was_closed = state.closed
        self.epoch = state.epoch
        self.forgotten = state.forgotten_through

    def moves_files(self, state: MonitorState) -> bool:
        """Whether the plan of the files may be another than before; weights are in none."""
        if state.epoch != self.epoch or state.forgotten_through != self.forgotten:
            return True
        return any(getattr(e.event, "kind", "weights") != "weights" for e in self.announcements)


class Reducer:
    """Folds one run while it leads.

    While one batch is folded the next is being read and the commit of the former is on its way;
    commits stay in order, and after one that is refused nothing more is sent. Work on the disk
    is done beside it. Where nothing is left to fold, one event costs one wait and one commit.

    Everything it holds in memory can be loaded again, so that whenever it is in doubt (a reply
    that was lost, a lead that was lost) it is thrown away and made anew.

    Args:
        log: The run's log.
        files: The run's checkpoint directory, if it has one.
        token: The fencing token of our lead.
        keep: Archives what came up to a position, that of a snapshot; called when there is time,
            and again after a while when it returns False or raises.
        archived: The events that are kept in files after a position.
        beside: What else the leader does, given the state as it is folded.
        reached: How far we know the log was folded before, to notice when that is lost.
    """

    def __init__(
        self,
        log: EventLog,
        files: CheckpointFiles | None,
        token: int,
        keep: Callable[[str], Awaitable[bool]] | None = None,
        *,
        archived: Callable[[str], Iterator[Entry]] | None = None,
        beside: Sequence[Callable[[LiveState], Coroutine[Any, Any, None]]] = (),
        reached: str = ORIGIN,
    ) -> None:
        self._log = log
        self._files = files
        self._token = token
        self._keep = keep
        self._archived = archived
        self._beside = beside
        self.reached = reached
        """The position of the last commit that was taken."""
        self._decode = EnvelopeReader().decode
        self._batch = PageSize(BATCH)
        self._after = ORIGIN
        self._since_snapshot = Work()
        self._snapshot_at = ORIGIN
        self._began_before = ORIGIN
        self._unkept = 0
        self._keep_at = -math.inf
        self._reconciled_at = 0.0
        self._stale = False

    async def run(self, *, until_closed: bool = False) -> bool:
        """Fold until the log refuses us, because another leads or has gone further.

        Told to, also until the run is closed and nothing more comes; returns whether it was.

        Raises the client's errors. Whichever way it ends, what was folded does not count.
        """
        try:
            async with anyio.create_task_group() as tasks:
                closed = await self._run(tasks, until_closed)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return closed

    async def _run(self, tasks: anyio.abc.TaskGroup, until_closed: bool) -> bool:
        monitor = await self._load()
        if monitor is None:
            return False
        self._tasks = tasks
        self._commit: TaskResult[bool] | None = None
        self._file_chore, self._log_chore = (
            BackgroundJob("bringing the files in step"),
            BackgroundJob("archiving"),
        )
        for beside in (self._file_chore.run, self._log_chore.run):
            tasks.start_soon(beside)
        self._live = LiveState(monitor.state)
        for attend in self._beside:
            tasks.start_soon(attend, self._live)
        self._wish_for_files(monitor.state)
        closed = await self._fold_on(monitor, until_closed)
        if closed:
            await self._file_chore.until_idle()
            await self._log_chore.until_idle()
        return closed

    async def _load(self) -> Monitor | None:
        """Load the state to go on from; None when another leads."""
        loaded = await load_monitor(self._log, self._archived)
        self._since_snapshot, self._after = loaded.silent, loaded.position
        if position(loaded.position) < position(self.reached):
            logger.error(
                "the log of %s was folded up to %s, but the server knows of %s only: it failed "
                "over or lost its data, and what came between is lost; the run goes on from there",
                self._log.run_id,
                self.reached,
                loaded.position,
            )
        self.reached = loaded.position
        # First of all: a log that takes no more entries could not be told what is due.
        if await self._log.renumber(self._token, loaded.position) is None:
            return None
        self._began_before = await self._log.last_id()
        # A leader before us may have died between its snapshot and archiving up to that.
        self._snapshot_at, self._unkept = loaded.began, int(loaded.began != ORIGIN)
        return loaded.monitor

    async def _fold_on(self, monitor: Monitor, until_closed: bool) -> bool:
        """Fold batch by batch; returns whether the run was closed, and not our commit refused."""
        state = monitor.state
        asked = self._batch.limit
        found = await self._log.read(state.position, limit=asked)
        while True:
            if found and not is_from_a_clock(found[-1].id):
                if not await self._renumber(state, found):
                    return False
                found = await self._log.read(state.position, limit=asked)
            nbytes = self._batch.learn(found)
            if len(found) == asked:
                if self._unkept >= _UNKEPT and self._is_past_the_beginning(found[-1].id):
                    await self._log_chore.until_idle()  # what is not archived stays on the server
                    self._wish_to_keep()
                asked = self._batch.limit
                more = partial(self._log.read, found[-1].id, limit=asked)
                ahead = TaskResult(self._tasks, more)
                if not await self._step(monitor, found, nbytes, last=False):
                    return False
                found = await ahead.result()
                continue
            if not await self._step(monitor, found, nbytes, last=True):
                return False
            asked = self._batch.limit
            found = await self._wait(state, asked)
            if not found and self._file_chore.is_idle:
                over = state.closed is not None and not lease_holders(state)
                if until_closed and over and self._is_kept:
                    return True
                if position(await self._log.last_id()) < position(state.position):
                    return False  # the server has less than it had: what is left is loaded

    async def _renumber(self, state: MonitorState, found: list[Entry]) -> bool:
        """Have the log give entries ids of its clock. False when another leads."""
        renumbered = await self._log.renumber(self._token, state.position)
        if renumbered:
            logger.warning(
                "run %s had entries with ids that no clock makes, such as %s: they were given "
                "others, %d in all; docs/security.md says who can choose ids",
                self._log.run_id,
                found[-1].id,
                renumbered,
            )
        return renumbered is not None

    def _is_past_the_beginning(self, entry_id: str) -> bool:
        return position(entry_id) > position(self._began_before)

    async def _wait(self, state: MonitorState, limit: int) -> list[Entry]:
        """Wait for entries; all there was is folded and committed by now.

        Where it waits for a whole second, the files were reconciled too: the waits are short
        while that is under way.
        """
        seconds = _SHORTEST_WAIT
        while True:
            self._wish_to_keep()
            self._look_at_files(state, 0.0)
            if self._file_chore.is_idle or seconds > RECONCILE_EVERY:
                seconds = RECONCILE_EVERY
            waited = await self._log.read_blocking(
                {Stream.EVENTS: state.position}, seconds=seconds, limit=limit
            )
            if waited or seconds == RECONCILE_EVERY:
                return [entry for _, entry in waited]
            seconds *= 2

    async def _step(self, monitor: Monitor, found: list[Entry], nbytes: int, *, last: bool) -> bool:
        """Fold a batch and commit it; unless it is the ``last``, the commit is on its way only."""
        state = monitor.state
        step = _Step(state)
        since = self._since_snapshot
        since.entries += len(found)
        since.bytes += nbytes
        for number, some in enumerate(in_turns(found, nbytes, SLICE)):
            if number or not last:
                await anyio.lowlevel.checkpoint()
            began = anyio.current_time()
            announcements, dead = fold(monitor, some, self._decode)
            since.seconds += anyio.current_time() - began
            step.announcements += announcements
            step.dead += dead
        if self._commit is not None and not await self._commit.result():
            return False
        self._commit = None
        if not found:
            return True
        self._live.notify()
        self._stale = self._stale or step.moves_files(state)
        commit = partial(self._take, self._commit_of(step, state), step)
        if last:
            return await commit()
        self._commit = TaskResult(self._tasks, commit)
        self._look_at_files(state, RECONCILE_EVERY)
        return True

    def _commit_of(self, step: _Step, state: MonitorState) -> Commit:
        # A run that ends leaves its last state, for whoever looks at it afterwards.
        ended = state.closed is not None and step.was_closed is None
        due = ended or _is_worth_a_snapshot(self._since_snapshot)
        if due:
            self._since_snapshot = Work()
        made = step.announcements
        commit = Commit(
            token=self._token,
            after=self._after,
            position=state.position,
            announcements=list(
                zip(newest_subjects(made, state), [encode(one) for one in made], strict=True)
            ),
            retracted=OF_AN_EPOCH if state.epoch != step.epoch else (),
            grants=[one.event.save_id for one in made if type(one.event) is SaveGranted],
            dead_letters=step.dead,
            snapshot=encode_state(state) if due else None,
        )
        self._after = state.position
        return commit

    async def _take(self, commit: Commit, step: _Step) -> bool:
        if not await self._log.commit(commit):
            return False
        self.reached = commit.position
        if commit.snapshot is not None:
            self._snapshot_at = commit.position
            self._unkept += 1
        if logger.isEnabledFor(logging.INFO):
            for one in step.announcements:
                logger.info("%s", one.event)
        return True

    def _wish_to_keep(self) -> None:
        """Have the log archived up to the last snapshot, if that is new, or it failed before."""
        if self._unkept and self._keep is not None and anyio.current_time() >= self._keep_at:
            self._unkept = 0
            self._log_chore.submit_latest(
                partial(self._keep_through, self._keep, self._snapshot_at)
            )

    async def _keep_through(self, keep: Callable[[str], Awaitable[bool]], through: str) -> None:
        failed = True
        try:
            failed = await keep(through) is False
        finally:
            if failed:
                self._unkept = max(1, self._unkept)
                self._keep_at = anyio.current_time() + KEEP_AGAIN

    @property
    def _is_kept(self) -> bool:
        """Whether nothing is left to archive, of what is to be."""
        return self._keep is None or (self._log_chore.is_idle and not self._unkept)

    def _look_at_files(self, state: MonitorState, pause: float) -> None:
        """Have the files reconciled once a second, and ``pause`` after they were when stale."""
        since = anyio.current_time() - self._reconciled_at
        if since >= (pause if self._stale else RECONCILE_EVERY):
            self._wish_for_files(state)

    def _wish_for_files(self, state: MonitorState) -> None:
        self._reconciled_at, self._stale = anyio.current_time(), False
        if self._files is not None:
            self._file_chore.submit_latest(partial(_reconcile, self._files, state))


def _is_worth_a_snapshot(since: Work) -> bool:
    """Return True where a new leader would have enough to repeat."""
    return (
        since.entries >= SNAPSHOT_EVERY
        or since.bytes >= SNAPSHOT_BYTES
        or since.seconds >= SNAPSHOT_SECONDS
    )


async def _reconcile(files: CheckpointFiles, state: MonitorState) -> None:
    # Planned when its turn comes, and not in the thread: the state goes on meanwhile.
    await anyio.to_thread.run_sync(files.reconcile, plan_files(state))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group: callers are told what failed, not how we are built."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
