"""Critic of actor-critic algorithms as a role."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ..algorithms.batch import Batch
from ..trainer.step.base import ModelName
from ..worker_group.dispatch import Dispatch
from ..worker_group.registered import register
from .base import RoleWorker


class CriticWorker(RoleWorker):
    """Critic on one rank: values of tokens, and their training."""

    @property
    def models(self) -> Collection[ModelName]:
        """Models of the role."""
        return {"critic"}

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_values(self, batch: Batch) -> dict[str, Tensor]:
        """Return the value before each response token, as `values`: [B, R] float32."""
        return self._compute("critic", "values", batch)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_critic(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of the critic on a batch with `values` and `returns`.

        Metrics are `critic/vf_loss`, `critic/grad_norm` and so on, by veRL's names.
        """
        return self._update("critic", batch)

    def _save_in_run(self, local_path: str, global_step: int) -> None:
        self._in_run.save_critic(local_path, global_step)
