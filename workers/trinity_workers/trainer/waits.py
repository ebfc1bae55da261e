"""Reports of the trainer's long waits for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from trinity_events.errors import TrinityError
from trinity_events.log import AsyncPublisher
from trinity_events.rollouts import HeldRequest
from trinity_schemas import TrainerStatusChanged, TrainerWait

from ..config import RunConfig

REPORTED_AFTER = 5.0
"""Seconds after which a wait is reported."""


class ReportedWaits:
    """Reports the explorers that the trainer waits for, once for each set of them.

    Args:
        config: The run.
        publisher: Publisher of the trainer.
    """

    def __init__(self, config: RunConfig, publisher: AsyncPublisher) -> None:
        self._config = config
        self._publisher = publisher
        self._reported: tuple[str, ...] | None = None

    async def waiting(self, step: int, missing: Sequence[HeldRequest], seconds: float) -> None:
        """Report requests of a step that have no answer after so many seconds."""
        if seconds < REPORTED_AFTER:
            return
        explorers = tuple(sorted({one.explorer for one in missing if one.explorer is not None}))
        if explorers == self._reported:
            return
        self._reported = explorers
        expected = self._config.rollouts.prompts_per_step
        wait = TrainerWait(
            what="experiences",
            step=step,
            have=max(expected - len(missing), 0),
            expected=expected,
            missing=explorers,
            seconds=seconds,
        )
        await self._report(step, wait)

    async def over(self, step: int) -> None:
        """Report the end of a wait that was reported."""
        if self._reported is not None:
            self._reported = None
            await self._report(step, None)

    async def _report(self, step: int, wait: TrainerWait | None) -> None:
        status = TrainerStatusChanged(status="running", step=step - 1, waits_for=wait)
        with suppress(TrinityError):  # Training continues without the report.
            await self._publisher.publish(status)
