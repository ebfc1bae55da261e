"""One rank of a trainer on veRL's Megatron engine."""

from __future__ import annotations

from typing import Any

from ..models.verl_megatron import make_step
from .megatron import MegatronTrainWorker


class VerlMegatronTrainWorker(MegatronTrainWorker):
    """Rank of the training loop whose policy is veRL's Megatron engine.

    Saves and publications are those of :class:`MegatronTrainWorker`, in its layout on disk.
    """

    def _make_step(self) -> Any:
        return make_step(self._config, self._device)
