"""One rank of a trainer on veRL's FSDP engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engines.state_files import write_state
from ..models.verl import make_step
from .fsdp import TrainWorker


class VerlTrainWorker(TrainWorker):
    """Rank of the training loop whose policy is veRL's FSDP engine.

    Saves and publications are those of :class:`TrainWorker`. The files of a checkpoint are those
    that veRL loads.
    """

    def _make_step(self) -> Any:
        return make_step(self._config, self._device)

    def _save_training_state(self, name: str, engine: Any, folder: Path, step: int) -> None:
        if engine is not self._engine:
            super()._save_training_state(name, engine, folder, step)
            return
        files = engine.training_files(folder)

        def save() -> None:
            for path, state in files.items():
                write_state(path, state)

        self._coordinator.save_async(
            name, save, step, path=list(files), ranks=self._config.trainer.ranks
        )
