"""One training step on FSDP: passes without gradients, then updates of critic and policy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms.aggregation import Means
from ..algorithms.batch import Batch
from ..algorithms.distillation import token_divergence
from ..algorithms.prepare import prepare
from ..algorithms.settings import AlgorithmConfig
from ..algorithms.update import Update, policy_update, value_update
from ..algorithms.values import explained_variance, value_means
from ..collectives import all_reduced, together
from ..engines import FSDPEngine
from ..engines.base import resident
from ..engines.model_memory import ALL
from ..learning.logprobs import (
    response_logits,
    response_logprobs,
    response_statistics,
    statistics_of_logits,
)
from ..learning.values import response_values
from .division import (
    NO_LIMIT,
    BatchDivision,
    MicroBatchLimit,
    division_of,
    loss_denominators,
    response_tokens,
)


class Models(NamedTuple):
    """Models of a training step, of which only the policy is always there."""

    policy: FSDPEngine
    critic: FSDPEngine | None = None
    reference: Any = None
    """Sharded module without gradients, as is the teacher."""
    teacher: Any = None

    @property
    def trained(self) -> list[Any]:
        """Return the modules that are trained."""
        return [one.module for one in (self.policy, self.critic) if one is not None]


class FSDPTrainingStep:
    """Training step of one rank. All ranks take it together.

    Args:
        models: The models.
        settings: The algorithm.
        temperature: Temperature that sampled.
        limit: Maximum size of one pass; by default all rows.
        fused: Compute log-probabilities and entropies chunk by chunk, without whole logits.
    """

    def __init__(
        self,
        models: Models,
        settings: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        limit: MicroBatchLimit = NO_LIMIT,
        fused: bool = False,
    ) -> None:
        self._models = models
        self._settings = settings
        self._temperature = temperature
        self._limit = limit
        self._fused = fused
        for module in models.trained:
            module.train()

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take one step on this rank's batch; return the metrics of all ranks. Collective."""
        settings = self._settings
        division = division_of(batch, settings, self._limit)
        batch, means = prepare(self._with_passes(batch, division), settings, all_reduced)
        means += response_tokens(batch, shown=dist.get_rank() == 0)
        mini_batches = batch.equal_parts(settings.mini_batches)
        counts = all_reduced(loss_denominators(mini_batches, settings))
        told: dict[str, float] = {}
        for learner in self._learners():
            updates = []
            with resident(learner.engine, *ALL):
                for index in division.updates():
                    told[learner.rate_name] = learner.engine.learning_rate
                    parts = division.of_update(mini_batches[index], index).parts
                    updates.append(_update(learner, parts, counts[index]))
            means += reduce(operator.add, (one.means for one in updates)).prefixed(learner.prefix)
            told[learner.norm_name] = fmean(one.norm for one in updates)
        if self._models.critic is not None:
            means += value_means(batch)
        return explained_variance(means.reduced(all_reduced).values()) | told

    # --- passes without gradients --------------------------------------------------------------

    def _with_passes(self, batch: Batch, division: BatchDivision) -> Batch:
        """Return the batch with the fields that its preparation or several updates need."""
        models, settings = self._models, self._settings
        passes: dict[str, tuple[Any, Callable[[Batch], Tensor]]] = {
            "reference_logprobs": (
                models.reference,
                lambda part: self._logprobs(models.reference, part),
            ),
            "teacher_logprobs": (models.teacher, lambda part: self._logprobs(models.teacher, part)),
        }
        if models.critic is not None:
            critic = models.critic
            passes["values"] = (critic, lambda part: response_values(critic.module, part))
        if settings.passes_proximal:
            policy = models.policy
            passes["proximal_logprobs"] = (policy, lambda part: self._logprobs(policy.module, part))
        divided = division.of_pass(batch)
        found = {}
        for name in sorted(settings.needed_fields & passes.keys()):
            model, compute = passes[name]
            with torch.no_grad(), _evaluated(models), resident(model):
                found[name] = divided.joined([compute(part) for part in divided.parts])
        return replace(batch, **found)

    def _logprobs(self, module: Any, part: Batch) -> Tensor:
        return response_logprobs(module, part, self._temperature, fused=self._fused)

    # --- updates -------------------------------------------------------------------------------

    def _learners(self) -> Iterator[_Learner]:
        policy, critic = self._models.policy, self._models.critic
        warm = True
        if critic is not None:
            warm = critic.steps >= self._settings.critic.warmup_steps * self._settings.updates
            yield _Learner(critic, self._critic_update, "critic/", "critic/grad_norm", "critic/lr")
        if warm:
            yield _Learner(policy, self._policy_update, "", "gradient_norm", "learning_rate")

    def _critic_update(self, part: Batch) -> Update:
        assert self._models.critic is not None
        values = response_values(self._models.critic.module, part)
        return value_update(part, values, self._settings)

    def _policy_update(self, part: Batch) -> Update:
        settings, policy = self._settings, self._models.policy.module
        entropy, divergence = settings.entropy_coefficient > 0, None
        if settings.loss == "divergence":
            logits = response_logits(policy, part)
            current = statistics_of_logits(logits, part, self._temperature, entropy=entropy)
            divergence = self._divergence(logits, part)
        else:
            current = response_statistics(
                policy, part, self._temperature, entropy=entropy, fused=self._fused
            )
        if settings.updates == 1:
            # The policy before a step's only update is the current one.
            part = replace(part, proximal_logprobs=current.logprobs.detach())
        with together() if settings.has_own_loss else nullcontext():
            return policy_update(
                part, current.logprobs, settings, entropy=current.entropy, divergence=divergence
            )

    def _divergence(self, logits: Tensor, part: Batch) -> Tensor:
        """Return the divergence of the policy from the teacher, with gradient."""
        settings = self._settings.teacher
        with torch.no_grad(), resident(self._models.teacher):
            teacher = response_logits(self._models.teacher, part)
        # Models of one tokenizer may pad their vocabularies to different sizes.
        width = min(logits.shape[-1], teacher.shape[-1])
        return token_divergence(
            logits[..., :width],
            teacher[..., :width],
            settings.divergence,
            mixture=settings.mixture,
            temperature=self._temperature,
        )


class _Learner(NamedTuple):
    """Model that is updated, its loss, and the names of its metrics."""

    engine: FSDPEngine
    update_of: Callable[[Batch], Update]
    prefix: str
    norm_name: str
    rate_name: str


class _Taken(NamedTuple):
    """Means of an optimizer step, and its gradients' norm."""

    means: Means
    norm: float


def _update(learner: _Learner, parts: Sequence[Batch], count: Tensor) -> _Taken:
    """Take one optimizer step on the micro-batches of a mini-batch.

    Args:
        learner: The model.
        parts: The micro-batches.
        count: Denominator of their loss, over all ranks.
    """
    engine, world = learner.engine, dist.get_world_size()
    means = []
    for index, part in enumerate(parts):
        update = learner.update_of(part)
        # FSDP averages gradients over ranks.
        loss = update.loss(count, world)
        engine.accumulate(loss, first=index == 0, last=index == len(parts) - 1)
        means.append(update.means())
    return _Taken(reduce(operator.add, means), engine.apply_gradients())


@contextmanager
def _evaluated(models: Models) -> Iterator[None]:
    """Let trained models evaluate in the block, so that no dropout disturbs what it computes."""
    for module in models.trained:
        module.eval()
    try:
        yield
    finally:
        for module in models.trained:
            module.train()
