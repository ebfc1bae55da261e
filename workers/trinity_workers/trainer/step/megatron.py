"""One training step on Megatron."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithms.aggregation import Means
from ...algorithms.batch import Batch
from ...algorithms.update import Update
from ...runtime.collectives import all_reduced, gather_bytes
from .base import Taken, TrainingStep
from .division import BatchDivision, division_of


class MegatronTrainingStep(TrainingStep):
    """Training step of one rank, whose replica has several.

    The models are engines of one layout. The last pipeline stage alone computes losses.
    """

    def _division(self, batch: Batch) -> BatchDivision:
        from megatron.core import parallel_state as state

        shared = state.get_expert_model_parallel_world_size() > 1
        return division_of(
            batch,
            self._settings,
            self._limit,
            stages=state.get_pipeline_model_parallel_world_size(),
            # Ranks that share experts exchange their tokens.
            alike=state.get_expert_model_parallel_group() if shared else None,
        )

    @property
    def _is_first_replica(self) -> bool:
        from megatron.core import parallel_state as state

        return bool(state.get_data_parallel_rank() == 0)

    def _summed(self, tensor: Tensor) -> Tensor:
        from megatron.core import parallel_state as state

        return all_reduced(tensor, state.get_data_parallel_group())

    def _reduced_values(self, means: Means) -> dict[str, float]:
        payload = msgspec.msgpack.encode(means.reduced(self._summed).values())
        # The last rank is one of the last stage.
        return msgspec.msgpack.decode(gather_bytes(payload)[-1], type=dict[str, float])

    def compute_rm_score(self, batch: Batch, division: BatchDivision) -> Tensor:
        """Return the reward model's score of each row [B] on every rank. Collective."""
        judge = self.models.reward_model
        scores = judge.model.scores(judge.tokens.inputs(batch), parts=division.parts_of_pass)
        return _from_last_stage(scores, batch.rewards)

    def _pass(self, name: str, batch: Batch, division: BatchDivision) -> Tensor:
        models, divided = self.models, division.for_pass(batch)
        if name == "values":
            values = models.critic.values_of_parts(divided.parts)
        else:
            judge = {
                "proximal_logprobs": models.policy,
                "reference_logprobs": models.reference,
                "teacher_logprobs": models.teacher,
            }[name]
            values = judge.logprobs_of_parts(divided.parts, temperature=self._temperature)
        return _from_last_stage(divided.joined(values) if values else None, batch.response_mask)

    def _update_policy(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        means, norm = self.models.policy.train_batch(
            parts,
            self._sum_over_replicas(self._policy_loss, count),
            temperature=self._temperature,
            entropy=self._settings.entropy_coefficient > 0,
        )
        return Taken(_summed_means(means, parts[0]), norm)

    def _update_critic(self, parts: Sequence[Batch], count: Tensor) -> Taken:
        means, norm = self.models.critic.train_values(
            parts, self._sum_over_replicas(self._value_loss, count)
        )
        return Taken(_summed_means(means, parts[0]), norm)

    def _sum_over_replicas(
        self, loss_of: Callable[[Any, Batch], Update], count: Tensor
    ) -> Callable[[Any, Batch], tuple[Tensor, Means]]:
        """Return the loss of micro-batches for the engine; ``count`` divides all of them."""
        from megatron.core import parallel_state as state

        replicas = state.get_data_parallel_world_size()

        def loss(current: Any, part: Batch) -> tuple[Tensor, Means]:
            update = loss_of(current, part)
            # Megatron averages gradients over replicas.
            return update.loss(count, replicas), update.means()

        return loss


def _summed_means(means: list[Means], batch: Batch) -> Means:
    """Return the means of all micro-batches; none before the last stage."""
    return reduce(operator.add, means, Means.from_tokens({}, batch.response_mask))


def _from_last_stage(own_values: Tensor | None, like: Tensor) -> Tensor:
    """Return the last pipeline stage's values on every stage of the replica. Collective.

    They are float32, of the shape and on the device of another tensor.
    """
    from megatron.core import parallel_state as state

    if own_values is None:
        # float32, as what the last stage sends.
        values = torch.empty(like.shape, device=like.device)
    else:
        values = own_values.float().contiguous()
    group = state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=last, group=group)
    return values
