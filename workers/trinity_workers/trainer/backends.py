"""Choice of the training backend that a configuration names."""

from __future__ import annotations

from typing import get_args

from ..config.other_names import format_absent_value
from ..config.sections.trainer import EngineName
from ..config.train_config import RunConfig
from ..rules import format_choices
from .backend import TrainEngineWrapper


def get_trainer_wrapper(config: RunConfig) -> TrainEngineWrapper:
    """Return the engine that the configuration names. Raises ValueError for others."""
    engine, engines = config.trainer.engine, get_args(EngineName)
    if engine in engines:
        from .rank_actors import RankActor, start_rank_actors

        ranks = start_rank_actors(RankActor, config)
        # Only now: the ranks load their libraries, torch among them, at the same time.
        from .ray_backend import RayTrainBackend

        return RayTrainBackend(config, ranks)
    reason = format_absent_value("trainer.engine", engine) or f"choose {format_choices(engines)}"
    raise ValueError(f"there is no engine {engine!r}: {reason}")
