"""A rank that publishes, as the log hears of it: alive, done, or failed."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from trinity_schemas import SaveFailed, Slot

from ..coordinator.heartbeat import Heartbeat
from ..coordinator.save_attempt import SaveAttempt
from ..log import Publisher


class PartAttempt:
    """One attempt at a rank's part of a version. It says that its process lives while it lasts.

    Args:
        publisher: Tells the log.
        step: The version's.
        role: The process's.
        rank: The process's.
        lease: Seconds of silence after which the process is taken for dead.
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
        """Say that it begins."""
        heart = Heartbeat.of(self._publisher, self._lease)
        # Nobody is waited for: who was heard of just now has a whole lease to be heard of again.
        self._beating.enter_context(heart.beating(self._publisher, patience=0.0))
        self._publisher.publish(self._begun)

    def end(self) -> None:
        """It is over: the process need not be alive for it, once what it said is in the log."""
        self._beating.close()

    def failure(self, error: BaseException, *, followed: bool = False) -> SaveFailed:
        """What there is to say of its failure; of a ``followed`` one others say why."""
        return self._attempt.fail(error, followed=followed)
