"""Coordinator that runs saves and publishes an event when each starts, finishes or fails.

1. A save never waits for the log and never fails because of it, unless it needs a turn.
2. The whole save function runs within the save's turn.
3. Saves of one name run one after another.
4. A save that fails is an event. In the background its error is raised once, by a wait.
5. A save is published as finished only after the files that it staged are listed.
6. A save that does not fit on its disk fails before its function is called (:mod:`.free_space`).
7. A process has a heartbeat from before a save starts until the log has its last event
   (:mod:`.heartbeat`).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread

from trinity_schemas import (
    Event,
    Kind,
    Registration,
    SaveRequested,
    SaveStrategy,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
)

from ..checkpoints.layout import (
    STAGING,
    final_name,
    is_in_place,
    parse_staged_folder,
    staged_name,
)
from ..checkpoints.manifest import mark_in_place, write_part
from ..errors import PublishError, SaveError, StaleEpoch
from ..log import Publisher
from ..log.publishing.heartbeat import LEASE, Heartbeat
from ..log.publishing.metric_values import check_metrics, split_metrics
from ..log.reducer_root import other_folder
from ..system.error_text import checkpoint_cause
from .admission_client import wait_for_turn
from .free_space import PlannedSave, SaveSpace
from .inflight import InflightSaves
from .process_identity import this_process
from .save_attempt import SaveAttempt
from .save_run import reporting_progress, wait_for_future
from .saved_paths import MeasuredPaths, SavedPath, SavedPaths
from .sync_save_names import SavePlace, SyncSaveNames
from .timeouts import SaveTimeouts

logger = logging.getLogger(__name__)

TURN_DEADLINE = 3600.0
"""Seconds that a save waits for its turn before it fails."""


class _Failure(NamedTuple):
    attempt: SaveAttempt
    error: BaseException


class CheckpointCoordinator:
    """Coordinator of one process's saves.

    The four calls of Trinity-RFT's coordinator have the meaning that they have there, with three
    differences. A failed save is an event, and :meth:`wait_all` raises its error. The whole
    ``save_fn`` runs within its turn. The leader detects a process that dies while it saves.

    The publisher buffers events while the server is away. If the buffer is full, the save still
    runs, and its caller gets a ``PublishError`` from :meth:`save_sync` or from :meth:`wait_all`.

    Call :meth:`wait_all` last: it returns once the log has every event and the heartbeat stopped.

    Args:
        publisher: Publisher of the events; its role and rank name the slots.
        run_folder: The run's checkpoint directory. Paths in events are relative to it.
        strategy: Save strategy that the trainer opened the run with.
        lease: Seconds without a heartbeat after which the leader takes this process for dead.
        turn_deadline: Seconds that a save waits for its turn before it fails.
        timeouts: Its other waits and periods.
    """

    def __init__(
        self,
        publisher: Publisher,
        run_folder: Path | str | None = None,
        *,
        strategy: SaveStrategy = "unrestricted",
        lease: float = LEASE,
        turn_deadline: float = TURN_DEADLINE,
        timeouts: SaveTimeouts = SaveTimeouts(),
    ) -> None:
        self._publisher = publisher
        self._run_folder = None if run_folder is None else Path(run_folder)
        self._strategy = strategy
        self._lease = lease
        self._turn_deadline = turn_deadline
        self._timeouts = timeouts
        flush = timeouts.flush
        self._flush_within = publisher.deadline if flush is None else flush
        self._heartbeat = Heartbeat.of(publisher)
        self._inflight = InflightSaves(publisher.waits)
        self._sync_names = SyncSaveNames()
        self._failures: list[_Failure] = []
        self._unpublished: list[PublishError] = []
        self._space = SaveSpace(self._run_folder)
        # Background saves append their failures while a wait takes them.
        self._lock = threading.Lock()
        self._warned: str | None = None  # a run that commits each step warns once, not each time

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], Any],
        global_step: int,
        is_state_dict: bool = False,
        *,
        path: SavedPath | None = None,
        ranks: int | None = None,
        also: Sequence[Path] = (),
    ) -> None:
        """Run ``save_fn`` in a background thread and publish its events.

        Saves of one name run one after another: the call waits for the earlier save.

        Args:
            name: Name of the save within this worker, such as ``"model_state_dict"``.
            save_fn: Function that does the I/O. An exception that it raises fails the save. The
                save lasts as long as the future that it returns, if it returns one. A
                :class:`PlannedSave` has its size, and a function to call if it never runs.
            global_step: The training step.
            is_state_dict: True for a state dict for weight sync, False for a part of a
                checkpoint.
            path: File or folder that ``save_fn`` writes, if it lies in the run's directory. A
                sequence names files and folders that this save alone writes: each is digested.
            ranks: Number of ranks that each make a save of this name. The step is not ready
                before all of them have finished, whatever the registrations say.
            also: Further files and folders that ``save_fn`` writes. The checkpoint's manifest lists
                them with those of ``path``; the event does not name them.
        """
        paths = _paths(path, also)
        attempt = self._attempt(name, global_step, is_state_dict, paths, ranks)

        def save() -> None:
            try:
                self._collect(attempt, lambda: self._save(attempt, save_fn, paths))
            finally:
                self._inflight.leave(attempt)

        # The thread is registered before it starts, because a second save of the name must find it.
        thread = _save_thread(attempt, save)
        self._inflight.enter(attempt, thread, self._turn_deadline)
        try:
            # A thread that cannot start (the limit of the host) would block its name for ever.
            thread.start()
        except BaseException:
            self._inflight.leave(attempt)
            raise

    def start_save(
        self,
        name: str,
        start_fn: Callable[[], Any],
        global_step: int,
        is_state_dict: bool = False,
        *,
        path: SavedPath | None = None,
        ranks: int | None = None,
    ) -> None:
        """Run ``start_fn`` in this thread, within the save's turn; await its future in another.

        It is for functions that copy tensors before they return a future, such as
        ``torch.distributed.checkpoint.async_save``. They must begin on the training thread, but
        not before the earlier save of the name has ended. Under a strategy that limits saves, the
        rules of :meth:`save_sync` hold.

        Args:
            name: Name of the save within this worker.
            start_fn: Function that begins the save, and returns the future of its end.
            global_step: The training step.
            is_state_dict: True for a state dict, False for a part of a checkpoint.
            path: What is written, as in :meth:`save_async`.
            ranks: Number of ranks that each make a save of this name.

        Raises what ``start_fn`` raises. What its future raises is for :meth:`wait_all`.
        """
        paths = _paths(path)
        attempt = self._attempt(name, global_step, is_state_dict, paths, ranks)

        def finish() -> None:
            # The block holds the name and the heartbeat of the first part until the future has
            # ended.
            with cleanup:
                self._collect(attempt, lambda: self._finish(attempt, lambda: started, paths))

        thread = _save_thread(attempt, finish)
        with ExitStack() as exits:
            self._inflight.enter(attempt, thread, self._turn_deadline)
            exits.callback(self._inflight.leave, attempt)
            # Before the event of the start: the leader expires saves of a process without a
            # heartbeat.
            exits.enter_context(self._beating())
            with self._failing(attempt):
                self._start(attempt, start_fn, paths)
                # Still on the caller's thread, where the collectives of a save must run.
                started = start_fn()
            # From here on the thread leaves the registry; an error above leaves it in this block.
            cleanup = exits.pop_all()
        try:
            thread.start()
        except BaseException:
            with cleanup, self._failing(attempt):
                raise

    def save_sync(
        self,
        save_fn: Callable[[], Any],
        global_step: int,
        is_state_dict: bool = False,
        *,
        name: str | None = None,
        path: SavedPath | None = None,
        ranks: int | None = None,
    ) -> None:
        """Run ``save_fn`` in this thread and publish its events; raise what it raises.

        Meant for saves with barriers, which must run on the training thread. Under a strategy
        that limits saves, only one rank of a barrier may call this method. The other ranks would
        wait for a turn that the first rank cannot end.

        Calls of a worker without a name count as in Trinity-RFT: each that returns is one save of
        its step, and fills one of those that :meth:`register_and_monitor` expects. Calls with the
        same name at a step are attempts at one save, of which the step needs one.
        """
        if name is None:
            kind: Kind = "state_dict" if is_state_dict else "checkpoint"
            folder = parse_staged_folder(self._relative(_paths(path)))
            # A name that is free in this step, so that each call fills a slot (invariant 1 of
            # sync_save_names).
            with self._sync_names.reserved(SavePlace(global_step, kind, folder)) as free_name:
                self.save_sync(
                    *(save_fn, global_step, is_state_dict), name=free_name, path=path, ranks=ranks
                )
            return
        paths = _paths(path)
        attempt = self._attempt(name, global_step, is_state_dict, paths, ranks)
        self._inflight.enter(attempt, threading.current_thread(), self._turn_deadline)
        try:
            unpublished = self._save(attempt, save_fn, paths)
        finally:
            self._inflight.leave(attempt)
        if unpublished is not None:
            # Raised after the slot is left: the save succeeded, and only its event is missing.
            raise unpublished

    def wait(self, name: str, deadline: float | None = None) -> None:
        """Wait for the background save of one name, and until the log has its events.

        Other saves run on, and their failures stay for :meth:`wait_all`. A name without a save is
        no error: it may have ended.

        Raises as :meth:`wait_all`, for this name alone.
        """
        self._wait(name, deadline)

    def wait_all(self, deadline: float | None = None) -> None:
        """Wait for all background saves, and until the log has their events.

        Args:
            deadline: Seconds to wait for the saves; None waits as long as they run.

        Raises:
            DeadlineExceeded: if saves still run after ``deadline``; the message names them.
            SaveError: if saves failed since the last call; it names the first and holds all.
            PublishError: if no save failed, but the log lacks some of their events.
        """
        self._wait(None, deadline)

    def _wait(self, name: str | None, deadline: float | None) -> None:
        give_up = None if deadline is None else time.monotonic() + deadline
        self._inflight.wait(deadline, name)
        remaining = self._flush_within
        if give_up is not None:
            remaining = max(0.0, min(remaining, give_up - time.monotonic()))
        try:
            # Flush and heartbeat share one deadline: the caller asked for one.
            until = time.monotonic() + remaining
            self._publisher.flush(remaining)
            if name is None:
                # Only a wait for all saves stops the heartbeat: saves of other names still need it.
                self._heartbeat.settle(max(0.0, until - time.monotonic()))
        except PublishError as error:
            with self._lock:
                self._unpublished.append(error)
        # Failures are raised after the flush, so that the log has their events if the caller exits.
        self._raise_failures(name)

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Register the expected number of saves of a step, and commit the step.

        The trainer calls this once it has dispatched the saves, in whatever state they are. The
        committed kind is always registered: a count of zero means that there is nothing to wait
        for. When the call returns, the log has the commit.

        Args:
            global_step: The training step.
            is_state_dict: True to commit the state dict, False to commit the checkpoint.
            state_dict_thread_count: State-dict saves to expect, over all workers.
            checkpoint_thread_count: Checkpoint saves to expect, over all workers.
            metrics: Metrics of the training step, for display: numbers of Python, NumPy or torch.

        Raises:
            MetricRefused: A metric is no number. The step is committed, without it.
            PublishError: if the log did not accept the events within ``timeouts.flush``
                seconds, by default the publisher's deadline. It may still accept them later;
                calling again does no harm.
        """
        # The publisher blocks; on the event loop it would stop the other tasks of a trainer.
        await anyio.to_thread.run_sync(
            partial(
                self.register_and_monitor_blocking,
                global_step,
                is_state_dict,
                state_dict_thread_count,
                checkpoint_thread_count,
                metrics=metrics,
            )
        )

    def register_and_monitor_blocking(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Do as :meth:`register_and_monitor`, in code without an event loop or inside of one."""
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        counts: list[tuple[Kind, int]] = [
            ("state_dict", state_dict_thread_count),
            ("checkpoint", checkpoint_thread_count),
        ]
        producer = self._publisher.producer
        # One id for each registrar: to save a step again replaces its registration.
        registrations = tuple(
            Registration(
                registration_id=f"{producer.role}-{producer.rank}-{counted_kind}",
                kind=counted_kind,
                expected=count,
            )
            for counted_kind, count in counts
            # A registration of zero for the committed kind: without one the fold would wait for a
            # count.
            if count or counted_kind == kind
        )
        for registration in registrations:
            self._publisher.publish(
                ThreadCountRegistered(step=global_step, registration=registration)
            )
        numbers, refused = split_metrics(metrics)
        self._publisher.publish(
            StepCommitted(step=global_step, kind=kind, registrations=registrations, metrics=numbers)
        )
        # A trainer that dies after this call has committed the step: the leader can complete it.
        self._publisher.flush(self._flush_within)
        self._warn_if_other_folder()
        # Raised last: a metric that is no number must not cost the step its commit.
        check_metrics(global_step, refused)

    def _warn_if_other_folder(self) -> None:
        """Warn once if the reducer uses another folder than this process."""
        if self._run_folder is None:
            return
        log = self._publisher.log
        try:
            warning = other_folder(log.get_leader_folder(), self._run_folder.resolve(), log.run_id)
        except Exception as error:
            # The check is a courtesy: the commit is in the log already and must not seem to fail.
            logger.debug("the folder of the reducer of run %s is unknown: %s", log.run_id, error)
            return
        if warning is not None and warning != self._warned:
            self._warned = warning
            logger.warning("%s", warning)

    def _attempt(
        self,
        name: str,
        step: int,
        is_state_dict: bool,
        paths: SavedPaths | None,
        ranks: int | None,
    ) -> SaveAttempt:
        producer = self._publisher.producer
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        return SaveAttempt(
            # 64 random bits: ids of attempts are unique over processes and restarts without a
            # counter.
            secrets.token_hex(8),
            Slot(step=step, kind=kind, role=producer.role, rank=producer.rank, name=name),
            path=self._relative(paths),
            lease=self._lease,
            # Without a process the attempt asks for no turn: see SaveAttempt.begin.
            process=None if self._strategy == "unrestricted" else this_process(),
            ranks=ranks,
        )

    def _collect(self, attempt: SaveAttempt, save: Callable[[], PublishError | None]) -> None:
        """Run a save in the background, and keep its error for a wait."""
        try:
            unpublished = save()
        # Also SystemExit, which a thread would swallow without a trace.
        except BaseException as error:
            logger.exception("background save %s failed", attempt.what)
            with self._lock:
                self._failures.append(_Failure(attempt, checkpoint_cause(error)))
        else:
            if unpublished is not None:
                with self._lock:
                    self._unpublished.append(unpublished)

    def _save(
        self, attempt: SaveAttempt, save_fn: Callable[[], Any], paths: SavedPaths | None
    ) -> PublishError | None:
        """Run the attempt in its turn; return the error if its success was not published."""
        with self._beating():
            with self._failing(attempt):
                self._start(attempt, save_fn, paths)
            # Outside of the block above: _finish publishes its own failure, and two of them are out
            # of order.
            return self._finish(attempt, save_fn, paths)

    def _finish(
        self, attempt: SaveAttempt, save_fn: Callable[[], Any], paths: SavedPaths | None
    ) -> PublishError | None:
        """Run a started attempt to its end; return the error if its success was not published."""
        began = time.monotonic()
        with self._failing(attempt):
            every = self._timeouts.progress_every
            with reporting_progress(self._publisher, attempt, paths, every):
                wait_for_future(save_fn())
            # Measured after the future has ended, and inside of the turn: a digest of half a file
            # would fail the checkpoint.
            measured = self._measure(attempt, paths)
            if paths is not None:
                self._space.finish(attempt, measured.bytes, is_folder=paths.is_folder)
            finished = attempt.finish(
                nbytes=measured.bytes,
                digest=measured.digest,
                seconds=time.monotonic() - began,
                files=() if paths is None or self._relative(paths) is None else paths.files,
            )
        return self._publish(finished, f"{attempt.what} was saved, but this was not published")

    def _measure(self, attempt: SaveAttempt, paths: SavedPaths | None) -> MeasuredPaths:
        """Digest what a save wrote, and list it in the manifest of its staged folder.

        A save into the step's final folder marks this one: only what a saver of the run marked is
        ever removed.
        """
        if paths is None:
            return MeasuredPaths(0, None, {})
        staged = paths.staged_root(self._run_folder)
        measured = paths.measure(staged, shared=attempt.ranks not in (None, 1))
        relative = self._relative(paths)
        if self._run_folder and relative and is_in_place(relative, attempt.slot.step):
            folder = self._run_folder / final_name(attempt.slot.step)
            # Marked by the saver, because an event alone must not make a folder removable (decision
            # 35).
            mark_in_place(folder, self._publisher.epoch, attempt.slot.step)
        if staged is not None:  # also of nothing: the reducer digests what several ranks wrote
            slot = attempt.slot
            write_part(staged, f"{slot.kind} {slot.role} {slot.rank} {slot.name}", measured.sums)
        return measured

    def _beating(self) -> AbstractContextManager[None]:
        """Return a block with heartbeats; invariant 7."""
        patience = self._timeouts.first_heartbeat
        return self._heartbeat.active(self._publisher, self._lease, patience)

    @contextmanager
    def _failing(self, attempt: SaveAttempt) -> Iterator[None]:
        """Publish the failure of the attempt if the block raises."""
        try:
            yield
        except StaleEpoch:
            self._space.release(attempt)
            raise  # the fold ignores events of an older epoch
        except BaseException as error:
            self._space.release(attempt)
            # The caller must see the save's own error, not an error of publishing it.
            self._publish(attempt.fail(error), f"the failure of {attempt.what} was not published")
            raise

    def _start(
        self, attempt: SaveAttempt, save_fn: Callable[[], Any], paths: SavedPaths | None
    ) -> None:
        """Start an attempt in its turn, and check that it fits; cancel its function if it fails."""
        try:
            event = attempt.begin()
            if isinstance(event, SaveRequested):
                wait_for_turn(self._publisher, event, self._turn_deadline, self._timeouts)
                event = attempt.granted()
            # The fold counts a save's end without its start: an unpublished start loses nothing.
            self._publish(event, f"the start of {attempt.what} was not published")
            if paths is not None:
                planned_bytes = save_fn.nbytes if isinstance(save_fn, PlannedSave) else None
                self._space.reserve(attempt, paths, planned_bytes)
        except BaseException:
            if isinstance(save_fn, PlannedSave) and save_fn.cancel is not None:
                save_fn.cancel()
            raise

    def _publish(self, event: Event, otherwise: str) -> PublishError | None:
        """Publish an event; return the error if the log does not accept it."""
        try:
            self._publisher.publish(event)
        except PublishError as error:
            logger.warning("%s: %s", otherwise, error)
            return PublishError(error.run_id, otherwise, str(error))
        return None

    def _raise_failures(self, name: str | None) -> None:
        """Raise the failures of the saves of one name, or of all; the others are kept."""
        with self._lock:
            failures = [
                failure for failure in self._failures if name in (None, failure.attempt.slot.name)
            ]
            self._failures = [failure for failure in self._failures if failure not in failures]
            unpublished, self._unpublished = self._unpublished, []
        if failures:
            errors = [*(failure.error for failure in failures), *unpublished]
            raise SaveError(failures[0].attempt.what, tuple(errors))
        if unpublished:
            raise unpublished[0]

    def _relative(self, paths: SavedPaths | None) -> str | None:
        """Return the path relative to the run's folder; None if it lies outside of it."""
        if paths is None or self._run_folder is None:
            return None
        return paths.relative_to(self._run_folder)


def _paths(path: SavedPath | None, also: Sequence[Path] = ()) -> SavedPaths | None:
    return None if path is None else SavedPaths(path, also)


def _save_thread(attempt: SaveAttempt, run: Callable[[], None]) -> threading.Thread:
    """Return the thread of a save; not a daemon, for a process that ends waits for its saves."""
    slot = attempt.slot
    return threading.Thread(target=run, name=f"save-{slot.name}-step-{slot.step}")


def staged_path(run_folder: Path | str, epoch: int, step: int) -> Path:
    """Return a new folder for one attempt at a step; it becomes ``global_step_N`` once ready.

    All workers of the attempt write below the same folder, so only the trainer calls this.
    """
    return Path(run_folder) / STAGING / staged_name(epoch, step, secrets.token_hex(4))
