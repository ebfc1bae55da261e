"""Engines whose models have a head of one output: critics and reward models."""

from __future__ import annotations

from collections.abc import Callable
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
        found = read_description(folder)
        self._absent = HEAD - checked_head(found.config, folder)
        return structs.replace(found, config=critic_config(found.config))

    @holding("parameters")
    def response_values(self, batch: Batch, *, parts: int | None = None) -> torch.Tensor | None:
        """Return the value before each response token [B, R], without gradients. Collective.

        They are on the last pipeline stage; the other stages get None.
        """
        found = response_values(self.module, batch.equal_parts(self._part_count(parts)))
        return torch.cat(found)[: len(batch)] if found else None

    @holding(*ALL)
    def train_values(
        self, batch: Batch, loss: ValueLoss, *, parts: int | None = None
    ) -> tuple[list[Any], float]:
        """Take one optimizer step on a loss of values, as :meth:`train_batch`. Collective."""
        micro_batches = batch.equal_parts(self._part_count(parts))
        return self._optimizer_step(
            lambda: accumulate_value_gradients(self.module, micro_batches, loss)
        )


class MegatronRewardModel(MegatronEngine):
    """Reward model without gradients, from a folder of transformers' models for classification."""

    def _read(self, folder: Path) -> Description:
        found = read_description(folder)
        checked_head(found.config, folder, required=True)
        return found

    @holding("parameters")
    def scores(self, batch: Batch, *, parts: int | None = None) -> torch.Tensor | None:
        """Return the output at each row's last token [B], on the last stage. Collective."""
        found = last_values(self.module, batch.equal_parts(self._part_count(parts)))
        return torch.cat(found)[: len(batch)] if found else None
