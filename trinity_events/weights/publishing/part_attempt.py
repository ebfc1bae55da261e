"""Attempt of a rank at publishing its part, as the log records it."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from trinity_schemas import SaveFailed, Slot

from ...coordinator.heartbeat import Heartbeat
from ...coordinator.save_attempt import SaveAttempt
from ...log import Publisher


class PartAttempt:
    """One attempt at a rank's part of a version. It sends heartbeats while it lasts.

    Args:
        publisher: Publishes the events of the attempt.
        step: Step of the version.
        role: Role of the process.
        rank: Rank of the process.
        lease: Seconds without a heartbeat after which the reducer takes the process for dead.
    """

    def __init__(self, publisher: Publisher, step: int, role: str, rank: int, lease: float) -> None:
        self.step = step
        self.save_id = secrets.token_hex(8)
        slot = Slot(step=step, kind="weights", role=role, rank=rank, name="part")
        self._attempt = SaveAttempt(self.save_id, slot, lease=lease)
        self._begun = self._attempt.begin()
        self._publisher = publisher
        self._lease = lease
        self._beating = ExitStack()

    def begin(self) -> None:
        """Publish the start of the attempt, and begin the heartbeats."""
        heart = Heartbeat.of(self._publisher, self._lease)
        # No wait for the first heartbeat: the start event begins a whole lease.
        self._beating.enter_context(heart.active(self._publisher, patience=0.0))
        self._publisher.publish(self._begun)

    def end(self) -> None:
        """End the heartbeats, once the events of the attempt are in the log."""
        self._beating.close()

    def failure(self, error: BaseException, *, followed: bool = False) -> SaveFailed:
        """Return the failure event; ``followed`` defers the reason to another rank's event."""
        return self._attempt.fail(error, followed=followed)
