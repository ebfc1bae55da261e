"""Evaluator of the trainer: has explorers evaluate versions, beside training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio
import redis
import redis.asyncio
from msgspec import structs

from trinity_events.core.reward_errors import REWARD_ERRORS
from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter
from trinity_events.errors import StaleEpoch, TrinityError
from trinity_events.log import AsyncPublisher
from trinity_events.rollouts import (
    AnswerLimits,
    DispatchSettings,
    RolloutDispatcher,
    evaluation_keys,
)
from trinity_events.rollouts.experience_checks import NO_LIMITS
from trinity_schemas import BestBy, EvaluationFailed, EvaluationFinished, EvaluationStarted, StepRef

from ...config.train_config import RunConfig
from ...evaluation.failed_rewards import Score, select_rewards
from ...evaluation.schedule import is_due
from ...evaluation.statistics import results
from ...rollouts.held_out_sets import HeldOutSet

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Maximum questions that are asked for at a time, so that few answers are in memory."""
# As KEPT_EVALUATED of trinity_events.core.limits: the version of a third one may be retired.
MOST_OPEN = 2
"""Open versions beyond which a version that is due is passed over for the next one."""


class PendingEvaluation(NamedTuple):
    """Version that is to be evaluated on a set of held-out questions."""

    held_out: HeldOutSet
    version: StepRef


class Evaluator:
    """Evaluator of one epoch: no step of training waits for it.

    Evaluations are answered one after the other, in the order of their versions. Their requests
    have a stream of their own, which explorers read while training asks for nothing.

    Args:
        config: The run.
        client: Client of the server of the run's log.
        publisher: Publisher of the trainer.
        sets: Sets of held-out questions.
        through: Newest version by set that needs no evaluation any more, as the log tells it.
        waits: Reporter of the trainer's long waits.
        limits: Limits of the answers.
        training: Dispatcher of the epoch's training, whose excluded explorers and circuit breaker
            count for evaluations too; by default they have their own.
    """

    def __init__(
        self,
        config: RunConfig,
        client: redis.asyncio.Redis,
        publisher: AsyncPublisher,
        sets: Sequence[HeldOutSet],
        through: Mapping[str, StepRef],
        *,
        waits: WaitReporter = NO_REPORTS,
        limits: AnswerLimits = NO_LIMITS,
        training: RolloutDispatcher | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._publisher = publisher
        self._sets = sets
        self._waits = waits
        self._limits = limits
        self._shares = training
        self._last_steps = {name: version.step for name, version in through.items()}
        """Step by set of the last version that needs no evaluation any more, or is asked for."""
        self._open: deque[PendingEvaluation] = deque()
        self._changed = anyio.Condition()

    async def publishing(self, step: int) -> None:
        """Ask for the evaluations of a version, before it is published: so it is not retired.

        Raises:
            PublishError: The event that asks for them may not be in the log.
        """
        config, version = self._config, StepRef(self._config.epoch, step)
        versions = {evaluation.version for evaluation in self._open}
        # The version of the last step is evaluated in any case: no later one takes its place.
        if step < config.steps and version not in versions and len(versions) >= MOST_OPEN:
            return
        for held_out in self._sets:
            due = is_due(
                held_out.settings,
                step,
                before=self._last_steps.get(held_out.name),
                steps=config.steps,
                keeps_versions=config.keeps_versions,
            )
            if due:
                started = EvaluationStarted(
                    name=held_out.name,
                    version=version,
                    questions=len(held_out.questions),
                    samples=held_out.settings.samples,
                    fingerprint=held_out.fingerprint,
                )
                # The event before the version: a reader of the log keeps versions with open
                # evaluations.
                await self._publisher.publish(started)
                self._last_steps[held_out.name] = step
                async with self._changed:
                    self._open.append(PendingEvaluation(held_out, version))
                    self._changed.notify_all()

    async def run(self) -> None:
        """Have what is asked for answered, until cancelled; an evaluation that fails is told.

        Raises:
            StaleEpoch: The run has a newer epoch.
            PublishError: A result may not be in the log.
        """
        while True:
            async with self._changed:
                while not self._open:
                    await self._changed.wait()
            evaluation = self._open[0]
            # It stays in the queue meanwhile: drain() returns only when the result is in the log.
            await self._publisher.publish(await self._ended(evaluation))
            async with self._changed:
                self._open.popleft()
                self._changed.notify_all()

    async def drain(self) -> None:
        """Wait until all evaluations have ended; each has its deadline."""
        with self._waits.waiting("the evaluations on held-out questions"):
            async with self._changed:
                while self._open:
                    await self._changed.wait()

    async def _ended(self, evaluation: PendingEvaluation) -> EvaluationFinished | EvaluationFailed:
        name, version = evaluation.held_out.name, evaluation.version
        began = anyio.current_time()
        try:
            scores = await self._scores(evaluation)
            rewards, failed = select_rewards(scores, self._config.rewards.on_error)
        # No failure of this evaluation: the run continues in a newer epoch, without this trainer.
        except StaleEpoch:
            raise
        except (TrinityError, redis.RedisError, OSError) as error:
            logger.warning("the evaluation of step %d on %s failed: %s", version.step, name, error)
            return EvaluationFailed(name=name, version=version, reason=str(error))
        keep_best = self._config.checkpoints.keep_best
        return EvaluationFinished(
            name=name,
            version=version,
            metrics=results(evaluation.held_out.settings, rewards)
            | ({REWARD_ERRORS: float(failed)} if failed else {}),
            answers=sum(map(len, rewards)),
            seconds=anyio.current_time() - began,
            best_by=BestBy(keep_best.metric, keep_best.mode) if keep_best.set == name else None,
        )

    async def _scores(self, evaluation: PendingEvaluation) -> list[list[Score]]:
        """Return the scores of the answers to each question."""
        config, held_out = self._config, evaluation.held_out
        deadline = config.evaluation.timeout
        dispatcher = RolloutDispatcher(
            self._client,
            None,
            _settings(config, held_out, self._limits),
            deadline=deadline,
            keys=evaluation_keys(config.run_id),
            shares=self._shares,
        )
        # Those of an evaluation count for the next one.
        self._shares = self._shares or dispatcher
        await dispatcher.start()
        scores: list[list[Score]] = []
        while remaining := len(held_out.questions) - len(scores):
            count = min(remaining, AT_ONCE)
            await dispatcher.dispatch(count, evaluation.version, exact=True)
            groups = await dispatcher.take(count, deadline=deadline)
            await dispatcher.trained(len(scores), groups)  # which frees the answers
            scores += [
                [Score(sample.reward, sample.reward_error) for sample in group.experiences]
                for group in groups
            ]
        return scores


def _settings(config: RunConfig, held_out: HeldOutSet, limits: AnswerLimits) -> DispatchSettings:
    rollouts = config.rollouts
    return DispatchSettings(
        run_id=config.run_id,
        epoch=config.epoch,
        samples=held_out.settings.samples,
        sampling=held_out.sampling,
        limits=structs.replace(limits, error_score=config.rewards.error_score),
        prompts_per_step=AT_ONCE,
        fingerprint=held_out.fingerprint,
        window=AT_ONCE,
        claim_lease=rollouts.claim_lease,
        request_deadline=rollouts.request_deadline,
        max_attempts=rollouts.max_attempts,
        on_reward_error="score",
        max_consecutive_failures=None,  # A set may have questions that no reward can judge.
        outage_timeout=rollouts.outage_timeout,
        may_drop=False,
    )
