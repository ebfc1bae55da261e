"""Choice of the training backend that a configuration names."""

from __future__ import annotations

from ..config.train_config import RunConfig
from .backend import TrainEngineWrapper


def get_trainer_wrapper(config: RunConfig) -> TrainEngineWrapper:
    """Return the engine that the configuration names. Raises ValueError for others."""
    if config.trainer.engine in {"fsdp", "megatron", "verl"}:
        from .ray_backend import RayTrainBackend

        return RayTrainBackend(config)
    raise ValueError(f"there is no engine {config.trainer.engine!r}: choose fsdp, megatron or verl")
