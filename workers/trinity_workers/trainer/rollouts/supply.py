"""Supply of rollouts for the trainer's steps, as far as sync style and staleness bound allow."""

from __future__ import annotations

import logging
from dataclasses import field

import anyio

from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_events.rollouts import AnswerGroup, RolloutDispatcher
from trinity_events.subscriptions import subscribe
from trinity_schemas import ContractError, StepReady, StepRef

from ...algorithms.filters import is_informative
from ...algorithms.settings import FiltersConfig
from ...config.sync_method import is_version
from ...config.sync_schedule import names_exact_version
from ...config.train_config import RunConfig

FILTERED = "filtered"
"""Reason for which a group of equal rewards is dropped."""
_PUBLISH_DEADLINE = 10.0
"""Seconds for the last event of a trainer that fails: its server may be what failed."""

logger = logging.getLogger(__name__)


class GroupsFiltered(DeadlineExceeded):
    """Groups are missing at the deadline of a step, as others were dropped for equal rewards.

    Attributes:
        run_id: The run.
        step: The step.
        filtered: Number of groups that were dropped for it.
        part: Part of the rewards that was compared; empty for all of them.
    """

    run_id: str = field(kw_only=True)
    step: int = field(kw_only=True)
    filtered: int = field(kw_only=True)
    part: str = field(kw_only=True, default="")
    text = (
        f"{DeadlineExceeded.text}; {{filtered}} groups were dropped for step {{step}}, as the "
        "{_compared} of each were equal: let the answers to a prompt differ in reward (easier "
        "prompts, more samples, a reward with steps), or set algorithm.filters.zero_variance to "
        "keep or mask"
    )

    @property
    def _compared(self) -> str:
        return f"part {self.part!r} of the rewards" if self.part else "rewards"


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

    async def request(self, version: int) -> None:
        """Ask for the rollouts that may be served by the version of a step."""
        config = self._config
        prompts = config.prompts_open(
            begun=self._begun,
            version=version,
            oldest_named=self._dispatcher.oldest_named,
        )
        await self._dispatcher.dispatch(
            max(prompts - self._dispatcher.open_count, 0),
            StepRef(config.epoch, version),
            exact=names_exact_version(config.sync),
        )

    async def request_when_ready(self) -> None:
        """Ask for the rollouts of each version once it is ready, until cancelled."""
        config = self._config
        async with subscribe(config.run_id, StepReady, redis_url=config.redis_url) as events:
            async for delivered in events:
                ready = delivered.event
                if ready.epoch == config.epoch and is_version(ready, config.sync.method):
                    # The requests first: until_ready() returns once they were made.
                    await self.request(ready.step)
                    async with self._announced:
                        self._ready = ready.step
                        self._announced.notify_all()

    async def until_ready(self, step: int) -> None:
        """Wait until rollouts were asked for that training step ``step`` may use.

        It needs :meth:`request_when_ready` beside it.

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
            f"weights of step {oldest} of run {self._config.run_id} were not announced",
            timeout,
            f"does its reducer run? See trinity-events status {self._config.run_id}",
        )

    async def take(self, step: int) -> list[AnswerGroup]:
        """Return the groups of a step.

        Raises:
            DeadlineExceeded: Groups are missing.
            GroupsFiltered: The same, and others were dropped, as their rewards were equal.
        """
        config = self._config
        filters = config.algorithm.filters
        filtered = 0

        def judge(group: AnswerGroup) -> bool | str:
            nonlocal filtered
            verdict = judged(group, filters)
            filtered += verdict == FILTERED
            return verdict

        try:
            groups = await self._dispatcher.take(
                config.rollouts.prompts_per_step,
                deadline=config.sync.timeout,
                oldest=config.version_wanted(step),
                usable=judge,
            )
        except TrinityError as error:
            await self._publish_dropped()
            # Exactly this class: its subclasses name causes of their own.
            if type(error) is not DeadlineExceeded or not filtered:
                raise
            raise GroupsFiltered(
                error.missing,
                error.deadline,
                error.reason,
                run_id=config.run_id,
                step=step,
                filtered=filtered,
                part=filters.part or "",
            ) from None
        self._begun = step
        return groups

    async def _publish_dropped(self) -> None:
        """Publish the fates of dropped groups, which the next step would have reported."""
        try:
            with anyio.fail_after(_PUBLISH_DEADLINE):
                await self._dispatcher.publish_dropped()
        except (TrinityError, ContractError, TimeoutError) as error:
            logger.warning(
                "run %s: the fates of its dropped prompts are not in the log: %s",
                self._config.run_id,
                error,
            )


def judged(group: AnswerGroup, filters: FiltersConfig) -> bool | str:
    """Return True if a group may be trained on, else the reason to drop it.

    Args:
        group: All samples of one prompt.
        filters: The algorithm's filters.
    """
    return is_informative(group.experiences, filters) or FILTERED
