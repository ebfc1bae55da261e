"""Training step whose policy is veRL's FSDP engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithms.aggregation import Means
from ...algorithms.batch import Batch
from ...algorithms.logits import TokenStatistics
from ...config.train_config import RunConfig
from ...engines.verl.fsdp import VerlEngine, VerlOptions
from ...runtime.collectives import together
from ..step.base import ModelName, Taken, needed_models
from ..step.fsdp import FSDPTrainingStep
from .fsdp import load_models
from .rates import get_adamw_options, policy_rate


class VerlTrainingStep(FSDPTrainingStep):
    """Training step of one rank. veRL's engine computes and updates the policy.

    Critic, reference, teacher and reward model are those of FSDPTrainingStep.
    """

    def _computations(self) -> dict[str, tuple[Any, Callable[[Batch], Tensor]]]:
        policy = self.models.policy

        def logprobs(part: Batch) -> Tensor:
            logprobs: Tensor = policy.logprobs(part, self._temperature)
            return logprobs

        return super()._computations() | {"proximal_logprobs": (policy, logprobs)}

    def _update_policy(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        settings, means = self._settings, list[Means]()

        def loss(part: Batch, current: TokenStatistics) -> Tensor:
            # A loss of the user's may raise on one rank, while the others wait in the next
            # collective.
            with together() if settings.has_own_loss else nullcontext():
                update = self._policy_loss(current, part)
            means.append(update.means())
            return update.loss(count, dist.get_world_size())  # FSDP averages over ranks

        norm = self.models.policy.update(
            parts,
            loss,
            temperature=self._temperature,
            entropy=settings.entropy_coefficient > 0,
        )
        return Taken(reduce(operator.add, means), norm)


def make_step(
    config: RunConfig, device: torch.device, names: Collection[ModelName] | None = None
) -> VerlTrainingStep:
    """Load models, as :func:`.load_models`, and return the step that computes with them."""
    names = needed_models(config) if names is None else names
    # Without the policy, which veRL's engine loads.
    models = load_models(config, device, [name for name in names if name != "policy"])
    if "policy" in names:
        models = models._replace(policy=_policy(config, device))
    return VerlTrainingStep.for_run(config, models)


def _policy(config: RunConfig, device: torch.device) -> VerlEngine:
    trainer = config.trainer
    rate = policy_rate(config)  # of the steps that follow the critic's warm-up
    options = VerlOptions(
        learning_rate=rate,
        total_steps=rate.steps,
        dtype=config.model.dtype,
        adamw=get_adamw_options(trainer),
        recompute=trainer.recompute,
    )
    return VerlEngine(config.model_folder, device=device, options=options)
