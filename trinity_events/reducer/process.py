"""Reducer of one run in this process: it takes the lead, and retries after server failures."""

from __future__ import annotations

import gc
import logging
import math
import resource
import secrets
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import redis
import redis.asyncio

from trinity_schemas import WaitStarted

from ..archive.ownership import FolderOwner, log_identity
from ..archive.segments import Archive
from ..core import MonitorState
from ..core.limits import LONGEST_WAIT
from ..diagnostics.stacks import name_process
from ..diagnostics.waits import RENEWAL
from ..errors import FolderTaken, LogExhausted, TrinityError
from ..log import ORIGIN, EventLog, RedisEventLog, Stream
from ..log.redis.error_replies import reply_text
from ..log.reducer_root import mark_folder
from ..log.retry import CONNECTION_ERRORS, backoff_delays
from ..server import address_of
from ..system.error_text import first_error, ungrouped
from .checkpoint_files import CheckpointFiles
from .checkpoint_retention import CheckpointRetention
from .checkpoint_trash import CheckpointTrash
from .folder_waits import FolderWaits
from .idle_groups import IdleGroups
from .leader import Leader, LeaderPublisher
from .live_state import LiveState
from .log_retention import LogRetention
from .phase_reports import PhaseReporter, StandbyReporter
from .policy import Policy
from .reducer import Reducer
from .timekeeper import Timekeeper

logger = logging.getLogger(__name__)

# Every error of the client, not lost connections alone: a reply such as OOM passes, too.
ABSENCE: tuple[type[Exception], ...] = (redis.RedisError, *CONNECTION_ERRORS)
# The log raises some of the server's replies as its own errors, such as KeyConflict.
IN_THE_WAY: tuple[type[Exception], ...] = (*ABSENCE, TrinityError)
BREAK = 1.0
"""Longest pause before an unreachable server is tried again, in seconds."""
_FIRST_ENTRY = 3.0
"""Seconds of one blocking read for a run's first entry."""


async def reduce_run(
    client: redis.asyncio.Redis,
    run_id: str,
    root: Path | None,
    *,
    until_closed: bool = False,
    policy: Policy = Policy(),
) -> None:
    """Lead and fold one run, for ever or until it is closed.

    The reducer takes a lost lead again, and waits for a lost server. It logs an error of the run
    and retries after a pause, without affecting other runs.
    """
    log = RedisEventLog(client, run_id)
    server = "" if root is None else address_of(client)  # for the mark in the folder
    # One object for all leads: the position of the last one shows if the server lost entries.
    lead = _Lead(log, root, policy, server=server)
    backoff = backoff_delays(BREAK)
    while True:
        began = anyio.current_time()
        try:
            if await lead.once(until_closed=until_closed):
                return
            logger.warning("lost the lead of run %s", run_id)
        except* FolderTaken as errors:  # it is an OSError too, and no fault of the server
            await lead.report_fault(first_error(errors))
        except* ABSENCE as errors:
            logger.warning(
                "run %s waits for the server: %s", run_id, reply_text(first_error(errors))
            )
        # The next lead renumbers the log before it folds (`Reducer._load`): no user has to act.
        except* LogExhausted as errors:
            logger.warning("run %s is about to be repaired: %s", run_id, first_error(errors))
        except* TrinityError as errors:
            await lead.report_fault(first_error(errors))
        except* Exception:
            logger.exception("run %s cannot be folded", run_id)
        # A lead that outlasted one lease was in order: pauses after the next fault begin short
        # again.
        if anyio.current_time() - began > policy.timeouts.leader_lease:
            backoff = backoff_delays(BREAK)
        await anyio.sleep(next(backoff))


class _Lead:
    """Successive leads of one run in this process."""

    def __init__(
        self, log: RedisEventLog, root: Path | None, policy: Policy, *, server: str
    ) -> None:
        self._log = log
        self._policy = policy
        self._server = server
        self._owner: FolderOwner | None = None
        self._files: CheckpointFiles | None = None
        self._archive: Archive | None = None
        if root is not None:
            folder, adopt = root / log.run_id, log.run_id in policy.adopt_folders
            self._owner = FolderOwner(folder, log.run_id, adopt=adopt)
            self._files = CheckpointFiles(root, log.run_id, self._owner.claim)
            self._archive = Archive(folder, log.run_id, self._owner.claim)
        self._reached = ORIGIN
        self._token = 0
        # One id for all reports: the fold then has one wait that is renewed, and not one for each
        # try.
        self._fault_id = secrets.token_hex(8)
        self._report_again = -math.inf

    async def report_fault(self, error: BaseException) -> None:
        """Report why the run cannot be folded, also to the log as a wait; then pause."""
        logger.error("run %s cannot be folded: %s", self._log.run_id, error)
        # A new producer: after a lost reply the numbers of the last one would be in doubt.
        publisher = LeaderPublisher(self._log, self._token)
        event = WaitStarted(
            wait_id=self._fault_id,
            what=f"a repair of run {self._log.run_id} ({error})"[:LONGEST_WAIT],
            seconds=0.0,
        )
        with suppress(*IN_THE_WAY):
            if anyio.current_time() >= self._report_again:
                epoch = await self._log.newest_epoch()
                # There is no folded state here. The publisher reads only the run's id of it.
                await publisher.publish(event, MonitorState(run_id=self._log.run_id), epoch)
                self._report_again = anyio.current_time() + RENEWAL
        await anyio.sleep(self._policy.timeouts.fault_retry)

    async def once(self, *, until_closed: bool) -> bool:
        """Lead once; return True if the run was closed, False if the lead was lost."""
        leader = Leader(self._log, self._policy.timeouts)
        closed, retention = False, None
        self._token = token = await self._acquire(leader)
        logger.info("leads run %s with token %d", self._log.run_id, token)
        name_process(self._log.run_id, "reducer-0")
        if self._archive is not None:
            retention = LogRetention(self._log, self._archive, token, self._policy.archive)
        reducer = self._reducer(token, retention)
        try:
            async with anyio.create_task_group() as tasks:

                async def renew() -> None:
                    await leader.renew_until_lost()
                    tasks.cancel_scope.cancel()

                # Before the folder is claimed, which may take longer than a lease (`_own`).
                tasks.start_soon(renew)
                if self._owner is not None and self._files is not None:
                    await self._own(self._owner, self._files)
                    await self._set_leader_folder(self._files, token)
                if retention is not None:
                    # Before the fold loads its state, which may read the archive: both must be of
                    # one log.
                    await retention.begin()
                closed = await reducer.run(until_closed=until_closed)
                tasks.cancel_scope.cancel()
        finally:
            # Also after an error: the next lead compares it with the log that it finds.
            self._reached = reducer.reached
            # Shielded, so that a cancelled leader frees its lease too. A server that is away holds
            # up the exit for a second at most.
            with anyio.CancelScope(shield=True), suppress(*IN_THE_WAY), anyio.move_on_after(1):
                await leader.release()
        return closed

    async def _acquire(self, leader: Leader) -> int:
        """Stand by until this reducer leads; return its fencing token."""
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(StandbyReporter(self._log).run)
                token = await leader.acquire()
                tasks.cancel_scope.cancel()
        return token

    async def _own(self, owner: FolderOwner, files: CheckpointFiles) -> None:
        """Mark the run's folder as this log's. Raises FolderTaken if it belongs to another log."""
        # The identity is made of the first entry: a log without one has none yet.
        while (identity := await log_identity(self._log, owner.archive)) is None:
            await self._log.read_blocking({Stream.EVENTS: ORIGIN}, seconds=_FIRST_ENTRY, limit=1)
        # On the server while the first entry is still there: trimming removes what it is made of.
        await self._log.store_identity(identity)
        owner.belongs(identity, self._server)
        try:
            await anyio.to_thread.run_sync(files.claim)
        # It is an OSError, too, but no fault of the disk: the folder is another log's.
        except FolderTaken:
            raise
        except OSError as error:
            # Each use of the folder claims it again; without a claim, nothing in it changes.
            logger.error("the folder %s cannot be used: %s", files.folder, error)

    async def _set_leader_folder(self, files: CheckpointFiles, token: int) -> None:
        """Publish the folder's mark, so that a trainer can detect that it writes elsewhere."""

        def mark() -> bytes:
            with files.opened(create=True) as run:
                return mark_folder(run, token)

        try:
            marked = await anyio.to_thread.run_sync(mark)
        except OSError as error:
            logger.error("the folder %s cannot be marked as the reducer's: %s", files.folder, error)
        else:
            await self._log.set_leader_folder(marked)

    def _reducer(self, token: int, retention: LogRetention | None) -> Reducer:
        log, policy, archive = self._log, self._policy, self._archive
        publisher = LeaderPublisher(log, token)
        clock = Timekeeper(log, publisher, policy)
        phases = PhaseReporter(log, token)
        beside: list[Callable[[LiveState], Coroutine[Any, Any, None]]] = [
            clock.leases,
            clock.deadlines,
            partial(_raise_epoch, log, token),
            IdleGroups(log, publisher, token, policy.group_idle).run,
            FolderWaits(publisher, partial(self._faults, retention)).run,
            phases.run,
        ]
        if self._files is not None:
            trash = CheckpointTrash(self._files, token, policy.timeouts)
            beside.append(CheckpointRetention(log, trash, token, policy).run)
        reducer = Reducer(
            log,
            self._files,
            token,
            retention,
            archived=partial(archive.read, Stream.EVENTS) if archive is not None else None,
            beside=beside,
            reached=self._reached,
            policy=policy,
        )
        reducer.clock = phases.clock
        return reducer

    def _faults(self, retention: LogRetention | None) -> dict[str, str]:
        """Return what the leader cannot write now, each with the error in words."""
        faults = {} if self._files is None else dict(self._files.faults)
        if retention is not None and self._archive is not None and retention.fault is not None:
            faults[f"the archive {self._archive.folder}"] = retention.fault
        return faults


async def _raise_epoch(log: EventLog, token: int, live: LiveState) -> None:
    """Raise the counter of epochs to the newest folded one, until another reducer leads.

    A trainer takes the next epoch from the counter and appends the opening, in one script. A client
    that may append events can append an opening of any epoch without the counter. The fold then
    refuses each opening that the counter gives as stale, until the counter has passed the invented
    epoch. Only the reducer knows the folded epoch, and has the right to set the counter.
    """
    raised = 0
    while True:
        await live.wait_until(lambda state, raised=raised: state.epoch > raised)  # type: ignore[misc]
        raised = live.state.epoch
        counted = await log.raise_epoch(token, raised)
        if counted is None:
            return
        if counted < raised:
            logger.warning(
                "an event opened epoch %d of run %s, and the last number that a trainer took "
                "was %d: the next opening takes %d; docs/security.md says who can append",
                raised,
                live.state.run_id,
                counted,
                raised + 1,
            )


def tune_process() -> None:
    """Tune the garbage collector, the thread switch interval and the limit of open files.

    Meant for a process that does nothing but fold. Few collections scan the long-lived state. A
    short switch interval keeps archiving threads from delaying the fold. Each run takes two
    connections, and a shell's default limit is 1,024 open files.
    """
    gc.collect()
    # After the collection: a frozen object is never scanned again, not even as garbage.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.001)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # some systems allow fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
