"""Engines whose models have a head of one output: critics and reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from msgspec import structs

from ...algorithms.batch import Batch
from ...learning.value_head import HEAD, checked_head, critic_config
from ..model_memory import ALL, holding
from .engine import MegatronEngine
from .model_description import Description, read_description
from .training import accumulate_value_gradients, last_values, response_values

ValueLoss: TypeAlias = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Any]]
"""Returns loss (0-dim) and metrics of a micro-batch from its values [B, R]."""


class MegatronCritic(MegatronEngine):
    """Critic that begins with the layers of any folder, and with its head if the folder has one.

    A head that the folder lacks begins at 0, so that the first values are 0.
    """

    def _read(self, folder: Path) -> Description:
        description = read_description(folder)
        # By the folder's own configuration: that of the critic, below, always has a head.
        self._absent = HEAD - checked_head(description.config, folder)
        return structs.replace(description, config=critic_config(description.config))

    def response_values(self, batch: Batch) -> torch.Tensor | None:
        """Return the value before each response token [B, R], without gradients. Collective.

        They are on the last pipeline stage; the other stages get None.
        """
        values = self.values_of_parts(batch.equal_parts(self._parts))
        return torch.cat(values)[: len(batch)] if values else None

    @holding("parameters")
    def values_of_parts(self, parts: Sequence[Batch]) -> list[torch.Tensor]:
        """Return values of each micro-batch, as :meth:`logprobs_of_parts`."""
        return response_values(self.module, parts)

    @holding(*ALL)
    def train_values(
        self, batch: Batch | Sequence[Batch], loss: ValueLoss
    ) -> tuple[list[Any], float]:
        """Take one optimizer step on a loss of values, as :meth:`train_batch`. Collective."""
        parts = batch.equal_parts(self._parts) if isinstance(batch, Batch) else batch
        return self._optimizer_step(lambda: accumulate_value_gradients(self.module, parts, loss))


class MegatronRewardModel(MegatronEngine):
    """Reward model without gradients, from a folder of transformers' models for classification."""

    def _read(self, folder: Path) -> Description:
        description = read_description(folder)
        checked_head(description.config, folder, required=True)
        return description

    @holding("parameters")
    def scores(self, batch: Batch, *, parts: int | None = None) -> torch.Tensor | None:
        """Return the output at each row's last token [B], on the last stage. Collective."""
        scores = last_values(self.module, batch.equal_parts(parts or self._parts))
        return torch.cat(scores)[: len(batch)] if scores else None
