"""Follower of a run's weight versions: it waits for announcements, never for a timer.

1. Announcements of earlier epochs count for nothing. A newer epoch ends each wait with RunEnded.
2. A version that is ready is returned although the run was closed after its announcement.
3. A version that was skipped is waited past until it is sent again.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

import anyio

from trinity_events.errors import DeadlineExceeded, TrinityError, VersionNotAnnounced
from trinity_events.subscriptions import subscription_on
from trinity_schemas import EpochClosed, StepReady, StepRef, TrainingEnded, VersionResent

from ..config.sections.sync import SyncMethod
from ..config.sync_method import is_version
from .run_follower import Followed, RunFollower

_KEPT = 4
"""Announced versions that are remembered; a reducer retires all but two."""


class RunEnded(TrinityError):
    """The run was closed, or opened again: this epoch gets no more weights.

    Attributes:
        run_id: The run.
        epoch: Epoch of this explorer.
        newest: Newest epoch of the run; None if it was closed.
        reason: Reason for which it was closed.
    """

    run_id: str
    epoch: int
    newest: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.newest is None:
            return f"run {self.run_id} was closed: {self.reason}"
        return (
            f"run {self.run_id} was opened anew as epoch {self.newest}: this explorer is of epoch "
            f"{self.epoch}, and ends"
        )


class VersionFollower:
    """Ready weight versions of one epoch, of which it keeps the newest.

    Args:
        run: Follower of the run.
        epoch: The epoch.
        method: The run's sync method. Versions are files with `checkpoint`; with `nccl`, one may be
            sent again.
    """

    def __init__(self, run: RunFollower, epoch: int, *, method: SyncMethod = "memory") -> None:
        self._run = run
        self._run_id = run.log.run_id
        self._epoch = epoch
        self._method = method
        self._changed = anyio.Condition()
        self.newest: StepReady | None = None
        self._announced: dict[int, StepReady] = {}
        self._skipped: StepRef | None = None
        self._closed: EpochClosed | None = None
        self._newer_epoch: int | None = None
        self._training_ended = False

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Listen to the run's announcements for the block."""
        return self._run.listening(self._receive)

    async def _receive(self, announcement: Followed) -> None:
        epoch = announcement.epoch
        if epoch < self._epoch:
            return
        async with self._changed:
            if epoch > self._epoch:
                self._newer_epoch = epoch
            elif isinstance(announcement, StepReady):
                if is_version(announcement, self._method):
                    self._record(announcement)
            elif isinstance(announcement, EpochClosed):
                self._closed = announcement
            elif isinstance(announcement, TrainingEnded):
                self._training_ended = True
            elif isinstance(announcement, VersionResent):
                resent = StepRef(epoch, announcement.step)
                self._skipped = None if resent == self._skipped else self._skipped
            self._changed.notify_all()

    def _record(self, ready: StepReady) -> None:
        self.newest = ready
        self._announced[ready.step] = ready
        for old in list(self._announced)[:-_KEPT]:
            del self._announced[old]

    def skip(self, version: StepRef) -> None:
        """Wait for no version of this step, unless it is sent again."""
        self._skipped = version

    def has(self, step: int) -> bool:
        """Return True if a version of ``step`` or later is ready."""
        return self.newest is not None and self.newest.step >= step

    def get_announced(self, step: int) -> StepReady | None:
        """Return the version of a step, if it was announced and is among the newest ones."""
        return self._announced.get(step)

    async def find(self, version: StepRef) -> StepReady:
        """Return the announcement of a ready version of this epoch, however old.

        Raises:
            VersionUnavailable: The announcements that are left in the log do not have it.
        """
        ready = self._announced.get(version.step)
        # Without any version of this epoch the log has none either.
        if ready is not None or self.newest is None:
            return self._found(version, ready)
        events = subscription_on(
            lambda: nullcontext(self._run.log),
            self._run_id,
            StepReady,
            start="beginning",
            group=None,
            deadline=None,
            claim_after=1.0,
        )
        async with events:
            async for delivered in events:
                event = delivered.event
                if event.epoch == self._epoch and is_version(event, self._method):
                    if event.step == version.step:
                        return event
                    # Steps only grow. Beyond the newest, the read would wait for entries to come.
                    if event.step >= self.newest.step:
                        break
        return self._found(version, None)

    def _found(self, version: StepRef, ready: StepReady | None) -> StepReady:
        if ready is None:
            raise VersionNotAnnounced(
                f"weights of step {version.step} of run {self._run_id}", fault="absent"
            )
        return ready

    async def until_trainer_stops(self) -> None:
        """Wait until the trainer has stopped, or the run was closed or opened anew."""
        async with self._changed:
            while not self._training_ended and self._closed is None and self._newer_epoch is None:
                await self._changed.wait()

    async def wait(self, step: int, *, deadline: float | None) -> StepReady:
        """Return the newest version once it is of ``step`` or later, and is not skipped.

        Args:
            step: Step of the oldest version that will do.
            deadline: Seconds to wait; None waits for as long as the run is open.

        Raises:
            RunEnded: The run was closed before that, or opened anew.
            DeadlineExceeded: The deadline passed before that.
        """
        with anyio.move_on_after(deadline):
            async with self._changed:
                while True:
                    # Before the end of the run: its last version may be announced, and not
                    # installed.
                    newest = self.newest
                    if (
                        newest is not None
                        and newest.step >= step
                        and StepRef(newest.epoch, newest.step) != self._skipped
                    ):
                        return newest
                    if self._closed is not None:
                        raise RunEnded(self._run_id, self._epoch, reason=self._closed.reason)
                    if self._newer_epoch is not None:
                        raise RunEnded(self._run_id, self._epoch, self._newer_epoch)
                    await self._changed.wait()
        available = (
            "none is ready" if self.newest is None else f"the newest is of step {self.newest.step}"
        )
        raise DeadlineExceeded(
            f"weights of step {step} of run {self._run_id} were not ready",
            deadline or 0.0,
            f"{available}; see trinity-events status {self._run_id}",
        )
