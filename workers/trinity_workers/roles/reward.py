"""Reward model as a role."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ..algorithms.batch import Batch
from ..trainer.step.base import ModelName
from ..worker_group.dispatch import Dispatch
from ..worker_group.registered import register
from .base import RoleRefused, RoleWorker


class RewardWorker(RoleWorker):
    """Reward model on one rank, which scores whole episodes."""

    @property
    def models(self) -> Collection[ModelName]:
        """Models of the role."""
        return {"reward_model"}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model. Raises RoleRefused if the run has none."""
        # Before the base loads anything: all ranks refuse alike, and none waits for another.
        if self._config.reward_folder is None:
            raise RoleRefused("reward model", type(self).__name__)
        super().init_model()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_rm_score(self, batch: Batch) -> dict[str, Tensor]:
        """Return the score at each row's last valid token, as `rewards`: [B] float32.

        The text is tokenised anew where the reward model has another tokenizer. veRL calls the
        scores `rm_scores`, and places each at its token.
        """
        return {"rewards": self._with("reward_model").scores(batch.to(self._device))}


RewardModelWorker = RewardWorker
"""Name by which veRL's users know the role."""
