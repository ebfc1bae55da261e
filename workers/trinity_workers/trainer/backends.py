"""Choice of the training backend that a configuration names."""

from __future__ import annotations

from ..config.other_names import format_absent_value
from ..config.train_config import RunConfig
from .backend import TrainEngineWrapper


def get_trainer_wrapper(config: RunConfig) -> TrainEngineWrapper:
    """Return the engine that the configuration names. Raises ValueError for others."""
    if config.trainer.engine in {"fsdp", "megatron", "verl"}:
        from .rank_actors import RankActor, start_rank_actors

        ranks = start_rank_actors(RankActor, config)
        # Loads torch, which takes seconds: the ranks load theirs at the same time.
        from .ray_backend import RayTrainBackend

        return RayTrainBackend(config, ranks)
    engine = config.trainer.engine
    reason = format_absent_value("trainer.engine", engine) or "choose fsdp, megatron or verl"
    raise ValueError(f"there is no engine {engine!r}: {reason}")
