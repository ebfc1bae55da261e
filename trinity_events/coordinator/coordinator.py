"""Saves in the background or at once, each told to the log as it starts, finishes or fails."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

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

from ..errors import PublishError, SaveError, StaleEpoch
from ..log import Publisher
from ..reducer_root import other_folder
from .admission_client import wait_for_turn
from .heartbeat import Heartbeat
from .inflight import InflightSaves
from .process_identity import this_process
from .progress import size_of, telling
from .save_attempt import SaveAttempt

logger = logging.getLogger(__name__)

LEASE = 15.0
"""Seconds of silence after which a process that saves is taken for dead."""
TURN_DEADLINE = 3600.0
"""Seconds that a save waits for its turn."""
FLUSH_DEADLINE = 30.0
"""Seconds that the log is given to take what was published, where somebody waits for that."""


class CheckpointCoordinator:
    """Runs saves and publishes what becomes of them.

    The four calls and their meanings are those of Trinity-RFT's coordinator, with these
    differences: a save that fails is an event, and :meth:`wait_all` raises it; a save's whole
    ``save_fn`` runs in its turn; and a process that dies while it saves is found out.

    Saves never wait for the log, nor fail because of it: a save that is done while the server is
    away is told when it is back. Where that cannot be, because the publisher's buffer is full,
    the save is run all the same, and its caller gets a ``PublishError`` afterwards: from
    :meth:`save_sync`, or from :meth:`wait_all`. Only a save that needs a turn waits for one.

    End with :meth:`wait_all`, after which all is told and the heartbeat is at rest.

    Args:
        publisher: Who publishes; its role and rank name the slots.
        run_folder: The run's checkpoint directory. Paths in events are relative to it.
        strategy: Which saves of the run may run at once, as its trainer opened it with.
        lease: Seconds of silence after which this process is taken for dead.
        turn_deadline: Seconds that a save waits for its turn before it fails.
    """

    def __init__(
        self,
        publisher: Publisher,
        run_folder: Path | str | None = None,
        *,
        strategy: SaveStrategy = "unrestricted",
        lease: float = LEASE,
        turn_deadline: float = TURN_DEADLINE,
    ) -> None:
        self._publisher = publisher
        self._run_folder = None if run_folder is None else Path(run_folder)
        self._strategy = strategy
        self._lease = lease
        self._turn_deadline = turn_deadline
        self._heart = Heartbeat.of(publisher, lease)
        self._under_way = InflightSaves()
        self._failures: list[tuple[str, BaseException]] = []
        self._untold: list[PublishError] = []
        self._lock = threading.Lock()
        self._warned: str | None = None

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], None],
        global_step: int,
        is_state_dict: bool = False,
        *,
        path: Path | str | None = None,
        ranks: int | None = None,
    ) -> None:
        """Run ``save_fn`` in a background thread, with its events.

        Saves of one name are serialised: this waits for the one before it.

        Args:
            name: Name of the save within this worker, such as ``"model_state_dict"``.
            save_fn: Does the I/O. What it raises fails the save.
            global_step: The training step.
            is_state_dict: Whether it is a state dict for weight sync, not part of a checkpoint.
            path: The file or folder that it writes, when it lies in the run's directory.
            ranks: How many ranks each make a save of this name. The step is then not ready before
                all of them have finished, whatever was registered.
        """
        attempt = self._attempt(name, global_step, is_state_dict, path, ranks)

        def run() -> None:
            try:
                untold = self._save(attempt, save_fn, path)
                if untold is not None:
                    with self._lock:
                        self._untold.append(untold)
            except BaseException as error:
                logger.exception("background save %s failed", attempt.what)
                with self._lock:
                    self._failures.append((attempt.what, error))
            finally:
                self._under_way.leave(attempt)

        # Not a daemon: a process that ends waits for its saves to be whole.
        thread = threading.Thread(target=run, name=f"save-{name}-step-{global_step}")
        self._under_way.enter(attempt, thread, self._turn_deadline)
        try:
            thread.start()
        except BaseException:
            self._under_way.leave(attempt)
            raise

    def save_sync(
        self,
        save_fn: Callable[[], None],
        global_step: int,
        is_state_dict: bool = False,
        *,
        name: str = "save_sync",
        path: Path | str | None = None,
        ranks: int | None = None,
    ) -> None:
        """Run ``save_fn`` in this thread, with its events; raises what it raises.

        For saves that must run on the training thread, because barriers are part of them. Of
        those that meet at a barrier, only one may come through here under a strategy that limits
        saves: the others would wait for a turn that the first cannot end.
        """
        attempt = self._attempt(name, global_step, is_state_dict, path, ranks)
        self._under_way.enter(attempt, threading.current_thread(), self._turn_deadline)
        try:
            untold = self._save(attempt, save_fn, path)
        finally:
            self._under_way.leave(attempt)
        if untold is not None:
            raise untold

    def wait_all(self, deadline: float | None = None) -> None:
        """Wait for all background saves, and until the log has what was said of them.

        Args:
            deadline: Seconds for it; without one, saves are given the time that they take.

        Raises:
            DeadlineExceeded: when saves are still under way after ``deadline``, naming them.
            SaveError: when any failed since the last call, naming the first and holding all.
            PublishError: when none failed, but the log was not told of all.
        """
        give_up = None if deadline is None else time.monotonic() + deadline
        self._under_way.wait(deadline)
        left = FLUSH_DEADLINE
        if give_up is not None:
            left = max(0.0, min(left, give_up - time.monotonic()))
        try:
            until = time.monotonic() + left
            self._publisher.flush(left)
            self._heart.settle(max(0.0, until - time.monotonic()))
        except PublishError as error:
            with self._lock:
                self._untold.append(error)
        self._raise_what_failed()

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        *,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Register how many saves to expect of a step, and commit it.

        To be called once the saves are dispatched; they may be anywhere between not started and
        finished. The kind that is committed is registered in any case: a count of zero says
        that there is nothing to wait for. When this returns, the log has the commit.

        Args:
            global_step: The training step.
            is_state_dict: Whether to commit its state dict, not its checkpoint.
            state_dict_thread_count: State-dict saves to expect, over all workers.
            checkpoint_thread_count: Checkpoint saves to expect, over all workers.
            metrics: The training step's metrics, for those who watch.

        Raises:
            PublishError: when the log did not take it within :data:`FLUSH_DEADLINE` seconds; it
                may take it still, and doing it again does no harm.
        """
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        counts: list[tuple[Kind, int]] = [
            ("state_dict", state_dict_thread_count),
            ("checkpoint", checkpoint_thread_count),
        ]
        who = self._publisher.producer
        # One id for each registrar: saving a step again, after a failure, expects no more of it.
        registrations = tuple(
            Registration(registration_id=f"{who.role}-{who.rank}-{one}", kind=one, expected=count)
            for one, count in counts
            if count or one == kind
        )
        for registration in registrations:
            self._publisher.publish(
                ThreadCountRegistered(step=global_step, registration=registration)
            )
        self._publisher.publish(
            StepCommitted(
                step=global_step, kind=kind, registrations=registrations, metrics=metrics or {}
            )
        )
        await anyio.to_thread.run_sync(self._publisher.flush, FLUSH_DEADLINE)
        await anyio.to_thread.run_sync(self._look_for_reducer)

    def _look_for_reducer(self) -> None:
        """Warn once where the reducer uses another folder than ours."""
        if self._run_folder is None:
            return
        log = self._publisher.log
        try:
            said = other_folder(log.leaders_folder(), self._run_folder.resolve(), log.run_id)
        except Exception as error:
            logger.debug("it is not known where the reducer of run %s is: %s", log.run_id, error)
            return
        if said is not None and said != self._warned:
            self._warned = said
            logger.warning("%s", said)

    def _attempt(
        self,
        name: str,
        step: int,
        is_state_dict: bool,
        path: Path | str | None,
        ranks: int | None,
    ) -> SaveAttempt:
        who = self._publisher.producer
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        return SaveAttempt(
            secrets.token_hex(8),
            Slot(step=step, kind=kind, role=who.role, rank=who.rank, name=name),
            path=self._relative(path),
            lease=self._lease,
            process=None if self._strategy == "unrestricted" else this_process(),
            ranks=ranks,
        )

    def _save(
        self, attempt: SaveAttempt, save_fn: Callable[[], None], path: Path | str | None
    ) -> PublishError | None:
        """Make the attempt, in its turn; returns why its success could not be told, if so."""
        with self._heart.beating(self._publisher):
            try:
                self._start(attempt)
                began = time.monotonic()
                with telling(self._publisher, attempt, None if path is None else Path(path)):
                    save_fn()
                nbytes, digest = _measure(Path(path)) if path is not None else (0, None)
                finished = attempt.finish(
                    nbytes=nbytes, digest=digest, seconds=time.monotonic() - began
                )
            except StaleEpoch:
                raise  # whatever it would say of an older epoch is of no use to anyone
            except BaseException as error:
                # The save's own error is the one that its caller must see.
                self._tell(attempt.fail(error), f"the failure of {attempt.what} was not told")
                raise
            return self._tell(finished, f"{attempt.what} was saved, but the log was not told")

    def _start(self, attempt: SaveAttempt) -> None:
        said = attempt.begin()
        if isinstance(said, SaveRequested):
            wait_for_turn(self._publisher, said, self._turn_deadline)
            said = attempt.granted()
        # Its end counts without its start, so nothing is lost when that cannot be told.
        self._tell(said, f"the start of {attempt.what} was not told")

    def _tell(self, event: Event, otherwise: str) -> PublishError | None:
        """Publish; returns the error when the log cannot take it."""
        try:
            self._publisher.publish(event)
        except PublishError as error:
            logger.warning("%s: %s", otherwise, error)
            return PublishError(f"{otherwise}: {error}")
        return None

    def _raise_what_failed(self) -> None:
        with self._lock:
            failures, self._failures = self._failures, []
            untold, self._untold = self._untold, []
        if failures:
            raise SaveError.of(failures, *untold)
        if untold:
            raise untold[0]

    def _relative(self, path: Path | str | None) -> str | None:
        """The path as events have it; None when it lies elsewhere, where nothing is promoted."""
        if path is None or self._run_folder is None:
            return None
        full, root = Path(path).resolve(), self._run_folder.resolve()
        return str(full.relative_to(root)) if full.is_relative_to(root) else None


def _measure(path: Path) -> tuple[int, str | None]:
    """Bytes of a file or a folder, and a file's digest. Raises OSError when it is not there."""
    if path.is_dir():
        return size_of(path), None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return size_of(path), f"sha256:{digest}"
