"""Waits of the trainer that last: told to the log with those for whom it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from trinity_events.errors import TrinityError
from trinity_events.log import AsyncPublisher
from trinity_schemas import ExperienceGroup, TrainerStatusChanged, TrainerWait

from ..config import RunConfig

TOLD_AFTER = 5.0
"""Seconds after which a wait is told."""


class ToldWaits:
    """Tells the log for which explorers the trainer waits, once for each set of them.

    Args:
        config: The run.
        publisher: The trainer's.
    """

    def __init__(self, config: RunConfig, publisher: AsyncPublisher) -> None:
        self._config = config
        self._publisher = publisher
        self._told: tuple[str, ...] | None = None

    async def waiting(self, step: int, held: Iterable[ExperienceGroup], seconds: float) -> None:
        """Tell that the experiences of a step are not all there after so many seconds."""
        if seconds < TOLD_AFTER:
            return
        groups = list(held)
        missing = late_explorers(self._config, groups)
        if missing == self._told:
            return
        self._told = missing
        wait = TrainerWait(
            what="experiences",
            step=step,
            have=len(groups),
            expected=self._config.rollouts.prompts_per_step,
            missing=missing,
            seconds=seconds,
        )
        await self._tell(step, wait)

    async def over(self, step: int) -> None:
        """Tell that what it waited for has come, if it was told that it did."""
        if self._told is not None:
            self._told = None
            await self._tell(step, None)

    async def _tell(self, step: int, wait: TrainerWait | None) -> None:
        status = TrainerStatusChanged(status="running", step=step - 1, waits_for=wait)
        with suppress(TrinityError):  # training goes on without the log's knowing
            await self._publisher.publish(status)


def late_explorers(config: RunConfig, groups: Iterable[ExperienceGroup]) -> tuple[str, ...]:
    """Return the explorers of which groups of a step are missing, by their names in the log."""
    given = Counter(group.explorer for group in groups)
    return tuple(
        f"explorer-{rank}"
        for rank in range(config.explorer.count)
        if given[rank] < len(range(rank, config.rollouts.prompts_per_step, config.explorer.count))
    )
