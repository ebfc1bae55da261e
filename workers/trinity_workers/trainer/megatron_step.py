"""One training step on Megatron: passes without gradients, then updates of the policy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from statistics import fmean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms.aggregation import Means
from ..algorithms.batch import Batch
from ..algorithms.logits import TokenStatistics
from ..algorithms.prepare import prepare
from ..algorithms.settings import AlgorithmConfig
from ..algorithms.update import policy_update
from ..collectives import all_reduced, gather_bytes
from ..engines.megatron import MegatronEngine
from .division import (
    NO_LIMIT,
    BatchDivision,
    MicroBatchLimit,
    division_of,
    loss_denominators,
    response_tokens,
)


class MegatronTrainingStep:
    """Training step of one rank. All ranks take it together.

    Args:
        policy: The policy.
        settings: The algorithm.
        temperature: Temperature that sampled.
        limit: Maximum size of one pass; by default there is one for each pipeline stage.
        reference: Reference of the KL penalty, in the policy's layout.
        teacher: Teacher of a distillation, in the policy's layout.
    """

    def __init__(
        self,
        policy: MegatronEngine,
        settings: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        limit: MicroBatchLimit = NO_LIMIT,
        reference: MegatronEngine | None = None,
        teacher: MegatronEngine | None = None,
    ) -> None:
        self._policy = policy
        self._judges = {"reference_logprobs": reference, "teacher_logprobs": teacher}
        self._settings = settings
        self._temperature = temperature
        self._limit = limit

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take one step on this replica's batch; return the metrics of all. Collective."""
        from megatron.core import parallel_state as state

        settings, replicas = self._settings, state.get_data_parallel_group()
        summed = partial(all_reduced, group=replicas)
        layout = self._policy.layout
        division = division_of(
            batch,
            settings,
            self._limit,
            stages=layout.pipeline,
            # Ranks that share experts exchange their tokens.
            alike=state.get_expert_model_parallel_group() if layout.expert > 1 else None,
        )
        batch, means = prepare(self._with_passes(batch, division), settings, summed)
        mini_batches = batch.equal_parts(settings.mini_batches)
        counts = summed(loss_denominators(mini_batches, settings))
        parts: list[Means] = []
        norms = []
        rate = 0.0
        for index in division.updates():
            rate = self._policy.learning_rate
            found, norm = self._policy.train_batch(
                division.of_update(mini_batches[index], index).parts,
                self._loss(counts[index], replicas.size()),
                temperature=self._temperature,
                entropy=settings.entropy_coefficient > 0,
            )
            parts += found
            norms.append(norm)
        told: dict[str, float] = {}
        if parts:
            means += response_tokens(batch, shown=state.get_data_parallel_rank() == 0)
            told = (means + reduce(operator.add, parts)).reduced(summed).values()
        # The last stage alone has the loss, and the last rank is one of it.
        told = msgspec.json.decode(
            gather_bytes(msgspec.json.encode(told))[-1], type=dict[str, float]
        )
        return {**told, "gradient_norm": fmean(norms), "learning_rate": rate}

    def _loss(
        self, count: Tensor, replicas: int
    ) -> Callable[[TokenStatistics, Batch], tuple[Tensor, Means]]:
        """Return the loss of micro-batches; ``count`` is the denominator of all of them."""
        settings = self._settings

        def loss(current: TokenStatistics, part: Batch) -> tuple[Tensor, Means]:
            if settings.updates == 1:
                # The policy before a step's only update is the current one.
                part = replace(part, proximal_logprobs=current.logprobs.detach())
            update = policy_update(part, current.logprobs, settings, entropy=current.entropy)
            # Megatron averages gradients over replicas.
            return update.loss(count, replicas), update.means()

        return loss

    def _with_passes(self, batch: Batch, division: BatchDivision) -> Batch:
        """Return the batch with the fields that its preparation or several updates need."""
        settings = self._settings
        passes: dict[str, Any] = dict(self._judges)
        if settings.passes_proximal:
            passes["proximal_logprobs"] = self._policy
        divided = division.of_pass(batch)
        found = {}
        for name in sorted(settings.needed_fields & passes.keys()):
            logprobs = passes[name].logprobs_of_parts(divided.parts, temperature=self._temperature)
            whole = divided.joined(logprobs) if logprobs else None
            found[name] = _from_last_stage(whole, batch)
        return replace(batch, **found)


def _from_last_stage(found: Tensor | None, batch: Batch) -> Tensor:
    """Return the last pipeline stage's values [B, R] on every stage of the replica. Collective."""
    from megatron.core import parallel_state as state

    shape, device = batch.response_mask.shape, batch.input_ids.device
    values = torch.empty(shape, device=device) if found is None else found.float().contiguous()
    group = state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=last, group=group)
    return values
