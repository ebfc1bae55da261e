"""Supply of rollouts for the trainer's steps, as far as sync style and staleness bound allow."""

from __future__ import annotations

import anyio

from trinity_events.errors import DeadlineExceeded
from trinity_events.rollouts import Group, RolloutDispatcher
from trinity_events.subscriptions import subscribe
from trinity_events.waits import WaitReporter
from trinity_schemas import StepReady, StepRef

from ..algorithms.filters import is_informative
from ..algorithms.settings import FiltersConfig
from ..config import RunConfig
from ..sync_method import is_version
from ..sync_schedule import names_exact_version, prompts_open


class RolloutSupply:
    """Supply of rollouts for one epoch.

    Args:
        config: The run.
        dispatcher: Dispatcher of the epoch.
        waits: Reporter of the trainer's long waits.
    """

    def __init__(
        self, config: RunConfig, dispatcher: RolloutDispatcher, waits: WaitReporter
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._waits = waits
        self._begun = config.resumed_step or 0
        """Step whose groups were taken last."""
        self._ready = -1
        """Step of the newest version that was announced ready, as far as it is followed."""
        self._announced = anyio.Condition()

    async def ask(self, version: int) -> None:
        """Ask for the rollouts that may be served by the version of a step."""
        config = self._config
        wanted = prompts_open(
            config,
            begun=self._begun,
            version=version,
            oldest_named=self._dispatcher.oldest_named,
        )
        await self._dispatcher.dispatch(
            max(wanted - self._dispatcher.asked_count, 0),
            StepRef(config.epoch, version),
            exact=names_exact_version(config.sync),
        )

    async def ask_when_ready(self) -> None:
        """Ask for the rollouts of each version once it is ready, until cancelled."""
        config = self._config
        async with subscribe(config.run_id, StepReady, redis_url=config.redis_url) as events:
            async for delivered in events:
                ready = delivered.event
                if ready.epoch == config.epoch and is_version(ready, config.sync.method):
                    await self.ask(ready.step)
                    async with self._announced:
                        self._ready = ready.step
                        self._announced.notify_all()

    async def until_ready(self, step: int) -> None:
        """Wait until rollouts were asked for that training step ``step`` may use.

        It needs :meth:`ask_when_ready` beside it.

        Raises:
            DeadlineExceeded: No such version was announced in time.
        """
        timeout, oldest = self._config.sync.timeout, max(self._config.version_wanted(step), 0)
        with (
            self._waits.waiting(
                f"the announcement of step {oldest}", deadline=timeout, step=oldest
            ),
            anyio.move_on_after(timeout),
        ):
            async with self._announced:
                while self._ready < oldest:
                    await self._announced.wait()
                return
        raise DeadlineExceeded(
            f"weights of step {oldest} of run {self._config.run_id} were not announced within "
            f"{timeout:g} s: does its reducer run? See trinity-events status {self._config.run_id}"
        )

    async def take(self, step: int) -> list[Group]:
        """Return the groups of a step.

        Raises:
            DeadlineExceeded: Groups are missing.
        """
        config = self._config
        filters = config.algorithm.filters
        groups = await self._dispatcher.take(
            config.rollouts.prompts_per_step,
            deadline=config.sync.timeout,
            oldest=config.version_wanted(step),
            usable=lambda group: judged(group, filters),
        )
        self._begun = step
        return groups


def judged(group: Group, filters: FiltersConfig) -> bool | str:
    """Return True if a group may be trained on, else the reason to drop it.

    Args:
        group: All samples of one prompt.
        filters: The algorithm's filters.
    """
    return is_informative(group.experiences, filters) or "filtered"
