"""One training step on any engine: passes without gradients, then updates of critic and policy."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from trinity_events.core.skipped_updates import SKIPPED_UPDATES

from ...algorithms.aggregation import Means
from ...algorithms.batch import NO_GROUP, Batch
from ...algorithms.logits import TokenStatistics
from ...algorithms.prepare import prepare
from ...algorithms.settings import AlgorithmConfig
from ...algorithms.statistics import explained_variance, value_means
from ...algorithms.update import Update, policy_update, value_update
from ...config.train_config import RunConfig
from ...engines.base import resident
from ...engines.model_memory import ALL
from .division import (
    NO_LIMIT,
    BatchDivision,
    MicroBatchLimit,
    division_of,
    loss_denominators,
    micro_batch_limit,
    response_tokens,
)
from .skipped_updates import MAX_SKIPPED_STEPS, SkippedUpdates, taken_norm

ModelName = Literal["policy", "rollout", "critic", "reference", "teacher", "reward_model"]
"""Models of a training step; `rollout` is the policy without an optimizer, which generates."""
Trained = Literal["policy", "critic"]


def needed_models(config: RunConfig) -> frozenset[ModelName]:
    """Return the models that a training step of the run needs."""
    settings = config.algorithm_of_step
    needed: dict[ModelName, bool] = {
        "policy": True,
        "critic": settings.critic.use,
        "reference": "reference_logprobs" in settings.needed_fields,
        "teacher": config.teacher_folder is not None,
        "reward_model": config.reward_folder is not None,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


class Models(NamedTuple):
    """Models of a training step, of which a role has some alone."""

    policy: Any = None
    """Engine with optimizer, as is the critic; of a `rollout`, one without."""
    critic: Any = None
    reference: Any = None
    """Model without gradients, as is the teacher; of adapters, their base."""
    teacher: Any = None
    reward_model: Any = None
    """RewardModel whose scores are added to rewards."""

    @property
    def trained(self) -> list[Any]:
        """Return the engines that are trained."""
        return [
            learner
            for learner in (self.policy, self.critic)
            if learner is not None and learner.optimizer is not None
        ]


class Taken(NamedTuple):
    """Means of an optimizer step, as far as this rank has them, and its gradients' norm."""

    means: Means
    norm: float
    """Not finite, on all ranks alike, if the engine skipped the step."""


class Updated(NamedTuple):
    """Means of a step's updates of a model, and the figures that are the same on all ranks."""

    means: Means
    figures: dict[str, float]


class Learner(NamedTuple):
    """Model that is updated, its update, and the names of its metrics."""

    engine: Any
    update: Callable[[Sequence[Batch], Tensor], Taken]
    """Takes an optimizer step on micro-batches; the tensor is the denominator of their loss."""
    prefix: str
    norm_name: str
    rate_name: str
    model: Trained


class TrainingStep(ABC):
    """Training step of one rank. All ranks take it together.

    Args:
        models: The models, in the engine's form.
        settings: The algorithm.
        temperature: Temperature that sampled.
        limit: Maximum size of one pass; by default the engine's.
        reward_weight: Factor of the reward model's scores.
        max_skipped_steps: Training steps in a row without an update of a model, because a number is
            not finite, after which the run fails.
    """

    def __init__(
        self,
        models: Models,
        settings: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        limit: MicroBatchLimit = NO_LIMIT,
        reward_weight: float = 1.0,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
    ) -> None:
        self.models = models
        self._settings = settings
        self._temperature = temperature
        self._limit = limit
        self._reward_weight = reward_weight
        self._skipped = SkippedUpdates(max_skipped_steps)
        self.keeps_batch = False
        """True to keep each step's batch for :meth:`pop_batch`."""
        self._step_batch: Batch | None = None
        self._current_logprobs: list[Tensor] = []
        """Log-probabilities of the only update's micro-batches, where the batch is kept."""
        self._step_logprobs: Tensor | None = None

    @classmethod
    def for_run(cls, config: RunConfig, models: Models, **options: Any) -> Self:
        """Return the step of a run, with further options of its engine."""
        return cls(
            models,
            config.algorithm_of_step,
            temperature=config.rollouts.temperature,
            limit=micro_batch_limit(config.trainer),
            reward_weight=config.rewards.reward_model_weight,
            max_skipped_steps=config.trainer.max_skipped_steps,
            **options,
        )

    def learn(self, batch: Batch, *, step: int | None = None) -> dict[str, float]:
        """Take one step on this replica's batch; return the metrics of all. Collective.

        Args:
            batch: The batch.
            step: Number of the step, for errors.

        Raises:
            TooManySkippedSteps: if the updates of a model were skipped in too many steps in a row.
        """
        settings = self._settings
        division = self._division(batch)
        batch, scored = self._with_scores(batch, division)
        batch, means = prepare(self._with_passes(batch, division), settings, self._summed)
        means += scored + response_tokens(batch, shown=self._is_first_replica)
        # After prepare(): advantages are of whole groups, which this may cut.
        mini_batches = batch.equal_parts(settings.mini_batches)
        # (mini_batches,) float64. One exchange gives the denominators of all updates.
        counts = self._summed(loss_denominators(mini_batches, settings))
        figures: dict[str, float] = {}
        for learner in self._learners():
            updated = self._updated(learner, mini_batches, counts, division, step)
            means += updated.means
            figures |= updated.figures
        if self.models.critic is not None:
            means += value_means(batch)
        if self.keeps_batch:
            logprobs, self._step_logprobs = self._step_logprobs, None
            if logprobs is not None:
                logprobs = logprobs[: len(batch)]  # without the padding rows of equal parts
            self._step_batch = replace(
                batch, logprobs=batch.proximal_logprobs if logprobs is None else logprobs
            )
        return explained_variance(self._reduced_values(means)) | figures

    def pop_batch(self) -> Batch | None:
        """Return the batch of the last step, and forget it; None if it was not kept.

        It has advantages. Its ``logprobs`` are those of the policy before the step's updates, if
        the step computed them on this rank.
        """
        batch, self._step_batch = self._step_batch, None
        return batch

    def passes(self, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
        """Return fields [B, R] of the batch, computed without gradients, by name. Collective."""
        division = self._division(batch)
        return {name: self._pass(name, batch, division) for name in sorted(names)}

    def policy_logprobs(self, batch: Batch) -> Tensor:
        """Return log-probabilities [B, R] of the policy at a temperature of 1. Collective."""
        # Probes are of the distribution itself: explorers compute theirs without a temperature.
        sampled_at, self._temperature = self._temperature, 1.0
        try:
            return self._pass("proximal_logprobs", batch, self._division(batch))
        finally:
            self._temperature = sampled_at

    def scores(self, batch: Batch) -> Tensor:
        """Return the reward model's score of each row [B]. Collective."""
        division = self._division(batch)
        return self.compute_rm_score(batch, division)

    def update(self, batch: Batch, model: Trained) -> dict[str, float]:
        """Take a step's updates of one model; return the metrics of all replicas. Collective.

        Args:
            batch: This replica's rows of a batch that :func:`.prepare` returned.
            model: The model.

        Raises:
            TooManySkippedSteps: as :meth:`learn`.
        """
        division = self._division(batch)
        mini_batches = batch.equal_parts(self._settings.mini_batches)
        counts = self._summed(loss_denominators(mini_batches, self._settings))
        updated = self._updated(self._learner(model), mini_batches, counts, division)
        means = updated.means if model == "policy" else updated.means + value_means(batch)
        return explained_variance(self._reduced_values(means)) | updated.figures

    def _updated(
        self,
        learner: Learner,
        mini_batches: Sequence[Batch],
        counts: Tensor,
        division: BatchDivision,
        step: int | None = None,
    ) -> Updated:
        """Take a step's updates of a model. ``counts`` are the denominators of their losses."""
        updates, rate = [], 0.0
        skipped: list[tuple[Means, Sequence[Batch]]] = []
        # One block for all updates, so that the model's parts move to the device once.
        with resident(learner.engine, *ALL):
            for index in division.updates():
                # Before the update, which moves the schedule on.
                rate = learner.engine.learning_rate
                divided = division.for_update(mini_batches[index], index)
                parts = divided.parts
                updates.append(learner.update(parts, counts[index]))
                if self._current_logprobs:
                    # (rows, response), in the order of the step's batch: it was the only update.
                    self._step_logprobs = divided.joined(self._current_logprobs)
                    self._current_logprobs.clear()
                if not math.isfinite(updates[-1].norm):
                    skipped.append((updates[-1].means, parts))
        # On all ranks alike, as all have the same norms: it may be collective.
        self._skipped.record(learner.model, skipped, step=step)
        means = reduce(operator.add, (update.means for update in updates)).prefixed(learner.prefix)
        figures = {
            learner.rate_name: rate,
            learner.norm_name: taken_norm([update.norm for update in updates]),
            SKIPPED_UPDATES[learner.model]: float(len(skipped)),
        }
        return Updated(means, figures)

    def _with_scores(self, batch: Batch, division: BatchDivision) -> tuple[Batch, Means]:
        """Return the batch with the reward model's scores in its rewards, and their mean."""
        if self.models.reward_model is None:
            return batch, Means.from_rows({}, batch.groups != NO_GROUP)
        scores = self.compute_rm_score(batch, division)
        means = Means.from_rows({"reward_model/score": scores}, batch.groups != NO_GROUP)
        return replace(batch, rewards=batch.rewards + self._reward_weight * scores), means

    def _with_passes(self, batch: Batch, division: BatchDivision) -> Batch:
        """Return the batch with the fields that its preparation or several updates need."""
        settings = self._settings
        names = set(settings.needed_fields)
        if not settings.needs_proximal_pass:
            names.discard("proximal_logprobs")
        return replace(batch, **{name: self._pass(name, batch, division) for name in sorted(names)})

    def _learners(self) -> Iterator[Learner]:
        critic, warm = self.models.critic, True
        if critic is not None:
            # Updates that were taken: a skipped one has not warmed the critic up.
            warm = (
                critic.steps >= self._settings.critic.critic_warmup_steps * self._settings.updates
            )
            yield self._learner("critic")
        if warm:
            yield self._learner("policy")

    def _learner(self, model: Trained) -> Learner:
        models = self.models
        if model == "critic":
            return Learner(
                models.critic,
                self._update_critic,
                prefix="critic/",
                norm_name="critic/grad_norm",
                rate_name="critic/lr",
                model=model,
            )
        return Learner(
            models.policy,
            self._update_policy,
            prefix="",
            norm_name="gradient_norm",
            rate_name="learning_rate",
            model=model,
        )

    def _value_loss(self, values: Tensor, part: Batch) -> Update:
        """Return the critic's loss on a micro-batch."""
        return value_update(part, values, self._settings)

    def _policy_loss(
        self, current: TokenStatistics, part: Batch, divergence: Tensor | None = None
    ) -> Update:
        """Return the policy's loss on a micro-batch."""
        settings = self._settings
        if settings.updates == 1:
            # The policy before a step's only update is the current one.
            part = replace(part, proximal_logprobs=current.logprobs.detach())
            if self.keeps_batch:
                self._current_logprobs.append(current.logprobs.detach())
        return policy_update(
            part, current.logprobs, settings, entropy=current.entropy, divergence=divergence
        )

    # --- the engine's part ---------------------------------------------------------------------

    def _division(self, batch: Batch) -> BatchDivision:
        """Return the division of a step on this batch. Collective."""
        return division_of(batch, self._settings, self._limit)

    @property
    @abstractmethod
    def _is_first_replica(self) -> bool:
        """Return True on the ranks of exactly one of the replicas, whose batches differ."""

    @abstractmethod
    def _summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over replicas. Collective."""

    @abstractmethod
    def _reduced_values(self, means: Means) -> dict[str, float]:
        """Return the values of means over all replicas, on every rank. Collective."""

    @abstractmethod
    def compute_rm_score(self, batch: Batch, division: BatchDivision) -> Tensor:
        """Return the reward model's score of each row [B] on every rank. Collective."""

    @abstractmethod
    def _pass(self, name: str, batch: Batch, division: BatchDivision) -> Tensor:
        """Return a field [B, R] of the batch, computed without gradients. Collective."""

    @abstractmethod
    def _update_policy(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        """Take an optimizer step of the policy on micro-batches; ``count`` divides its loss."""

    @abstractmethod
    def _update_critic(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        """Take an optimizer step of the critic, as :meth:`_update_policy`."""
