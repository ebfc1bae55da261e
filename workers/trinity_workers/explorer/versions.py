"""Follower of a run's weight versions: it waits for announcements, never for a timer."""

from __future__ import annotations

import anyio

from trinity_events.errors import DeadlineExceeded, TrinityError, VersionUnavailable
from trinity_events.subscriptions import subscribe
from trinity_schemas import (
    RunClosed,
    RunOpened,
    RunResumed,
    StepReady,
    StepRef,
    TrainerStatusChanged,
    VersionPartPublished,
)

from ..config import SyncMethod
from ..sync_method import is_version

_KEPT = 4
"""Announced versions that are remembered; a reducer retires all but two."""


class RunEnded(TrinityError):
    """Raised if the run was closed, or opened anew: this epoch gets no more weights."""


class VersionFollower:
    """Follows the ready weight versions of one epoch, and keeps the newest.

    Args:
        run_id: The run.
        epoch: The epoch.
        redis_url: The server of the log.
        method: The run's sync method. Versions are files with `checkpoint`; with `nccl`, one may be
            sent again.
    """

    def __init__(
        self, run_id: str, epoch: int, redis_url: str, *, method: SyncMethod = "memory"
    ) -> None:
        self._run_id = run_id
        self._epoch = epoch
        self._redis_url = redis_url
        self._method = method
        self._changed = anyio.Condition()
        self.newest: StepReady | None = None
        self._announced: dict[int, StepReady] = {}
        self._skipped: StepRef | None = None
        self._closed: RunClosed | None = None
        self._newer_epoch: int | None = None
        self._trainer_stopped = False

    async def follow(self) -> None:
        """Follow until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_end)
            if self._method == "nccl":
                tasks.start_soon(self._follow_sent)
            async with subscribe(self._run_id, StepReady, redis_url=self._redis_url) as events:
                async for delivered in events:
                    event = delivered.event
                    if event.epoch == self._epoch and is_version(event, self._method):
                        async with self._changed:
                            self.newest = event
                            self._announced[event.step] = event
                            for old in list(self._announced)[:-_KEPT]:
                                del self._announced[old]
                            self._changed.notify_all()

    async def _follow_end(self) -> None:
        events = subscribe(
            self._run_id,
            *(RunOpened, RunResumed, RunClosed, TrainerStatusChanged),
            redis_url=self._redis_url,
            start="beginning",
        )
        async with events:
            async for delivered in events:
                epoch, event = delivered.envelope.epoch, delivered.event
                if epoch < self._epoch:
                    continue
                async with self._changed:
                    if epoch > self._epoch:
                        self._newer_epoch = epoch
                    elif isinstance(event, RunClosed):
                        self._closed = event
                    elif isinstance(event, TrainerStatusChanged):
                        self._trainer_stopped = event.status == "stopped"
                    self._changed.notify_all()

    async def _follow_sent(self) -> None:
        events = subscribe(self._run_id, VersionPartPublished, redis_url=self._redis_url)
        async with events:
            async for delivered in events:
                ref = StepRef(delivered.envelope.epoch, delivered.event.step)
                if ref == self._skipped:
                    async with self._changed:
                        self._skipped = None
                        self._changed.notify_all()

    def skip(self, version: StepRef) -> None:
        """Wait for no version of this step, unless it is sent again."""
        self._skipped = version

    def has(self, step: int) -> bool:
        """Return True if a version of ``step`` or later is ready."""
        return self.newest is not None and self.newest.step >= step

    def announced(self, step: int) -> StepReady | None:
        """Return the version of a step, if it was announced and is among the newest ones."""
        return self._announced.get(step)

    async def find(self, version: StepRef) -> StepReady:
        """Return the announcement of a ready version of this epoch, however old.

        Raises:
            VersionUnavailable: The announcements that are left in the log do not have it.
        """
        known = self._announced.get(version.step)
        if known is not None or self.newest is None:
            return self._found(version, known)
        events = subscribe(self._run_id, StepReady, redis_url=self._redis_url, start="beginning")
        async with events:
            async for delivered in events:
                event = delivered.event
                if event.epoch == self._epoch and is_version(event, self._method):
                    if event.step == version.step:
                        return event
                    if event.step >= self.newest.step:
                        break
        return self._found(version, None)

    def _found(self, version: StepRef, ready: StepReady | None) -> StepReady:
        if ready is None:
            raise VersionUnavailable(
                f"the weights of step {version.step} of run {self._run_id} were not announced, or "
                "their announcement is no longer in the log"
            )
        return ready

    async def until_trainer_stops(self) -> None:
        """Wait until the trainer has stopped, or the run was closed or opened anew."""
        async with self._changed:
            while not self._trainer_stopped and self._closed is None and self._newer_epoch is None:
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
                    newest = self.newest
                    if (
                        newest is not None
                        and newest.step >= step
                        and StepRef(newest.epoch, newest.step) != self._skipped
                    ):
                        return newest
                    if self._closed is not None:
                        raise RunEnded(f"run {self._run_id} was closed: {self._closed.reason}")
                    if self._newer_epoch is not None:
                        raise RunEnded(
                            f"run {self._run_id} was opened anew as epoch {self._newer_epoch}: "
                            f"this explorer is of epoch {self._epoch}, and ends"
                        )
                    await self._changed.wait()
        have = "none" if self.newest is None else f"of step {self.newest.step}"
        raise DeadlineExceeded(
            f"weights of step {step} of run {self._run_id} were not ready within {deadline:g} s "
            f"(newest: {have}): see trinity-events status {self._run_id}"
        )
