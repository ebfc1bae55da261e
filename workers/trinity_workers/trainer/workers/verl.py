"""One rank of a trainer on veRL's FSDP engine."""

from __future__ import annotations

from typing import Any

from ..models.verl import make_step
from .fsdp import TrainWorker


class VerlTrainWorker(TrainWorker):
    """Rank of the training loop whose policy is veRL's FSDP engine.

    Saves and publications are those of :class:`TrainWorker`. The files of a checkpoint are those
    that veRL loads.
    """

    def _make_step(self) -> Any:
        return make_step(self._config, self._device)
