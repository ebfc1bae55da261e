"""Port of training engines, as the trainer's loop drives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from trinity_schemas import Experience

from ..config import RunConfig
from .state import TrainerState


class TrainEngineWrapper(ABC):
    """Training engine, with workers that may run in other processes."""

    @abstractmethod
    async def prepare(self) -> None:
        """Start the workers and load the model."""

    @abstractmethod
    async def load_checkpoint(self, folder: Path, step: int) -> None:
        """Load the checkpoint of a step on every rank, before the first publication."""

    @property
    @abstractmethod
    def train_step_num(self) -> int:
        """Number of steps taken."""

    @abstractmethod
    async def train_step(self, batch_exps: Sequence[Sequence[Experience]]) -> dict[str, float]:
        """Take one step on groups of samples; return its metrics."""

    @abstractmethod
    async def save_checkpoint(
        self,
        block_until_saved: bool = False,
        save_as_hf: bool = False,
        state: TrainerState | None = None,
    ) -> None:
        """Save the whole checkpoint: model, optimizer, random states, and the loop's own state.

        The model is saved as a Hugging Face folder if ``save_as_hf`` is set, or if the step's
        weights are a version in files.
        """

    @abstractmethod
    async def save_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Save the weights in files, for checkpoint-based weight sync, and commit the version."""

    @abstractmethod
    async def upload_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the weights for memory-based weight sync, and commit the version."""

    @abstractmethod
    async def sync_weight_nccl(self, metrics: dict[str, float] | None = None) -> None:
        """Send the weights through the collective group, and commit the version."""

    @abstractmethod
    async def wait_for_save(self) -> None:
        """Wait for background saves, and raise the error of one that failed."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop the workers."""


def get_trainer_wrapper(config: RunConfig) -> TrainEngineWrapper:
    """Return the engine that the configuration names. Raises ValueError for others."""
    if config.trainer.engine in {"fsdp", "megatron"}:
        from .fleet import RayTrainerFleet

        return RayTrainerFleet(config)
    raise ValueError(f"there is no engine {config.trainer.engine!r}: choose fsdp or megatron")
