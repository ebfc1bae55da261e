"""One training step on FSDP."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithms.aggregation import Means
from ...algorithms.batch import Batch
from ...algorithms.distillation import token_divergence
from ...algorithms.settings import AlgorithmConfig
from ...algorithms.update import Update
from ...engines.base import resident
from ...engines.fsdp import FSDPEngine
from ...engines.fsdp_context import ContextRanks
from ...engines.fsdp_tensor import TensorRanks
from ...learning.logprobs import (
    response_logits,
    response_logprobs,
    response_statistics,
    statistics_of_logits,
)
from ...learning.values import last_values, response_values
from ...runtime.collectives import all_reduced, together
from .base import Models, Taken, TrainingStep
from .division import BatchDivision


class FSDPTrainingStep(TrainingStep):
    """Training step of one rank, which is a replica, or shares the sequences or layers of one.

    Policy and critic of the models are FSDPEngines, reference and teacher sharded modules. All are
    of the same ``context``, where ranks share sequences, or ``tensor``, where they share layers.
    """

    def __init__(
        self,
        models: Models,
        settings: AlgorithmConfig,
        *,
        fused: bool = False,
        context: ContextRanks | None = None,
        tensor: TensorRanks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(models, settings, **options)
        self._fused = fused
        # None is the group of all ranks, and of none that share sequences.
        self._group = None if context is None else context.group
        shared = context or tensor
        self._replicas = None if shared is None else shared.replicas
        for engine in models.trained:
            engine.module.train()

    @property
    def _is_first_replica(self) -> bool:
        return dist.get_rank(self._replicas) == 0

    def _summed(self, tensor: Tensor) -> Tensor:
        return all_reduced(tensor, self._replicas)

    def _reduced_values(self, means: Means) -> dict[str, float]:
        return means.reduced(self._summed).values()

    # --- passes without gradients --------------------------------------------------------------

    def compute_rm_score(self, batch: Batch, division: BatchDivision) -> Tensor:
        """Return the reward model's score of each row [B]. Collective."""
        judge = self.models.reward_model
        parts = judge.tokens.inputs(batch).equal_parts(division.parts_of_pass)
        with torch.no_grad(), resident(judge.model):
            # (rows,), without the padding rows of equal parts.
            return torch.cat([last_values(judge.model, part) for part in parts])[: len(batch)]

    def _pass(self, name: str, batch: Batch, division: BatchDivision) -> Tensor:
        model, compute = self._computations()[name]
        with torch.no_grad(), _evaluated(self.models), resident(model):
            divided = division.for_pass(batch)
            return divided.joined([compute(part) for part in divided.parts])

    def _computations(self) -> dict[str, tuple[Any, Callable[[Batch], Tensor]]]:
        """Return the model that computes each field, and how."""
        policy, critic, reference, teacher, _ = self.models
        return {
            "proximal_logprobs": (policy, lambda part: self._logprobs(policy.module, part)),
            "reference_logprobs": (reference, lambda part: self._logprobs(reference, part)),
            "teacher_logprobs": (teacher, lambda part: self._logprobs(teacher, part)),
            "values": (critic, lambda part: response_values(critic.module, part)),
        }

    def _logprobs(self, module: Any, part: Batch) -> Tensor:
        return response_logprobs(
            module, part, self._temperature, fused=self._fused, group=self._group
        )

    # --- updates -------------------------------------------------------------------------------

    def _update_critic(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        critic = self.models.critic

        def loss(part: Batch) -> Update:
            return self._value_loss(response_values(critic.module, part), part)

        return self._update(critic, loss, parts, count)

    def _update_policy(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        settings, policy = self._settings, self.models.policy

        def loss(part: Batch) -> Update:
            entropy, divergence = settings.entropy_coefficient > 0, None
            if settings.loss == "divergence":
                logits = response_logits(policy.module, part)
                current = statistics_of_logits(logits, part, self._temperature, entropy=entropy)
                divergence = self._divergence(logits, part)
            else:
                current = response_statistics(
                    policy.module,
                    part,
                    self._temperature,
                    entropy=entropy,
                    fused=self._fused,
                    group=self._group,
                )
            # A user's loss may fail on one rank alone, and leave the others in the backward pass.
            with together() if settings.has_own_loss else nullcontext():
                return self._policy_loss(current, part, divergence)

        return self._update(policy, loss, parts, count)

    def _divergence(self, logits: Tensor, part: Batch) -> Tensor:
        """Return the divergence of the policy from the teacher, with gradient."""
        settings = self._settings.teacher
        with torch.no_grad(), resident(self.models.teacher):
            teacher = response_logits(self.models.teacher, part)
        # Models of one tokenizer may pad their vocabularies to different sizes.
        width = min(logits.shape[-1], teacher.shape[-1])
        return token_divergence(
            logits[..., :width],
            teacher[..., :width],
            settings.divergence,
            mixture=settings.mixture,
            temperature=self._temperature,
        )

    def _update(
        self,
        engine: FSDPEngine,
        loss_of: Callable[[Batch], Update],
        parts: Sequence[Batch],
        count: Tensor,
    ) -> Taken:
        """Take one optimizer step on a mini-batch.

        Args:
            engine: The engine.
            loss_of: Returns the loss of a micro-batch.
            parts: The micro-batches.
            count: Denominator of their loss, over all replicas.
        """
        replicas, means = dist.get_world_size(self._replicas), []
        for index, part in enumerate(parts):
            update = loss_of(part)
            # FSDP takes the mean over ranks of gradients that add up (engines.fsdp_context, 3), and
            # over replicas alone where ranks share layers (engines.fsdp_tensor, 1).
            loss = update.loss(count, replicas)
            engine.accumulate(loss, first=index == 0, last=index == len(parts) - 1)
            means.append(update.means())
        return Taken(reduce(operator.add, means), engine.apply_gradients())


@contextmanager
def _evaluated(models: Models) -> Iterator[None]:
    """Let trained models evaluate in the block, so that no dropout disturbs what it computes."""
    for engine in models.trained:
        engine.module.eval()
    try:
        yield
    finally:
        for engine in models.trained:
            engine.module.train()
